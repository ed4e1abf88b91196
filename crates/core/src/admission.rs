//! Admission: whether one node can take one pod, and if not, why not.
//!
//! The scheduler's filter, prioritize, bind, preempt and explanation, and the command line, all go
//! through [`Admission`], so they reach the same verdict and give the same reason.
//!
//! The checks have one order. The first one that fails gives the reason:
//!
//! 1. The caller knows and can read the node ([`RejectReason::of_missing_node`]).
//! 2. The node's agent runs, and serves the resources by which the pod requests GPUs.
//! 3. The quota of the pod's namespace allows the pod on this node.
//! 4. The node's GPUs have room for the pod.
//! 5. The kubelet offers the resources now. The agent withdraws devices of GPUs that pods hold, so a full node offers
//!    none, and step 4 has named the reason. If GPUs are free, the kubelet would reject the pod all the same.
//!
//! Steps 2, 4 and 5 depend only on the node's state and on the request. A caller may therefore cache
//! them ([`Admission::cacheable_score`]) and apply the quota later ([`Admission::score_from`]).

use std::borrow::Cow;

use crate::gang::GangWait;
use crate::gpu_set::GpuSet;
use crate::node::NodeState;
use crate::placement::{self, GpuRejectReason, Placement, PlacementError, PlacementExplanation, Policy};
use crate::quota::{GpuAmount, NamespaceUsage, OverQuota, Quota, QuotaLabels};
use crate::request::{ContainerRequest, ContainerRole, PodRequest};
use crate::units::GpuIndex;

/// The value of [`RejectReason::kind`] for [`RejectReason::Quota`].
pub const QUOTA: &str = "quota";

/// The reason why a node cannot take a pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// The watch has not shown the node yet.
    #[error("node is not known yet")]
    UnknownNode,
    /// The node's annotations or status cannot be parsed.
    #[error("node cannot be read: {0}")]
    BadNode(String),
    /// The node does not offer the resource that the pod requests.
    #[error("node does not offer this kind of GPU resource")]
    NotServed,
    /// The node offers the resource that the pod requests, but no unit of it is allocatable although GPUs are free.
    #[error("node offers none of this GPU resource at the moment")]
    Withdrawn,
    /// The node's agent has announced that it does not serve pods now.
    #[error("the agent of the node is being replaced, or was stopped")]
    NoAgent,
    /// The node's GPUs, CPU or memory do not suffice.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The quota of the pod's namespace is exhausted or does not allow this node.
    #[error(transparent)]
    Quota(#[from] OverQuota),
    /// The pod waits for the other pods of its gang.
    #[error(transparent)]
    Gang(#[from] GangWait),
}

/// A reason that follows from the node's state and the pod's request alone. It stays valid until
/// the node changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeMismatch {
    /// The node does not offer the resource that the pod requests.
    NotServed,
    /// The node offers the resource that the pod requests, but no unit of it is allocatable although GPUs are free.
    Withdrawn,
    /// The node's agent has announced that it does not serve pods now.
    NoAgent,
    /// The node's GPUs, CPU or memory do not suffice.
    Placement(PlacementError),
}

/// Whether a node can give a pod the resources by which it requests GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The node offers every resource that the pod requests.
    Offered,
    /// The node offers every resource that the pod requests, but no unit of one of them is allocatable: the agent has
    /// withdrawn all because pods hold the GPUs, or the device plugin has ended.
    Withdrawn,
    /// The node lacks a resource that the pod requests.
    NotOffered,
    /// The node's agent does not serve pods now, so the kubelet would reject the pod.
    NoAgent,
}

/// A node as the pod in question meets it.
#[derive(Clone, Copy, Debug)]
pub struct NodeOffer<'a> {
    /// The node and what its pods use of it.
    pub state: &'a NodeState,
    /// Whether the node serves the resources by which the pod requests GPUs.
    pub service: Service,
    /// The labels by which quotas limit the node.
    pub quota_labels: &'a QuotaLabels,
}

/// A pod as one node meets it.
#[derive(Clone, Copy, Debug)]
pub struct PodQuery<'a> {
    /// The namespace whose quota the pod counts against.
    pub namespace: &'a str,
    /// The request, converted to the node's unit of memory.
    pub request: &'a PodRequest,
    /// The policy that chooses the GPUs.
    pub policy: &'a Policy,
}

