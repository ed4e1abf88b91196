//! Looks at the cards, each on a thread of its own: one that hangs holds up neither the others nor a page. However many ask, the
//! driver is asked once an interval.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use tessera_core::gpu::GpuUuid;
use tessera_node::{
    gpus::{Gpus, GpusError, Incident, IncidentKind, ProcessMemory, Window},
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
    /// Where the processes of the machine are listed.
    pub processes: PathBuf,
    /// The machine's address, for those who want it in a label.
    pub host_ip: String,
    /// Which metrics are written.
    pub wanted: Wanted,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(2),
            processes: PathBuf::from("/proc"),
            host_ip: String::new(),
            wanted: Wanted::default(),
        }
    }
}

/// No look may be older than this many intervals to be shown, and than [`PATIENCE`].
const INTERVALS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(10);

/// What was not counted for longer than this is not counted at all: the driver does not remember it.
const FORGETS: u64 = 30_000_000;

/// Looks at the cards and keeps their accounts.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Sampler {
    gpus: Arc<dyn Gpus>,
    sampling: Sampling,
    meter: Arc<Mutex<Meter>>,
    /// Cards that are looked at, until this end is dropped.
    pollers: Mutex<BTreeMap<GpuUuid, mpsc::Sender<()>>>,
    sees_the_machine: Option<bool>,
    /// Who is known of those on the cards.
    who: Mutex<Memory>,
}

impl Sampler {
    /// Looks at nothing yet.
    #[must_use]
    pub fn new(gpus: Arc<dyn Gpus>, sampling: Sampling) -> Self {
        let sees_the_machine = Processes::at(sampling.processes.clone()).see_the_machine();
        if sees_the_machine == Some(false) {
            tracing::warn!(
                "this is not the machine's own process namespace: what processes use cannot be told by container; \
                 set hostPID: true"
            );
        }
        let who = Mutex::new(Memory::of(Processes::at(sampling.processes.clone())));
        Self { gpus, sampling, meter: Arc::default(), pollers: Mutex::default(), sees_the_machine, who }
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

    /// What the libraries in containers report, all of it: takes the place of what was known.
    pub fn set_throttles(&self, throttles: Throttles) {
        lock(&self.meter).throttles = throttles;
    }

    /// The processes of containers that are on the cards now, and which cards told.
    pub(super) fn on_cards(&self) -> (BTreeSet<GpuUuid>, Vec<OnCard>) {
        let cards: Vec<GpuUuid> = lock(&self.pollers).keys().cloned().collect();
        // Not under a lock: a driver that hangs must hold up nobody else.
        let told = cards.into_iter().filter_map(|gpu| Some((self.gpus.processes(&gpu).ok()?, gpu)));
        let told: Vec<(Vec<ProcessMemory>, GpuUuid)> = told.collect();
        let processes = Processes::at(self.sampling.processes.clone());
        let who = lock(&self.who).who(told.iter().flat_map(|(all, _)| all).map(|process| process.pid));
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
        let picture = Picture::new(view, &meter, self.fresh_since(), self.sees_the_machine);
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
        let mut memory = Memory::of(Processes::at(self.sampling.processes.clone()));
        let mut since = 0;
        let mut trouble = None;
        thread::spawn(move || {
            loop {
                let started = Instant::now();
                let now = u64::try_from(unix().as_micros()).unwrap_or(u64::MAX);
                match look(&*gpus, &gpu, &mut memory, Window { since, now }) {
                    Ok(observation) => {
                        trouble = None;
                        since = observation.sample.work.to.max(now.saturating_sub(FORGETS));
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
    memory: &mut Memory,
    window: Window,
) -> Result<Observation, GpusError> {
    let sample = gpus.sample(gpu, window)?;
    let listed = sample.processes.iter().flatten().map(|process| process.pid);
    // One that ended since may have computed before.
    let worked = sample.work.processes.iter().flatten().map(|(pid, _)| *pid);
    let who = memory.who(listed.chain(worked));
    let at = Duration::from_micros(window.now).as_secs_f64();
    Ok(Observation { at, took: 0.0, sample, who })
}

fn unix() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
