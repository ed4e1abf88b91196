//! What containers really use against what they were given: what their books lack, and who has escaped.
//!
//! The driver's own count of a container's memory is compared with the books its processes keep. What those lack (modules,
//! what the driver takes for itself) is told to the library, which takes it off the limit. A process that uses a GPU and keeps no
//! books runs without the library.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::{gpu::GpuUuid, units::PodUid};
use tessera_limits::UuidBytes;

use super::{
    Action, Agent, EventTime,
    isolation::{Enforcement, NotEnforced},
};

/// A container of a pod.
pub type PodContainer = (PodUid, String);

/// One look at the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSample {
    /// When it began, on the clock that agent and library share.
    pub at: u64,
    /// The GPUs of which the driver told who is on them.
    pub sampled_gpus: BTreeSet<GpuUuid>,
    /// What the driver says of processes in containers.
    pub processes: Vec<GpuProcess>,
    /// What the processes of containers with a share say themselves.
    pub accounts: Vec<AccountSample>,
}

/// A process of a container on a GPU, by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The process, as the node numbers it.
    pub pid: u32,
    /// When it started, in ticks: with its number this names it for all time.
    pub started: u64,
    /// The process, as its container numbers it.
    pub own_pid: Option<u32>,
    /// Whose it is.
    pub container: PodContainer,
    /// Bytes of the GPU's memory, where the driver tells.
    pub bytes: Option<u64>,
}

/// The books of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountSample {
    /// Whose they are.
    pub container: PodContainer,
    /// Processes that keep them, as the container numbers them.
    pub processes: BTreeSet<u32>,
    /// Processes that kept them and have ended: the driver may still show what they had, and the books do not.
    pub ended: BTreeSet<u32>,
    /// Bytes the living hold of each GPU, in the order of the limits; none where that changed while the driver was asked: then nobody
    /// knows which of both the driver's answer goes with.
    pub held: Vec<Option<u64>>,
}

/// How somebody uses what was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Escape {
    /// A process uses a GPU that its container was not given.
    NotGranted,
    /// A process uses a GPU without the library.
    WithoutLibrary,
    /// A container has more memory than it was given.
    OverMemory,
}

impl Escape {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::NotGranted, Self::WithoutLibrary, Self::OverMemory];

    /// In one word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotGranted => "not-granted",
            Self::WithoutLibrary => "without-library",
            Self::OverMemory => "over-memory",
        }
    }
}

/// One that is going on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Suspicion {
    since: Duration,
    told: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    container: PodContainer,
    gpu: GpuUuid,
    escape: Escape,
    /// Of a process; 0 for a container as a whole.
    pid: u32,
}

/// What was seen before.
#[derive(Debug, Default)]
pub(super) struct Watch {
    suspicions: BTreeMap<Case, Suspicion>,
    /// What the books of a container lacked of a GPU.
    lacks: BTreeMap<(PodContainer, usize), Lack>,
    /// How often somebody escaped.
    pub(super) escapes: BTreeMap<(PodContainer, Escape), u64>,
}

/// What books lacked at the last looks, for as long as the same processes keep them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Lack {
    processes: BTreeSet<u32>,
    last: [u64; 2],
}

/// How long something must go on. A process registers before it uses a GPU, so this is for looks that were not at the same moment.
const PERSISTS: Duration = Duration::from_secs(5);

/// The driver may take this much for a container beyond its limit before anybody could know: modules, local memory.
const TOLERATED: u64 = 256 << 20;

impl Lack {
    /// What to count on. A process books what it asks for before it has it, so a look at the wrong moment finds too little: the
    /// most of three looks counts.
    fn learn(&mut self, processes: &BTreeSet<u32>, bytes: u64) -> u64 {
        if self.processes != *processes {
            *self = Self { processes: processes.clone(), last: [0; 2] };
        }
        let [last, before] = self.last;
        self.last = [bytes, last];
        bytes.max(last).max(before)
    }
}

impl Agent {
    /// Compares, tells the libraries what their books lack, and reports who has escaped.
    pub(super) fn on_measured(&mut self, now: EventTime, measured: &UsageSample, actions: &mut Vec<Action>) {
        let sampled_gpus: BTreeSet<UuidBytes> =
            measured.sampled_gpus.iter().filter_map(|gpu| UuidBytes::parse(&gpu.0)).collect();
        for account in &measured.accounts {
            self.correct(account, measured, &sampled_gpus, actions);
        }
        let is_there =
            |whose: &PodContainer| measured.accounts.iter().any(|account| account.container == *whose);
        self.watch.lacks.retain(|(whose, _), _| is_there(whose));
        let cases = self.cases(measured);
        self.watch.suspicions.retain(|case, _| cases.contains_key(case));
        for (case, (message, processes)) in cases {
            let fresh = Suspicion { since: now.elapsed, told: false };
            let suspicion = self.watch.suspicions.entry(case.clone()).or_insert(fresh);
            if now.elapsed < suspicion.since + PERSISTS {
                continue;
            }
            if !std::mem::replace(&mut suspicion.told, true) {
                *self.watch.escapes.entry((case.container.clone(), case.escape)).or_default() += 1;
                self.tell(&case, &message, actions);
            }
            if self.settings.isolation.kill_escaped {
                let kill =
                    |process: &&GpuProcess| Action::Kill { pid: process.pid, started: process.started };
                actions.extend(processes.iter().map(kill));
            }
        }
        let pods = &self.pods;
        self.watch.escapes.retain(|((uid, _), _), _| pods.contains_key(uid));
    }

