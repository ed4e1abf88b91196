//! A GPU as a tile, and who fills it.

use serde::Serialize;
use tessera_core::gpu::{Gpu, Health};
use tessera_core::grant::GpuUsage;
use tessera_core::node::NodeState;

use super::super::lookup::{self, GpuNode};
use crate::state::State;

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTile {
    /// Its position on the node.
    pub index: u8,
    /// The product.
    pub model: String,
    /// Memory it has.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Memory promised.
    #[serde(rename = "memoryHeldMiB")]
    pub memory_held_mib: u64,
    /// Compute promised, percent.
    pub compute_held: u32,
    /// Whether one pod holds all of it.
    pub whole: bool,
    /// Whether it may be granted.
    pub healthy: bool,
    /// Whether it carries more than it has.
    pub overbooked: bool,
    /// Who holds it, by namespace and name.
    pub pods: Vec<PodSlice>,
}

/// What one pod holds of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSlice {
    /// The pod's namespace; empty for a booking whose pod is gone.
    pub namespace: String,
    /// The pod's name, or its UID where the name is not known.
    pub pod: String,
    /// Compute, percent.
    pub compute: u32,
    /// Memory.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

/// How many GPUs are in which state. Every GPU is counted once, but for the unhealthy ones, which are also counted as
/// what they would be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTotals {
    /// All.
    pub total: usize,
    /// Nobody holds anything of them.
    pub idle: usize,
    /// Somebody holds a part.
    pub shared: usize,
    /// Somebody holds all.
    pub whole: usize,
    /// Reported broken, whoever holds them.
    pub unhealthy: usize,
    /// They carry more than they have.
    pub overbooked: usize,
    /// Compute promised, percent of one GPU.
    pub compute_held: u64,
    /// Memory they have.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Memory promised.
    #[serde(rename = "memoryHeldMiB")]
    pub memory_held_mib: u64,
    /// GPUs taken: of each what is scarcer, compute or memory.
    pub taken: f64,
}

/// What a use takes of a GPU: compute in percent, memory in MiB.
pub(super) fn amounts(gpu: &Gpu, usage: GpuUsage) -> (u32, u64) {
    if usage.whole {
        (usage.compute_percent.0.saturating_add(100), gpu.memory.0 + usage.memory.0)
    } else {
        (usage.compute_percent.0, usage.memory.0)
    }
}

/// The part of a GPU that is taken: what is scarcer counts.
pub(super) fn taken(gpu: &Gpu, usage: GpuUsage) -> f64 {
    let (compute, memory) = amounts(gpu, usage);
    #[expect(clippy::cast_precision_loss, reason = "no GPU has 2^52 MiB")]
    let memory = memory as f64 / gpu.memory.0.max(1) as f64;
    (f64::from(compute) / 100.0).max(memory).min(1.0)
}

impl GpuTotals {
    /// Counts one more GPU.
    pub(super) fn add(&mut self, gpu: &Gpu, usage: GpuUsage) {
        let (compute, memory) = amounts(gpu, usage);
        self.total += 1;
        self.idle += usize::from(usage.is_none());
        self.whole += usize::from(usage.whole);
        self.shared += usize::from(!usage.is_none() && !usage.whole);
        self.unhealthy += usize::from(gpu.health == Health::Unhealthy);
        self.overbooked += usize::from(usage.exceeds(gpu.memory));
        self.compute_held += u64::from(compute);
        self.memory_mib += gpu.memory.0;
        self.memory_held_mib += memory;
        self.taken += taken(gpu, usage);
    }

    /// All GPUs of a node.
    pub(super) fn of(state: &NodeState) -> Self {
        let mut totals = Self::default();
        state.node().gpus().iter().for_each(|gpu| totals.add(gpu, state.used(gpu.index)));
        totals
    }
}

/// All GPUs of a node, with who holds them.
pub(super) fn tiles(state: &State, node: GpuNode<'_>) -> Vec<GpuTile> {
    let gpus = node.spec.node.gpus();
    let mut tiles: Vec<GpuTile> = gpus.iter().map(|gpu| tile(gpu, node.state.used(gpu.index))).collect();
    for holder in lookup::holders(state, &node.spec.node.name) {
        for (index, usage) in holder.grant.footprint() {
            let (Some(gpu), Some(tile)) = (node.spec.node.gpu(index), tiles.get_mut(index.position())) else {
                continue;
            };
            let (compute, memory_mib) = amounts(gpu, usage);
            let namespace = holder.pod.map_or_else(String::new, |pod| pod.namespace.clone());
            let pod = holder.pod.map_or_else(|| holder.uid.to_string(), |pod| pod.name.clone());
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
        healthy: gpu.health == Health::Healthy,
        overbooked: usage.exceeds(gpu.memory),
        pods: Vec::new(),
    }
}
