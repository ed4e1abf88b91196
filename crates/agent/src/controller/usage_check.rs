//! Compares what containers use with what they were granted.
//!
//! The driver's count of a container's memory is compared with the container's memory account. The
//! difference (modules, the driver's own allocations) is published to the library, which subtracts
//! it from the limit.
//!
//! Escapes are decided from what the kernel and the driver report, never from the account: a process of
//! the container can write anything there.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::{gpu::GpuUuid, grant::Hold, units::GpuIndex};
use tessera_limits::UuidBytes;
use tessera_wire::{foreign::objects::Pod, tessera::memory_limit};

use super::{
    AccountSample, Action, AgentSettings, DutyCycle, Escape, EventTime, GpuProcess, LibraryMapping,
    PodContainer, ProcessState, UsageSample, Warning,
    grants::GrantDirectories,
    holdings::Holdings,
    isolation::{Enforcement, NotEnforced, OnEscape},
    over_time::TimeHistory,
    pods::{Pods, has_ended},
};

/// Number of consecutive samples that must show an escape before the agent acts. The driver, the kernel
/// and the kubelet are not read at the same moment, so one sample may mix the times before and after the
/// end of a container.
const CONFIRMING_SAMPLES: u32 = 3;

/// Time for which those samples must last, because samples may follow each other quickly.
const CONFIRMING_TIME: Duration = Duration::from_secs(2);

/// Time after the start of the agent in which it resumes processes that an earlier agent has stopped.
const RESUMING_TIME: Duration = Duration::from_secs(30);

/// Memory that the driver may allocate for a container beyond its limit before the agent can know:
/// modules and local memory.
pub(super) const TOLERATED_BYTES: u64 = 256 << 20;

/// Results of earlier checks.
#[derive(Debug, Default)]
pub(super) struct UsageCheck {
    suspicions: BTreeMap<Case, Suspicion>,
    /// Memory missing in accounts, by container and position of the GPU in its limits.
    uncharged: BTreeMap<(PodContainer, usize), UnchargedHistory>,
    /// Number of reported escapes.
    escapes: BTreeMap<(PodContainer, Escape), u64>,
    /// Processes that are confirmed to be outside their grant, by container and GPU.
    escaped: BTreeMap<(PodContainer, GpuUuid), BTreeSet<u32>>,
    /// GPU time of containers with shares.
    times: BTreeMap<(PodContainer, GpuUuid), TimeHistory>,
    throttled: BTreeMap<ProcessKey, Throttled>,
    /// Processes of an earlier agent that were resumed.
    resumed: BTreeSet<ProcessKey>,
}

/// Process ID on the node and start time of a process.
type ProcessKey = (u32, u64);

/// A process that may run only for a part of the time, until it ends.
#[derive(Debug)]
struct Throttled {
    container: PodContainer,
    gpu: GpuUuid,
    /// Share of the time, from 0 to 1.
    share: f64,
    cycle: DutyCycle,
}

/// An escape of a container or of one of its processes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    container: PodContainer,
    gpu: GpuUuid,
    escape: Escape,
    /// Process ID, or 0 for the container as a whole.
    pid: u32,
}

/// An escape that is going on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Suspicion {
    since: Duration,
    samples: u32,
    is_reported: bool,
}

impl Suspicion {
    /// Returns whether enough samples have shown the escape.
    fn is_confirmed(&self, now: EventTime) -> bool {
        self.samples >= CONFIRMING_SAMPLES && now.elapsed >= self.since + CONFIRMING_TIME
    }
}

/// Processes of one container on one GPU.
struct Tenant<'s> {
    container: &'s PodContainer,
    gpu: &'s GpuUuid,
    processes: Vec<&'s GpuProcess>,
}

impl Tenant<'_> {
    /// Returns an escape of the container, or of one process if `pid` is not 0.
    fn case(&self, escape: Escape, pid: u32) -> Case {
        Case { container: self.container.clone(), gpu: self.gpu.clone(), escape, pid }
    }
}

