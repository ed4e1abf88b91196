//! Policy `tessera` for shares of GPUs and for nodes: a pod goes where the least free capacity
//! becomes useless.
//!
//! The [forecast](crate::forecast) predicts how much of the GPUs will stay unused. The policy
//! minimises the growth of that amount. Among equal nodes it takes the one with the fewest idle GPUs.

use super::{Chosen, ContainerQuery, links};
use crate::bandwidth::Sets;
use crate::forecast::Forecast;
use crate::gpu_set::GpuSet;
use crate::grant::GpuUsage;
use crate::node::NodeState;
use crate::request::{PodRequest, Request};
use crate::units::{GpuIndex, MiB, MilliCpu};

/// Penalty in GPUs for each idle GPU of a node. It is just large enough to decide between nodes where
/// the loss is equal.
///
/// Pods with several GPUs need nodes that become idle, and the node with the most idle GPUs is the
/// closest to it. Parts of GPUs, CPU and memory do not count: they change with every pod that ends, and
/// so would the preferred node.
const IDLE_GPU_PENALTY_GPUS: f64 = 0.002;

/// Bonus in GPUs for a set with the best links over a set with the worst.
const LINK_BONUS_GPUS: f64 = 0.2;

/// Resolution of scores. Smaller differences are rounding errors: such nodes count as equal, and
/// their order decides.
const STEPS_PER_GPU: f64 = 1e9;

/// Chooses the GPU on which the share wastes the least capacity.
pub(super) fn choose_share(forecast: &Forecast, node: &NodeState, query: &ContainerQuery) -> Option<GpuSet> {
    let then = Host::left(node).without(query.cpu, query.memory);
    let (gpu, _) = best_gpu(forecast, node, query, &Left::of(node), then)?;
    Some(GpuSet::EMPTY.with(gpu))
}

/// Upper bound for the sets that a share over several GPUs is tried on; 8 of 16 GPUs are more.
const MAX_TRIED_SETS: u64 = 2_000;

/// Chooses several GPUs for a share of each: those on which the least capacity becomes useless, unless
/// better links are worth more.
///
/// The points are those of [`links::choose`]. Where there are too many sets, the choice is between
/// the set with the least loss and the one with the best links.
pub(super) fn choose_shares(forecast: &Forecast, node: &NodeState, query: &ContainerQuery) -> Option<Chosen> {
    let missing = query.count().checked_sub(query.required.len())?;
    let others = query.candidates.difference(query.required);
    let model = node.node().topology().bandwidth_model();
    let links = |gpus| if links::depends_on_links(query) { model.share(gpus) } else { 0.0 };
    let losses = losses(forecast, node, query);
    let loss = |gpus: GpuSet| gpus.iter().map(|gpu| losses[gpu.position()]).sum::<f64>();
    let mut best: Option<(f64, Chosen)> = None;
    let mut consider = |gpus: GpuSet| {
        let lost = loss(gpus);
        // Even the best links would not make up for the loss.
        if best.is_some_and(|(least, _)| lost - LINK_BONUS_GPUS >= least) {
            return;
        }
        let merit = links(gpus);
        let cost = lost - LINK_BONUS_GPUS * merit;
        if best.is_none_or(|(least, _)| cost < least - 1.0 / STEPS_PER_GPU) {
            best = Some((cost, Chosen { gpus, merit }));
        }
    };
    let is_searched = matches!(model.sets(), Sets::Searched(_));
    if is_searched || subset_count(others.len(), missing) > MAX_TRIED_SETS {
        let mut order: Vec<GpuIndex> = others.iter().collect();
        order.sort_by(|a, b| losses[a.position()].total_cmp(&losses[b.position()]));
        consider(order.into_iter().take(missing).fold(query.required, GpuSet::with));
        links::choose(node, query).into_iter().for_each(|chosen| consider(chosen.gpus));
    } else {
        others.subsets(missing).for_each(|others| consider(query.required.union(others)));
    }
    best.map(|(_, chosen)| chosen)
}

