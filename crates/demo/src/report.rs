//! What happened, for scripts.

use serde::Serialize;

/// The report at the end.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DemoReport {
    /// Nodes and GPUs.
    pub nodes: usize,
    /// All GPUs.
    pub gpus: usize,
    /// The seed of the stream of pods.
    pub seed: u64,
    /// From the start to a page that shows every node, milliseconds.
    pub page_millis: u64,
    /// From then to the end, seconds.
    pub seconds: f64,
    /// Pods.
    pub pods: PodCounts,
    /// The scripted steps, in order.
    pub steps: Vec<StepReport>,
    /// What must always hold.
    pub invariants: InvariantReport,
    /// What the agents say is used.
    pub agents: AgentReport,
    /// What the demonstration itself took: all nodes, agents and servers together.
    pub process: ProcessUsage,
}

/// Counts of pods.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodCounts {
    /// Made by the stream.
    pub created: u64,
    /// Placed by the scheduler.
    pub bound: u64,
    /// Ran to their end.
    pub succeeded: u64,
    /// Did not: rejected by a kubelet, which must not happen.
    pub failed: u64,
    /// Evicted for others.
    pub evicted: u64,
    /// Attempts that found no node.
    pub refusals: u64,
    /// Attempts that broke off.
    pub broken_attempts: u64,
    /// From taking a pod from the queue to its Binding, milliseconds on average.
    pub bind_millis: f64,
}

/// One scripted step.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepReport {
    /// Its name.
    pub name: &'static str,
    /// Whether it happened as it should.
    pub happened: bool,
    /// What was seen, or what was not.
    pub detail: String,
    /// How long it took.
    pub seconds: f64,
}

/// What must always hold.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InvariantReport {
    /// How often all GPUs were looked at.
    pub checks: u64,
    /// GPUs that carried too much.
    pub violations: Vec<String>,
    /// Where kubelets, annotations and the scheduler's ledger differed at the end.
    pub differences: Vec<String>,
    /// Grants compared at the end.
    pub grants: usize,
}

/// What the agents say is used, by their pages.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentReport {
    /// Agents that answered.
    pub answered: usize,
    /// Containers they know.
    pub containers: usize,
    /// Those whose processes they found on a GPU.
    pub in_use: usize,
}

/// What the process took.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessUsage {
    /// Cores, on average while pods ran.
    pub cores: f64,
    /// Resident memory at the end, MiB.
    #[serde(rename = "residentMiB")]
    pub resident_mib: u64,
    /// The most there was, MiB.
    #[serde(rename = "peakMiB")]
    pub peak_mib: u64,
    /// Threads at the end.
    pub threads: u64,
}

impl DemoReport {
    /// Whether everything happened and held.
    #[must_use]
    pub fn is_good(&self) -> bool {
        let InvariantReport { violations, differences, .. } = &self.invariants;
        self.steps.iter().all(|step| step.happened)
            && violations.is_empty()
            && differences.is_empty()
            && self.pods.failed == 0
    }
}

/// Processor time taken so far, seconds.
pub(crate) fn processor_seconds() -> f64 {
    // utime and stime, the 14th and 15th field, in hundredths on Linux.
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u32 =
        after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    f64::from(ticks) / 100.0
}

/// What the process takes now; `cores` is for the caller to know.
pub(crate) fn process(cores: f64) -> ProcessUsage {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default()
    };
    ProcessUsage {
        cores,
        resident_mib: field("VmRSS") >> 10,
        peak_mib: field("VmHWM") >> 10,
        threads: field("Threads"),
    }
}