/// The limits of all namespaces and their current usage.
#[derive(Clone, Copy, Debug)]
pub struct QuotaState<'a> {
    /// The limits of each namespace.
    pub quota: &'a Quota,
    /// The usage of each namespace.
    pub usage: &'a NamespaceUsage,
}

/// The admission of one pod to one node.
///
/// ```
/// use std::sync::Arc;
/// use tessera_core::admission::{Admission, NodeOffer, NodeVerdict, PodQuery, Service};
/// use tessera_core::gpu::Gpu;
/// use tessera_core::node::{Node, NodeState};
/// use tessera_core::placement::Policy;
/// use tessera_core::quota::QuotaLabels;
/// use tessera_core::request::{PodRequest, Request};
/// use tessera_core::topology::Topology;
/// use tessera_core::units::{GpuIndex, MiB, MilliCpu};
///
/// let gpu = Gpu::new(GpuIndex(0), "GPU-0".into(), "T4".into(), MiB(15_360));
/// let node = Node::new("n".into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768))?;
/// let state = NodeState::empty(Arc::new(node));
/// let offer = NodeOffer { state: &state, service: Service::Offered, quota_labels: &QuotaLabels::default() };
/// let two_gpus = PodRequest::of_mains([Request::Whole(2)]);
/// let query = PodQuery { namespace: "team", request: &two_gpus, policy: &Policy::Simple };
///
/// let admission = Admission { offer, query, quota: None };
/// let NodeVerdict::Rejected(rejection) = admission.verdict() else { panic!() };
/// assert_eq!(rejection.reason.to_string(), "fewer than 2 GPUs");
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    /// The node.
    pub offer: NodeOffer<'a>,
    /// The pod.
    pub query: PodQuery<'a>,
    /// The quotas, or `None` where no quota limits the pod. [`QuotaState::limiting`] answers this
    /// once for all nodes.
    pub quota: Option<QuotaState<'a>>,
}

/// The verdict on one node.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeVerdict {
    /// The pod fits on these GPUs.
    Fits(Placement),
    /// The pod does not fit now.
    Rejected(Rejection),
}

/// The reason why a node was rejected, GPU by GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The reason in the words of the scheduler's event.
    pub reason: RejectReason,
    /// The container that found no GPUs; `None` where the node as a whole was rejected.
    pub container: Option<String>,
    /// For each GPU the reason why it cannot serve that container, or `None` where it can.
    pub gpus: Vec<(GpuIndex, Option<GpuRejectReason>)>,
}

// === impl Service ===

impl Service {
    /// Returns the service of a node for a pod. A stopped agent is the reason to name, because the kubelet reports no
    /// resources without one.
    #[must_use]
    pub fn new(is_agent_unavailable: bool, is_offered: bool, is_allocatable: bool) -> Self {
        match (is_agent_unavailable, is_offered, is_allocatable) {
            (true, _, _) => Self::NoAgent,
            (false, true, true) => Self::Offered,
            (false, true, false) => Self::Withdrawn,
            (false, false, _) => Self::NotOffered,
        }
    }
}

// === impl QuotaState ===

impl<'a> QuotaState<'a> {
    /// Returns the quotas where one limits GPU pods of `namespace`, or `None` where none does.
    #[must_use]
    pub fn limiting(self, namespace: &str) -> Option<Self> {
        self.quota.limits(namespace).then_some(self)
    }
}

// === impl Admission ===

impl<'a> Admission<'a> {
    /// Checks everything but the GPUs: whether the node serves the pod's resources now, and whether the
    /// quota allows it.
    pub fn check(&self) -> Result<(), RejectReason> {
        self.check_served()?;
        self.check_quota()?;
        Ok(())
    }

    /// Returns the GPUs that the pod gets on this node.
    pub fn place(&self) -> Result<Placement, RejectReason> {
        self.check_before_placement()?;
        let request = self.request();
        let placement = placement::place(self.offer.state, &request, self.query.policy, GpuSet::EMPTY)?;
        self.check_placement(&placement)?;
        Ok(placement)
    }

    /// Returns how well the node suits the pod; scores of the same policy compare across nodes.
    pub fn score(&self) -> Result<f64, RejectReason> {
        self.score_from(self.cacheable_score())
    }

    /// Returns the score without regard to quotas. It stays valid until the node changes.
    pub fn cacheable_score(&self) -> Result<f64, NodeMismatch> {
        self.check_offered()?;
        let score = placement::score(self.offer.state, &self.request(), self.query.policy)
            .map_err(NodeMismatch::Placement)?;
        self.check_served()?;
        Ok(score)
    }

