//! Preemption: which pods to evict so that a pod with a higher priority fits on a node.

use std::collections::BTreeSet;

use crate::gpu_set::GpuSet;
use crate::grant::ContainerGrant;
use crate::ledger::NodeGrant;
use crate::node::NodeState;
use crate::placement::{Policy, filter, only_request};
use crate::quota::GpuAmount;
use crate::request::{PodRequest, Request};
use crate::units::{GpuIndex, PodUid};

/// A pod on the node that holds CPU, memory or GPUs, or a booking in doubt.
#[derive(Clone, Copy, Debug)]
pub struct RunningPod<'a> {
    /// The grant of the pod. An eviction does not release a booking in doubt.
    pub grant: NodeGrant<'a>,
    /// The priority of the pod.
    pub priority: i32,
    /// The amount that the eviction returns to the preemptor's quota; zero for pods of other
    /// namespaces.
    pub quota_released: GpuAmount,
}

/// The pod for which others are evicted.
#[derive(Clone, Copy, Debug)]
pub struct Preemptor<'a> {
    /// The request of the pod.
    pub request: &'a PodRequest,
    /// The priority of the pod. Only pods of lower priority may be evicted.
    pub priority: i32,
    /// The policy that chooses the GPUs.
    pub policy: &'a Policy,
    /// The amount by which the pod exceeds its quota. Where it is not zero, only pods of the same
    /// quota may be evicted: other namespaces do not make room for one that is over its quota.
    pub quota_excess: GpuAmount,
}

/// Upper bound for the size of sets that are searched exhaustively, before the greedy search
/// starts.
const MAX_SEARCHED_SET: usize = 3;

/// Upper bound for the examined sets: about the number of sets of three out of a hundred pods.
const MAX_EXAMINED_SETS: usize = 200_000;

/// Upper bound for the pods summed up while sets are tried, which takes some milliseconds.
/// kube-scheduler asks about hundreds of nodes in one call and waits for seconds.
const MAX_SUMMED_PODS: usize = 100_000;

