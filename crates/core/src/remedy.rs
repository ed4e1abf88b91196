//! Remedies for a waiting pod: the pods that would have to end, or a smaller request that fits.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::node::NodeState;
use crate::placement::{Policy, filter};
use crate::preemption::{Preemptor, RunningPod, victims};
use crate::quota::GpuAmount;
use crate::request::{ContainerRole, MemoryRequest, PodRequest, Request, Share};
use crate::units::{MiB, Percent, PodUid};

/// Returns the fewest pods that must end so that the pod fits, whatever their priority; `None`
/// where that cannot help.
#[must_use]
pub fn pods_to_end(
    node: &NodeState,
    holders: &[RunningPod<'_>],
    request: &PodRequest,
    policy: &Policy,
) -> Option<Vec<PodUid>> {
    // All pods get the same lower priority, so that only their number counts.
    let alike: Vec<RunningPod<'_>> =
        holders.iter().map(|holder| RunningPod { priority: 0, ..*holder }).collect();
    let preemptor = Preemptor { request, priority: 1, policy, quota_excess: GpuAmount::default() };
    victims(node, &alike, preemptor, &BTreeSet::new())
}

/// Returns the largest smaller requests that fit on the node now: fewer GPUs, or less memory or
/// compute of each GPU. The result is empty for pods in which several containers request GPUs.
#[must_use]
pub fn smaller_requests(node: &NodeState, pod: &PodRequest, policy: &Policy) -> Vec<Request> {
    let mut asking = pod.containers.iter().enumerate().filter(|(_, container)| container.request.is_some());
    let (Some((position, only)), None) = (asking.next(), asking.next()) else { return Vec::new() };
    let Some(request) = only.request.filter(|_| only.role != ContainerRole::Init) else { return Vec::new() };
    let fits = |smaller: &Request| {
        let mut pod = pod.clone();
        if let Some(container) = pod.containers.get_mut(position) {
            container.request = Some(*smaller);
        }
        filter(node, &pod, policy).is_ok()
    };
    let smaller: Vec<Request> = match request {
        Request::Whole(count) => (1..count).rev().map(Request::Whole).find(fits).into_iter().collect(),
        Request::Share(share) => {
            let fewer =
                (1..share.count).rev().map(|count| Request::Share(Share { count, ..share })).find(fits);
            smaller_shares(node, share).map(Request::Share).chain(fewer).collect()
        }
    };
    smaller.into_iter().filter(fits).collect()
}

/// Returns the share with as much memory, and with as much compute, as enough GPUs have left.
fn smaller_shares(node: &NodeState, share: Share) -> impl Iterator<Item = Share> {
    let rooms = || node.node().gpus().iter().map(|gpu| (gpu.memory, node.room(gpu.index)));
    let with_compute = rooms().filter(|(_, room)| room.compute_percent >= share.compute_percent);
    let with_memory = rooms().filter(|(memory, room)| room.memory >= share.memory.on(*memory));
    let memory = nth_largest(with_compute.map(|(_, room)| room.memory).collect(), share.count);
    let compute = nth_largest(with_memory.map(|(_, room)| room.compute_percent).collect(), share.count);
    let less_memory = memory.filter(|memory| *memory > MiB::ZERO);
    let less_memory = less_memory.map(|memory| Share { memory: MemoryRequest::Amount(memory), ..share });
    let less_compute = compute.filter(|compute| share.has_compute() && *compute > Percent::ZERO);
    let less_compute = less_compute.map(|compute_percent| Share { compute_percent, ..share });
    less_memory.into_iter().chain(less_compute)
}

/// Returns what the `count` largest amounts have in common.
fn nth_largest<T: Ord + Copy>(mut amounts: Vec<T>, count: u8) -> Option<T> {
    amounts.sort_unstable_by_key(|amount| Reverse(*amount));
    amounts.get(usize::from(count).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{node, pcie_pairs};
    use crate::grant::{ContainerGrant, Hold, PodGrant};
    use crate::ledger::NodeGrant;
    use crate::units::{GpuIndex, MilliCpu};

    fn grant(pod: &str, gpus: &[u8], hold: Hold) -> PodGrant {
        PodGrant {
            pod: pod.into(),
            node: "n".into(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![ContainerGrant {
                container: "c".into(),
                role: ContainerRole::Main,
                holds: gpus.iter().map(|gpu| (GpuIndex(*gpu), hold)).collect(),
            }],
        }
    }

    #[test]
    fn names_the_fewest_pods_and_the_largest_request_that_fits() {
        let mut state = node(&pcie_pairs(), &[]);
        let part = |compute_percent, memory| Hold::Share {
            compute_percent: Percent(compute_percent),
            memory: MiB(memory),
        };
        let grants = [
            grant("five", &[0, 1, 2, 3, 4], Hold::Whole),
            grant("small", &[5], part(20, 1024)),
            grant("large", &[6], part(80, 10_240)),
        ];
        grants.iter().for_each(|grant| state.add(grant));
        let holders: Vec<RunningPod<'_>> = grants
            .iter()
            .map(|grant| RunningPod {
                grant: NodeGrant::Held(grant),
                priority: 7,
                gang: None,
                quota_released: GpuAmount::default(),
                is_guaranteed: false,
            })
            .collect();
        let asked = |request| PodRequest::of_mains([request]);
        let end = |request| pods_to_end(&state, &holders, &asked(request), &Policy::Simple);
        let smaller = |request| smaller_requests(&state, &asked(request), &Policy::Simple);
        assert_eq!(end(Request::Whole(6)), Some(vec!["five".into()]));
        assert_eq!(end(Request::Whole(9)), None);
        assert_eq!(smaller(Request::Whole(6)), [Request::Whole(1)]);
        assert_eq!(smaller(Request::memory(MiB(20_000))), [Request::memory(MiB(16_384))]);
        let share = |percent, memory| Request::share(Percent(percent), MiB(memory));
        assert_eq!(smaller(share(90, 17_000)), [share(90, 16_384)]);
    }
}
