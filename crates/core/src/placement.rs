//! Which GPUs of a node a pod gets, and how well the node suits it.
//!
//! One function, [`place`], serves every dialect and every policy. It looks at values and answers with a value;
//! booking the answer is the [ledger](crate::ledger)'s affair.

pub mod best_effort;
mod containers;
mod describe;
mod links;
mod policy;
mod rejection;
pub mod scoreboard;
mod share;
pub mod static_table;
mod tessera;
mod whole;

use crate::gpu_set::GpuSet;
use crate::grant::{ContainerGrant, Hold};
use crate::node::NodeState;
use crate::request::{ContainerRole, LinkSensitivity, PodRequest, Request};
use crate::units::{GpuIndex, MiB, MilliCpu};

use containers::try_place;
pub use describe::describe;
pub use policy::{Policy, UnknownPolicy};
pub use rejection::{GpuRejectReason, PlacementError, PlacementExplanation};

/// The GPUs a node would give a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// For each container of the pod, in its order; empty for one that asks for no GPU.
    pub gpus: Vec<GpuSet>,
    /// How well the node suits the pod; comparable between nodes under the same policy only. Higher is better.
    pub score: f64,
}

/// Chooses GPUs for every container, or says what stands in the way.
///
/// `required` names GPUs that must be among those of the first container that asks for whole ones.
pub fn place(
    node: &NodeState,
    pod: &PodRequest,
    policy: &Policy,
    required: GpuSet,
) -> Result<Placement, PlacementError> {
    try_place(node, pod, policy, required).map_err(|blocked| blocked.error)
}

/// Whether [`place`] would find GPUs, and if not, why not.
pub fn filter(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Result<(), PlacementError> {
    match only_request(pod) {
        Some(request) => simple_query(node, pod, request).map(|_| ()),
        None => place(node, pod, policy, GpuSet::EMPTY).map(|_| ()),
    }
}

/// GPUs for a pod that is on the node already, of which nobody told the GPUs: until somebody does, these are set aside for
/// it. None where nothing is left for it.
#[must_use]
pub fn set_aside(node: &NodeState, pod: &PodRequest) -> Vec<ContainerGrant> {
    // Its CPU is the kubelet's affair: it is there already.
    let gpus_only = PodRequest { cpu: MilliCpu::ZERO, memory: MiB::ZERO, ..pod.clone() };
    let placement = place(node, &gpus_only, &Policy::Simple, GpuSet::EMPTY);
    placement.map(|placement| placement.grants(&gpus_only)).unwrap_or_default()
}

/// The score [`place`] would give, where the GPUs themselves do not matter yet: ranking thousands of nodes takes this
/// road.
pub fn score(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Result<f64, PlacementError> {
    if let (Policy::Tessera(forecast), Some(request)) = (policy, only_request(pod)) {
        let query = simple_query(node, pod, request)?;
        if let Some(score) = tessera::quick_score(forecast, node, pod, query.as_ref()) {
            return Ok(score);
        }
    }
    place(node, pod, policy, GpuSet::EMPTY).map(|placement| placement.score)
}

/// What a pod asks of the GPUs where it is no more than one lasting container's request; most pods are so.
pub(crate) fn only_request(pod: &PodRequest) -> Option<Option<Request>> {
    let mut asking = pod.containers.iter().filter(|container| container.request.is_some());
    match (asking.next(), asking.next()) {
        (None, _) => Some(None),
        (Some(only), None) if only.role != ContainerRole::Init => Some(only.request),
        _ => None,
    }
}

/// The candidates of a pod with one request or none.
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
/// The function decides as [`place`] does, and pays for the explanation only where the pod does not fit.
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

fn grants(pod: &PodRequest, gpus: &[GpuSet]) -> Vec<ContainerGrant> {
    let asking = pod.containers.iter().zip(gpus).filter_map(|(container, gpus)| {
        let hold = Hold::of(container.request?);
        Some(ContainerGrant {
            container: container.name.clone(),
            role: container.role,
            holds: gpus.iter().map(|gpu| (gpu, hold)).collect(),
        })
    });
    asking.collect()
}

impl Placement {
    /// The placement as grants, for the ledger and for the pod's annotations.
    #[must_use]
    pub fn grants(&self, pod: &PodRequest) -> Vec<ContainerGrant> {
        grants(pod, &self.gpus)
    }
}

/// What one container asks of one node, as the policies see it.
#[derive(Clone, Copy, Debug)]
struct ContainerQuery {
    hold: Hold,
    count: usize,
    /// GPUs that could serve; at least `count`.
    candidates: GpuSet,
    /// Candidates that must be chosen.
    required: GpuSet,
    link_sensitivity: LinkSensitivity,
    /// CPU of the whole pod.
    cpu: MilliCpu,
    /// Main memory of the whole pod.
    memory: MiB,
}

/// What a policy chose.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    gpus: GpuSet,
    /// The policy's own points for this set, if it gives any.
    merit: f64,
}

impl ContainerQuery {
    /// Finds the candidates. Those in `preferred` are the only ones where they are enough.
    fn new(
        node: &NodeState,
        pod: &PodRequest,
        request: Request,
        required: GpuSet,
        preferred: GpuSet,
    ) -> Result<Self, PlacementError> {
        let hold = Hold::of(request);
        let (count, required) = match request {
            Request::Whole(count) => (usize::from(count), required),
            Request::Share { .. } | Request::Memory(_) => (1, GpuSet::EMPTY),
        };
        let fits = |gpu: &GpuIndex| {
            node.fits(*gpu, hold) && node.node().gpu(*gpu).is_some_and(|found| pod.accepts(&found.model))
        };
        let mut candidates: GpuSet = node.node().topology().gpus().iter().filter(fits).collect();
        if candidates.len() < count || !candidates.is_superset(required) {
            return Err(rejection::of_gpus(node, pod, request, required));
        }
        let preferred = candidates.intersection(preferred);
        if preferred.len() >= count {
            candidates = preferred;
        }
        let PodRequest { cpu, memory, link_sensitivity, .. } = *pod;
        Ok(Self { hold, count, candidates, required, link_sensitivity, cpu, memory })
    }
}

impl Chosen {
    fn plain(gpus: GpuSet) -> Self {
        Self { gpus, merit: 0.0 }
    }
}
