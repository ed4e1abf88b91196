//! Placement of the containers of a pod, one after the other.

use std::borrow::Cow;
use std::cmp::Reverse;

use super::{Chosen, ContainerQuery, Placement, PlacementError, Policy, grants, rejection};
use crate::gpu_set::GpuSet;
use crate::grant::{GpuUsage, footprint};
use crate::node::NodeState;
use crate::request::{ContainerRequest, ContainerRole, MemoryRequest, PodRequest, Request, Share};
use crate::units::Percent;

/// The point at which a placement failed, and the reason.
pub(super) struct Blocked<'a> {
    pub(super) error: PlacementError,
    /// The container that found no GPUs; `None` where the node as a whole was rejected.
    pub(super) container: Option<usize>,
    /// The node with the pod's earlier containers on it.
    pub(super) node: Cow<'a, NodeState>,
}

pub(super) fn try_place<'a>(
    node: &'a NodeState,
    pod: &PodRequest,
    policy: &Policy,
    required: GpuSet,
) -> Result<Placement, Blocked<'a>> {
    if let Err(error) = rejection::check_node(node, pod) {
        return Err(Blocked { error, container: None, node: Cow::Borrowed(node) });
    }
    let lasting = |(position, container): (usize, &ContainerRequest)| {
        (container.role != ContainerRole::Init).then_some((position, container.request?))
    };
    let mut asking: Vec<(usize, Request)> = pod.containers.iter().enumerate().filter_map(lasting).collect();
    let (mut gpus, merit) = place_lasting(node, pod, policy, &asking, required).or_else(|blocked| {
        // A small container may have taken the only GPU that suits a large one: try the largest
        // first.
        asking.sort_by_key(|(_, request)| Reverse(size(*request)));
        let again = (asking.len() > 1 && required.is_empty()).then_some(&asking);
        again.and_then(|order| place_lasting(node, pod, policy, order, required).ok()).ok_or(blocked)
    })?;
    place_inits(node, pod, policy, &mut gpus)?;
    let score = policy.score(node, &after(node, pod, &gpus), merit);
    Ok(Placement { gpus, score })
}

/// Orders requests by how hard they are to place.
fn size(request: Request) -> (u8, Percent, MemoryRequest) {
    match request {
        Request::Whole(count) => (count, Percent::WHOLE, MemoryRequest::PartOfGpu(Percent::WHOLE)),
        Request::Share(Share { count, compute_percent, memory }) => {
            (count.saturating_sub(1), compute_percent, memory)
        }
    }
}

/// Chooses GPUs for the main containers and sidecars, which run at the same time. Returns the sum
/// of the policy's points with them.
fn place_lasting<'a>(
    node: &'a NodeState,
    pod: &PodRequest,
    policy: &Policy,
    asking: &[(usize, Request)],
    mut required: GpuSet,
) -> Result<(Vec<GpuSet>, f64), Blocked<'a>> {
    let mut gpus = vec![GpuSet::EMPTY; pod.containers.len()];
    let mut merit = 0.0;
    let mut beside = Cow::Borrowed(node);
    for (position, request) in asking {
        match choose(&beside, pod, policy, *request, std::mem::take(&mut required), GpuSet::EMPTY) {
            Ok(chosen) => {
                take(&mut beside, chosen.gpus, *request);
                gpus[*position] = chosen.gpus;
                merit += chosen.merit;
            }
            Err(error) => {
                return Err(Blocked { error, container: Some(*position), node: beside });
            }
        }
    }
    Ok((gpus, merit))
}

/// Chooses GPUs for the init containers, which run beside the earlier sidecars only.
///
/// Init containers reuse the GPUs of the main containers where those suffice, as the kubelet does.
fn place_inits<'a>(
    node: &'a NodeState,
    pod: &PodRequest,
    policy: &Policy,
    gpus: &mut [GpuSet],
) -> Result<(), Blocked<'a>> {
    let own = gpus.iter().copied().fold(GpuSet::EMPTY, GpuSet::union);
    let mut before = Cow::Borrowed(node);
    for (position, container) in pod.containers.iter().enumerate() {
        let Some(request) = container.request else {
            continue;
        };
        match container.role {
            ContainerRole::Main => {}
            ContainerRole::Sidecar => take(&mut before, gpus[position], request),
            ContainerRole::Init => match choose(&before, pod, policy, request, GpuSet::EMPTY, own) {
                Ok(chosen) => gpus[position] = chosen.gpus,
                Err(error) => {
                    return Err(Blocked { error, container: Some(position), node: before });
                }
            },
        }
    }
    Ok(())
}

/// Chooses GPUs for one container, among the `preferred` ones where those suffice.
fn choose(
    node: &NodeState,
    pod: &PodRequest,
    policy: &Policy,
    request: Request,
    required: GpuSet,
    preferred: GpuSet,
) -> Result<Chosen, PlacementError> {
    let query = ContainerQuery::new(node, pod, request, required, preferred)?;
    policy.choose(node, &query).ok_or_else(|| match request {
        Request::Whole(count) | Request::Share(Share { count, .. }) if policy.has_strict_table() => {
            PlacementError::Unlisted(count)
        }
        _ => PlacementError::Required,
    })
}

pub(super) fn take(state: &mut Cow<'_, NodeState>, gpus: GpuSet, request: Request) {
    for gpu in gpus.iter() {
        let hold = state.node().hold(request, gpu);
        state.to_mut().add_usage(gpu, GpuUsage::of(hold));
    }
}

/// Returns the node's state with the pod on it.
fn after(node: &NodeState, pod: &PodRequest, gpus: &[GpuSet]) -> NodeState {
    let mut state = node.clone();
    state.take(pod.cpu, pod.memory, footprint(&grants(node.node(), pod, gpus)));
    state
}
