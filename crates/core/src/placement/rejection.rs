//! Reasons why a node or a GPU cannot take a pod, short enough for a scheduler event.

use crate::gpu_set::GpuSet;
use crate::grant::Hold;
use crate::node::NodeState;
use crate::request::{MemoryRequest, PodRequest, Request, Share};
use crate::units::{Count, GpuIndex, MiB, Percent};

/// The reason why a pod does not fit on a node.
///
/// The text names the request and never the node's own numbers, because kube-scheduler counts nodes
/// by equal messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The node has too little CPU left.
    #[error("not enough CPU")]
    Cpu,
    /// The node has too little main memory left.
    #[error("not enough memory")]
    Memory,
    /// The node has no GPU.
    #[error("no GPU")]
    NoGpu,
    /// The pod requests a share, and the node serves whole GPUs only.
    #[error("node serves whole GPUs only")]
    WholeOnly,
    /// The node has no GPU of a model that the pod accepts.
    #[error("no GPU of an accepted model")]
    Model,
    /// The node has fewer GPUs than requested that the pod's annotations allow.
    #[error("fewer than {} that the annotations allow", Count(*.0, "GPU"))]
    FewerSelected(u8),
    /// No NUMA node has that many GPUs with enough left.
    #[error("no NUMA node with {} for the pod", Count(*.0, "GPU"))]
    NumaNode(u8),
    /// The node has fewer GPUs than requested.
    #[error("fewer than {}", Count(*.0, "GPU"))]
    FewerGpus(u8),
    /// Fewer GPUs are idle than requested.
    #[error("fewer than {}", Count(*.0, "idle GPU"))]
    FewerIdle(u8),
    /// No GPU has that much memory, even when it is idle.
    #[error("no GPU has {0}")]
    TooLarge(MiB),
    /// Fewer GPUs have that much memory than requested, even when they are idle.
    #[error("fewer than {} with {memory}", Count(*.count, "GPU"))]
    FewerLarge {
        /// The number of GPUs.
        count: u8,
        /// The memory of each.
        memory: MiB,
    },
    /// Fewer GPUs than requested have the share left.
    #[error("{} with {share} left", fewer(.0.count), share = .0)]
    NoShare(Share),
    /// Fewer GPUs than requested have the share and a device for it left.
    #[error("{} with a free slot of nvidia.com/gpu", fewer(*.0))]
    NoSlot(u8),
    /// A GPU that the caller requires is not free.
    #[error("a required GPU is not free")]
    Required,
    /// The static table is strict and lists no free set for the request.
    #[error("no free set of {} in the static table", Count(*.0, "GPU"))]
    Unlisted(u8),
}

/// The reason why one GPU cannot serve a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuRejectReason {
    /// The GPU is unhealthy, for this reason.
    #[error("{0}")]
    Unhealthy(&'static str),
    /// The pod does not accept the GPU's model.
    #[error("another model")]
    Model,
    /// The pod's annotations exclude the GPU.
    #[error("excluded by an annotation")]
    NotSelected,
    /// The pod's annotations demand a GPU of its own, and another pod uses this one.
    #[error("in use, and an annotation demands an idle GPU")]
    InUse,
    /// The pods on the GPU hold all the devices into which it is split.
    #[error("no slot of nvidia.com/gpu left, of {0}")]
    NoSlot(u16),
    /// A pod holds the whole GPU.
    #[error("held whole")]
    HeldWhole,
    /// The container requests a whole GPU, and pods hold shares of this one.
    #[error("shared: {compute_percent} and {memory} are held")]
    Shared {
        /// The compute that the shares hold.
        compute_percent: Percent,
        /// The memory that the shares hold.
        memory: MiB,
    },
    /// The GPU has too little compute left.
    #[error("{left} of {asked} compute left")]
    Compute {
        /// The compute that is left.
        left: Percent,
        /// The requested compute.
        asked: Percent,
    },
    /// The GPU has too little memory left.
    #[error("{left} of {asked} left")]
    Memory {
        /// The memory that is left.
        left: MiB,
        /// The requested memory.
        asked: MiB,
    },
}

/// The reason why a pod does not fit on a node, GPU by GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementExplanation {
    /// The reason for the node.
    pub error: PlacementError,
    /// The container that found no GPUs; `None` where the node as a whole was rejected.
    pub container: Option<String>,
    /// For each GPU the reason why it cannot serve that container, or `None` where it can.
    pub gpus: Vec<(GpuIndex, Option<GpuRejectReason>)>,
}

/// `no GPU` or `fewer than 2 GPUs`
fn fewer(count: u8) -> String {
    if count == 1 { "no GPU".to_owned() } else { format!("fewer than {}", Count(count, "GPU")) }
}

