//! Preemption: which pods to evict so that a pod with a higher priority fits on a node.
//!
//! The pods of a gang on the node are evicted together or not at all, because a gang without one of its pods does no
//! work. Gangs are spared where other pods of the same priorities suffice.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;

use crate::gpu_set::GpuSet;
use crate::ledger::NodeGrant;
use crate::node::NodeState;
use crate::placement::{Policy, filter, only_request};
use crate::quota::GpuAmount;
use crate::request::{PodRequest, Request, Share};
use crate::units::{GpuIndex, PodUid};

/// A pod on the node that holds CPU, memory or GPUs, a booking in doubt, or a reserved place.
#[derive(Clone, Copy, Debug)]
pub struct RunningPod<'a> {
    /// The grant of the pod. An eviction releases neither a booking in doubt nor a reserved place.
    pub grant: NodeGrant<'a>,
    /// The priority of the pod. For a pod of a gang it is the highest priority in the gang.
    pub priority: i32,
    /// A number for the gang of the pod, the same for all its pods; `None` for a pod without a gang.
    pub gang: Option<usize>,
    /// The amount that the eviction returns to the preemptor's quota; zero for pods of other
    /// namespaces.
    pub quota_released: GpuAmount,
    /// True if the eviction would leave the namespace of the pod below its guarantee, so that the pod stays.
    pub is_guaranteed: bool,
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

/// Upper bound for the pods summed up in the greedy search, which takes some tens of milliseconds. It suffices for nodes
/// with 700 pods, more than a kubelet runs. On a node with more pods the victims may be too many, but they suffice.
const MAX_SPARING_SUMS: usize = 1_000_000;

/// Returns the pods to evict so that the preemptor fits, or `None` where no eviction helps.
///
/// The `proposed` pods are returned where they suffice, because kube-scheduler has checked them
/// already, together with the other pods of their gangs. Otherwise the highest priority among the
/// victims is as low as possible, then the number of gangs among them, and then their number. The
/// result is empty where the pod fits without an eviction.
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
/// let running = RunningPod { grant, priority: 0, gang: None, quota_released: GpuAmount::default(), is_guaranteed: false };
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
    let scenario = Scenario { node, holders, preemptor, summed_pods: Cell::new(0) };
    let is_over_quota = preemptor.quota_excess != GpuAmount::default();
    let is_named = |holder: &RunningPod<'_>| holder.pod().is_some_and(|pod| proposed.contains(pod));
    let named_gangs: BTreeSet<usize> =
        holders.iter().filter(|holder| is_named(holder)).filter_map(|holder| holder.gang).collect();
    let is_in_named_gang =
        |holder: &RunningPod<'_>| holder.gang.is_some_and(|gang| named_gangs.contains(&gang));
    let is_proposed =
        |holder: &RunningPod<'_>| is_named(holder) || (holder.pod().is_some() && is_in_named_gang(holder));
    let may_go = |holder: &RunningPod<'_>| {
        holder.pod().is_some()
            && !holder.is_guaranteed
            && holder.priority < preemptor.priority
            && (!is_over_quota || holder.quota_released != GpuAmount::default())
    };
    let fixed_gangs: BTreeSet<usize> =
        holders.iter().filter(|holder| !may_go(holder)).filter_map(|holder| holder.gang).collect();
    let is_movable = |holder: &RunningPod<'_>| {
        may_go(holder) && holder.gang.is_none_or(|gang| !fixed_gangs.contains(&gang))
    };
    let are_all_movable = || {
        let needs_check =
            |holder: &&RunningPod<'_>| is_over_quota || holder.is_guaranteed || is_in_named_gang(holder);
        holders.iter().filter(|holder| is_proposed(holder)).filter(needs_check).all(is_movable)
    };
    if !proposed.is_empty() && are_all_movable() && scenario.fits_without(is_proposed) {
        let added = holders.iter().filter(|holder| is_proposed(holder)).filter_map(RunningPod::pod);
        let all: BTreeSet<&PodUid> = proposed.iter().chain(added).collect();
        return Some(all.into_iter().cloned().collect());
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
    let is_single = |holder: &RunningPod<'_>| holder.gang.is_none() && is_movable(holder);
    if scenario.fits_without(|holder| holder.priority <= level && is_single(holder)) {
        movable.retain(is_single);
    }
    let units = units(&movable);
    let chosen = scenario.smallest(&units).unwrap_or_else(|| scenario.spare(&units));
    Some(chosen.into_iter().cloned().collect())
}

impl<'a> RunningPod<'a> {
    /// Returns the pod whose eviction releases the grant.
    fn pod(&self) -> Option<&'a PodUid> {
        match self.grant {
            NodeGrant::Held(grant) => Some(&grant.pod),
            NodeGrant::InDoubt(_) | NodeGrant::Reserved(_) => None,
        }
    }

    fn is_one_of(&self, pods: &[&PodUid]) -> bool {
        self.pod().is_some_and(|pod| pods.contains(&pod))
    }
}

/// Pods that are evicted together: one pod, or all pods of a gang on the node.
struct Unit<'a> {
    pods: Vec<&'a PodUid>,
    /// The GPUs of each pod.
    gpus: Vec<GpuSet>,
    gang: Option<usize>,
}