/// An escape in one sample.
struct Evidence<'a> {
    /// Description for people.
    message: String,
    /// Processes that cause it.
    processes: Vec<&'a GpuProcess>,
    /// Percentage of the GPU's time that the container was granted.
    share_percent: u32,
}

/// Memory missing in an account in the last samples with the same processes.
#[derive(Debug, Default, PartialEq, Eq)]
struct UnchargedHistory {
    processes: BTreeSet<u32>,
    last: [u64; 2],
}

impl UnchargedHistory {
    /// Adds a sample and returns the highest of the last three.
    ///
    /// A process charges memory before it allocates it, so a single sample may find too little.
    fn add(&mut self, processes: &BTreeSet<u32>, bytes: u64) -> u64 {
        if self.processes != *processes {
            *self = Self { processes: processes.clone(), last: [0; 2] };
        }
        let [last, before] = self.last;
        self.last = [bytes, last];
        bytes.max(last).max(before)
    }
}

/// What a sample is compared with.
#[derive(Clone, Copy)]
pub(super) struct Granted<'a> {
    pub(super) settings: &'a AgentSettings,
    pub(super) holdings: Holdings<'a>,
    pub(super) grants: &'a GrantDirectories,
    pub(super) node_labels: Option<&'a BTreeMap<String, String>>,
}

impl UsageCheck {
    /// Returns the number of reported escapes, by container and kind.
    pub(super) fn escapes(&self) -> &BTreeMap<(PodContainer, Escape), u64> {
        &self.escapes
    }

    /// Returns the processes that are confirmed to be outside their grant, by container and GPU.
    pub(super) fn escaped(&self) -> &BTreeMap<(PodContainer, GpuUuid), BTreeSet<u32>> {
        &self.escaped
    }

    /// Publishes uncharged memory to the libraries, and acts on escapes.
    pub(super) fn check(
        &mut self,
        now: EventTime,
        sample: &UsageSample,
        granted: Granted<'_>,
        actions: &mut Vec<Action>,
    ) {
        let sampled: BTreeSet<UuidBytes> =
            sample.sampled_gpus.iter().filter_map(|gpu| UuidBytes::parse(&gpu.0)).collect();
        for account in &sample.accounts {
            self.publish_uncharged(account, sample, granted.grants, &sampled, actions);
        }
        let has_account =
            |key: &PodContainer| sample.accounts.iter().any(|account| account.container == *key);
        self.uncharged.retain(|(key, _), _| has_account(key));
        let measured = self.add_times(sample);
        let cases = granted.cases(sample, &self.times);
        self.suspicions.retain(|case, _| cases.contains_key(case));
        self.escaped.clear();
        self.resume_stopped(now, sample, granted.grants, actions);
        let on_escape = granted.settings.isolation.on_escape;
        for (case, evidence) in cases {
            let fresh = Suspicion { since: now.elapsed, samples: 0, is_reported: false };
            let suspicion = self.suspicions.entry(case.clone()).or_insert(fresh);
            suspicion.samples = suspicion.samples.saturating_add(1);
            if !suspicion.is_confirmed(now) {
                continue;
            }
            let pids = evidence.processes.iter().map(|process| process.pid);
            self.escaped.entry((case.container.clone(), case.gpu.clone())).or_default().extend(pids);
            let is_new = !std::mem::replace(&mut suspicion.is_reported, true);
            if is_new {
                *self.escapes.entry((case.container.clone(), case.escape)).or_default() += 1;
                report(&case, &evidence, on_escape, granted.holdings.pods, actions);
            }
            match effect(on_escape, case.escape) {
                OnEscape::Report => {}
                OnEscape::Kill => {
                    let kill =
                        |process: &&GpuProcess| Action::Kill { pid: process.pid, started: process.started };
                    actions.extend(evidence.processes.iter().map(kill));
                }
                OnEscape::Throttle => self.throttle(&case, &evidence, actions),
            }
        }
        self.correct_cycles(sample, &measured, actions);
        self.escapes.retain(|((uid, _), _), _| granted.holdings.pods.get(uid).is_some());
    }

