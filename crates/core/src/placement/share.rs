//! The choice of the GPUs that serve a share, for every policy except `tessera`.

use super::ContainerQuery;
use crate::gpu_set::GpuSet;
use crate::node::NodeState;
use crate::request::Request;
use crate::units::GpuIndex;

/// The order in which GPUs with enough room are preferred. Ties go to the lowest index.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// The lowest index.
    LowestIndex,
    /// The least compute left, then the fewest memory blocks.
    LeastCompute,
    /// The least memory left.
    LeastMemory,
    /// The most compute left where the request names compute, else the most memory.
    MostRoom,
}

/// The unit in which gpu-manager compares memory.
const MEMORY_BLOCK_MIB: u64 = 256;

pub(super) fn choose(node: &NodeState, query: &ContainerQuery, order: Order) -> Option<GpuSet> {
    let wants_compute = matches!(query.request, Request::Share(share) if share.has_compute());
    let key = |gpu: &GpuIndex| {
        let room = node.room(*gpu);
        let (compute_percent, memory) = (u64::from(room.compute_percent.0), room.memory.0);
        if let Some(weights) = query.weights {
            let fullness = weights.fullness(node, *gpu, node.node().hold(query.request, *gpu));
            match order {
                Order::LeastMemory => return (u64::MAX - fullness, 0),
                Order::MostRoom => return (fullness, 0),
                Order::LowestIndex | Order::LeastCompute => {}
            }
        }
        match order {
            Order::LowestIndex => (0, 0),
            Order::LeastCompute => (compute_percent, memory / MEMORY_BLOCK_MIB),
            Order::LeastMemory => (memory, 0),
            Order::MostRoom if wants_compute => (u64::MAX - compute_percent, u64::MAX - memory),
            Order::MostRoom => (u64::MAX - memory, u64::MAX - compute_percent),
        }
    };
    if query.count() == 1 {
        return query.candidates.iter().min_by_key(key).map(|gpu| GpuSet::EMPTY.with(gpu));
    }
    let missing = query.count().checked_sub(query.required.len())?;
    let mut others: Vec<GpuIndex> = query.candidates.difference(query.required).iter().collect();
    others.sort_by_key(key);
    Some(others.into_iter().take(missing).fold(query.required, GpuSet::with))
}
