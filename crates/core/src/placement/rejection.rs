//! Why a node, or a GPU, will not do: in words short enough for a scheduler event.

use crate::gpu::Health;
use crate::gpu_set::GpuSet;
use crate::grant::Hold;
use crate::node::NodeState;
use crate::request::{PodRequest, Request};
use crate::units::{GpuIndex, MiB, Percent};

/// What stands in the way on a node. The words name the request, never the node's own numbers: the scheduler
/// counts nodes by equal messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// CPU is short.
    #[error("not enough CPU")]
    Cpu,
    /// Main memory is short.
    #[error("not enough memory")]
    Memory,
    /// A node without GPUs.
    #[error("no GPU")]
    NoGpu,
    /// No GPU of a model the pod accepts.
    #[error("no GPU of an accepted model")]
    Model,
    /// Not that many GPUs in all.
    #[error("fewer than {0} GPUs")]
    FewerGpus(u8),
    /// Not that many GPUs that nobody holds.
    #[error("fewer than {0} idle GPUs")]
    FewerIdle(u8),
    /// No GPU is that large, were it empty.
    #[error("no GPU has {0}")]
    TooLarge(MiB),
    /// No GPU has both left.
    #[error("no GPU with {compute_percent} and {memory} left")]
    NoShare {
        /// Asked for.
        compute_percent: Percent,
        /// Asked for.
        memory: MiB,
    },
    /// No GPU has that much memory left.
    #[error("no GPU with {0} left")]
    NoMemory(MiB),
    /// A required GPU is not to be had.
    #[error("a required GPU is not free")]
    Required,
}

/// What stands in the way on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuRejectReason {
    /// Broken.
    #[error("unhealthy")]
    Unhealthy,
    /// Not a model the pod accepts.
    #[error("another model")]
    Model,
    /// A pod holds all of it.
    #[error("held whole")]
    HeldWhole,
    /// Shared, and asked for as a whole.
    #[error("shared: {compute_percent} and {memory} are held")]
    Shared {
        /// Compute held.
        compute_percent: Percent,
        /// Memory held.
        memory: MiB,
    },
    /// Compute is short.
    #[error("{left} of {asked} compute left")]
    Compute {
        /// What is left.
        left: Percent,
        /// What was asked for.
        asked: Percent,
    },
    /// Memory is short.
    #[error("{left} of {asked} left")]
    Memory {
        /// What is left.
        left: MiB,
        /// What was asked for.
        asked: MiB,
    },
}

/// What keeps a pod from a node, GPU by GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementExplanation {
    /// The short form.
    pub error: PlacementError,
    /// The container that found no GPUs; none where the node as a whole will not do.
    pub container: Option<String>,
    /// For each GPU what keeps it from serving that container, or `None` where it would.
    pub gpus: Vec<(GpuIndex, Option<GpuRejectReason>)>,
}

impl PlacementError {
    /// Whether the pod could fit once others have gone; if not, evicting them is no help.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        match self {
            Self::NoGpu | Self::Model | Self::FewerGpus(_) | Self::TooLarge(_) => false,
            Self::Cpu
            | Self::Memory
            | Self::FewerIdle(_)
            | Self::NoShare { .. }
            | Self::NoMemory(_)
            | Self::Required => true,
        }
    }
}

/// CPU, main memory and the mere presence of GPUs.
pub(super) fn check_node(node: &NodeState, pod: &PodRequest) -> Result<(), PlacementError> {
    if pod.wants_gpu() && node.node().gpus().is_empty() {
        return Err(PlacementError::NoGpu);
    }
    if pod.cpu > node.cpu_left() {
        return Err(PlacementError::Cpu);
    }
    if pod.memory > node.memory_left() {
        return Err(PlacementError::Memory);
    }
    Ok(())
}

/// The reason that too few GPUs of a node can serve `request`.
pub(super) fn of_gpus(
    node: &NodeState,
    pod: &PodRequest,
    request: Request,
    required: GpuSet,
) -> PlacementError {
    let accepted = || node.node().gpus().iter().filter(|gpu| pod.accepts(&gpu.model));
    let none_so_large = |memory: MiB| accepted().all(|gpu| gpu.memory < memory);
    if accepted().next().is_none() {
        return PlacementError::Model;
    }
    match request {
        Request::Whole(count) if accepted().count() < usize::from(count) => PlacementError::FewerGpus(count),
        Request::Whole(_) if !required.is_empty() => PlacementError::Required,
        Request::Whole(count) => PlacementError::FewerIdle(count),
        Request::Share { memory, .. } | Request::Memory(memory) if none_so_large(memory) => {
            PlacementError::TooLarge(memory)
        }
        Request::Share { compute_percent, memory } => PlacementError::NoShare { compute_percent, memory },
        Request::Memory(memory) => PlacementError::NoMemory(memory),
    }
}

/// For each GPU of a node: what keeps it from serving `request`, or `None` where it would.
pub(super) fn of_each_gpu(
    node: &NodeState,
    pod: &PodRequest,
    request: Request,
) -> Vec<(GpuIndex, Option<GpuRejectReason>)> {
    let gpus = node.node().gpus().iter();
    gpus.map(|gpu| {
        let refusal = if gpu.health == Health::Unhealthy {
            Some(GpuRejectReason::Unhealthy)
        } else if !pod.accepts(&gpu.model) {
            Some(GpuRejectReason::Model)
        } else {
            room_reject_reason(node, gpu.index, Hold::of(request))
        };
        (gpu.index, refusal)
    })
    .collect()
}

fn room_reject_reason(node: &NodeState, gpu: GpuIndex, hold: Hold) -> Option<GpuRejectReason> {
    if node.has_room(gpu, hold) {
        return None;
    }
    let used = node.used(gpu);
    let room = node.room(gpu);
    Some(match hold {
        _ if used.whole => GpuRejectReason::HeldWhole,
        Hold::Whole => GpuRejectReason::Shared { compute_percent: used.compute_percent, memory: used.memory },
        Hold::Share { compute_percent, .. } if compute_percent > room.compute_percent => {
            GpuRejectReason::Compute { left: room.compute_percent, asked: compute_percent }
        }
        Hold::Share { memory, .. } => GpuRejectReason::Memory { left: room.memory, asked: memory },
    })
}