    /// Adds the GPU times of a sample. Returns the containers and GPUs for which the driver has measured
    /// something new.
    fn add_times(&mut self, sample: &UsageSample) -> BTreeSet<(PodContainer, GpuUuid)> {
        let mut known = std::mem::take(&mut self.times);
        let mut measured = BTreeSet::new();
        for time in &sample.times {
            let key = (time.container.clone(), time.gpu.clone());
            let mut history = known.remove(&key).unwrap_or_default();
            if history.add(time.totals) {
                measured.insert(key.clone());
            }
            self.times.insert(key, history);
        }
        measured
    }

    /// Resumes processes with a grant that an earlier agent may have stopped before it ended.
    fn resume_stopped(
        &mut self,
        now: EventTime,
        sample: &UsageSample,
        grants: &GrantDirectories,
        actions: &mut Vec<Action>,
    ) {
        if now.elapsed > RESUMING_TIME {
            return;
        }
        for process in sample.processes.iter().filter(|process| process.state == ProcessState::Stopped) {
            let key = (process.pid, process.started);
            let is_ours =
                grants.limits_of(&process.container).is_some() && !self.throttled.contains_key(&key);
            if is_ours && self.resumed.insert(key) {
                actions.push(Action::Resume { pid: process.pid, started: process.started });
            }
        }
    }

    /// Throttles the processes of an escape that are not throttled yet.
    fn throttle(&mut self, case: &Case, evidence: &Evidence<'_>, actions: &mut Vec<Action>) {
        let share = f64::from(evidence.share_percent) / 100.0;
        for process in &evidence.processes {
            let key = (process.pid, process.started);
            self.throttled.entry(key).or_insert_with(|| {
                let cycle = DutyCycle::first(share);
                actions.push(Action::Throttle { pid: process.pid, started: process.started, cycle });
                Throttled { container: case.container.clone(), gpu: case.gpu.clone(), share, cycle }
            });
        }
    }

    /// Corrects the cycles of throttled processes by what the driver has measured, and forgets processes
    /// that have ended.
    fn correct_cycles(
        &mut self,
        sample: &UsageSample,
        measured: &BTreeSet<(PodContainer, GpuUuid)>,
        actions: &mut Vec<Action>,
    ) {
        let is_listed = |(pid, started): &ProcessKey| {
            let mut alive = sample.processes.iter().filter(|process| process.state != ProcessState::Ended);
            alive.any(|process| (process.pid, process.started) == (*pid, *started))
        };
        self.throttled
            .retain(|key, throttled| !sample.sampled_gpus.contains(&throttled.gpu) || is_listed(key));
        for (&(pid, started), throttled) in &mut self.throttled {
            let key = (throttled.container.clone(), throttled.gpu.clone());
            let part =
                self.times.get(&key).filter(|_| measured.contains(&key)).and_then(TimeHistory::latest_part);
            let Some(part) = part else { continue };
            let cycle = throttled.cycle.corrected(throttled.share, part);
            if cycle != throttled.cycle {
                throttled.cycle = cycle;
                actions.push(Action::Throttle { pid, started, cycle });
            }
        }
    }

    /// Publishes the memory that the driver counts for a container and its account lacks.
    ///
    /// Zero is published too, because the library may wait for it.
    fn publish_uncharged(
        &mut self,
        account: &AccountSample,
        sample: &UsageSample,
        grants: &GrantDirectories,
        sampled: &BTreeSet<UuidBytes>,
        actions: &mut Vec<Action>,
    ) {
        let Some(limits) = grants.limits_of(&account.container) else { return };
        for (position, (gpu, held)) in limits.gpus.iter().zip(&account.held).enumerate() {
            let is_gpu = |other: &GpuUuid| UuidBytes::parse(&other.0) == Some(gpu.uuid);
            let has_ended =
                |process: &GpuProcess| process.own_pid.is_some_and(|own| account.ended.contains(&own));
            let on_gpu = sample.processes.iter().filter(|process| {
                process.container == account.container && is_gpu(&process.gpu) && !has_ended(process)
            });
            let used = on_gpu.map(|process| process.bytes).sum::<Option<u64>>();
            if let Some((used, held)) = used.zip(*held).filter(|_| sampled.contains(&gpu.uuid)) {
                let (pod, container) = account.container.clone();
                let history = self.uncharged.entry((account.container.clone(), position)).or_default();
                let bytes = history.add(&account.processes, used.saturating_sub(held));
                actions.push(Action::SetUncharged { pod, container, gpu: position, bytes, at: sample.at });
            }
        }
    }
}