/// Returns the pods to evict so that the preemptor fits, or `None` where no eviction helps.
///
/// The `proposed` pods are returned where they suffice, because kube-scheduler has checked them
/// already. Otherwise the highest priority among the victims is as low as possible, and then their
/// number. The result is empty where the pod fits without an eviction.
///
/// ```
/// # use std::collections::BTreeSet;
/// # use std::sync::Arc;
/// # use tessera_core::gpu::Gpu;
/// # use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
/// use tessera_core::ledger::NodeGrant;
/// # use tessera_core::node::{Node, NodeState};
/// # use tessera_core::placement::Policy;
/// use tessera_core::preemption::{Preemptor, RunningPod, victims};
/// # use tessera_core::quota::GpuAmount;
/// # use tessera_core::request::{ContainerRole, PodRequest, Request};
/// # use tessera_core::topology::Topology;
/// # use tessera_core::units::{GpuIndex, MiB, MilliCpu};
/// # let gpu = Gpu::new(GpuIndex(0), "GPU-0".into(), "T4".into(), MiB(15_360));
/// # let node = Node::new("n".into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768))?;
/// # let mut state = NodeState::empty(Arc::new(node));
/// # let grant = PodGrant {
/// #     pod: "batch".into(),
/// #     node: "n".into(),
/// #     cpu: MilliCpu::ZERO,
/// #     memory: MiB::ZERO,
/// #     containers: vec![ContainerGrant {
/// #         container: "main".to_owned(),
/// #         role: ContainerRole::Main,
/// #         holds: vec![(GpuIndex(0), Hold::Whole)],
/// #     }],
/// # };
/// # state.add(&grant);
/// // The pod `batch` of priority 0 holds the only GPU of the node.
/// let grant = NodeGrant::Held(&grant);
/// let running = RunningPod { grant, priority: 0, quota_released: GpuAmount::default() };
/// let request = PodRequest::of_mains([Request::Whole(1)]);
/// let quota_excess = GpuAmount::default();
/// let preemptor = Preemptor { request: &request, priority: 10, policy: &Policy::Simple, quota_excess };
/// assert_eq!(victims(&state, &[running], preemptor, &BTreeSet::new()), Some(vec!["batch".into()]));
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
#[must_use]
pub fn victims(
    node: &NodeState,
    holders: &[RunningPod<'_>],
    preemptor: Preemptor<'_>,
    proposed: &BTreeSet<PodUid>,
) -> Option<Vec<PodUid>> {
    let scenario = Scenario { node, holders, preemptor };
    let is_over_quota = preemptor.quota_excess != GpuAmount::default();
    let is_proposed = |holder: &RunningPod<'_>| holder.pod().is_some_and(|pod| proposed.contains(pod));
    let is_movable = |holder: &RunningPod<'_>| {
        holder.pod().is_some()
            && holder.priority < preemptor.priority
            && (!is_over_quota || holder.quota_released != GpuAmount::default())
    };
    let are_all_movable = || holders.iter().filter(|holder| is_proposed(holder)).all(is_movable);
    if !proposed.is_empty() && (!is_over_quota || are_all_movable()) && scenario.fits_without(is_proposed) {
        return Some(proposed.iter().cloned().collect());
    }
    if scenario.fits_without(|_| false) {
        return Some(Vec::new());
    }
    let mut movable: Vec<RunningPod<'_>> =
        holders.iter().filter(|holder| is_movable(holder)).copied().collect();
    movable.sort_by(|a, b| (a.priority, a.pod()).cmp(&(b.priority, b.pod())));
    let levels: BTreeSet<i32> = movable.iter().map(|holder| holder.priority).collect();
    let enough =
        |level: &&i32| scenario.fits_without(|holder| holder.priority <= **level && is_movable(holder));
    let level = *levels.iter().find(enough)?;
    movable.retain(|holder| holder.priority <= level);
    let chosen = scenario.smallest(&movable).unwrap_or_else(|| scenario.spare(&movable));
    Some(chosen.into_iter().cloned().collect())
}

impl<'a> RunningPod<'a> {
    /// Returns the pod whose eviction releases the grant.
    fn pod(&self) -> Option<&'a PodUid> {
        match self.grant {
            NodeGrant::Held(grant) => Some(&grant.pod),
            NodeGrant::InDoubt(_) => None,
        }
    }

    fn is_one_of(&self, pods: &[&PodUid]) -> bool {
        self.pod().is_some_and(|pod| pods.contains(&pod))
    }
}

struct Scenario<'a> {
    node: &'a NodeState,
    holders: &'a [RunningPod<'a>],
    preemptor: Preemptor<'a>,
}

/// A necessary condition that a minimal set of victims meets. Checking it is cheaper than placing
/// the pod.
enum Need {
    /// All victims are on one GPU, of which the preemptor then gets a share.
    OneGpu,
    /// With the GPUs that are idle already, this number becomes idle, and each victim was on one of
    /// them.
    IdleGpus(usize, GpuSet),
    /// Only a placement can tell.
    Unknown,
}

