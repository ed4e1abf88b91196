//! Compares what containers use with what they were granted.
//!
//! The driver's count of a container's memory is compared with the container's memory account. The
//! difference (modules, the driver's own allocations) is published to the library, which subtracts
//! it from the limit. A process that uses a GPU and is not in the account runs without the library.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::{gpu::GpuUuid, grant::Hold, units::GpuIndex};
use tessera_limits::UuidBytes;
use tessera_wire::foreign::objects::Pod;

use super::{
    AccountSample, Action, AgentSettings, Escape, EventTime, GpuProcess, PodContainer, UsageSample, Warning,
    grants::GrantDirectories,
    holdings::Holdings,
    isolation::{Enforcement, NotEnforced},
    pods::Pods,
};

/// How long an escape must last before it is reported. A process registers before it uses a GPU, so
/// the delay only covers that driver and accounts are not sampled at the same moment.
const REPORT_DELAY: Duration = Duration::from_secs(5);

/// Memory that the driver may allocate for a container beyond its limit before the agent can know:
/// modules and local memory.
const TOLERATED_BYTES: u64 = 256 << 20;

/// Results of earlier checks.
#[derive(Debug, Default)]
pub(super) struct UsageCheck {
    suspicions: BTreeMap<Case, Suspicion>,
    /// Memory missing in accounts, by container and position of the GPU in its limits.
    uncharged: BTreeMap<(PodContainer, usize), UnchargedHistory>,
    /// Number of reported escapes.
    escapes: BTreeMap<(PodContainer, Escape), u64>,
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
    is_reported: bool,
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

/// Description of an escape, and the processes that cause it.
type Evidence<'a> = (String, Vec<&'a GpuProcess>);

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

    /// Publishes uncharged memory to the libraries, and reports escapes.
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
        let cases = granted.cases(sample);
        self.suspicions.retain(|case, _| cases.contains_key(case));
        let kills = granted.settings.isolation.kill_escaped;
        for (case, (message, processes)) in cases {
            let fresh = Suspicion { since: now.elapsed, is_reported: false };
            let suspicion = self.suspicions.entry(case.clone()).or_insert(fresh);
            if now.elapsed < suspicion.since + REPORT_DELAY {
                continue;
            }
            if !std::mem::replace(&mut suspicion.is_reported, true) {
                *self.escapes.entry((case.container.clone(), case.escape)).or_default() += 1;
                report(&case, &message, kills, granted.holdings.pods, actions);
            }
            if kills {
                let kill =
                    |process: &&GpuProcess| Action::Kill { pid: process.pid, started: process.started };
                actions.extend(processes.iter().map(kill));
            }
        }
        self.escapes.retain(|((uid, _), _), _| granted.holdings.pods.get(uid).is_some());
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
    fn cases<'s>(&self, sample: &'s UsageSample) -> BTreeMap<Case, Evidence<'s>> {
        let mut cases = BTreeMap::new();
        let Holdings { pods, kubelet, gpus, .. } = self.holdings;
        // Without the pods and the kubelet's list the grants are unknown.
        if !kubelet.has_listed() || !pods.is_complete() {
            return cases;
        }
        let served_by_others = kubelet.served_by_others(gpus);
        let mut by_container: BTreeMap<(&PodContainer, &GpuUuid), Vec<&GpuProcess>> = BTreeMap::new();
        // The pause container of a pod has no name and is not one of its containers.
        for process in sample.processes.iter().filter(|process| !process.container.1.is_empty()) {
            by_container.entry((&process.container, &process.gpu)).or_default().push(process);
        }
        for ((container, gpu), processes) in by_container {
            let tenant = Tenant { container, gpu, processes };
            let Some(pod) = pods.get(&container.0) else { continue };
            if let Some(hold) = self.hold(&tenant, pod) {
                self.check_share(sample, tenant, pod, hold, &mut cases);
                continue;
            }
            let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
            if !served_by_others.contains(&(namespace, name, container.1.clone())) {
                let message = format!(
                    "container {} uses GPU {gpu}, which it was not given; does it run privileged, or ask for all \
                     GPUs by itself?",
                    container.1
                );
                cases.insert(tenant.case(Escape::NotGranted, 0), (message, tenant.processes));
            }
        }
        cases
    }

    /// Returns what a container holds of a GPU, if it was granted the GPU.
    fn hold(&self, tenant: &Tenant<'_>, pod: &Pod) -> Option<Hold> {
        let (uid, container) = tenant.container;
        let holdings = self.holdings.of_pod(uid, pod);
        let held = holdings.iter().find(|held| held.grant.container == *container)?;
        let is_gpu = |(index, _): &&(GpuIndex, _)| {
            let known = self.holdings.gpus.and_then(|gpus| gpus.node.gpu(*index));
            known.is_some_and(|known| known.uuid == *tenant.gpu)
        };
        held.grant.holds.iter().find(is_gpu).map(|(_, hold)| *hold)
    }

    /// Adds processes without the library and memory over the limit to `cases`.
    fn check_share<'s>(
        &self,
        sample: &UsageSample,
        tenant: Tenant<'s>,
        pod: &Pod,
        hold: Hold,
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
        if is_by_library {
            let account = sample.accounts.iter().find(|account| account.container == *tenant.container);
            let is_registered = |process: &GpuProcess| {
                let known = account.zip(process.own_pid);
                known.is_none_or(|(account, own)| account.processes.contains(&own))
            };
            for process in tenant.processes.iter().filter(|process| !is_registered(process)) {
                let message = format!(
                    "process {} of container {container} uses GPU {gpu} without libtessera.so and is held to no \
                     share; is it linked statically, or is its image not based on glibc?",
                    process.pid
                );
                let case = tenant.case(Escape::WithoutLibrary, process.pid);
                cases.insert(case, (message, vec![*process]));
            }
        }
        if let Hold::Share { memory, .. } = hold
            && is_limited
        {
            let used = tenant.processes.iter().filter_map(|process| process.bytes).sum::<u64>();
            if used > (memory.0 << 20).saturating_add(TOLERATED_BYTES) {
                let (used, given) = (used >> 20, memory.0);
                let message =
                    format!("container {container} uses {used} MiB of GPU {gpu}, and was given {given} MiB");
                cases.insert(tenant.case(Escape::OverMemory, 0), (message, tenant.processes));
            }
        }
    }
}

/// Logs an escape and records an event for the pod.
fn report(case: &Case, message: &str, is_killed: bool, pods: &Pods, actions: &mut Vec<Action>) {
    let Some(pod) = pods.get(&case.container.0) else { return };
    let (namespace, name) = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
    let killed = if is_killed { "; it is killed" } else { "" };
    let message = format!("{message}{killed}");
    let warning = Warning::new("a container uses more of a GPU than it was granted");
    let warning = warning.pod(pod).container(&case.container.1).gpu(&case.gpu).detail(message.clone());
    actions.push(Action::Warn(warning));
    let (uid, reason) = (case.container.0.clone(), "GpuShareEscaped");
    actions.push(Action::RecordPodEvent { uid, namespace, name, reason, message });
}