    /// Tells the library what the driver has for its container and no book explains; also that this is nothing, for it may wait
    /// to hear that.
    fn correct(
        &mut self,
        account: &AccountSample,
        measured: &UsageSample,
        sampled_gpus: &BTreeSet<UuidBytes>,
        actions: &mut Vec<Action>,
    ) {
        let Some(limits) = self.truth.on_disk.get(&account.container) else { return };
        for (place, (card, held)) in limits.gpus.iter().zip(&account.held).enumerate() {
            let is_it = |gpu: &GpuUuid| UuidBytes::parse(&gpu.0) == Some(card.uuid);
            let has_ended =
                |process: &GpuProcess| process.own_pid.is_some_and(|own| account.ended.contains(&own));
            let on_gpu = measured.processes.iter().filter(|process| {
                process.container == account.container && is_it(&process.gpu) && !has_ended(process)
            });
            let bytes = on_gpu.map(|process| process.bytes).sum::<Option<u64>>();
            if let Some((bytes, held)) = bytes.zip(*held).filter(|_| sampled_gpus.contains(&card.uuid)) {
                let (pod, container) = account.container.clone();
                let lack = self.watch.lacks.entry((account.container.clone(), place)).or_default();
                let bytes = lack.learn(&account.processes, bytes.saturating_sub(held));
                actions.push(Action::SetUncharged { pod, container, gpu: place, bytes, at: measured.at });
            }
        }
    }

    /// All that looks like an escape now, in words, with the processes at fault.
    fn cases<'a>(&self, measured: &'a UsageSample) -> BTreeMap<Case, (String, Vec<&'a GpuProcess>)> {
        let mut cases = BTreeMap::new();
        // Without pods and the kubelet's books nobody knows what was given.
        if !self.listed_once || !self.pods_known {
            return cases;
        }
        let served_by_others = self.served_by_others();
        let mut by_container: BTreeMap<(&PodContainer, &GpuUuid), Vec<&GpuProcess>> = BTreeMap::new();
        // The pause container of a pod is none of its containers, and its names say nothing.
        for process in measured.processes.iter().filter(|process| !process.container.1.is_empty()) {
            by_container.entry((&process.container, &process.gpu)).or_default().push(process);
        }
        for ((key, gpu), processes) in by_container {
            let case =
                |escape: Escape, pid: u32| Case { container: key.clone(), gpu: gpu.clone(), escape, pid };
            let Some(pod) = self.pods.get(&key.0) else { continue };
            let holdings = self.holdings_of(&key.0, pod);
            let held = holdings.iter().find(|held| held.grant.container == key.1);
            let hold = held.and_then(|held| {
                let of_gpu = |(index, _): &&(tessera_core::units::GpuIndex, _)| {
                    let card = self.cards.as_ref().and_then(|cards| cards.node.gpu(*index));
                    card.is_some_and(|card| card.uuid == *gpu)
                };
                held.grant.holds.iter().find(of_gpu).map(|(_, hold)| *hold)
            });
            let name = (pod.metadata.namespace.clone(), pod.metadata.name.clone(), key.1.clone());
            let Some(hold) = hold else {
                if served_by_others.contains(&name) {
                    continue;
                }
                let message = format!(
                    "container {} uses GPU {gpu}, which it was not given; does it run privileged, or ask for all GPUs by itself?",
                    key.1
                );
                cases.insert(case(Escape::NotGranted, 0), (message, processes));
                continue;
            };
            let labels = self.published.node.as_ref().map(|node| &node.metadata.labels);
            let by = self.settings.isolation.of(hold, &pod.metadata.annotations, labels);
            let (by_library, limited) = match by {
                Ok(Enforcement::ByLibrary(_)) => (true, true),
                Ok(Enforcement::None(NotEnforced::NoLibrary(_))) | Err(_) => (false, true),
                Ok(Enforcement::None(_)) => (false, false),
            };
            if by_library {
                let account = measured.accounts.iter().find(|account| account.container == *key);
                let keeps_books = |process: &&GpuProcess| {
                    let known = account.zip(process.own_pid);
                    known.is_none_or(|(account, own)| account.processes.contains(&own))
                };
                for process in processes.iter().filter(|process| !keeps_books(process)) {
                    let message = format!(
                        "process {} of container {} uses GPU {gpu} without libtessera.so and is held to no share; \
                         is it linked statically, or is its image not based on glibc?",
                        process.pid, key.1
                    );
                    cases.insert(case(Escape::WithoutLibrary, process.pid), (message, vec![*process]));
                }
            }
            if let tessera_core::grant::Hold::Share { memory, .. } = hold
                && limited
            {
                let (used, given) =
                    (processes.iter().filter_map(|process| process.bytes).sum::<u64>(), memory.0 << 20);
                if used > given.saturating_add(TOLERATED) {
                    let message = format!(
                        "container {} has {} MiB of GPU {gpu}, and was given {} MiB",
                        key.1,
                        used >> 20,
                        memory.0
                    );
                    cases.insert(case(Escape::OverMemory, 0), (message, processes));
                }
            }
        }
        cases
    }

    fn tell(&self, case: &Case, message: &str, actions: &mut Vec<Action>) {
        let Some(pod) = self.pods.get(&case.container.0) else { return };
        let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        let killed = if self.settings.isolation.kill_escaped { "; it is killed" } else { "" };
        let message = format!("{message}{killed}");
        actions.push(Action::Warn(format!("{namespace}/{name}: {message}")));
        let (uid, reason) = (case.container.0.clone(), "GpuShareEscaped");
        actions.push(Action::RecordPodEvent { uid, namespace, name, reason, message });
    }
}