/// Returns for each GPU by how much the loss of the node grows if the GPU alone serves the share.
fn losses(forecast: &Forecast, node: &NodeState, query: &ContainerQuery) -> [f64; GpuSet::CAPACITY] {
    let (before, then) = (Left::of(node), Host::left(node).without(query.cpu, query.memory));
    let lost_before = before.lost(forecast, node, then);
    let mut losses = [0.0; GpuSet::CAPACITY];
    for gpu in query.candidates.iter() {
        let after = before.with(gpu, left_after(node, gpu, query.request));
        losses[gpu.position()] = after.lost(forecast, node, then) - lost_before;
    }
    losses
}

/// Returns the number of subsets with `size` of `count` members, or more than [`MAX_TRIED_SETS`].
fn subset_count(count: usize, size: usize) -> u64 {
    let size = size.min(count.saturating_sub(size)) as u64;
    let count = count as u64;
    let mut subsets = 1;
    for step in 1..=size {
        subsets = subsets * (count - size + step) / step;
        if subsets > MAX_TRIED_SETS {
            break;
        }
    }
    subsets
}

/// Returns the score of a node from its state before and after the pod, and from the link quality
/// of the chosen sets.
pub(super) fn score(forecast: &Forecast, before: &NodeState, after: &NodeState, links: f64) -> f64 {
    let lost = |node: &NodeState| Left::of(node).lost(forecast, node, Host::left(node));
    rounded(lost(before) - lost(after) - idle_penalty(before) + LINK_BONUS_GPUS * links)
}

/// Returns the score for a pod with at most one GPU request, without choosing the GPUs.
///
/// The result is `None` where the score depends on the choice: whole GPUs of a node with several
/// kinds of GPUs, and shares of several GPUs.
pub(super) fn quick_score(
    forecast: &Forecast,
    node: &NodeState,
    pod: &PodRequest,
    query: Option<&ContainerQuery>,
) -> Option<f64> {
    let before = Left::of(node);
    let now = Host::left(node);
    let then = now.without(pod.cpu, pod.memory);
    let lost = match query {
        None => before.lost(forecast, node, then),
        Some(ContainerQuery { request: Request::Whole(_), .. }) if node.node().kinds().len() > 1 => {
            return None;
        }
        Some(ContainerQuery { request: Request::Whole(count), candidates, .. }) => {
            before.without(candidates.lowest_n(usize::from(*count))).lost(forecast, node, then)
        }
        Some(query) if query.count() > 1 => return None,
        Some(query) => best_gpu(forecast, node, query, &before, then)?.1,
    };
    let gain = before.lost(forecast, node, now) - lost;
    let links = query.map_or(0.0, |query| links::merit(node, query));
    Some(rounded(gain - idle_penalty(node) + LINK_BONUS_GPUS * links))
}

/// Returns the first GPU with the least loss, and that loss.
fn best_gpu(
    forecast: &Forecast,
    node: &NodeState,
    query: &ContainerQuery,
    before: &Left,
    host: Host,
) -> Option<(GpuIndex, f64)> {
    let mut best: Option<(GpuIndex, f64)> = None;
    let mut tried = GpuSet::EMPTY;
    for gpu in query.candidates.iter() {
        // A GPU equal to an earlier one cannot be better.
        let alike = |other: GpuIndex| {
            before.0[other.position()] == before.0[gpu.position()]
                && node.used(other) == node.used(gpu)
                && node.node().kind(other) == node.node().kind(gpu)
        };
        if tried.iter().any(alike) {
            continue;
        }
        tried = tried.with(gpu);
        let lost = before.with(gpu, left_after(node, gpu, query.request)).lost(forecast, node, host);
        if best.is_none_or(|(_, least)| lost < least - 1.0 / STEPS_PER_GPU) {
            best = Some((gpu, lost));
        }
    }
    best
}

fn left_after(node: &NodeState, gpu: GpuIndex, request: Request) -> u8 {
    node.percent_left_with(gpu, GpuUsage::of(node.node().hold(request, gpu)))
}