/// Groups pods by their gangs, in the order of the first pod of each.
fn units<'a>(movable: &[RunningPod<'a>]) -> Vec<Unit<'a>> {
    let mut units: Vec<Unit<'a>> = Vec::new();
    for holder in movable {
        let Some(pod) = holder.pod() else { continue };
        let gpus = held_gpus(holder);
        match units.iter_mut().find(|unit| unit.gang.is_some() && unit.gang == holder.gang) {
            Some(unit) => {
                unit.pods.push(pod);
                unit.gpus.push(gpus);
            }
            None => units.push(Unit { pods: vec![pod], gpus: vec![gpus], gang: holder.gang }),
        }
    }
    // Sets are tried from the begin and pods are spared from the end, so gangs are the last to go.
    units.sort_by_key(|unit| unit.gang.is_some());
    units
}

struct Scenario<'a> {
    node: &'a NodeState,
    holders: &'a [RunningPod<'a>],
    preemptor: Preemptor<'a>,
    /// Number of pods summed up so far, which is the effort of the search.
    summed_pods: Cell<usize>,
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
        self.summed_pods.set(self.summed_pods.get() + self.holders.len());
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
    fn smallest(&self, units: &[Unit<'a>]) -> Option<Vec<&'a PodUid>> {
        let need = self.need();
        let pods_by_gpu = pods_by_gpu(self.holders);
        let mut examined = MAX_EXAMINED_SETS;
        let budget = self.summed_pods.get() + MAX_SUMMED_PODS;
        for size in 1..=MAX_SEARCHED_SET.min(units.len()) {
            let mut picked: Vec<usize> = (0..size).collect();
            loop {
                examined = examined.checked_sub(1)?;
                // The condition is about single pods: a pod of a gang goes even if its GPU does not help.
                let has_gang = picked.iter().any(|index| units[*index].gang.is_some());
                let gpus = picked.iter().flat_map(|index| units[*index].gpus.iter().copied());
                if has_gang || need.may_be_met_by(gpus, &pods_by_gpu) {
                    if self.summed_pods.get() >= budget {
                        return None;
                    }
                    let set: Vec<&PodUid> =
                        picked.iter().flat_map(|index| units[*index].pods.iter().copied()).collect();
                    if self.fits_without(|holder| holder.is_one_of(&set)) {
                        return Some(set);
                    }
                }
                if !next_combination(&mut picked, units.len()) {
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
                Request::Share(Share { count: 1, .. }) => Need::OneGpu,
                Request::Share(_) => Need::Unknown,
            },
            _ => Need::Unknown,
        }
    }

    /// Starts with all movable pods and spares as many as possible, those with the highest priority
    /// first. Whole blocks are spared at once where that suffices, so that few victims are found with few sums.
    fn spare(&self, units: &[Unit<'a>]) -> Vec<&'a PodUid> {
        let pods = |block: Range<usize>| units[block].iter().flat_map(|unit| unit.pods.iter().copied());
        let mut gone: BTreeSet<&PodUid> = pods(0..units.len()).collect();
        let budget = self.summed_pods.get() + MAX_SPARING_SUMS;
        // All of them cannot be spared, because the pod did not fit. The last block is tried first.
        let mut blocks = halves(0..units.len());
        while let Some(block) = blocks.pop() {
            if self.summed_pods.get() >= budget {
                break;
            }
            pods(block.clone()).for_each(|pod| {
                gone.remove(pod);
            });
            if self.fits_without(|holder| holder.pod().is_some_and(|pod| gone.contains(pod))) {
                continue;
            }
            gone.extend(pods(block.clone()));
            blocks.extend(halves(block));
        }
        pods(0..units.len()).filter(|pod| gone.contains(pod)).collect()
    }
}

/// Returns the halves of a block, or nothing if it has only one element.
fn halves(block: Range<usize>) -> Vec<Range<usize>> {
    let middle = block.start + block.len() / 2;
    if block.len() < 2 { Vec::new() } else { vec![block.start..middle, middle..block.end] }
}

/// Returns the number of pods on each GPU, by the position of the GPU.
fn pods_by_gpu(holders: &[RunningPod<'_>]) -> Vec<usize> {
    let mut counts = Vec::new();
    for gpu in holders.iter().flat_map(|holder| held_gpus(holder).iter().collect::<Vec<_>>()) {
        if counts.len() <= gpu.position() {
            counts.resize(gpu.position() + 1, 0);
        }
        counts[gpu.position()] += 1;
    }
    counts
}

impl Need {
    /// Returns whether victims with these GPUs can meet the condition; `pods_by_gpu` counts all pods.
    fn may_be_met_by(&self, victims: impl Iterator<Item = GpuSet> + Clone, pods_by_gpu: &[usize]) -> bool {
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
                    pods_by_gpu.get(gpu.position()) == Some(&going)
                };
                let freed: GpuSet = touched.iter().filter(is_freed).collect();
                freed.union(*idle).len() >= *count && all.all(|held| !held.intersection(freed).is_empty())
            }
        }
    }
}

fn held_gpus(holder: &RunningPod<'_>) -> GpuSet {
    holder.grant.grant().gpus()
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