    /// Returns the score that follows from a cached one, after the quota was applied to it.
    pub fn score_from(&self, cached: Result<f64, NodeMismatch>) -> Result<f64, RejectReason> {
        if !matches!(cached, Err(NodeMismatch::NotServed | NodeMismatch::NoAgent)) {
            self.check_quota()?;
        }
        let score = cached?;
        let is_init = |container: &ContainerRequest| container.role == ContainerRole::Init;
        let has_init = |request: &PodRequest| {
            request.containers.iter().any(|container| is_init(container) && container.request.is_some())
        };
        // What such a pod takes of its quota depends on the chosen GPUs.
        if self.quota.is_some() && has_init(self.query.request) {
            self.place()?;
        }
        Ok(score)
    }

    /// Returns the verdict with the reason for each GPU. It leaves CPU and memory to
    /// kube-scheduler.
    #[must_use]
    pub fn verdict(&self) -> NodeVerdict {
        if let Err(reason) = self.check_before_placement() {
            return NodeVerdict::Rejected(reason.into());
        }
        match placement::place_or_explain(self.offer.state, &self.request(), self.query.policy) {
            Ok(placement) => match self.check_placement(&placement) {
                Ok(()) => NodeVerdict::Fits(placement),
                Err(reason) => NodeVerdict::Rejected(reason.into()),
            },
            Err(PlacementExplanation { error, container, gpus }) => {
                NodeVerdict::Rejected(Rejection { reason: error.into(), container, gpus })
            }
        }
    }

    /// Returns the verdict that a user sees, which includes the CPU and memory that kube-scheduler
    /// checks first.
    #[must_use]
    pub fn verdict_with_host(&self) -> NodeVerdict {
        let (state, request) = (self.offer.state, self.query.request);
        let rejected = |error: PlacementError| NodeVerdict::Rejected(RejectReason::from(error).into());
        match self.verdict() {
            NodeVerdict::Fits(_) if request.cpu > state.cpu_left() => rejected(PlacementError::Cpu),
            NodeVerdict::Fits(_) if request.memory > state.memory_left() => rejected(PlacementError::Memory),
            verdict => verdict,
        }
    }

    /// Returns the amount that the namespace must release before its quota allows the pod on this
    /// node.
    ///
    /// The amount is zero where the quota allows the pod already. The result is `None` where
    /// eviction cannot help: the node does not serve the pod, or the quota excludes the node.
    #[must_use]
    pub fn quota_excess(&self) -> Option<GpuAmount> {
        self.check_served().ok()?;
        let Some(QuotaState { quota, usage }) = self.quota else { return Some(GpuAmount::default()) };
        let more = GpuAmount::peak_need(self.query.request, self.offer.state.node());
        quota.excess(self.query.namespace, usage, self.offer.quota_labels, more)
    }

