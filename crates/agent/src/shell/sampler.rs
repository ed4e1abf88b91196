//! Looks at the GPUs, each on a thread of its own: one that hangs holds up neither the others nor a page. However many ask, the
//! driver is asked once an interval.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use tessera_core::gpu::GpuUuid;
use tessera_node::{
    gpus::{Gpus, GpusError, Incident, IncidentKind, ProcessMemory, SampleInterval, SampleProgress},
    processes::{ProcessCache, Processes},
};

use crate::{
    controller::{GpuProcess, View},
    exporter::{Consumer, Meter, Observation, ShareReports, Snapshot, families::MetricsOptions},
};

/// How the GPUs are looked at.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// How often.
    pub every: Duration,
    /// Where the driver's process numbers are explained.
    pub processes: PathBuf,
    /// Whether that is so even if `/proc` does not show the whole machine. Otherwise it is not asked then: other processes under the
    /// same numbers would be worse than none.
    pub trust_processes: bool,
    /// The machine's address, for those who want it in a label.
    pub host_ip: String,
    /// Which metrics are written.
    pub wanted: MetricsOptions,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(2),
            processes: PathBuf::from(PROC),
            trust_processes: false,
            host_ip: String::new(),
            wanted: MetricsOptions::default(),
        }
    }
}

const PROC: &str = "/proc";

/// No look may be older than this many intervals to be shown, and than [`PATIENCE`].
const INTERVALS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a GPU may take to tell who is on it.
const GLANCE: Duration = Duration::from_millis(200);

/// Looks at the GPUs and keeps their accounts.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Sampler {
    gpus: Arc<dyn Gpus>,
    sampling: Sampling,
    meter: Arc<Mutex<Meter>>,
    /// GPUs that are looked at.
    pollers: Mutex<BTreeMap<GpuUuid, Poller>>,
    /// Where processes are explained, if anywhere.
    processes: Option<Processes>,
    /// Who is known of those on the GPUs.
    who: Mutex<Acquainted>,
}

/// The thread of a GPU, which ends when this is dropped.
struct Poller {
    questions: mpsc::Sender<mpsc::Sender<OnOneGpu>>,
    /// It has been asked who is on the GPU, and has not told yet.
    asked: Arc<AtomicBool>,
}

/// A GPU and who is on it; nobody, where it does not tell.
type OnOneGpu = (GpuUuid, Option<Vec<ProcessMemory>>);

/// Those who were on the GPUs when last asked.
#[derive(Default)]
struct Acquainted {
    memory: Option<ProcessCache>,
    /// The numbers they have in their containers, by their number here and when they started: these never change.
    own_numbers: HashMap<(u32, u64), Option<u32>>,
}

impl Sampler {
    /// Looks at nothing yet.
    #[must_use]
    pub fn new(gpus: Arc<dyn Gpus>, sampling: Sampling) -> Self {
        let processes = Processes::at(sampling.processes.clone());
        let is_own = sampling.processes == Path::new(PROC) && !sampling.trust_processes;
        let believed = !is_own || processes.see_the_machine() == Some(true);
        if !believed {
            tracing::warn!(
                "this is not the machine's own process namespace, so nobody knows whose processes are on the GPUs; \
                 set hostPID: true, or name the right directory with --proc-root"
            );
        }
        let processes = believed.then_some(processes);
        let who = Acquainted { memory: processes.clone().map(ProcessCache::of), ..Acquainted::default() };
        let (meter, pollers) = (Arc::default(), Mutex::default());
        Self { gpus, sampling, meter, pollers, processes, who: Mutex::new(who) }
    }

    /// Looks at nothing any more.
    pub(super) fn rest(&self) {
        lock(&self.pollers).clear();
    }

    /// Takes note of the GPUs and pods there are.
    pub(super) fn learn(&self, view: &View) {
        let gpus = view.node.iter().flat_map(|node| node.node().gpus());
        let cards: Vec<GpuUuid> = gpus.map(|gpu| gpu.uuid.clone()).collect();
        if view.node.is_some() {
            let mut pollers = lock(&self.pollers);
            pollers.retain(|card, _| cards.contains(card));
            for card in &cards {
                if !pollers.contains_key(card) {
                    match self.poll(card.clone()) {
                        Ok(poller) => drop(pollers.insert(card.clone(), poller)),
                        Err(error) => {
                            tracing::warn!(%card, %error, "cannot start a thread to look at the GPU")
                        }
                    }
                }
            }
            lock(&self.meter).keep(&cards);
        }
        if view.pods_known {
            lock(&self.meter).learn(&view.pods);
        }
    }

