//! Policy `tessera` for whole GPUs: the best links now, then the best links for the jobs to come.
//!
//! A job that depends on its links gets a set of the highest predicted bandwidth. Among equally fast sets, and for a
//! job that does not care, the choice is about what stays possible: for the GPUs left over, for those GPUs together
//! with what each running job will give back, and for the chosen block itself once it comes back.

use std::cmp::Reverse;

use super::{Chosen, ContainerQuery};
use crate::bandwidth::{Aim, Bandwidth, BandwidthModel, Outlook, Sets, Wanted};
use crate::gpu::Health;
use crate::gpu_set::GpuSet;
use crate::grant::Hold;
use crate::node::NodeState;
use crate::request::LinkSensitivity;

/// Weight of the GPUs left over together with what one running job gives back, against the GPUs left over alone.
/// On a busy machine the next job rarely finds its GPUs at once: it mostly starts when another one ends. Without
/// this, meshes lose 0.015 of their bandwidth and PCIe machines 0.010; from 1.5 to 3 little changes.
const COMING_BACK: f32 = 2.0;

/// Weight of the chosen block itself: it comes back as a whole, and later jobs are better served from a block with
/// good links inside. This is what makes a job that does not care take neighbours rather than strays. With more than
/// about 0.5 it spoils machines on which only some pairs have NVLinks.
const BLOCK: f32 = 0.3;

/// Weight of all other GPUs, once everybody has gone. Small, for it decides only where the near future does not:
/// for jobs of two to four GPUs that all depend on their links.
const EVERYONE_ELSE: f32 = 0.05;

/// Sums of shares that differ by less are equal: the rest is rounding.
const STEPS_PER_UNIT: f32 = 1e5;

/// What the choice depends on besides the machine.
#[derive(Debug)]
struct Situation {
    wanted: Wanted,
    /// GPUs that come back together, each GPU once.
    held: Vec<GpuSet>,
    link_sensitivity: LinkSensitivity,
}

/// How good a set is where everything is known, the most important first. Sets are met lowest indexes first, so equals
/// need no further order.
type Rank = (Bandwidth, i32, Reverse<(usize, usize)>);

/// The GPUs for a request of whole ones; `None` only where the required ones cannot be had. The points are the share
/// of the best bandwidth such a set has on the empty machine, where the job depends on it.
pub(super) fn choose(node: &NodeState, query: &ContainerQuery) -> Option<Chosen> {
    let machine = node.node().topology().bandwidth_model();
    let gpus = choose_in(machine, &Situation::of(node, query))?;
    let merit = if depends_on_links(query) { machine.share(gpus) } else { 0.0 };
    Some(Chosen { gpus, merit })
}

/// The points [`choose`] would give where no GPU is required, without choosing.
pub(super) fn merit(node: &NodeState, query: &ContainerQuery) -> f64 {
    if depends_on_links(query) {
        node.node().topology().bandwidth_model().best_share_within(query.candidates, query.count)
    } else {
        0.0
    }
}

fn depends_on_links(query: &ContainerQuery) -> bool {
    query.link_sensitivity == LinkSensitivity::Sensitive && query.hold == Hold::Whole && query.count > 1
}

fn choose_in(machine: &BandwidthModel, situation: &Situation) -> Option<GpuSet> {
    let Situation { wanted, link_sensitivity, .. } = situation;
    let lowest = wanted.candidates.lowest_with(wanted.required, wanted.size)?;
    match machine.sets() {
        _ if wanted.candidates.len() == wanted.size => Some(lowest),
        Sets::Alike(_) => Some(on_few_numa_nodes(machine, wanted)),
        Sets::Known(outlook, _) => situation.best_set(machine, outlook),
        Sets::Searched(large) => large.search(
            machine,
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
        let ContainerQuery { candidates, required, count, link_sensitivity, .. } = *query;
        let wanted = Wanted { free: node.idle(), candidates, required, size: count };
        Self { wanted, held: coming_back(node), link_sensitivity }
    }

    fn best_set(&self, machine: &BandwidthModel, outlook: &Outlook) -> Option<GpuSet> {
        let Wanted { free, candidates, required, size } = self.wanted;
        let others = candidates.difference(required).subsets(size.checked_sub(required.len())?);
        let everyone = self.held.iter().copied().fold(free, GpuSet::union);
        let mut best: Option<(Rank, GpuSet)> = None;
        for set in others.map(|others| required.union(others)) {
            let bandwidth = match self.link_sensitivity {
                LinkSensitivity::Sensitive => outlook.bandwidth(set),
                LinkSensitivity::Insensitive => Bandwidth::NONE,
            };
            let least = best.map(|(rank, _)| rank);
            // Most sets fall behind already here; what follows costs more.
            if least.is_some_and(|(fastest, ..)| bandwidth < fastest) {
                continue;
            }
            let future = self.future(outlook, everyone, set);
            if least.is_some_and(|(fastest, brightest, _)| (bandwidth, future) < (fastest, brightest)) {
                continue;
            }
            let rank = (bandwidth, future, Reverse(machine.numa_spread(free, set)));
            if least.is_none_or(|least| rank > least) {
                best = Some((rank, set));
            }
        }
        best.map(|(_, set)| set)
    }

    /// How well the jobs to come will be served once `set` is taken.
    fn future(&self, outlook: &Outlook, everyone: GpuSet, set: GpuSet) -> i32 {
        let left = self.wanted.free.difference(set);
        let with_one_back: f32 = self.held.iter().map(|held| outlook.next_job(left.union(*held))).sum();
        #[expect(clippy::cast_precision_loss, reason = "at most 64 sets")]
        let jobs = (self.held.len() + 1) as f32;
        let future = outlook.next_job(left)
            + COMING_BACK / jobs * with_one_back
            + BLOCK * outlook.queue(set)
            + EVERYONE_ELSE * outlook.queue(everyone.difference(set));
        #[expect(clippy::cast_possible_truncation, reason = "a sum of a few shares")]
        let steps = (future * STEPS_PER_UNIT).round() as i32;
        steps
    }
}

/// The GPUs of each pod that ends as a whole. A GPU that several pods share is free only when the last of them has
/// gone, so it stands alone; a broken one does not come back.
fn coming_back(node: &NodeState) -> Vec<GpuSet> {
    let (mut once, mut shared) = (GpuSet::EMPTY, GpuSet::EMPTY);
    for held in node.held() {
        shared = shared.union(held.intersection(once));
        once = once.union(*held);
    }
    let gpus = node.node().gpus().iter();
    let broken = gpus.filter(|gpu| gpu.health == Health::Unhealthy).map(|gpu| gpu.index).collect();
    let own = node.held().iter().map(|held| held.difference(shared).difference(broken));
    let alone = shared.difference(broken).iter().map(|gpu| GpuSet::EMPTY.with(gpu));
    own.filter(|held| !held.is_empty()).chain(alone).collect()
}

/// Where links do not tell sets apart: the fullest NUMA node that has enough, else as few nodes as can be.
fn on_few_numa_nodes(machine: &BandwidthModel, wanted: &Wanted) -> GpuSet {
    let mut chosen = wanted.required;
    while chosen.len() < wanted.size {
        let missing = wanted.size - chosen.len();
        let left = |node: &GpuSet| node.intersection(wanted.candidates).difference(chosen);
        let open = machine.numa_nodes().iter().filter(|node| !left(node).is_empty());
        let order = |node: &&GpuSet| {
            let (count, is_new) = (left(node).len(), node.intersection(chosen).is_empty());
            // A node that has enough by itself, the fullest of those; else the emptiest, for the fewest pieces.
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
