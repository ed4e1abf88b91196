//! Placement: which GPUs of a node a pod gets, and how well the node suits it.
//!
//! One function, [`place`], serves every dialect and every policy. It changes nothing; the
//! [ledger](crate::ledger) books the result.

pub mod best_effort;
mod containers;
mod describe;
pub(crate) mod links;
mod policy;
mod rejection;
pub mod scoreboard;
mod share;
pub mod static_table;
mod tessera;
mod whole;

use crate::gpu_set::GpuSet;
use crate::grant::{ContainerGrant, Hold};
use crate::node::{Node, NodeState};
use crate::request::{ContainerRole, LinkSensitivity, PodRequest, Request, Share};
use crate::selection::ScoringWeights;
use crate::units::{MiB, MilliCpu};

use containers::try_place;
pub use describe::describe;
pub use policy::{Policy, PolicyPair, UnknownPolicy};
pub use rejection::{GpuRejectReason, PlacementError, PlacementExplanation};

/// The GPUs that a pod gets on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The GPUs of each container, in the pod's order; empty for a container that requests no GPU.
    pub gpus: Vec<GpuSet>,
    /// How well the node suits the pod. Higher is better; only scores of one policy are comparable.
    pub score: f64,
}

/// Chooses GPUs for every container, or returns the reason why the pod does not fit.
///
/// The first container gets the `required` GPUs among its own, unless it requests a share of one GPU.
///
/// ```
/// use std::sync::Arc;
/// use tessera_core::gpu::Gpu;
/// use tessera_core::gpu_set::GpuSet;
/// use tessera_core::node::{Node, NodeState};
/// use tessera_core::placement::{Policy, place};
/// use tessera_core::request::{PodRequest, Request};
/// use tessera_core::topology::{Link, Topology};
/// use tessera_core::units::{GpuIndex, MiB, MilliCpu};
///
/// // Four GPUs; NVLinks join 0 with 3 and 1 with 2.
/// let links = |a: GpuIndex, b: GpuIndex| if a.0 + b.0 == 3 { Link::nvlink(2) } else { Link::default() };
/// let gpu = |i: u8| Gpu::new(GpuIndex(i), format!("GPU-{i}").as_str().into(), "V100".into(), MiB(16_384));
/// let gpus = (0..4).map(gpu).collect();
/// let node = Node::new("n".into(), gpus, Topology::from_pairs(4, links), MilliCpu(8000), MiB(65_536))?;
/// let state = NodeState::empty(Arc::new(node));
///
/// let pod = PodRequest::of_mains([Request::Whole(2)]);
/// let policy: Policy = "tessera".parse().unwrap();
/// let placement = place(&state, &pod, &policy, GpuSet::EMPTY).unwrap();
/// assert_eq!(placement.gpus[0].to_string(), "0,3");
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
pub fn place(
    node: &NodeState,
    pod: &PodRequest,
    policy: &Policy,
    required: GpuSet,
) -> Result<Placement, PlacementError> {
    try_place(node, pod, policy, required).map_err(|blocked| blocked.error)
}

