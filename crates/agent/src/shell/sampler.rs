//! Looks at the cards, each on a thread of its own: one that hangs holds up neither the others nor a page. However many ask, the
//! driver is asked once an interval.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use tessera_core::gpu::GpuUuid;
use tessera_node::{
    gpus::{Gpus, GpusError, Incident, IncidentKind, Known, ProcessMemory, Window},
    processes::{Memory, Processes},
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{Message, Messages};
use crate::{
    exporter::{Holder, Meter, Observation, Picture, Throttles, families::Wanted},
    machine::{OnCard, View},
};

/// How the cards are looked at.
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
    pub wanted: Wanted,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(2),
            processes: PathBuf::from(PROC),
            trust_processes: false,
            host_ip: String::new(),
            wanted: Wanted::default(),
        }
    }
}

const PROC: &str = "/proc";

/// No look may be older than this many intervals to be shown, and than [`PATIENCE`].
const INTERVALS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a card may take to tell who is on it.
const GLANCE: Duration = Duration::from_millis(200);

/// Looks at the cards and keeps their accounts.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Sampler {
    gpus: Arc<dyn Gpus>,
    sampling: Sampling,
    meter: Arc<Mutex<Meter>>,
    /// Cards that are looked at, until this end is dropped.
    pollers: Mutex<BTreeMap<GpuUuid, mpsc::Sender<()>>>,
    /// Where processes are explained, if anywhere.
    processes: Option<Processes>,
    /// Who is known of those on the cards.
    who: Mutex<Option<Memory>>,
    /// Cards that have not told yet who is on them.
    asked: Arc<Mutex<BTreeSet<GpuUuid>>>,
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
        let who = Mutex::new(processes.clone().map(Memory::of));
        let (meter, pollers, asked) = (Arc::default(), Mutex::default(), Arc::default());
        Self { gpus, sampling, meter, pollers, processes, who, asked }
    }

    /// Follows the agent: new cards are looked at, pods that are gone are forgotten.
    pub(super) async fn follow(self: Arc<Self>, messages: Messages, stop: CancellationToken) {
        loop {
            let (answer, waiting) = oneshot::channel();
            if messages.send(Message::Inspect(answer)).is_err() {
                return;
            }
            if let Some(Ok(view)) = stop.run_until_cancelled(waiting).await {
                self.learn(&view);
            }
            if stop.run_until_cancelled(tokio::time::sleep(self.sampling.every)).await.is_none() {
                lock(&self.pollers).clear();
                return;
            }
        }
    }

    /// Takes note of the cards and pods there are.
    pub(super) fn learn(&self, view: &View) {
        let gpus = view.node.iter().flat_map(|node| node.node().gpus());
        let cards: Vec<GpuUuid> = gpus.map(|gpu| gpu.uuid.clone()).collect();
        if view.node.is_some() {
            let mut pollers = lock(&self.pollers);
            pollers.retain(|card, _| cards.contains(card));
            for card in &cards {
                pollers.entry(card.clone()).or_insert_with(|| self.poll(card.clone()));
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
    pub fn report(&self, throttles: Throttles, windows_age: Duration) {
        let now = unix();
        lock(&self.meter).report(throttles, now.as_secs_f64(), now.saturating_sub(windows_age).as_secs_f64());
    }

    /// The processes of containers that are on the cards now, and which cards told.
    pub(super) fn on_cards(&self) -> (BTreeSet<GpuUuid>, Vec<OnCard>) {
        let Some(processes) = &self.processes else { return <(BTreeSet<GpuUuid>, Vec<OnCard>)>::default() };
        let told = self.ask_all();
        let pids = told.iter().flat_map(|(all, _)| all).map(|process| process.pid);
        let who = lock(&self.who).as_mut().map(|memory| memory.who(pids)).unwrap_or_default();
        let meter = lock(&self.meter);
        let on_card = |gpu: &GpuUuid, process: &ProcessMemory| {
            let known = who.get(&process.pid)?;
            let Holder::Container(key) = meter.holder(Some(known)) else { return None };
            Some(OnCard {
                gpu: gpu.clone(),
                pid: process.pid,
                started: known.started,
                own_pid: processes.own_number(process.pid),
                container: (key.uid, key.container),
                bytes: process.bytes,
            })
        };
        let all = told.iter().flat_map(|(all, gpu)| all.iter().filter_map(|process| on_card(gpu, process)));
        let all = all.collect();
        (told.into_iter().map(|(_, gpu)| gpu).collect(), all)
    }

    /// Asks all cards at once who is on them. One that hangs is waited for no longer than [`GLANCE`], and not asked again until it has
    /// answered.
    fn ask_all(&self) -> Vec<(Vec<ProcessMemory>, GpuUuid)> {
        let (tell, told) = mpsc::channel();
        let cards: Vec<GpuUuid> = lock(&self.pollers).keys().cloned().collect();
        for gpu in cards.into_iter().filter(|gpu| lock(&self.asked).insert(gpu.clone())) {
            let (gpus, asked, tell) = (self.gpus.clone(), self.asked.clone(), tell.clone());
            thread::spawn(move || {
                let processes = gpus.processes(&gpu);
                lock(&asked).remove(&gpu);
                let _left = tell.send(processes.ok().map(|processes| (processes, gpu)));
            });
        }
        drop(tell);
        let until = Instant::now() + GLANCE;
        let next = || told.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        std::iter::from_fn(next).flatten().collect()
    }

    /// Looks from before this moment, in seconds since 1970, say nothing about now.
    fn fresh_since(&self) -> f64 {
        let patience = (self.sampling.every * INTERVALS).max(PATIENCE);
        unix().saturating_sub(patience).as_secs_f64()
    }

    /// Everything there is to tell now.
    #[must_use]
    pub fn picture(&self, view: &View) -> Picture {
        let mut meter = lock(&self.meter);
        if view.pods_known {
            meter.learn(&view.pods);
        }
        let picture = Picture::new(view, &meter, self.fresh_since(), self.processes.is_some());
        Picture { host_ip: self.sampling.host_ip.clone(), ..picture }
    }

    /// Which metrics are written.
    #[must_use]
    pub fn wanted(&self) -> &Wanted {
        &self.sampling.wanted
    }

    fn poll(&self, gpu: GpuUuid) -> mpsc::Sender<()> {
        let (stay, stop) = mpsc::channel::<()>();
        let (gpus, meter, every) = (self.gpus.clone(), self.meter.clone(), self.sampling.every);
        let mut memory = self.processes.clone().map(Memory::of);
        let mut known = Known::default();
        let mut trouble = None;
        let begin = Instant::now();
        thread::spawn(move || {
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
                            tracing::warn!(%gpu, "cannot tell what the card does: {reason}");
                        }
                        trouble = Some(reason);
                    }
                }
                let rest = every.saturating_sub(started.elapsed());
                if stop.recv_timeout(rest) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        stay
    }
}

/// One look at a card and at whoever is on it.
pub fn look(
    gpus: &dyn Gpus,
    gpu: &GpuUuid,
    memory: Option<&mut Memory>,
    window: Window,
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

    use tessera_node::gpus::{CardSample, Found};

    use super::*;

    /// Cards without processes, of which one never answers.
    struct Wedged;

    impl Gpus for Wedged {
        fn discover(&self) -> Result<Found, GpusError> {
            Err(GpusError::NoGpu)
        }

        fn sample(&self, _gpu: &GpuUuid, _window: Window) -> Result<CardSample, GpusError> {
            Err(GpusError::NoGpu)
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

    #[test]
    fn a_card_that_hangs_is_left_out_and_asked_once() {
        let sampler = Sampler::new(Arc::new(Wedged), Sampling::default());
        for card in ["fine", "hangs", "fails"] {
            lock(&sampler.pollers).insert(card.into(), mpsc::channel().0);
        }
        for _ in 0..2 {
            assert_eq!(sampler.on_cards().0, ["fine".into()].into());
            assert_eq!(*lock(&sampler.asked), ["hangs".into()].into());
        }
    }
}
