//! How many equal pods fit on a node at the same time.

use crate::gpu_set::GpuSet;
use crate::grant::PodGrant;
use crate::node::NodeState;
use crate::placement::{Placement, Policy, only_request, place};
use crate::request::{PodRequest, Request};

/// Returns how many pods with this request fit on the node, at most `most`.
pub(crate) fn capacity(node: &NodeState, request: &PodRequest, most: usize) -> usize {
    if let Some(capacity) = whole_capacity(node, request) {
        return capacity.min(most);
    }
    let mut state = node.clone();
    let mut count = 0;
    while count < most
        && let Ok(placement) = place(&state, request, &Policy::Simple, GpuSet::EMPTY)
    {
        add(&mut state, request, &placement);
        count += 1;
    }
    count
}

/// Returns the number for pods that request whole GPUs of any kind, which is a division.
fn whole_capacity(node: &NodeState, request: &PodRequest) -> Option<usize> {
    let Some(Some(Request::Whole(count @ 1..))) = only_request(request) else { return None };
    if !request.models.is_empty() || !request.selection.accepts_all() {
        return None;
    }
    let fits =
        |left: u64, need: u64| left.checked_div(need).map(|fits| usize::try_from(fits).unwrap_or(usize::MAX));
    let by_cpu = fits(node.cpu_left().0, request.cpu.0).unwrap_or(usize::MAX);
    let by_memory = fits(node.memory_left().0, request.memory.0).unwrap_or(usize::MAX);
    Some((node.idle().len() / usize::from(count)).min(by_cpu).min(by_memory))
}

/// Adds a pod to a copy of a node.
pub(super) fn add(state: &mut NodeState, request: &PodRequest, placement: &Placement) {
    let containers = placement.grants(state.node(), request);
    let (node, cpu, memory) = (state.node().name.clone(), request.cpu, request.memory);
    state.add(&PodGrant { pod: "a member".into(), node, cpu, memory, containers });
}