    /// The driver reported something.
    pub(super) fn count(&self, incident: &Incident) {
        if let (Some(gpu), IncidentKind::Xid(number)) = (&incident.gpu, incident.kind) {
            lock(&self.meter).xid(gpu, number, unix().as_secs_f64());
        }
    }

    /// What the libraries in containers report now, and the arbiter so long ago, of all there are.
    pub fn report(&self, throttles: ShareReports, windows_age: Duration) {
        let now = unix();
        lock(&self.meter).report(throttles, now.as_secs_f64(), now.saturating_sub(windows_age).as_secs_f64());
    }

    /// The processes of containers that are on the GPUs now, and which GPUs told. Those on which the last look saw nobody are not
    /// asked, unless they are among `wanted`.
    pub(super) fn on_cards(&self, wanted: &BTreeSet<GpuUuid>) -> (BTreeSet<GpuUuid>, Vec<GpuProcess>) {
        let Some(processes) = &self.processes else {
            return <(BTreeSet<GpuUuid>, Vec<GpuProcess>)>::default();
        };
        let told = self.ask(|gpu| wanted.contains(gpu));
        let pids = told.iter().flat_map(|(_, all)| all).map(|process| process.pid);
        let Acquainted { memory, own_numbers } = &mut *lock(&self.who);
        let who = memory.as_mut().map(|memory| memory.who(pids)).unwrap_or_default();
        own_numbers.retain(|(pid, started), _| who.get(pid).is_some_and(|known| known.started == *started));
        let meter = lock(&self.meter);
        let mut on_cards = Vec::new();
        for (gpu, process) in told.iter().flat_map(|(gpu, all)| all.iter().map(move |process| (gpu, process)))
        {
            let Some(known) = who.get(&process.pid) else { continue };
            let Consumer::Container(key) = meter.holder(Some(known)) else { continue };
            let own = own_numbers.entry((process.pid, known.started));
            on_cards.push(GpuProcess {
                gpu: gpu.clone(),
                pid: process.pid,
                started: known.started,
                own_pid: *own.or_insert_with(|| processes.own_number(process.pid)),
                container: (key.uid, key.container),
                bytes: process.bytes,
            });
        }
        (told.into_iter().map(|(gpu, _)| gpu).collect(), on_cards)
    }

    /// Asks all GPUs at once who is on them, but for those where the last look saw nobody and nobody is `wanted`. One that hangs is
    /// waited for no longer than [`GLANCE`], and not asked again until it has answered.
    fn ask(&self, wanted: impl Fn(&GpuUuid) -> bool) -> Vec<(GpuUuid, Vec<ProcessMemory>)> {
        let (tell, told) = mpsc::channel();
        {
            let (pollers, meter) = (lock(&self.pollers), lock(&self.meter));
            let is_empty = |gpu: &GpuUuid| {
                let latest = meter.card(gpu).and_then(|card| card.latest.as_ref());
                latest.and_then(|look| look.sample.processes.as_ref()).is_some_and(Vec::is_empty)
            };
            for (_, poller) in pollers.iter().filter(|(gpu, _)| wanted(gpu) || !is_empty(gpu)) {
                if !poller.asked.swap(true, Ordering::Relaxed) {
                    let _ended = poller.questions.send(tell.clone());
                }
            }
        }
        drop(tell);
        let until = Instant::now() + GLANCE;
        let next = || told.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        std::iter::from_fn(next).filter_map(|(gpu, all)| Some((gpu, all?))).collect()
    }

    /// Looks from before this moment, in seconds since 1970, say nothing about now.
    fn fresh_since(&self) -> f64 {
        let patience = (self.sampling.every * INTERVALS).max(PATIENCE);
        unix().saturating_sub(patience).as_secs_f64()
    }

    /// Everything there is to tell now.
    #[must_use]
    pub fn picture(&self, view: &View) -> Snapshot {
        let mut meter = lock(&self.meter);
        if view.pods_known {
            meter.learn(&view.pods);
        }
        let picture = Snapshot::new(view, &meter, self.fresh_since(), self.processes.is_some());
        Snapshot { host_ip: self.sampling.host_ip.clone(), ..picture }
    }

    /// Which metrics are written.
    #[must_use]
    pub fn wanted(&self) -> &MetricsOptions {
        &self.sampling.wanted
    }