impl Granted<'_> {
    /// Returns everything in a sample that looks like an escape.
    fn cases<'s>(
        &self,
        sample: &'s UsageSample,
        times: &BTreeMap<(PodContainer, GpuUuid), TimeHistory>,
    ) -> BTreeMap<Case, Evidence<'s>> {
        let mut cases = BTreeMap::new();
        let Holdings { pods, kubelet, gpus, .. } = self.holdings;
        // Without the pods and the kubelet's list the grants are unknown.
        if !kubelet.has_listed() || !pods.is_complete() {
            return cases;
        }
        let served_by_others = kubelet.served_by_others(gpus);
        let mut by_container: BTreeMap<(&PodContainer, &GpuUuid), Vec<&GpuProcess>> = BTreeMap::new();
        // The driver lists a process for a moment after its end. The pause container of a pod has no name
        // and is not one of its containers.
        let runs =
            |process: &&GpuProcess| process.state != ProcessState::Ended && !process.container.1.is_empty();
        for process in sample.processes.iter().filter(runs) {
            by_container.entry((&process.container, &process.gpu)).or_default().push(process);
        }
        for ((container, gpu), processes) in by_container {
            let tenant = Tenant { container, gpu, processes };
            let Some(pod) = pods.get(&container.0).filter(|pod| !has_ended(pod)) else { continue };
            if let Some(hold) = self.hold(&tenant, pod) {
                let history = times.get(&(container.clone(), gpu.clone()));
                self.check_share(tenant, pod, hold, history, &mut cases);
                continue;
            }
            let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
            if !served_by_others.contains(&(namespace, name, container.1.clone())) {
                let message = format!(
                    "container {} uses GPU {gpu}, which it was not given; does it run privileged, or ask for all \
                     GPUs by itself?",
                    container.1
                );
                let evidence = Evidence { message, processes: tenant.processes.clone(), share_percent: 0 };
                cases.insert(tenant.case(Escape::NotGranted, 0), evidence);
            }
        }
        cases
    }

    /// Returns what a container holds of a GPU, if it was granted the GPU.
    fn hold(&self, tenant: &Tenant<'_>, pod: &Pod) -> Option<Hold> {
        let (uid, container) = tenant.container;
        let holdings = self.holdings.of_pod(uid, pod);
        let gpus = self.holdings.gpus?;
        let by_claims = self.holdings.claims.of_container(gpus, pod, container);
        let own = holdings.iter().filter(|held| held.grant.container == *container);
        let is_gpu = |(index, _): &&(GpuIndex, _)| {
            gpus.node.gpu(*index).is_some_and(|known| known.uuid == *tenant.gpu)
        };
        let mut held = own.flat_map(|held| &held.grant.holds).chain(&by_claims);
        held.find(is_gpu).map(|(_, hold)| *hold)
    }

    /// Adds processes without the library, memory over the limit and time over the share to `cases`.
    fn check_share<'s>(
        &self,
        tenant: Tenant<'s>,
        pod: &Pod,
        hold: Hold,
        history: Option<&TimeHistory>,
        cases: &mut BTreeMap<Case, Evidence<'s>>,
    ) {
        let isolation = &self.settings.isolation;
        let (is_by_library, is_limited) =
            match isolation.enforcement(hold, &pod.metadata.annotations, self.node_labels) {
                Ok(Enforcement::ByLibrary(_)) => (true, true),
                Ok(Enforcement::None(NotEnforced::NoLibrary(_))) | Err(_) => (false, true),
                Ok(Enforcement::None(_)) => (false, false),
            };
        let (container, gpu) = (&tenant.container.1, tenant.gpu);
        let Hold::Share { memory, compute_percent } = hold else { return };
        // A container with memory alone has no share, but a process must run to end.
        let share_percent = compute_percent.0.max(1);
        let mut add = |escape, pid, message, processes| {
            cases.insert(tenant.case(escape, pid), Evidence { message, processes, share_percent });
        };
        let limits = self.grants.limits_of(tenant.container);
        // Grants are removed when their pod ends. Until its last process has ended, it is not checked.
        if let Some(limits) = limits.filter(|_| is_by_library) {
            let is_without = |process: &&&GpuProcess| process.library == LibraryMapping::NotMapped;
            for process in tenant.processes.iter().filter(is_without) {
                let message = format!(
                    "process {} of container {container} uses GPU {gpu} without libtessera.so and is held to no \
                     share; is it linked statically, or is its image not based on glibc?",
                    process.pid
                );
                add(Escape::WithoutLibrary, process.pid, message, vec![*process]);
            }
            let of_gpu = limits.gpus.iter().find(|limit| UuidBytes::parse(&gpu.0) == Some(limit.uuid));
            // A container with memory alone may use all idle time.
            let ceiling = of_gpu.map_or(100, |limit| match limit.compute_ceiling_percent {
                0 => 100,
                ceiling => ceiling,
            });
            // Simulated processes compute without windows.
            let are_real = tenant.processes.iter().any(|process| process.library != LibraryMapping::NoMemory);
            let history = history.filter(|_| are_real);
            if let Some(over) = history.and_then(|history| history.over_time(ceiling)) {
                let percent = |part: Duration| 100.0 * part.as_secs_f64() / over.measured.as_secs_f64();
                let message = format!(
                    "container {container} computed on GPU {gpu} for {:.0} % of the last {} s, and its windows \
                     allowed {:.0} %",
                    percent(over.busy),
                    over.measured.as_secs(),
                    percent(over.granted)
                );
                add(Escape::OverTime, 0, message, tenant.processes.clone());
            }
        }
        if is_limited {
            // Borrowed memory is no escape. Borrowers that keep too much are treated by the rules of loans.
            let limit = memory_limit::parse(&pod.metadata.annotations).ok().flatten().unwrap_or_default();
            let memory = memory.max(limit);
            let used = tenant.processes.iter().filter_map(|process| process.bytes).sum::<u64>();
            if used > (memory.0 << 20).saturating_add(TOLERATED_BYTES) {
                let (used, given) = (used >> 20, memory.0);
                let message =
                    format!("container {container} uses {used} MiB of GPU {gpu}, and was given {given} MiB");
                add(Escape::OverMemory, 0, message, tenant.processes.clone());
            }
        }
    }
}