impl<'a> Scenario<'a> {
    fn fits_without(&self, gone: impl Fn(&RunningPod<'_>) -> bool) -> bool {
        let mut left = NodeState::empty(self.node.shared_node());
        let mut repaid = GpuAmount::default();
        for holder in self.holders {
            if gone(holder) {
                repaid = repaid.plus(holder.quota_released);
            } else {
                left.add(holder.grant.grant());
            }
        }
        repaid.covers(self.preemptor.quota_excess)
            && filter(&left, self.preemptor.request, self.preemptor.policy).is_ok()
    }

    /// Returns the first of the smallest sufficient sets, if the search finds one within its
    /// limits.
    fn smallest(&self, movable: &[RunningPod<'a>]) -> Option<Vec<&'a PodUid>> {
        let need = self.need();
        let gpus: Vec<GpuSet> = movable.iter().map(held_gpus).collect();
        let all_pods: Vec<GpuSet> = self.holders.iter().map(held_gpus).collect();
        let (mut examined, mut tries) = (MAX_EXAMINED_SETS, MAX_SUMMED_PODS / self.holders.len().max(1));
        for size in 1..=MAX_SEARCHED_SET.min(movable.len()) {
            let mut picked: Vec<usize> = (0..size).collect();
            loop {
                examined = examined.checked_sub(1)?;
                if need.may_be_met_by(picked.iter().map(|index| gpus[*index]), &all_pods) {
                    tries = tries.checked_sub(1)?;
                    let set: Vec<&PodUid> = picked.iter().filter_map(|index| movable[*index].pod()).collect();
                    if self.fits_without(|holder| holder.is_one_of(&set)) {
                        return Some(set);
                    }
                }
                if !next_combination(&mut picked, movable.len()) {
                    break;
                }
            }
        }
        None
    }

    /// Returns the condition. It is about GPUs only where one container requests them, the host has
    /// room, and no quota is exceeded.
    fn need(&self) -> Need {
        let Preemptor { request, quota_excess, .. } = self.preemptor;
        let host_has_room = request.cpu <= self.node.cpu_left() && request.memory <= self.node.memory_left();
        match only_request(request) {
            Some(Some(asked)) if host_has_room && quota_excess == GpuAmount::default() => match asked {
                Request::Whole(count) => Need::IdleGpus(usize::from(count), self.node.idle()),
                Request::Share { .. } | Request::Memory(_) => Need::OneGpu,
            },
            _ => Need::Unknown,
        }
    }

    /// Starts with all movable pods and spares as many as possible, those with the highest priority
    /// first.
    fn spare(&self, movable: &[RunningPod<'a>]) -> Vec<&'a PodUid> {
        let mut gone: Vec<&PodUid> = movable.iter().filter_map(RunningPod::pod).collect();
        for position in (0..gone.len()).rev() {
            let spared = gone.remove(position);
            if !self.fits_without(|holder| holder.is_one_of(&gone)) {
                gone.insert(position, spared);
            }
        }
        gone
    }
}

impl Need {
    /// Returns whether victims with these GPUs can meet the condition; `all_pods` lists the GPUs of
    /// all pods.
    fn may_be_met_by(&self, victims: impl Iterator<Item = GpuSet> + Clone, all_pods: &[GpuSet]) -> bool {
        let mut all = victims.clone();
        match self {
            Self::Unknown => true,
            Self::OneGpu => all.reduce(GpuSet::intersection).is_some_and(|shared| !shared.is_empty()),
            Self::IdleGpus(count, idle) => {
                let touched = victims.clone().fold(GpuSet::EMPTY, GpuSet::union);
                if touched.union(*idle).len() < *count {
                    return false;
                }
                let is_freed = |gpu: &GpuIndex| {
                    let going = victims.clone().filter(|held| held.contains(*gpu)).count();
                    going == all_pods.iter().filter(|held| held.contains(*gpu)).count()
                };
                let freed: GpuSet = touched.iter().filter(is_freed).collect();
                freed.union(*idle).len() >= *count && all.all(|held| !held.intersection(freed).is_empty())
            }
        }
    }
}

fn held_gpus(holder: &RunningPod<'_>) -> GpuSet {
    holder.grant.grant().containers.iter().map(ContainerGrant::gpus).fold(GpuSet::EMPTY, GpuSet::union)
}

/// Advances to the next set of positions below `count` in lexicographic order; returns false after
/// the last one.
fn next_combination(picked: &mut [usize], count: usize) -> bool {
    let size = picked.len();
    let Some(place) = (0..size).rev().find(|place| picked[*place] < count - size + place) else {
        return false;
    };
    picked[place] += 1;
    for later in place + 1..size {
        picked[later] = picked[later - 1] + 1;
    }
    true
}

#[cfg(test)]
mod tests;
