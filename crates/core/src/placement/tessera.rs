//! Policy `tessera` for shares of GPUs and for nodes: a pod goes where the least free capacity
//! becomes useless.
//!
//! The [forecast](crate::forecast) predicts how much of the GPUs will stay unused. The policy
//! minimises the growth of that amount. Among equal nodes it takes the one with the least capacity
//! left.

use super::{ContainerQuery, links};
use crate::forecast::Forecast;
use crate::gpu_set::GpuSet;
use crate::grant::{GpuUsage, Hold};
use crate::node::NodeState;
use crate::request::PodRequest;
use crate::units::{GpuIndex, MiB, MilliCpu};

/// Penalty in GPUs for each free GPU, or free CPU for one GPU, that a node keeps. It is just large
/// enough to prefer nodes in use over idle ones.
const LEFT_OVER_PENALTY_GPUS: f64 = 0.002;

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

/// Returns the score of a node from its state before and after the pod, and from the link quality
/// of the chosen sets.
pub(super) fn score(forecast: &Forecast, before: &NodeState, after: &NodeState, links: f64) -> f64 {
    let lost = |node: &NodeState| Left::of(node).lost(forecast, node, Host::left(node));
    let left_over = left_over(forecast, after.gpus_left(), after.cpu_left());
    rounded(lost(before) - lost(after) - left_over + LINK_BONUS_GPUS * links)
}

/// Returns the score for a pod with at most one GPU request, without choosing the GPUs.
///
/// The result is `None` where the score depends on the choice: whole GPUs of a node with several
/// kinds of GPUs.
pub(super) fn quick_score(
    forecast: &Forecast,
    node: &NodeState,
    pod: &PodRequest,
    query: Option<&ContainerQuery>,
) -> Option<f64> {
    let before = Left::of(node);
    let now = Host::left(node);
    let then = now.without(pod.cpu, pod.memory);
    let (lost, after) = match query {
        None => (before.lost(forecast, node, then), before),
        Some(ContainerQuery { hold: Hold::Whole, .. }) if node.node().kinds().len() > 1 => return None,
        Some(ContainerQuery { hold: Hold::Whole, candidates, count, .. }) => {
            let after = before.without(candidates.lowest_n(*count));
            (after.lost(forecast, node, then), after)
        }
        Some(query) => {
            let (gpu, lost) = best_gpu(forecast, node, query, &before, then)?;
            (lost, before.with(gpu, left_after(node, gpu, query.hold)))
        }
    };
    let gain = before.lost(forecast, node, now) - lost;
    let links = query.map_or(0.0, |query| links::merit(node, query));
    Some(rounded(gain - left_over(forecast, after.gpus(node), then.cpu) + LINK_BONUS_GPUS * links))
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
        let lost = before.with(gpu, left_after(node, gpu, query.hold)).lost(forecast, node, host);
        if best.is_none_or(|(_, least)| lost < least - 1.0 / STEPS_PER_GPU) {
            best = Some((gpu, lost));
        }
    }
    best
}

fn left_after(node: &NodeState, gpu: GpuIndex, hold: Hold) -> u8 {
    node.percent_left_with(gpu, GpuUsage::of(hold))
}

fn left_over(forecast: &Forecast, gpus: f64, cpu: MilliCpu) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "no host has 2^52 thousandths of a CPU")]
    let cpu = cpu.0 as f64;
    LEFT_OVER_PENALTY_GPUS * (gpus + cpu / forecast.cpu_per_gpu())
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

    fn gpus(&self, node: &NodeState) -> f64 {
        let percents = self.0[..node.node().gpus().len()].iter().map(|percent| u32::from(*percent));
        f64::from(percents.sum::<u32>()) / 100.0
    }

    fn lost(&self, forecast: &Forecast, node: &NodeState, host: Host) -> f64 {
        forecast.lost(node.node(), host.cpu, host.memory, |position| self.0[position])
    }
}
