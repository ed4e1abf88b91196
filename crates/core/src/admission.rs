//! Whether one node will do for one pod, and if not, why not: one judgement for whoever asks, so that the scheduler's event, its
//! explanation and the command line name the same obstacle.

use std::borrow::Cow;

use crate::gpu_set::GpuSet;
use crate::node::NodeState;
use crate::placement::{self, GpuRejectReason, Placement, PlacementError, Policy};
use crate::quota::{GpuAmount, NamespaceUsage, OverQuota, Quota, QuotaLabels};
use crate::request::PodRequest;
use crate::units::GpuIndex;

/// The word for [`RejectReason::Quota`].
pub const QUOTA: &str = "quota";

/// What stands in the way on a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// No watch has shown it yet.
    #[error("node is not known yet")]
    UnknownNode,
    /// What it says of itself cannot be read.
    #[error("node cannot be read: {0}")]
    BadNode(String),
    /// It does not offer the resource the pod asks for.
    #[error("node does not offer this kind of GPU resource")]
    NotServed,
    /// Its GPUs, or its host.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The namespace has had its share.
    #[error(transparent)]
    Quota(#[from] OverQuota),
}

/// A node as a pod meets it.
#[derive(Clone, Copy, Debug)]
pub struct NodeOffer<'a> {
    /// What it has, and what is left of it.
    pub state: &'a NodeState,
    /// Whether it offers the resources the pod asks by.
    pub serves: bool,
    /// What it is to a quota.
    pub quota_labels: &'a QuotaLabels,
}

/// What a pod asks of one node.
#[derive(Clone, Copy, Debug)]
pub struct PodQuery<'a> {
    /// Whose quota it counts against.
    pub namespace: &'a str,
    /// In the node's unit of memory.
    pub request: &'a PodRequest,
    /// How its GPUs are chosen.
    pub policy: &'a Policy,
}

/// Who may take how much, and has taken.
#[derive(Clone, Copy, Debug)]
pub struct QuotaState<'a> {
    /// What each namespace may take.
    pub quota: &'a Quota,
    /// What each has taken.
    pub usage: &'a NamespaceUsage,
}

/// What a node says to a pod.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeVerdict {
    /// These would be its GPUs.
    Fits(Placement),
    /// It cannot go there now.
    Rejected(Rejection),
}

/// What stands in the way on a node, GPU by GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// In short, as the scheduler's event says it.
    pub reason: RejectReason,
    /// The container that found no GPUs; none where the node as a whole will not do.
    pub container: Option<String>,
    /// For each GPU what keeps it from serving that container, or `None` where it would.
    pub gpus: Vec<(GpuIndex, Option<GpuRejectReason>)>,
}

/// Everything but the GPUs: whether the node offers what the pod asks by, and the namespace may take it there.
pub fn admit(
    offer: NodeOffer<'_>,
    question: PodQuery<'_>,
    limits: QuotaState<'_>,
) -> Result<(), RejectReason> {
    let node = offer.state.node();
    if !node.gpus().is_empty() && !offer.serves {
        return Err(RejectReason::NotServed);
    }
    let PodQuery { namespace, request, .. } = question;
    if limits.quota.limits(namespace) && request.wants_gpu() {
        let more = GpuAmount::upper_bound(request, node);
        limits.quota.allows(namespace, limits.usage, offer.quota_labels, more)?;
    }
    Ok(())
}

/// The request with no more CPU and memory than the node has left by our book. Whether those suffice is kube-scheduler's to say, which has
/// newer news of pods without GPUs; we only weigh them.
#[must_use]
pub fn weigh<'r>(node: &NodeState, request: &'r PodRequest) -> Cow<'r, PodRequest> {
    let (cpu, memory) = (node.cpu_left(), node.memory_left());
    if request.cpu <= cpu && request.memory <= memory {
        return Cow::Borrowed(request);
    }
    let (cpu, memory) = (request.cpu.min(cpu), request.memory.min(memory));
    Cow::Owned(PodRequest { cpu, memory, ..request.clone() })
}

