//! Whom to evict, so that a pod fits on a node.

use std::collections::BTreeSet;

use crate::gpu_set::GpuSet;
use crate::grant::{ContainerGrant, PodGrant};
use crate::node::NodeState;
use crate::placement::{Policy, filter, only_request};
use crate::quota::GpuAmount;
use crate::request::{PodRequest, Request};
use crate::units::{GpuIndex, PodUid};

/// A pod that holds something of the node.
#[derive(Clone, Copy, Debug)]
pub struct RunningPod<'a> {
    /// What it holds.
    pub grant: &'a PodGrant,
    /// How much it matters.
    pub priority: i32,
    /// What the preemptor's quota gets back when it goes.
    pub quota_released: GpuAmount,
}

/// Who wants in.
#[derive(Clone, Copy, Debug)]
pub struct Preemptor<'a> {
    /// What it asks for.
    pub request: &'a PodRequest,
    /// How much it matters: only pods that matter less may go.
    pub priority: i32,
    /// How its GPUs are chosen.
    pub policy: &'a Policy,
    /// What its quota must get back before it may come. Then only those who repay something may go: nobody else makes room
    /// for a namespace that has had its share.
    pub quota_excess: GpuAmount,
}

/// Sets up to this size are all looked at before a short cut is taken.
const LARGEST_SET: usize = 3;

/// Sets looked at, at most: all those of three out of a hundred pods.
const LOOKS: usize = 200_000;

/// Pods counted up, at most, to try those sets that look as if they could do: some milliseconds. kube-scheduler asks about hundreds of nodes at
/// a time, and waits for seconds.
const COUNTED: usize = 100_000;

/// The pods to evict so that the preemptor fits: those `proposed` where they suffice, for others count on them too; else
/// those whose most important one matters least, and the fewest of those. None
/// where nobody need go; `None` where nothing helps.
#[must_use]
pub fn victims(
    node: &NodeState,
    holders: &[RunningPod<'_>],
    preemptor: Preemptor<'_>,
    proposed: &BTreeSet<PodUid>,
) -> Option<Vec<PodUid>> {
    let bench = Bench { node, holders, preemptor };
    let is_in_debt = preemptor.quota_excess != GpuAmount::default();
    let may_go = |holder: &RunningPod<'_>| {
        holder.priority < preemptor.priority && (!is_in_debt || holder.quota_released != GpuAmount::default())
    };
    let harms_nobody = || holders.iter().filter(|holder| proposed.contains(&holder.grant.pod)).all(may_go);
    if !proposed.is_empty()
        && (!is_in_debt || harms_nobody())
        && bench.fits_without(|holder| proposed.contains(&holder.grant.pod))
    {
        return Some(proposed.iter().cloned().collect());
    }
    if bench.fits_without(|_| false) {
        return Some(Vec::new());
    }
    let mut movable: Vec<RunningPod<'_>> = holders.iter().filter(|holder| may_go(holder)).copied().collect();
    movable.sort_by(|a, b| (a.priority, &a.grant.pod).cmp(&(b.priority, &b.grant.pod)));
    let levels: BTreeSet<i32> = movable.iter().map(|holder| holder.priority).collect();
    let enough = |level: &&i32| bench.fits_without(|holder| holder.priority <= **level && may_go(holder));
    let level = *levels.iter().find(enough)?;
    movable.retain(|holder| holder.priority <= level);
    let chosen = bench.smallest(&movable).unwrap_or_else(|| bench.spare(&movable));
    Some(chosen.into_iter().cloned().collect())
}

struct Bench<'a> {
    node: &'a NodeState,
    holders: &'a [RunningPod<'a>],
    preemptor: Preemptor<'a>,
}

/// What a set of victims comes to if it suffices and no smaller one does.
enum Need {
    /// All of them are on the GPU that the preemptor then gets a share of.
    OneGpu,
    /// So many GPUs are idle then, together with those that are so already, and each of the victims was on one of them.
    IdleGpus(usize, GpuSet),
    /// Nobody can tell without trying.
    Unknown,
}

impl<'a> Bench<'a> {
    fn fits_without(&self, gone: impl Fn(&RunningPod<'_>) -> bool) -> bool {
        let mut left = NodeState::empty(self.node.shared_node());
        let mut repaid = GpuAmount::default();
        for holder in self.holders {
            if gone(holder) {
                repaid = repaid.plus(holder.quota_released);
            } else {
                left.add(holder.grant);
            }
        }
        repaid.covers(self.preemptor.quota_excess)
            && filter(&left, self.preemptor.request, self.preemptor.policy).is_ok()
    }

    /// The first of the smallest sets that suffice, where it is small.
    fn smallest(&self, movable: &[RunningPod<'a>]) -> Option<Vec<&'a PodUid>> {
        let need = self.need();
        let gpus: Vec<GpuSet> = movable.iter().map(held_gpus).collect();
        let everybody: Vec<GpuSet> = self.holders.iter().map(held_gpus).collect();
        let (mut looks, mut tries) = (LOOKS, COUNTED / self.holders.len().max(1));
        for size in 1..=LARGEST_SET.min(movable.len()) {
            let mut picked: Vec<usize> = (0..size).collect();
            loop {
                looks = looks.checked_sub(1)?;
                if need.may_be_met_by(picked.iter().map(|index| gpus[*index]), &everybody) {
                    tries = tries.checked_sub(1)?;
                    let set: Vec<&PodUid> = picked.iter().map(|index| &movable[*index].grant.pod).collect();
                    if self.fits_without(|holder| set.contains(&&holder.grant.pod)) {
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

    /// Only GPUs count where a single container asks, the host has room as it is, and no quota has to be paid back.
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

    /// All, but for those that can stay, the most important first.
    fn spare(&self, movable: &[RunningPod<'a>]) -> Vec<&'a PodUid> {
        let mut gone: Vec<&PodUid> = movable.iter().map(|holder| &holder.grant.pod).collect();
        for position in (0..gone.len()).rev() {
            let spared = gone.remove(position);
            if !self.fits_without(|holder| gone.contains(&&holder.grant.pod)) {
                gone.insert(position, spared);
            }
        }
        gone
    }
}

impl Need {
    /// Whether it may be, by the GPUs of each victim and of everybody.
    fn may_be_met_by(&self, victims: impl Iterator<Item = GpuSet> + Clone, everybody: &[GpuSet]) -> bool {
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
                    going == everybody.iter().filter(|held| held.contains(*gpu)).count()
                };
                let freed: GpuSet = touched.iter().filter(is_freed).collect();
                freed.union(*idle).len() >= *count && all.all(|held| !held.intersection(freed).is_empty())
            }
        }
    }
}

fn held_gpus(holder: &RunningPod<'_>) -> GpuSet {
    holder.grant.containers.iter().map(ContainerGrant::gpus).fold(GpuSet::EMPTY, GpuSet::union)
}

/// Steps through the sets of positions below `count` in lexicographic order.
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