/// Returns what the agent does about a kind of escape. Throttling gives no memory back.
fn effect(on_escape: OnEscape, escape: Escape) -> OnEscape {
    match (on_escape, escape) {
        (OnEscape::Throttle, Escape::OverMemory) => OnEscape::Report,
        (on_escape, _) => on_escape,
    }
}

/// Logs an escape and records an event for the pod.
fn report(case: &Case, evidence: &Evidence<'_>, on_escape: OnEscape, pods: &Pods, actions: &mut Vec<Action>) {
    let Some(pod) = pods.get(&case.container.0) else { return };
    let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
    let consequence = match effect(on_escape, case.escape) {
        OnEscape::Report => String::new(),
        OnEscape::Throttle => format!("; it is held to {} % of the time", evidence.share_percent),
        OnEscape::Kill => "; it is killed".to_owned(),
    };
    let message = format!("{}{consequence}", evidence.message);
    let warning = Warning::new("a container uses more of a GPU than it was granted");
    let warning = warning.pod(pod).container(&case.container.1).gpu(&case.gpu).detail(message.clone());
    actions.push(Action::Warn(warning));
    let (uid, reason) = (case.container.0.clone(), "GpuShareEscaped");
    actions.push(Action::RecordPodEvent { uid, namespace, name, reason, message });
}
