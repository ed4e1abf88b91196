//! The choice of the pods to evict on one node.

use std::time::Duration;

use super::{HeldPod, Planner, VictimSet};
use crate::gpu_set::GpuSet;
use crate::grant::{ContainerGrant, PodGrant};
use crate::node::NodeState;
use crate::placement::filter;
use crate::request::PodRequest;
use crate::units::{GpuIndex, PodUid};

/// A pod that may be evicted.
struct Candidate<'a> {
    grant: &'a PodGrant,
    held: &'a HeldPod,
    gpus: GpuSet,
}

impl Planner<'_> {
    /// Returns sets of pods whose eviction makes room for the request on a node. The last resort is to evict all
    /// pods of the node that may move.
    pub(super) fn victim_sets(
        &self,
        state: &NodeState,
        request: &PodRequest,
        max_priority: i32,
    ) -> Vec<VictimSet> {
        let left = self.scene.max_moves.saturating_sub(self.plan.moves.len());
        let candidates = self.candidates(state, max_priority);
        let all: Vec<usize> = (0..candidates.len()).collect();
        if left == 0 || all.is_empty() || !self.fits_without(state, request, &candidates, &all) {
            return Vec::new();
        }
        let fits = |gone: &[usize]| self.fits_without(state, request, &candidates, gone);
        let mut sets = vec![spare(&all, &candidates, &fits)];
        sets.extend(by_gpus(state, &candidates, &fits));
        for gpu in state.node().topology().gpus().iter() {
            let on_gpu: Vec<usize> =
                all.iter().copied().filter(|index| candidates[*index].gpus.contains(gpu)).collect();
            if !on_gpu.is_empty() && on_gpu.len() < all.len() && fits(&on_gpu) {
                sets.push(spare(&on_gpu, &candidates, &fits));
            }
        }
        sets.push(all);
        sets.sort();
        sets.dedup();
        let allowed = |set: &Vec<usize>| {
            let pods: Vec<&PodUid> = set.iter().map(|index| &candidates[*index].grant.pod).collect();
            set.len() <= left && self.budgets_allow(&pods)
        };
        let named = |set: Vec<usize>| VictimSet {
            cost: set.iter().map(|index| candidates[*index].held.cost).fold(Duration::ZERO, add),
            node: state.node().name.clone(),
            pods: set.iter().map(|index| candidates[*index].grant.pod.clone()).collect(),
        };
        sets.into_iter().filter(allowed).map(named).collect()
    }

    /// Returns the pods of a node that may be evicted, the cheapest first.
    fn candidates(&self, state: &NodeState, max_priority: i32) -> Vec<Candidate<'_>> {
        let is_moved = |pod: &PodUid| {
            self.plan.moves.iter().any(|moved| moved.to.pod == *pod)
                || self.plan.places.iter().any(|place| place.pod == *pod)
        };
        let grants = self.ledger.grants_on(&state.node().name);
        let listed = grants.filter_map(|grant| {
            let held = self.scene.pods.get(&grant.pod)?;
            let may_go = held.fixed.is_none() && held.priority <= max_priority && !is_moved(&grant.pod);
            (may_go && self.budgets_allow(&[&grant.pod])).then(|| {
                let gpus =
                    grant.containers.iter().map(ContainerGrant::gpus).fold(GpuSet::EMPTY, GpuSet::union);
                Candidate { grant, held, gpus }
            })
        });
        let mut candidates: Vec<Candidate<'_>> =
            listed.filter(|candidate| !candidate.gpus.is_empty()).collect();
        candidates.sort_by(|a, b| (a.held.cost, &a.grant.pod).cmp(&(b.held.cost, &b.grant.pod)));
        candidates
    }

    fn fits_without(
        &self,
        state: &NodeState,
        request: &PodRequest,
        candidates: &[Candidate<'_>],
        gone: &[usize],
    ) -> bool {
        let pods: Vec<PodUid> = gone.iter().map(|index| candidates[*index].grant.pod.clone()).collect();
        let left = self.without(&state.node().name, &pods);
        left.is_some_and(|left| filter(&left, request, self.scene.policy).is_ok())
    }
}

/// Spares as many of the pods as possible, the most expensive first.
fn spare(set: &[usize], candidates: &[Candidate<'_>], fits: &impl Fn(&[usize]) -> bool) -> Vec<usize> {
    let mut gone = set.to_vec();
    let mut order = set.to_vec();
    order.sort_by_key(|index| std::cmp::Reverse((candidates[*index].held.cost, *index)));
    for index in order {
        let fewer: Vec<usize> = gone.iter().copied().filter(|other| *other != index).collect();
        if fits(&fewer) {
            gone = fewer;
        }
    }
    gone
}

/// Empties GPU after GPU, each time the one with the fewest pods, until the request fits. GPUs with pods that stay
/// are left alone.
fn by_gpus(
    state: &NodeState,
    candidates: &[Candidate<'_>],
    fits: &impl Fn(&[usize]) -> bool,
) -> Option<Vec<usize>> {
    let holders = |gpu: GpuIndex| state.held().iter().filter(|held| held.contains(gpu)).count();
    let on = |gpu: GpuIndex| {
        (0..candidates.len()).filter(|index| candidates[*index].gpus.contains(gpu)).collect::<Vec<_>>()
    };
    let used = state.node().topology().gpus().iter().filter(|gpu| !state.idle().contains(*gpu));
    let mut gpus: Vec<Vec<usize>> =
        used.filter(|gpu| on(*gpu).len() == holders(*gpu)).map(on).filter(|pods| !pods.is_empty()).collect();
    let mut gone: Vec<usize> = Vec::new();
    while !gpus.is_empty() {
        let price = |pods: &Vec<usize>| {
            let more = pods.iter().filter(|index| !gone.contains(index));
            let cost = more.clone().map(|index| candidates[*index].held.cost).fold(Duration::ZERO, add);
            (more.count(), cost)
        };
        let cheapest = (0..gpus.len()).min_by_key(|place| price(&gpus[*place]))?;
        gone.extend(gpus.remove(cheapest));
        gone.sort_unstable();
        gone.dedup();
        if fits(&gone) {
            return Some(spare(&gone, candidates, fits));
        }
    }
    None
}

fn add(a: Duration, b: Duration) -> Duration {
    a.saturating_add(b)
}
