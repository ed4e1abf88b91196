//! The arbiter, on a thread of its own: hands out time windows on shared GPUs to the containers of the grant directories.
//!
//! A new agent begins with nothing: the windows are in the grants' files, and the containers hold themselves to their shares
//! until it is there.

use std::{
    collections::HashMap,
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

/// How often what the containers have had is told.
const TELL: Duration = Duration::from_secs(1);

/// The service asks to be called again no sooner than this, in nanoseconds, when nobody wants a GPU.
const QUIET: u64 = 50_000_000;

/// How long the arbiter then sleeps: well below the time after which it is taken for gone.
const IDLE: u64 = 150_000_000;

/// How often a measurement is asked for at most: the driver takes some milliseconds for one.
const HURRY: Duration = Duration::from_millis(20);

/// The arbiter's thread, as the rest of the agent knows it.
#[derive(Clone, Debug)]
pub(super) struct Arbiter {
    commands: mpsc::Sender<Command>,
    used: Arc<Mutex<UsedTime>>,
}

/// What containers have had of GPUs.
#[derive(Clone, Debug, Default)]
pub(super) struct UsedTime {
    /// Until when, by [`futex::now`].
    pub(super) at: u64,
    /// By grant directory and GPU.
    pub(super) all: HashMap<(PathBuf, UuidBytes), WindowUsage>,
}

enum Command {
    Add(PathBuf),
    Remove(PathBuf),
    /// Whom to tell of processes that wait until what they hold has been measured.
    OnUnsure(Box<dyn Fn() + Send>),
    /// What a GPU draws.
    Power(UuidBytes, GpuPower),
}

/// What is known of a GPU where throughput is shared.
#[derive(Default)]
struct Throughput {
    /// When its power was asked for, and how long it had been busy by then.
    asked: (u64, u64),
    factor: Option<PowerFactor>,
}

impl Arbiter {
    pub(super) fn start(gpus: Arc<dyn Gpus>, stop: CancellationToken) -> std::io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let used = Arc::default();
        let arbiter = Self { commands, used: Arc::clone(&used) };
        let (ask, asked) = mpsc::sync_channel(MAX_GPUS);
        thread::Builder::new().name("arbiter".into()).spawn(move || run(&inbox, &ask, &used, &stop))?;
        // On another thread, as a driver that does not answer must not stop the windows.
        let answers = arbiter.commands.clone();
        thread::Builder::new().name("power".into()).spawn(move || tell_power(&*gpus, &asked, &answers))?;
        Ok(arbiter)
    }

    /// A container has, or will have, its grant there. One that starts again is another tenant.
    pub(super) fn add(&self, directory: PathBuf) {
        let _ended = self.commands.send(Command::Add(directory));
    }

    pub(super) fn remove(&self, directory: PathBuf) {
        let _ended = self.commands.send(Command::Remove(directory));
    }

    /// Whom to tell when a process near its limit waits until what it holds has been measured.
    pub(super) fn on_unsure(&self, tell: impl Fn() + Send + 'static) {
        let _ended = self.commands.send(Command::OnUnsure(Box::new(tell)));
    }

    pub(super) fn used(&self) -> UsedTime {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Tells what GPUs draw, for as long as somebody asks.
fn tell_power(gpus: &dyn Gpus, asked: &mpsc::Receiver<UuidBytes>, answers: &mpsc::Sender<Command>) {
    for card in asked {
        if let Some(power) = gpus.power(&GpuUuid::from(card.to_string().as_str())) {
            let _ended = answers.send(Command::Power(card, power));
        }
    }
}

fn run(
    inbox: &mpsc::Receiver<Command>,
    ask_power: &mpsc::SyncSender<UuidBytes>,
    used: &Mutex<UsedTime>,
    stop: &CancellationToken,
) {
    let mut service = Service::default();
    let mut throughput: HashMap<UuidBytes, Throughput> = HashMap::new();
    let mut tell: Box<dyn Fn() + Send> = Box::new(|| {});
    let (mut told, mut hurried) = (Instant::now(), Instant::now());
    while !stop.is_cancelled() {
        let now = futex::now();
        let next = service.step(now);
        if hurried.elapsed() >= HURRY && service.awaiting_measurement().next().is_some() {
            hurried = Instant::now();
            tell();
        }
        for (card, busy) in service.throughput_gpus() {
            let asked = &mut throughput.entry(card).or_default().asked;
            // An idle GPU draws nothing that matters, and nobody is woken for it.
            if now - asked.0 >= power::SAMPLE_INTERVAL_NS && busy != asked.1 {
                *asked = (now, busy);
                // Full where the driver does not answer.
                let _full = ask_power.try_send(card);
            }
        }
        if told.elapsed() >= TELL {
            told = Instant::now();
            let all = service.all_usage().map(|(folder, card, used)| ((folder.to_owned(), card), used));
            let all = all.collect();
            *used.lock().unwrap_or_else(PoisonError::into_inner) = UsedTime { at: now, all };
        }
        loop {
            match inbox.try_recv() {
                Ok(Command::OnUnsure(other)) => tell = other,
                Ok(command) => obey(&mut service, &mut throughput, command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        // Where nobody wants a GPU for now, whoever does will ring.
        service.wait(if next >= now + QUIET { now + IDLE } else { next });
    }
}

fn obey(service: &mut Service, throughput: &mut HashMap<UuidBytes, Throughput>, command: Command) {
    match command {
        Command::Add(folder) => {
            service.remove(&folder);
            if let Err(error) = service.add(&folder) {
                tracing::warn!(folder = %folder.display(), %error, "this grant gets no time windows");
            }
        }
        Command::Remove(folder) => service.remove(&folder),
        Command::Power(card, power) => {
            let known = throughput.entry(card).or_default();
            let model = || PowerFactor::new(PowerModel::with_limit(power.limit));
            if let Some(card) = service.gpu_mut(card) {
                let factor = known.factor.get_or_insert_with(model);
                card.set_factor(factor.sample(futex::now(), power.average, card.busy()));
            }
        }
        Command::OnUnsure(_) => {}
    }
}