    /// Returns the request with CPU and memory capped at what the node has left by our ledger.
    ///
    /// kube-scheduler decides whether CPU and memory suffice, because it knows pods without GPUs
    /// earlier than we do. The policy only weighs them.
    #[must_use]
    pub fn request(&self) -> Cow<'a, PodRequest> {
        let (node, request) = (self.offer.state, self.query.request);
        let (cpu, memory) = (node.cpu_left(), node.memory_left());
        if request.cpu <= cpu && request.memory <= memory {
            return Cow::Borrowed(request);
        }
        let (cpu, memory) = (request.cpu.min(cpu), request.memory.min(memory));
        Cow::Owned(PodRequest { cpu, memory, ..request.clone() })
    }

    /// Checks whether the node serves the pod's resources now, so that the kubelet would not reject the pod.
    pub fn check_served(&self) -> Result<(), NodeMismatch> {
        self.check_offered()?;
        match self.offer.service {
            Service::Withdrawn if !self.offer.state.node().gpus().is_empty() => Err(NodeMismatch::Withdrawn),
            _ => Ok(()),
        }
    }

    /// Checks whether the node serves the pod's resources, though pods may hold all of them.
    fn check_offered(&self) -> Result<(), NodeMismatch> {
        match self.offer.service {
            Service::Offered | Service::Withdrawn => Ok(()),
            // A node without GPUs gets the reason "no GPU" from the placement instead.
            _ if self.offer.state.node().gpus().is_empty() => Ok(()),
            Service::NotOffered => Err(NodeMismatch::NotServed),
            Service::NoAgent => Err(NodeMismatch::NoAgent),
        }
    }

    /// Checks what is known before the GPUs are chosen.
    fn check_before_placement(&self) -> Result<(), RejectReason> {
        self.check_offered()?;
        self.check_quota()?;
        Ok(())
    }

    /// Checks what remains after the GPUs were chosen.
    fn check_placement(&self, placement: &Placement) -> Result<(), RejectReason> {
        self.check_served()?;
        self.check_quota_of(placement)?;
        Ok(())
    }

    /// Checks the quota before the GPUs are chosen.
    fn check_quota(&self) -> Result<(), OverQuota> {
        self.check_quota_with(|| GpuAmount::peak_need(self.query.request, self.offer.state.node()))
    }

    /// Checks the quota for the chosen GPUs. They amount to more than the peak need of the pod where an init container
    /// has GPUs of its own.
    fn check_quota_of(&self, placement: &Placement) -> Result<(), OverQuota> {
        let node = self.offer.state.node();
        self.check_quota_with(|| GpuAmount::of_grants(&placement.grants(node, self.query.request), node))
    }

    fn check_quota_with(&self, more: impl FnOnce() -> GpuAmount) -> Result<(), OverQuota> {
        let PodQuery { namespace, request, .. } = self.query;
        match self.quota.and_then(|quotas| quotas.limiting(namespace)) {
            Some(QuotaState { quota, usage }) if request.wants_gpu() => {
                quota.allows(namespace, usage, self.offer.quota_labels, more())
            }
            _ => Ok(()),
        }
    }
}

// === impl NodeMismatch, RejectReason ===

impl From<NodeMismatch> for RejectReason {
    fn from(mismatch: NodeMismatch) -> Self {
        match mismatch {
            NodeMismatch::NotServed => Self::NotServed,
            NodeMismatch::Withdrawn => Self::Withdrawn,
            NodeMismatch::NoAgent => Self::NoAgent,
            NodeMismatch::Placement(error) => Self::Placement(error),
        }
    }
}

impl RejectReason {
    /// Returns the reason for a node that the caller does not know, or cannot read because of
    /// `problem`.
    #[must_use]
    pub fn of_missing_node(problem: Option<&str>) -> Self {
        problem.map_or(Self::UnknownNode, |problem| Self::BadNode(problem.to_owned()))
    }

    /// Returns whether the pod could fit once other pods have ended.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        match self {
            Self::UnknownNode => true,
            // The gang is placed as a whole, so evictions for one of its pods do not help.
            Self::BadNode(_) | Self::NotServed | Self::Withdrawn | Self::NoAgent | Self::Gang(_) => false,
            Self::Placement(error) => error.may_resolve(),
            Self::Quota(over) => over.may_resolve(),
        }
    }

    /// Returns the reason as one word, for counters.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnknownNode => "unknown-node",
            Self::BadNode(_) => "bad-node",
            Self::NotServed => "not-served",
            Self::Withdrawn => "withdrawn",
            Self::NoAgent => "no-agent",
            Self::Quota(_) | Self::Gang(GangWait::Quota { .. }) => QUOTA,
            Self::Gang(_) => "gang",
            Self::Placement(error) => match error {
                PlacementError::Cpu => "cpu",
                PlacementError::Memory => "memory",
                PlacementError::NoGpu => "no-gpu",
                PlacementError::WholeOnly => "whole-only",
                PlacementError::Model => "model",
                PlacementError::FewerSelected(_) => "not-selected",
                PlacementError::NumaNode(_) => "numa-node",
                PlacementError::FewerGpus(_) => "fewer-gpus",
                PlacementError::FewerIdle(_) => "fewer-idle",
                PlacementError::TooLarge(_) => "too-large",
                PlacementError::FewerLarge { .. } => "too-large",
                PlacementError::NoShare(share) if share.has_compute() => "no-share",
                PlacementError::NoShare(_) => "no-gpu-memory",
                PlacementError::NoSlot(_) => "no-slot",
                PlacementError::Required => "required",
                PlacementError::Unlisted(_) => "static-table",
            },
        }
    }
}

impl From<RejectReason> for Rejection {
    /// Wraps a reason that concerns the node as a whole.
    fn from(reason: RejectReason) -> Self {
        Self { reason, container: None, gpus: Vec::new() }
    }
}

#[cfg(test)]
mod tests;
