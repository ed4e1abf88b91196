//! Policy `tessera` for whole GPUs: the best links now, then the best links for later jobs.
//!
//! A job that is sensitive to links gets a set of the highest predicted bandwidth. Among equally
//! fast sets, and for an insensitive job, the policy rates what later jobs can get. It rates the
//! idle GPUs alone, the idle GPUs together with those of each running job, and the chosen set
//! itself once its job has ended.

use std::cmp::Reverse;

use super::{Chosen, ContainerQuery};
use crate::bandwidth::{Aim, Bandwidth, BandwidthModel, Outlook, Sets, Wanted};
use crate::gpu_set::GpuSet;
use crate::node::NodeState;
use crate::request::LinkSensitivity;

/// Weight of the idle GPUs together with those of one running job, relative to the idle GPUs alone.
///
/// On a busy host the next job mostly starts when another one ends. Without this weight, meshes
/// lose 0.015 of their bandwidth and PCIe hosts 0.010; values from 1.5 to 3 differ little.
const RELEASED_WEIGHT: f32 = 2.0;

/// Weight of the chosen set itself, which becomes free as a whole.
///
/// It makes an insensitive job take neighbouring GPUs rather than scattered ones. Above about 0.5
/// it harms hosts on which only some pairs have NVLinks.
const CHOSEN_SET_WEIGHT: f32 = 0.3;

/// Weight of all other GPUs once every job has ended.
///
/// It is small because it decides only where the near future does not: for jobs of two to four GPUs
/// that are all sensitive.
const OTHER_GPUS_WEIGHT: f32 = 0.05;

/// Resolution of ratings. Smaller differences are rounding errors.
const STEPS_PER_UNIT: f32 = 1e5;

/// The inputs of the choice besides the bandwidth model.
#[derive(Debug)]
struct Situation {
    wanted: Wanted,
    /// The sets of GPUs that become free together; each GPU is in one set.
    held: Vec<GpuSet>,
    link_sensitivity: LinkSensitivity,
}

/// The rating of a set, the most important part first. The search meets lower indexes first, so
/// ties need no further order.
type Rank = (Bandwidth, i32, Reverse<(usize, usize)>);

/// Chooses whole GPUs. The result is `None` only where the required GPUs cannot be combined.
///
/// The points of a sensitive job are the bandwidth relative to the best set of this size on the
/// idle host.
pub(super) fn choose(node: &NodeState, query: &ContainerQuery) -> Option<Chosen> {
    let model = node.node().topology().bandwidth_model();
    let gpus = choose_in(model, &Situation::of(node, query))?;
    let merit = if depends_on_links(query) { model.share(gpus) } else { 0.0 };
    Some(Chosen { gpus, merit })
}

/// Returns the points of [`choose`] without choosing, for a request without required GPUs.
pub(super) fn merit(node: &NodeState, query: &ContainerQuery) -> f64 {
    if depends_on_links(query) {
        node.node().topology().bandwidth_model().best_share_within(query.candidates, query.count())
    } else {
        0.0
    }
}

/// Returns whether policy `tessera` prefers `chosen` to `other`, a set of as many idle GPUs. Sets of equal rank are not
/// preferred to each other.
pub(crate) fn is_preferred(
    node: &NodeState,
    link_sensitivity: LinkSensitivity,
    chosen: GpuSet,
    other: GpuSet,
) -> bool {
    let model = node.node().topology().bandwidth_model();
    let Sets::Known(outlook, _) = model.sets() else {
        // Without a table of all sets, only the links of the sets themselves are compared.
        return link_sensitivity == LinkSensitivity::Sensitive && model.share(chosen) > model.share(other);
    };
    let free = node.idle();
    let wanted = Wanted { free, candidates: free, required: GpuSet::EMPTY, size: chosen.len() };
    let situation = Situation { wanted, held: released_together(node), link_sensitivity };
    let everyone = situation.held.iter().copied().fold(free, GpuSet::union);
    let rank = |set| situation.rank(model, outlook, everyone, set);
    rank(chosen) > rank(other)
}

pub(super) fn depends_on_links(query: &ContainerQuery) -> bool {
    query.link_sensitivity == LinkSensitivity::Sensitive && query.count() > 1
}

fn choose_in(model: &BandwidthModel, situation: &Situation) -> Option<GpuSet> {
    let Situation { wanted, link_sensitivity, .. } = situation;
    let lowest = wanted.candidates.lowest_with(wanted.required, wanted.size)?;
    match model.sets() {
        _ if wanted.candidates.len() == wanted.size => Some(lowest),
        Sets::Alike(_) => Some(on_few_numa_nodes(model, wanted)),
        Sets::Known(outlook, _) => situation.best_set(model, outlook),
        Sets::Searched(large) => large.search(
            model,
            *wanted,
            match link_sensitivity {
                LinkSensitivity::Sensitive => Aim::Bandwidth,
                LinkSensitivity::Insensitive => Aim::Rest,
            },
        ),
    }
}

// === impl Situation ===