/// The whole judgement, of the GPUs.
#[must_use]
pub fn judge(offer: NodeOffer<'_>, question: PodQuery<'_>, limits: QuotaState<'_>) -> NodeVerdict {
    let PodQuery { request, policy, .. } = question;
    if let Err(reason) = admit(offer, question, limits) {
        return NodeVerdict::Rejected(reason.into());
    }
    let request = &weigh(offer.state, request);
    match placement::place(offer.state, request, policy, GpuSet::EMPTY) {
        Ok(placement) => NodeVerdict::Fits(placement),
        Err(refusal) => {
            let detail = placement::explain(offer.state, request, policy);
            let (container, gpus) = detail.map(|detail| (detail.container, detail.gpus)).unwrap_or_default();
            NodeVerdict::Rejected(Rejection { reason: refusal.into(), container, gpus })
        }
    }
}

// === impl RejectReason ===

impl RejectReason {
    /// Whether the pod could fit once others have gone.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        match self {
            Self::UnknownNode => true,
            Self::BadNode(_) | Self::NotServed => false,
            Self::Placement(refusal) => refusal.may_resolve(),
            Self::Quota(over) => over.may_resolve(),
        }
    }

    /// A word for counting.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnknownNode => "unknown-node",
            Self::BadNode(_) => "bad-node",
            Self::NotServed => "not-served",
            Self::Quota(_) => QUOTA,
            Self::Placement(refusal) => match refusal {
                PlacementError::Cpu => "cpu",
                PlacementError::Memory => "memory",
                PlacementError::NoGpu => "no-gpu",
                PlacementError::Model => "model",
                PlacementError::FewerGpus(_) => "fewer-gpus",
                PlacementError::FewerIdle(_) => "fewer-idle",
                PlacementError::TooLarge(_) => "too-large",
                PlacementError::NoShare { .. } => "no-share",
                PlacementError::NoMemory(_) => "no-gpu-memory",
                PlacementError::Required => "required",
            },
        }
    }
}

impl From<RejectReason> for Rejection {
    /// An obstacle of the node as a whole.
    fn from(reason: RejectReason) -> Self {
        Self { reason, container: None, gpus: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::fixtures::{node, pcie_pairs};
    use crate::quota::NamespaceLimit;
    use crate::request::Request;
    use crate::units::MiB;

    fn reason(serves: bool, request: Request, quota: &Quota) -> Option<String> {
        let state = node(&pcie_pairs(), &[]);
        let policy = Policy::Tessera(Arc::default());
        let request = PodRequest::of_mains([request]);
        let question = PodQuery { namespace: "team", request: &request, policy: &policy };
        let offer = NodeOffer { state: &state, serves, quota_labels: &QuotaLabels::default() };
        match judge(offer, question, QuotaState { quota, usage: &NamespaceUsage::default() }) {
            NodeVerdict::Fits(_) => None,
            NodeVerdict::Rejected(obstacle) => Some(obstacle.reason.to_string()),
        }
    }

    #[test]
    fn the_first_obstacle_is_named() {
        let nothing =
            Quota { namespaces: BTreeMap::from([("team".to_owned(), closed())]), ..Quota::default() };
        let any = Quota::default();
        let asks = Request::Whole(9);
        assert_eq!(reason(true, Request::Whole(8), &any), None);
        assert_eq!(reason(true, asks, &any).as_deref(), Some("fewer than 9 GPUs"));
        assert_eq!(
            reason(true, asks, &nothing).as_deref(),
            Some("ExceedsGPUQuota: not a model of this namespace")
        );
        let unserved = "node does not offer this kind of GPU resource";
        assert_eq!(reason(false, asks, &nothing).as_deref(), Some(unserved));
        assert_eq!(
            reason(true, Request::Memory(MiB(1 << 20)), &any).as_deref(),
            Some("no GPU has 1048576 MiB")
        );
    }

    fn closed() -> NamespaceLimit {
        NamespaceLimit { gpus_by_model: Some(BTreeMap::new()), ..NamespaceLimit::default() }
    }
}
