//! Runs the arbiter on its own thread. The arbiter assigns time windows on shared GPUs to containers.
//!
//! An agent that restarts needs no state: windows are in the files of the grants, and the libraries in the containers
//! enforce their shares on their own until the arbiter runs again.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

use tessera_arbiter::{
    Service,
    gpu_arbiter::WindowUsage,
    power::{self, PowerFactor, PowerModel},
};
use tessera_core::gpu::GpuUuid;
use tessera_limits::{MAX_GPUS, UuidBytes, futex};
use tessera_node::gpus::{GpuPower, Gpus};
use tokio_util::sync::CancellationToken;

/// Time between two publications of the containers' window usage.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

/// Smallest time in nanoseconds to the next step of the service if no container waits for a GPU.
const IDLE_STEP_NS: u64 = 50_000_000;

/// Sleep in nanoseconds while no container waits for a GPU. Libraries consider the arbiter dead only after a much
/// longer time.
const IDLE_SLEEP_NS: u64 = 150_000_000;

/// Smallest time between two requested measurements. The driver takes some milliseconds for one.
const MEASURE_INTERVAL: Duration = Duration::from_millis(20);

/// Handle of the arbiter's thread.
#[derive(Clone, Debug)]
pub(super) struct Arbiter {
    commands: mpsc::Sender<Command>,
    used: Arc<Mutex<UsedTime>>,
}

/// Window usage of all containers.
#[derive(Clone, Debug, Default)]
pub(super) struct UsedTime {
    /// Time of the values, by [`futex::now`].
    pub(super) at: u64,
    /// Usage by grant directory and GPU.
    pub(super) all: HashMap<(PathBuf, UuidBytes), WindowUsage>,
}

enum Command {
    Add(PathBuf),
    Remove(PathBuf),
    /// Callback for processes that wait until their memory is measured.
    OnMeasureRequest(Box<dyn Fn() + Send>),
    /// Power draw of a GPU.
    Power(UuidBytes, GpuPower),
    /// Grant directories of the containers whose processes are all stopped.
    Stopped(BTreeSet<PathBuf>),
}

/// State of a GPU whose throughput is shared.
#[derive(Default)]
struct Throughput {
    /// Time of the last power request, and busy time of the GPU at that time.
    requested: (u64, u64),
    factor: Option<PowerFactor>,
}

impl Arbiter {
    pub(super) fn start(gpus: Arc<dyn Gpus>, stop: CancellationToken) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let used = Arc::default();
        let arbiter = Self { commands, used: Arc::clone(&used) };
        let (power_requests, requests) = mpsc::sync_channel(MAX_GPUS);
        thread::Builder::new()
            .name("arbiter".into())
            .spawn(move || run(&inbox, &power_requests, &used, &stop))?;
        // A separate thread reads the power, because a driver that hangs must not stop the windows.
        let answers = arbiter.commands.clone();
        thread::Builder::new()
            .name("power".into())
            .spawn(move || answer_power_requests(&*gpus, &requests, &answers))?;
        Ok(arbiter)
    }

    /// Adds the grant directory of a container. A container that restarts is a new tenant.
    pub(super) fn add(&self, directory: PathBuf) {
        let _ended = self.commands.send(Command::Add(directory));
    }

    pub(super) fn remove(&self, directory: PathBuf) {
        let _ended = self.commands.send(Command::Remove(directory));
    }

    /// Sets the callback for processes near their limit that wait until their memory is measured.
    pub(super) fn on_measure_request(&self, callback: impl Fn() + Send + 'static) {
        let _ended = self.commands.send(Command::OnMeasureRequest(Box::new(callback)));
    }

    /// Sets the containers whose processes are all stopped.
    pub(super) fn set_stopped(&self, directories: BTreeSet<PathBuf>) {
        let _ended = self.commands.send(Command::Stopped(directories));
    }

    pub(super) fn used(&self) -> UsedTime {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Answers requests for the power draw of GPUs until the arbiter ends.
fn answer_power_requests(
    gpus: &dyn Gpus,
    requests: &mpsc::Receiver<UuidBytes>,
    answers: &mpsc::Sender<Command>,
) {
    for gpu in requests {
        if let Some(power) = gpus.power(&GpuUuid::from(gpu.to_string().as_str())) {
            let _ended = answers.send(Command::Power(gpu, power));
        }
    }
}

fn run(
    inbox: &mpsc::Receiver<Command>,
    power_requests: &mpsc::SyncSender<UuidBytes>,
    used: &Mutex<UsedTime>,
    stop: &CancellationToken,
) {
    let mut service = Service::default();
    let mut throughput: HashMap<UuidBytes, Throughput> = HashMap::new();
    let mut request_measurement: Box<dyn Fn() + Send> = Box::new(|| {});
    let (mut published, mut measured) = (Instant::now(), Instant::now());
    while !stop.is_cancelled() {
        let now = futex::now();
        let next = service.step(now);
        if measured.elapsed() >= MEASURE_INTERVAL && service.awaiting_measurement().next().is_some() {
            measured = Instant::now();
            request_measurement();
        }
        for (gpu, busy) in service.throughput_gpus() {
            let requested = &mut throughput.entry(gpu).or_default().requested;
            // The power of an idle GPU does not matter, so the other thread is not woken for it.
            if now - requested.0 >= power::SAMPLE_INTERVAL_NS && busy != requested.1 {
                *requested = (now, busy);
                // The channel is full if the driver does not answer.
                let _full = power_requests.try_send(gpu);
            }
        }
        if published.elapsed() >= PUBLISH_INTERVAL {
            published = Instant::now();
            let all = service.all_usage().map(|(folder, gpu, used)| ((folder.to_owned(), gpu), used));
            let all = all.collect();
            *used.lock().unwrap_or_else(PoisonError::into_inner) = UsedTime { at: now, all };
        }
        loop {
            match inbox.try_recv() {
                Ok(Command::OnMeasureRequest(callback)) => request_measurement = callback,
                Ok(command) => handle(&mut service, &mut throughput, command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        // While no container waits for a GPU, a library that needs one wakes the arbiter.
        service.wait(if next >= now + IDLE_STEP_NS { now + IDLE_SLEEP_NS } else { next });
    }
}

fn handle(service: &mut Service, throughput: &mut HashMap<UuidBytes, Throughput>, command: Command) {
    match command {
        Command::Add(folder) => {
            service.remove(&folder);
            if let Err(error) = service.add(&folder) {
                tracing::warn!(folder = %folder.display(), %error, "cannot open the files of this grant; its container gets no time windows");
            }
        }
        Command::Remove(folder) => service.remove(&folder),
        Command::Power(gpu, power) => {
            let known = throughput.entry(gpu).or_default();
            let model = || PowerFactor::new(PowerModel::with_limit(power.limit));
            if let Some(gpu) = service.gpu_mut(gpu) {
                let factor = known.factor.get_or_insert_with(model);
                gpu.set_factor(factor.sample(futex::now(), power.average, gpu.busy()));
            }
        }
        Command::Stopped(directories) => {
            service.set_stopped(|directory| directories.contains(directory));
        }
        Command::OnMeasureRequest(_) => {}
    }
}