impl Situation {
    fn of(node: &NodeState, query: &ContainerQuery) -> Self {
        let ContainerQuery { candidates, required, link_sensitivity, .. } = *query;
        let wanted = Wanted { free: node.idle(), candidates, required, size: query.count() };
        Self { wanted, held: released_together(node), link_sensitivity }
    }

    fn best_set(&self, model: &BandwidthModel, outlook: &Outlook) -> Option<GpuSet> {
        let Wanted { free, candidates, required, size } = self.wanted;
        let others = candidates.difference(required).subsets(size.checked_sub(required.len())?);
        let everyone = self.held.iter().copied().fold(free, GpuSet::union);
        let mut best: Option<(Rank, GpuSet)> = None;
        for set in others.map(|others| required.union(others)) {
            let bandwidth = self.bandwidth(outlook, set);
            let least = best.map(|(rank, _)| rank);
            // This cheap test rules out most sets; the following one costs more.
            if least.is_some_and(|(fastest, ..)| bandwidth < fastest) {
                continue;
            }
            let future = self.future(outlook, everyone, set);
            if least.is_some_and(|(fastest, brightest, _)| (bandwidth, future) < (fastest, brightest)) {
                continue;
            }
            let rank = (bandwidth, future, Reverse(model.numa_spread(free, set)));
            if least.is_none_or(|least| rank > least) {
                best = Some((rank, set));
            }
        }
        best.map(|(_, set)| set)
    }

    /// Returns the bandwidth of a set as far as the job depends on it.
    fn bandwidth(&self, outlook: &Outlook, set: GpuSet) -> Bandwidth {
        match self.link_sensitivity {
            LinkSensitivity::Sensitive => outlook.bandwidth(set),
            LinkSensitivity::Insensitive => Bandwidth::NONE,
        }
    }

    fn rank(&self, model: &BandwidthModel, outlook: &Outlook, everyone: GpuSet, set: GpuSet) -> Rank {
        let spread = model.numa_spread(self.wanted.free, set);
        (self.bandwidth(outlook, set), self.future(outlook, everyone, set), Reverse(spread))
    }

    /// Rates how well later jobs can be served once `set` is taken.
    fn future(&self, outlook: &Outlook, everyone: GpuSet, set: GpuSet) -> i32 {
        let left = self.wanted.free.difference(set);
        let with_one_back: f32 = self.held.iter().map(|held| outlook.next_job(left.union(*held))).sum();
        #[expect(clippy::cast_precision_loss, reason = "at most 64 sets")]
        let jobs = (self.held.len() + 1) as f32;
        let future = outlook.next_job(left)
            + RELEASED_WEIGHT / jobs * with_one_back
            + CHOSEN_SET_WEIGHT * outlook.queue(set)
            + OTHER_GPUS_WEIGHT * outlook.queue(everyone.difference(set));
        #[expect(clippy::cast_possible_truncation, reason = "a sum of a few shares")]
        let steps = (future * STEPS_PER_UNIT).round() as i32;
        steps
    }
}

/// Returns the sets of GPUs that become free together: one per pod.
///
/// A GPU that several pods share becomes free after the last of them, so it is a set of its own.
/// Unhealthy GPUs are left out.
fn released_together(node: &NodeState) -> Vec<GpuSet> {
    let (mut once, mut shared) = (GpuSet::EMPTY, GpuSet::EMPTY);
    for held in node.held() {
        shared = shared.union(held.intersection(once));
        once = once.union(*held);
    }
    let gpus = node.node().gpus().iter();
    let broken = gpus.filter(|gpu| !gpu.health.is_healthy()).map(|gpu| gpu.index).collect();
    let own = node.held().iter().map(|held| held.difference(shared).difference(broken));
    let alone = shared.difference(broken).iter().map(|gpu| GpuSet::EMPTY.with(gpu));
    own.filter(|held| !held.is_empty()).chain(alone).collect()
}

/// Chooses GPUs where all sets have equal links: from the fullest NUMA node with enough, else from
/// as few as possible.
fn on_few_numa_nodes(model: &BandwidthModel, wanted: &Wanted) -> GpuSet {
    let mut chosen = wanted.required;
    while chosen.len() < wanted.size {
        let missing = wanted.size - chosen.len();
        let left = |node: &GpuSet| node.intersection(wanted.candidates).difference(chosen);
        let open = model.numa_nodes().iter().filter(|node| !left(node).is_empty());
        let order = |node: &&GpuSet| {
            let (count, is_new) = (left(node).len(), node.intersection(chosen).is_empty());
            // The fullest NUMA node that suffices comes first; without one, the emptiest, for the
            // fewest pieces.
            let (too_small, rest) =
                if count >= missing { (false, count) } else { (true, usize::MAX - count) };
            (too_small, is_new, rest, node.lowest())
        };
        let Some(node) = open.min_by_key(order) else { break };
        chosen = chosen.union(left(node).lowest_n(missing));
    }
    chosen
}

#[cfg(test)]
mod tests;
