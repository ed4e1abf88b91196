//! The output of `place`.

use std::fmt::Write as _;

use serde::Serialize;
use tessera_core::gpu::Gpu;
use tessera_core::grant::Hold;
use tessera_core::node::NodeState;
use tessera_core::placement::{GpuRejectReason, Placement, PlacementError, Policy, describe, explain};
use tessera_core::request::PodRequest;
use tessera_core::units::GpuIndex;

/// The result of one decision. Its JSON keys are stable.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    policy: &'static str,
    feasible: bool,
    containers: Vec<ContainerReport>,
    score: Option<f64>,
    /// Predicted bandwidth in GB/s of an all-reduce over the first container with several GPUs.
    bandwidth: Option<f64>,
    reason: String,
    /// Reason of each GPU in a rejection, for the text output only.
    #[serde(skip)]
    gpu_reasons: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ContainerReport {
    gpus: Vec<u8>,
    #[serde(rename = "cores")]
    compute_percent: u32,
    #[serde(rename = "memoryMiB")]
    memory_mib: u64,
}

impl Report {
    pub(super) fn new(
        node: &NodeState,
        pod: &PodRequest,
        policy: &Policy,
        outcome: &Result<Placement, PlacementError>,
    ) -> Self {
        match outcome {
            Ok(placement) => Self {
                policy: policy.name(),
                feasible: true,
                containers: containers(node, pod, placement),
                score: Some(placement.score),
                bandwidth: bandwidth(node, placement),
                reason: describe(node, pod, policy, placement),
                gpu_reasons: Vec::new(),
            },
            Err(refusal) => Self {
                policy: policy.name(),
                feasible: false,
                containers: Vec::new(),
                score: None,
                bandwidth: None,
                reason: refusal.to_string(),
                gpu_reasons: gpu_reasons(node, pod, policy),
            },
        }
    }

    pub(super) fn json(&self) -> String {
        // Numbers and texts always have a JSON form.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        if !self.feasible {
            let _ = writeln!(text, "does not fit: {}", self.reason);
            self.gpu_reasons.iter().for_each(|reason| {
                let _ = writeln!(text, "  {reason}");
            });
            return text;
        }
        for (position, container) in self.containers.iter().enumerate() {
            let gpus: Vec<String> = container.gpus.iter().map(u8::to_string).collect();
            let each = if gpus.len() > 1 { " each" } else { "" };
            let _ = writeln!(
                text,
                "container {position}: GPU {}, {}% and {} MiB{each}",
                gpus.join(","),
                container.compute_percent,
                container.memory_mib
            );
        }
        let _ = writeln!(text, "why: {}", self.reason);
        text
    }
}

fn bandwidth(node: &NodeState, placement: &Placement) -> Option<f64> {
    let set = placement.gpus.iter().find(|gpus| gpus.len() > 1)?;
    Some(node.node().topology().bandwidth_model().bandwidth(*set).gb_per_second())
}

fn containers(node: &NodeState, pod: &PodRequest, placement: &Placement) -> Vec<ContainerReport> {
    let grants = placement.grants(node.node(), pod);
    let report = |gpus: &[(GpuIndex, Hold)]| {
        let memory = |gpu: &GpuIndex| node.node().gpu(*gpu).map_or(0, |gpu: &Gpu| gpu.memory.0);
        let (compute_percent, memory_mib) = match gpus.first() {
            Some((_, Hold::Share { compute_percent, memory })) => (compute_percent.0, memory.0),
            // GPUs of one set may differ in size. A job can rely on the smallest.
            _ => (100, gpus.iter().map(|(gpu, _)| memory(gpu)).min().unwrap_or(0)),
        };
        ContainerReport { gpus: gpus.iter().map(|(gpu, _)| gpu.0).collect(), compute_percent, memory_mib }
    };
    grants.iter().map(|grant| report(&grant.holds)).collect()
}

/// Returns the reason of each GPU in a rejection. Returns nothing if every GPU fits and there are
/// only too few.
fn gpu_reasons(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Vec<String> {
    let Some(why) = explain(node, pod, policy) else {
        return Vec::new();
    };
    if why.gpus.iter().all(|(_, refusal)| refusal.is_none()) {
        return Vec::new();
    }
    let line = |(gpu, refusal): &(GpuIndex, Option<GpuRejectReason>)| match refusal {
        Some(refusal) => format!("GPU {gpu}: {refusal}"),
        None => format!("GPU {gpu}: fits"),
    };
    why.gpus.iter().map(line).collect()
}