    fn poll(&self, gpu: GpuUuid) -> io::Result<Poller> {
        let (questions, inbox) = mpsc::channel::<mpsc::Sender<OnOneGpu>>();
        let asked = Arc::new(AtomicBool::new(false));
        let poller = Poller { questions, asked: asked.clone() };
        let (gpus, meter, every) = (self.gpus.clone(), self.meter.clone(), self.sampling.every);
        let mut memory = self.processes.clone().map(ProcessCache::of);
        let mut known = SampleProgress::default();
        let mut trouble = None;
        let begin = Instant::now();
        let work = move || {
            loop {
                let started = Instant::now();
                let uptime = microseconds(started.duration_since(begin));
                let window = known.window(microseconds(unix()), uptime);
                match look(&*gpus, &gpu, memory.as_mut(), window) {
                    Ok(observation) => {
                        trouble = None;
                        known.learn(window, uptime, &observation.sample.work);
                        let took = started.elapsed().as_secs_f64();
                        lock(&meter).observe(&gpu, Observation { took, ..observation });
                    }
                    Err(error) => {
                        lock(&meter).missed(&gpu);
                        let reason = error.to_string();
                        if trouble.as_ref() != Some(&reason) {
                            tracing::warn!(%gpu, "cannot tell what the GPU does: {reason}");
                        }
                        trouble = Some(reason);
                    }
                }
                loop {
                    match inbox.recv_timeout(every.saturating_sub(started.elapsed())) {
                        Ok(answer) => {
                            let processes = gpus.processes(&gpu).ok();
                            asked.store(false, Ordering::Relaxed);
                            let _left = answer.send((gpu.clone(), processes));
                        }
                        Err(RecvTimeoutError::Timeout) => break,
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            }
        };
        thread::Builder::new().name("card".into()).spawn(work)?;
        Ok(poller)
    }
}

/// One look at a GPU and at whoever is on it.
pub fn look(
    gpus: &dyn Gpus,
    gpu: &GpuUuid,
    memory: Option<&mut ProcessCache>,
    window: SampleInterval,
) -> Result<Observation, GpusError> {
    let sample = gpus.sample(gpu, window)?;
    let listed = sample.processes.iter().flatten().map(|process| process.pid);
    // One that ended since may have computed before.
    let worked = sample.work.processes.iter().flatten().map(|(pid, _)| *pid);
    let who = memory.map(|memory| memory.who(listed.chain(worked))).unwrap_or_default();
    let at = Duration::from_micros(window.now).as_secs_f64();
    Ok(Observation { at, took: 0.0, sample, who })
}

fn unix() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use tessera_node::gpus::{DiscoveredGpus, GpuSample};

    use super::*;

    /// GPUs without processes, of which one never answers and one tells all of itself.
    struct Wedged;

    impl Gpus for Wedged {
        fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
            Err(GpusError::NoGpu)
        }

        fn sample(&self, gpu: &GpuUuid, _window: SampleInterval) -> Result<GpuSample, GpusError> {
            let empty = GpuSample { processes: Some(Vec::new()), ..GpuSample::default() };
            if gpu.0.as_ref() == "empty" { Ok(empty) } else { Err(GpusError::NoGpu) }
        }

        fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
            match gpu.0.as_ref() {
                "hangs" => loop {
                    thread::park();
                },
                "fails" => Err(GpusError::NoGpu),
                _ => Ok(Vec::new()),
            }
        }

        fn watch(
            &self,
            _report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
        ) -> Result<ControlFlow<()>, GpusError> {
            Ok(ControlFlow::Break(()))
        }

        fn have_device_nodes(&self) -> bool {
            false
        }
    }

    fn looking_at(cards: &[&str]) -> Sampler {
        let sampler =
            Sampler::new(Arc::new(Wedged), Sampling { trust_processes: true, ..Sampling::default() });
        for card in cards {
            let poller = sampler.poll((*card).into()).unwrap();
            lock(&sampler.pollers).insert((*card).into(), poller);
        }
        sampler
    }

    #[test]
    fn a_gpu_that_hangs_is_left_out_and_asked_once() {
        let sampler = looking_at(&["fine", "hangs", "fails"]);
        for _ in 0..2 {
            assert_eq!(sampler.on_cards(&BTreeSet::new()).0, ["fine".into()].into());
            let asked = |card: &str| lock(&sampler.pollers)[&card.into()].asked.load(Ordering::Relaxed);
            assert_eq!((asked("fine"), asked("hangs"), asked("fails")), (false, true, false));
        }
    }

    #[test]
    fn a_gpu_without_processes_is_asked_only_if_somebody_wants_it() {
        let sampler = looking_at(&["fine", "empty"]);
        while lock(&sampler.meter).card(&"empty".into()).is_none() {
            thread::yield_now();
        }
        let all: BTreeSet<GpuUuid> = ["fine".into(), "empty".into()].into();
        assert_eq!(sampler.on_cards(&BTreeSet::new()).0, ["fine".into()].into());
        assert_eq!(sampler.on_cards(&all).0, all);
    }
}
