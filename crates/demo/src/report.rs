//! The report for scripts.

use serde::Serialize;
use tessera_core::units::Count;

/// The report at the end of the demo.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DemoReport {
    /// Number of nodes.
    pub nodes: usize,
    /// Number of GPUs of all nodes.
    pub gpus: usize,
    /// Seed of the pod stream.
    pub seed: u64,
    /// Time from the start until the dashboard shows every node, in milliseconds.
    pub page_millis: u64,
    /// Time from then to the end, in seconds.
    pub seconds: f64,
    /// Counts of pods.
    pub pods: PodCounts,
    /// The scripted steps in order.
    pub steps: Vec<StepReport>,
    /// Results of the audit.
    pub invariants: InvariantReport,
    /// Usage reported by the agents.
    pub agents: AgentReport,
    /// Resources used by the demo process: all nodes, agents and servers together.
    pub process: ProcessResources,
}

/// Counts of pods.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodCounts {
    /// Pods created by the stream.
    pub created: u64,
    /// Pods bound by the scheduler.
    pub bound: u64,
    /// Pods that completed.
    pub succeeded: u64,
    /// Pods rejected by a kubelet. Any such pod is an error.
    pub failed: u64,
    /// Pods evicted for other pods.
    pub evicted: u64,
    /// Scheduling attempts that found no node.
    pub refusals: u64,
    /// Scheduling attempts that failed.
    pub broken_attempts: u64,
    /// Mean time from taking a pod from the queue to its binding, in milliseconds.
    pub bind_millis: f64,
}

/// Result of one scripted step.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepReport {
    /// Name of the step.
    pub name: &'static str,
    /// True if the step had the expected outcome.
    pub happened: bool,
    /// What happened, or why the step failed.
    pub detail: String,
    /// Duration of the step in seconds.
    pub seconds: f64,
}

/// Results of the audit.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InvariantReport {
    /// Number of checks of all GPUs.
    pub checks: u64,
    /// Overbooked GPUs.
    pub violations: Vec<String>,
    /// Differences between kubelets, annotations and the scheduler's ledger at the end.
    pub differences: Vec<String>,
    /// Number of such differences when the user ended the demo while pods were starting or ending. They are no errors.
    pub unsettled: usize,
    /// Number of grants compared at the end.
    pub grants: usize,
}

/// Usage reported by the agents' pages.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentReport {
    /// Number of agents that answered.
    pub answered: usize,
    /// Number of containers reported by the agents.
    pub containers: usize,
    /// Number of containers with processes on a GPU.
    pub in_use: usize,
}

/// Resources used by a process.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessResources {
    /// Mean number of CPU cores used while pods ran.
    pub cores: f64,
    /// Resident memory at the end, in MiB.
    #[serde(rename = "residentMiB")]
    pub resident_mib: u64,
    /// Peak resident memory, in MiB.
    #[serde(rename = "peakMiB")]
    pub peak_mib: u64,
    /// Number of threads at the end.
    pub threads: u64,
}

impl InvariantReport {
    /// Returns the results of a demo that the user interrupted, which waits for its pods only briefly.
    pub(crate) fn interrupted(mut self) -> Self {
        self.unsettled = std::mem::take(&mut self.differences).len();
        self
    }
}

impl DemoReport {
    /// Returns whether every step succeeded and every invariant held.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.problems().is_empty()
    }

    /// Returns why the demo failed, in one line each. Empty if every step succeeded and every invariant held.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let InvariantReport { violations, differences, .. } = &self.invariants;
        let steps = self.steps.iter().filter(|step| !step.happened);
        let mut problems: Vec<String> =
            steps.map(|step| format!("step {}: {}", step.name, step.detail)).collect();
        problems.extend(violations.iter().chain(differences).cloned());
        if self.pods.failed > 0 {
            problems.push(format!("kubelets rejected {}", Count(self.pods.failed, "pod")));
        }
        problems
    }
}

/// Returns the CPU time used so far, in seconds.
pub(crate) fn processor_seconds() -> f64 {
    // Fields 14 and 15 are utime and stime, in hundredths of a second on Linux.
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u32 =
        after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    f64::from(ticks) / 100.0
}

/// Returns the current memory and threads of the process, together with `cores` measured by the
/// caller.
pub(crate) fn process(cores: f64) -> ProcessResources {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default()
    };
    ProcessResources {
        cores,
        resident_mib: field("VmRSS") >> 10,
        peak_mib: field("VmHWM") >> 10,
        threads: field("Threads"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pods that start while the user ends the demo are no failure, and GPUs that were overbooked are.
    #[test]
    fn an_interrupted_demo_fails_only_for_what_went_wrong() {
        let found = InvariantReport {
            differences: vec!["n: the kubelet reports nothing".to_owned()],
            ..InvariantReport::default()
        };
        let report = |invariants| DemoReport { invariants, ..DemoReport::default() };
        assert!(!report(found.clone()).is_good());
        let interrupted = report(found.interrupted());
        assert!(interrupted.is_good());
        assert_eq!(interrupted.invariants.unsettled, 1);
        let violations = vec!["GPU 0 of n holds 120 %".to_owned()];
        let overbooked = InvariantReport { violations, ..InvariantReport::default() };
        assert!(!report(overbooked.interrupted()).is_good());
    }

    /// A demo that fails says why, also without `--json`.
    #[test]
    fn every_failure_has_a_line() {
        let good = DemoReport::default();
        assert!(good.is_good());
        let step = StepReport {
            name: "training",
            happened: false,
            detail: "no node had two GPUs".to_owned(),
            seconds: 1.0,
        };
        let bad = DemoReport {
            steps: vec![step],
            pods: PodCounts { failed: 2, ..PodCounts::default() },
            invariants: InvariantReport {
                violations: vec!["GPU 0 of n holds 120 %".to_owned()],
                differences: vec!["n: the kubelet reports nothing".to_owned()],
                ..InvariantReport::default()
            },
            ..DemoReport::default()
        };
        let lines = [
            "step training: no node had two GPUs",
            "GPU 0 of n holds 120 %",
            "n: the kubelet reports nothing",
            "kubelets rejected 2 pods",
        ];
        assert_eq!(bad.problems(), lines);
        assert!(!bad.is_good());
    }
}