/// Checks whether [`place`] finds GPUs, without choosing them.
///
/// ```
/// # use std::sync::Arc;
/// # use tessera_core::gpu::Gpu;
/// # use tessera_core::node::{Node, NodeState};
/// use tessera_core::placement::{Policy, filter, score};
/// use tessera_core::request::{PodRequest, Request};
/// # use tessera_core::topology::Topology;
/// # use tessera_core::units::{GpuIndex, MiB, MilliCpu};
///
/// # let gpu = Gpu::new(GpuIndex(0), "GPU-0".into(), "T4".into(), MiB(15_360));
/// # let node = Node::new("n".into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768))?;
/// # let state = NodeState::empty(Arc::new(node));
/// // `state` is a node with one idle GPU of 15,360 MiB.
/// let small = PodRequest::of_mains([Request::memory(MiB(1024))]);
/// let large = PodRequest::of_mains([Request::memory(MiB(20_480))]);
/// assert!(filter(&state, &small, &Policy::Binpack).is_ok());
/// assert!(score(&state, &small, &Policy::Binpack).is_ok());
/// assert_eq!(filter(&state, &large, &Policy::Binpack).unwrap_err().to_string(), "no GPU has 20480 MiB");
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
pub fn filter(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Result<(), PlacementError> {
    match only_request(pod).filter(|_| !policy.has_strict_table()) {
        Some(request) => simple_query(node, pod, request).map(|_| ()),
        None => place(node, pod, policy, GpuSet::EMPTY).map(|_| ()),
    }
}

/// Returns GPUs to set aside for a pod that is on the node already but whose GPUs are unknown.
///
/// The result is empty where no GPU has room for the pod.
#[must_use]
pub fn set_aside(node: &NodeState, pod: &PodRequest) -> Vec<ContainerGrant> {
    // The kubelet has admitted the pod, so CPU and memory suffice.
    let gpus_only = PodRequest { cpu: MilliCpu::ZERO, memory: MiB::ZERO, ..pod.clone() };
    let placement = place(node, &gpus_only, &Policy::Simple, GpuSet::EMPTY);
    placement.map(|placement| placement.grants(node.node(), &gpus_only)).unwrap_or_default()
}

/// Returns the score of [`place`] without choosing the GPUs, which is cheaper when thousands of
/// nodes are ranked.
pub fn score(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Result<f64, PlacementError> {
    if let (Policy::Tessera(forecast), Some(request)) = (policy, only_request(pod)) {
        let query = simple_query(node, pod, request)?;
        if let Some(score) = tessera::quick_score(forecast, node, pod, query.as_ref()) {
            return Ok(score);
        }
    }
    place(node, pod, policy, GpuSet::EMPTY).map(|placement| placement.score)
}

/// Returns the GPU request of a pod in which at most one container requests GPUs and that one is no
/// init container.
///
/// Most pods are of this form. `Some(None)` is a pod without GPU requests, `None` a pod of any
/// other form.
pub(crate) fn only_request(pod: &PodRequest) -> Option<Option<Request>> {
    let mut asking = pod.containers.iter().filter(|container| container.request.is_some());
    match (asking.next(), asking.next()) {
        (None, _) => Some(None),
        (Some(only), None) if only.role != ContainerRole::Init => Some(only.request),
        _ => None,
    }
}

/// Returns the query of a pod with at most one GPU request.
fn simple_query(
    node: &NodeState,
    pod: &PodRequest,
    request: Option<Request>,
) -> Result<Option<ContainerQuery>, PlacementError> {
    rejection::check_node(node, pod)?;
    request.map(|request| ContainerQuery::new(node, pod, request, GpuSet::EMPTY, GpuSet::EMPTY)).transpose()
}

/// Returns the placement of a pod, or an explanation that names the reason for each GPU.
///
/// The function decides as [`place`] does, and pays for the explanation only where the pod does not
/// fit.
pub fn place_or_explain(
    node: &NodeState,
    pod: &PodRequest,
    policy: &Policy,
) -> Result<Placement, PlacementExplanation> {
    try_place(node, pod, policy, GpuSet::EMPTY).map_err(|blocked| {
        let container = blocked.container.and_then(|position| pod.containers.get(position));
        let request = container.and_then(|container| container.request);
        PlacementExplanation {
            error: blocked.error,
            container: container.map(|container| container.name.clone()),
            gpus: request
                .map(|request| rejection::of_each_gpu(&blocked.node, pod, request))
                .unwrap_or_default(),
        }
    })
}

/// Returns what keeps a pod from a node, GPU by GPU, or `None` where the pod fits.
#[must_use]
pub fn explain(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Option<PlacementExplanation> {
    place_or_explain(node, pod, policy).err()
}

fn grants(node: &Node, pod: &PodRequest, gpus: &[GpuSet]) -> Vec<ContainerGrant> {
    let asking = pod.containers.iter().zip(gpus).filter_map(|(container, gpus)| {
        Some(ContainerGrant {
            container: container.name.clone(),
            role: container.role,
            holds: node.holds(container.request?, *gpus),
        })
    });
    asking.collect()
}

impl Placement {
    /// Returns the placement on `node` as grants for the ledger and for the pod's annotations.
    #[must_use]
    pub fn grants(&self, node: &Node, pod: &PodRequest) -> Vec<ContainerGrant> {
        grants(node, pod, &self.gpus)
    }
}

/// The request of one container on one node, as the policies read it.
#[derive(Clone, Copy, Debug)]
struct ContainerQuery {
    request: Request,
    /// The GPUs that could serve the container; at least as many as requested.
    candidates: GpuSet,
    /// The candidates that must be chosen.
    required: GpuSet,
    link_sensitivity: LinkSensitivity,
    /// The CPU of the whole pod.
    cpu: MilliCpu,
    /// The main memory of the whole pod.
    memory: MiB,
    /// How `binpack` and `spread` compare GPUs for shares, if the pod says so.
    weights: Option<ScoringWeights>,
}

/// The choice of a policy for one container.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    gpus: GpuSet,
    /// The points of the policy for this set; 0 for policies without points.
    merit: f64,
}

impl ContainerQuery {
    fn count(&self) -> usize {
        self.request.gpu_count()
    }

    /// Collects the candidates. Where enough of them are `preferred`, only those stay.
    fn new(
        node: &NodeState,
        pod: &PodRequest,
        request: Request,
        required: GpuSet,
        preferred: GpuSet,
    ) -> Result<Self, PlacementError> {
        let count = request.gpu_count();
        let required = match request {
            Request::Share(Share { count: 1, .. }) => GpuSet::EMPTY,
            Request::Whole(_) | Request::Share(_) => required,
        };
        let mut candidates = GpuSet::EMPTY;
        let is_accepted = |model| pod.accepts(model) && pod.selection.accepts_model(model);
        for (kind, gpus) in node.node().kinds().iter().filter(|(kind, _)| is_accepted(&kind.model)) {
            let hold = Hold::of(request, kind.memory);
            candidates = candidates.union(gpus.iter().filter(|gpu| node.fits(*gpu, hold)).collect());
        }
        candidates = pod.selection.of(node, candidates);
        if candidates.len() < count || !candidates.is_superset(required) {
            return Err(rejection::of_gpus(node, pod, request, required));
        }
        candidates = pod
            .selection
            .on_numa_node(node, candidates, required, count)
            .ok_or_else(|| PlacementError::NumaNode(u8::try_from(count).unwrap_or(u8::MAX)))?;
        let preferred = candidates.intersection(preferred);
        if preferred.len() >= count {
            candidates = preferred;
        }
        let PodRequest { cpu, memory, link_sensitivity, .. } = *pod;
        let weights = pod.selection.weights;
        Ok(Self { request, candidates, required, link_sensitivity, cpu, memory, weights })
    }
}

impl Chosen {
    fn plain(gpus: GpuSet) -> Self {
        Self { gpus, merit: 0.0 }
    }
}
