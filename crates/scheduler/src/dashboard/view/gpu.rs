//! The tile of a GPU, with the pods that hold shares of it.

use serde::Serialize;
use tessera_core::gpu::{Gpu, Health};
use tessera_core::grant::GpuUsage;
use tessera_core::node::NodeState;

use super::super::lookup::{self, GpuNode};
use crate::state::State;

/// The tile of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTile {
    /// Index of the GPU on its node.
    pub index: u8,
    /// Model of the GPU.
    pub model: String,
    /// Memory of the GPU in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Memory granted to pods, in MiB.
    #[serde(rename = "memoryHeldMiB")]
    pub memory_held_mib: u64,
    /// Compute granted to pods, in percent.
    pub compute_held: u32,
    /// True if one pod holds the whole GPU.
    pub whole: bool,
    /// True if the GPU is healthy and may be granted.
    pub healthy: bool,
    /// True if the GPU has a fault. A GPU that is cordoned or in MIG mode has none.
    pub faulty: bool,
    /// Why the GPU may not be granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<&'static str>,
    /// True if the grants exceed the capacity of the GPU.
    pub overbooked: bool,
    /// Pods that hold the GPU, sorted by namespace and name.
    pub pods: Vec<PodSlice>,
}

/// The share of one GPU that one pod holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSlice {
    /// Namespace of the pod; empty for a claim, a booking in doubt and a reserved place.
    pub namespace: String,
    /// Name of the pod, or for a claim its namespace, its name and `/claim`, or for a booking in doubt the UID of its pod
    /// and `/in-doubt`, or for a reserved place its owner and `/reserved`.
    pub pod: String,
    /// Compute in percent.
    pub compute: u32,
    /// GPU memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

/// Number of GPUs by state. A GPU with a grant counts once as shared or whole, and one without a grant as idle if it may
/// be granted. An unhealthy, cordoned or overbooked GPU counts there in addition.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTotals {
    /// Number of all GPUs.
    pub total: usize,
    /// Number of GPUs without a grant that may be granted.
    pub idle: usize,
    /// Number of GPUs that are partly granted.
    pub shared: usize,
    /// Number of GPUs that one pod holds as a whole.
    pub whole: usize,
    /// Number of GPUs with a fault, granted or not. GPUs that are cordoned or in MIG mode do not count.
    pub unhealthy: usize,
    /// Number of GPUs that an administrator has cordoned, granted or not.
    pub cordoned: usize,
    /// Number of GPUs in MIG mode.
    pub in_mig_mode: usize,
    /// Number of GPUs whose grants exceed their capacity.
    pub overbooked: usize,
    /// Compute granted to pods, in percent of one GPU.
    pub compute_held: u64,
    /// Memory of the GPUs in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Memory granted to pods, in MiB.
    #[serde(rename = "memoryHeldMiB")]
    pub memory_held_mib: u64,
    /// Number of GPUs in use. Each GPU counts with the scarcer of compute and memory.
    pub taken: f64,
}

/// Returns the granted compute in percent and the granted memory in MiB.
pub(super) fn amounts(gpu: &Gpu, usage: GpuUsage) -> (u32, u64) {
    if usage.whole {
        (usage.compute_percent.0.saturating_add(100), gpu.memory.0 + usage.memory.0)
    } else {
        (usage.compute_percent.0, usage.memory.0)
    }
}

impl GpuTotals {
    /// Adds one GPU to the sums.
    pub(super) fn add(&mut self, gpu: &Gpu, usage: GpuUsage) {
        let (compute, memory) = amounts(gpu, usage);
        self.total += 1;
        self.idle += usize::from(usage.is_none() && gpu.health.is_healthy());
        self.whole += usize::from(usage.whole);
        self.shared += usize::from(!usage.is_none() && !usage.whole);
        self.unhealthy += usize::from(gpu.health.is_faulty());
        self.cordoned += usize::from(gpu.health == Health::Cordoned);
        self.in_mig_mode += usize::from(gpu.health == Health::InMigMode);
        self.overbooked += usize::from(usage.exceeds(gpu.memory));
        self.compute_held += u64::from(compute);
        self.memory_mib += gpu.memory.0;
        self.memory_held_mib += memory;
        self.taken += usage.part_of(gpu.memory);
    }

    /// Returns the sums over all GPUs of a node.
    pub(super) fn of(state: &NodeState) -> Self {
        let mut totals = Self::default();
        state.node().gpus().iter().for_each(|gpu| totals.add(gpu, state.used(gpu.index)));
        totals
    }
}

/// Returns the tiles of all GPUs of a node.
pub(super) fn tiles(state: &State, node: GpuNode<'_>) -> Vec<GpuTile> {
    let gpus = node.spec.node.gpus();
    let mut tiles: Vec<GpuTile> = gpus.iter().map(|gpu| tile(gpu, node.state.used(gpu.index))).collect();
    for holder in lookup::holders(state, &node.spec.node.name) {
        for (index, usage) in holder.grant.footprint() {
            let (Some(gpu), Some(tile)) = (node.spec.node.gpu(index), tiles.get_mut(index.position())) else {
                continue;
            };
            let (compute, memory_mib) = amounts(gpu, usage);
            let (namespace, pod) = match (holder.pod, holder.claim, holder.reserved_for) {
                (Some(pod), ..) => (pod.namespace.clone(), pod.name.clone()),
                (None, Some((namespace, name)), _) => (String::new(), format!("{namespace}/{name}/claim")),
                (None, None, Some(owner)) => (String::new(), format!("{owner}/reserved")),
                (None, None, None) => (String::new(), format!("{}/in-doubt", holder.grant.pod)),
            };
            tile.pods.push(PodSlice { namespace, pod, compute, memory_mib });
        }
    }
    for tile in &mut tiles {
        tile.pods.sort_by(|a, b| (&a.namespace, &a.pod).cmp(&(&b.namespace, &b.pod)));
    }
    tiles
}

fn tile(gpu: &Gpu, usage: GpuUsage) -> GpuTile {
    let (compute_held, memory_held_mib) = amounts(gpu, usage);
    GpuTile {
        index: gpu.index.0,
        model: gpu.model.to_string(),
        memory_mib: gpu.memory.0,
        memory_held_mib,
        compute_held,
        whole: usage.whole,
        healthy: gpu.health.is_healthy(),
        faulty: gpu.health.is_faulty(),
        problem: gpu.health.problem(),
        overbooked: usage.exceeds(gpu.memory),
        pods: Vec::new(),
    }
}