/// Returns the penalty for the idle GPUs that a node has before the pod.
fn idle_penalty(node: &NodeState) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "at most 64 GPUs")]
    let idle = node.idle().len() as f64;
    IDLE_GPU_PENALTY_GPUS * idle
}

fn rounded(score: f64) -> f64 {
    (score * STEPS_PER_GPU).round() / STEPS_PER_GPU
}

/// The free CPU and main memory of a node.
#[derive(Clone, Copy)]
struct Host {
    cpu: MilliCpu,
    memory: MiB,
}

impl Host {
    fn left(node: &NodeState) -> Self {
        Self { cpu: node.cpu_left(), memory: node.memory_left() }
    }

    fn without(self, cpu: MilliCpu, memory: MiB) -> Self {
        Self { cpu: self.cpu.saturating_sub(cpu), memory: self.memory.saturating_sub(memory) }
    }
}

/// The free percentage of each GPU, by position.
#[derive(Clone, Copy)]
struct Left([u8; GpuSet::CAPACITY]);

impl Left {
    fn of(node: &NodeState) -> Self {
        let mut left = [0; GpuSet::CAPACITY];
        for gpu in node.node().topology().gpus().iter() {
            left[gpu.position()] = node.percent_left(gpu);
        }
        Self(left)
    }

    fn with(mut self, gpu: GpuIndex, percent: u8) -> Self {
        self.0[gpu.position()] = percent;
        self
    }

    fn without(mut self, gpus: GpuSet) -> Self {
        gpus.iter().for_each(|gpu| self.0[gpu.position()] = 0);
        self
    }

    fn lost(&self, forecast: &Forecast, node: &NodeState, host: Host) -> f64 {
        forecast.lost(node.node(), host.cpu, host.memory, |position| self.0[position])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{bridged_pairs, dgx1_v100, node};
    use crate::grant::{ContainerGrant, Hold, PodGrant};
    use crate::placement::{Policy, place};
    use crate::request::{ContainerRole, MemoryRequest, Share};
    use crate::topology::Topology;
    use crate::units::Percent;

    fn shares(count: u8) -> PodRequest {
        let memory = MemoryRequest::Amount(MiB(1024));
        PodRequest::of_mains([Request::Share(Share { count, compute_percent: Percent(30), memory })])
    }

    fn check(topology: &Topology, held: &[u8], count: u8, expected: &str) {
        let mut state = node(topology, &[]);
        for gpu in held {
            let hold = Hold::Share { compute_percent: Percent(50), memory: MiB(1024) };
            let containers = vec![ContainerGrant {
                container: "c".to_owned(),
                role: ContainerRole::Main,
                holds: vec![(GpuIndex(*gpu), hold)],
            }];
            let pod = format!("uid-{gpu}").as_str().into();
            state.add(&PodGrant {
                pod,
                node: "n".into(),
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
                containers,
            });
        }
        let policy = Policy::Tessera(Default::default());
        let placement = place(&state, &shares(count), &policy, GpuSet::EMPTY).unwrap();
        assert_eq!(placement.gpus[0].to_string(), expected, "{count} beside {held:?}");
    }

    #[test]
    fn shares_of_several_gpus_get_links_and_fill_used_gpus() {
        check(&dgx1_v100(), &[], 2, "0,3");
        // Both GPUs of one bridged pair are in use already.
        check(&bridged_pairs(), &[4, 5], 2, "4,5");
        // A bridge is worth an idle GPU beside one in use.
        check(&bridged_pairs(), &[1, 7], 2, "0,1");
    }

    #[test]
    fn counts_subsets_up_to_the_bound() {
        assert_eq!(subset_count(8, 4), 70);
        assert_eq!(subset_count(8, 8), 1);
        assert_eq!(subset_count(3, 0), 1);
        assert!(subset_count(16, 8) > MAX_TRIED_SETS && subset_count(64, 32) > MAX_TRIED_SETS);
    }
}