impl PlacementError {
    /// Returns whether the pod could fit once other pods have ended. Otherwise eviction cannot
    /// help.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        match self {
            Self::NoGpu
            | Self::WholeOnly
            | Self::Model
            | Self::FewerSelected(_)
            | Self::FewerGpus(_)
            | Self::TooLarge(_)
            | Self::FewerLarge { .. } => false,
            Self::Cpu
            | Self::Memory
            | Self::FewerIdle(_)
            | Self::NoShare(_)
            | Self::NoSlot(_)
            | Self::NumaNode(_)
            | Self::Required
            | Self::Unlisted(_) => true,
        }
    }
}

/// Checks CPU, main memory, the presence of GPUs and whether the node serves shares.
pub(super) fn check_node(node: &NodeState, pod: &PodRequest) -> Result<(), PlacementError> {
    if pod.wants_gpu() && node.node().gpus().is_empty() {
        return Err(PlacementError::NoGpu);
    }
    if pod.wants_share() && node.node().whole_gpus_only {
        return Err(PlacementError::WholeOnly);
    }
    if pod.cpu > node.cpu_left() {
        return Err(PlacementError::Cpu);
    }
    if pod.memory > node.memory_left() {
        return Err(PlacementError::Memory);
    }
    Ok(())
}

/// Returns the reason why too few GPUs of a node can serve `request`.
pub(super) fn of_gpus(
    node: &NodeState,
    pod: &PodRequest,
    request: Request,
    required: GpuSet,
) -> PlacementError {
    let of_models = || node.node().gpus().iter().filter(|gpu| pod.accepts(&gpu.model));
    let accepted = || of_models().filter(|gpu| pod.selection.accepts(gpu));
    let large = |memory: MemoryRequest| accepted().filter(|gpu| gpu.memory >= memory.on(gpu.memory)).count();
    if of_models().next().is_none() {
        return PlacementError::Model;
    }
    let count = u8::try_from(request.gpu_count()).unwrap_or(u8::MAX);
    if accepted().count() < usize::from(count) && of_models().count() >= usize::from(count) {
        return PlacementError::FewerSelected(count);
    }
    match request {
        Request::Whole(count) | Request::Share(Share { count, .. })
            if accepted().count() < usize::from(count) =>
        {
            PlacementError::FewerGpus(count)
        }
        Request::Whole(_) if !required.is_empty() => PlacementError::Required,
        Request::Whole(count) => PlacementError::FewerIdle(count),
        Request::Share(Share { count, memory: asked @ MemoryRequest::Amount(memory), .. })
            if large(asked) < usize::from(count) =>
        {
            match large(asked) {
                0 => PlacementError::TooLarge(memory),
                _ => PlacementError::FewerLarge { count, memory },
            }
        }
        Request::Share(_) if pod.selection.idle_only => PlacementError::FewerIdle(count),
        Request::Share(Share { count: 2.., .. }) if !required.is_empty() => PlacementError::Required,
        Request::Share(share) => {
            let with_room = accepted().filter(|gpu| {
                gpu.health.is_healthy() && node.has_room(gpu.index, node.node().hold(request, gpu.index))
            });
            let are_slots_missing = pod.selection.needs_slot && with_room.count() >= usize::from(share.count);
            if are_slots_missing {
                PlacementError::NoSlot(share.count)
            } else {
                PlacementError::NoShare(share)
            }
        }
    }
}

/// Returns for each GPU the reason why it cannot serve `request`, or `None` where it can.
pub(super) fn of_each_gpu(
    node: &NodeState,
    pod: &PodRequest,
    request: Request,
) -> Vec<(GpuIndex, Option<GpuRejectReason>)> {
    let gpus = node.node().gpus().iter();
    gpus.map(|gpu| {
        let refusal = if let Some(problem) = gpu.health.problem() {
            Some(GpuRejectReason::Unhealthy(problem))
        } else if !pod.accepts(&gpu.model) {
            Some(GpuRejectReason::Model)
        } else if !pod.selection.accepts(gpu) {
            Some(GpuRejectReason::NotSelected)
        } else if pod.selection.idle_only && !node.used(gpu.index).is_none() {
            Some(GpuRejectReason::InUse)
        } else {
            let slots = node.node().slots_per_gpu.filter(|_| pod.selection.needs_slot);
            let no_slot = slots.filter(|_| !node.has_slot(gpu.index)).map(GpuRejectReason::NoSlot);
            room_reject_reason(node, gpu.index, node.node().hold(request, gpu.index)).or(no_slot)
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
