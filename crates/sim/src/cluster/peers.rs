//! The published policies that the core is compared with, as Weng et al. describe them.
//!
//! Scores are whole numbers from 0 to 100. Among nodes with equal scores the first one wins.

use std::collections::HashMap;

use tessera_core::fragmentation::Fragmentation;
use tessera_core::gpu::GpuKind;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::Hold;
use tessera_core::node::NodeState;
use tessera_core::units::{GpuIndex, MilliCpu};
use tessera_core::workload::PodClass;

use super::pod::{PodSize, SimPod};
use super::sim_node::SimNode;

/// A published policy.
#[derive(Clone, Debug)]
pub(super) enum PublishedPolicy {
    /// The smallest dot product of free and requested resources.
    DotProduct,
    /// Nodes that already hold pods of the same size.
    Clustering,
    /// GPUs in use first, then nodes in use.
    Packing,
    /// The node with the least capacity left over.
    BestFit,
    /// Fragmentation gradient descent.
    Fgd(ClusterFragmentation),
}

/// CPU and GPUs of the largest node in the published experiment. Scores are relative to them.
const MAX_CPU_MILLI: f64 = 128_000.0;
const MAX_GPUS: f64 = 8.0;

impl PublishedPolicy {
    /// Returns the score of a node that fits, and the GPU that a share would get.
    pub(super) fn score(&self, node: &SimNode, pod: &SimPod) -> (f64, Option<GpuIndex>) {
        let state = &node.state;
        let fullest = fullest_gpu(state, pod);
        match self {
            Self::DotProduct => {
                let cpu = milli(state.cpu_left()) / MAX_CPU_MILLI * milli(pod.request.cpu) / MAX_CPU_MILLI;
                let gpus = state.gpus_left() / MAX_GPUS * asked(pod) / MAX_GPUS;
                ((100.0 * (1.0 - (cpu + gpus) / 2.0)).floor(), fullest)
            }
            Self::BestFit => {
                let cpu = (milli(state.cpu_left()) - milli(pod.request.cpu)) / MAX_CPU_MILLI;
                let gpus = (state.gpus_left() - asked(pod)) / MAX_GPUS;
                ((100.0 * (1.0 - 0.5 * cpu - 0.5 * gpus)).floor(), fullest)
            }
            Self::Clustering => (clustering(node, pod), fullest),
            Self::Packing => (packing(state, pod, fullest), fullest),
            Self::Fgd(measure) => measure.gradient(state, pod),
        }
    }
}

fn clustering(node: &SimNode, pod: &SimPod) -> f64 {
    if pod.size == PodSize::None {
        return 0.0;
    }
    let kinds = PodSize::WITH_GPUS.iter().filter(|size| node.holds(**size)).count();
    let band = match (node.holds(pod.size), kinds) {
        (true, 1) => 3.0,
        (true, _) => 2.0,
        (false, 0) => 1.0,
        (false, _) => 0.0,
    };
    (band * 25.0 + 24.0 * (1.0 - node.state.gpus_left() / MAX_GPUS)).floor()
}

fn packing(state: &NodeState, pod: &SimPod, fullest: Option<GpuIndex>) -> f64 {
    if pod.size == PodSize::None {
        return 0.0;
    }
    #[expect(clippy::cast_precision_loss, reason = "at most 64 GPUs")]
    let (idle, gpus) = (state.idle().len() as f64, state.node().gpus().len() as f64);
    let open = fullest.filter(|gpu| state.percent_left(*gpu) < 100);
    let score = if let (Some(gpu), Some(share)) = (open, pod.share()) {
        100.0 - f64::from(percent_left_after(state, gpu, share)) / 100.0 * 33.0
    } else if idle < gpus {
        66.0 - idle / MAX_GPUS * 33.0
    } else {
        33.0 - idle / MAX_GPUS * 33.0
    };
    score.floor()
}

/// Returns the GPU with the least free time that still fits the share.
fn fullest_gpu(state: &NodeState, pod: &SimPod) -> Option<GpuIndex> {
    fitting_gpus(state, pod).min_by_key(|gpu| state.percent_left(*gpu))
}

/// Returns the GPUs that fit a share. Other pods have none.
pub(super) fn fitting_gpus(state: &NodeState, pod: &SimPod) -> impl Iterator<Item = GpuIndex> {
    let gpus = if pod.size == PodSize::Share { state.node().topology().gpus() } else { GpuSet::EMPTY };
    let hold = pod.share();
    gpus.iter().filter(move |gpu| hold.is_some_and(|hold| state.fits(*gpu, hold)))
}

/// Returns the free percentage of a GPU, by the scarcer of compute and memory, with one more share
/// on it.
fn percent_left_after(state: &NodeState, gpu: GpuIndex, share: Hold) -> u8 {
    let Hold::Share { compute_percent, memory } = share else { return 0 };
    let room = state.room(gpu);
    let compute_left = u64::from(room.compute_percent.saturating_sub(compute_percent).0);
    let gpu_memory = state.node().gpu(gpu).map_or(0, |gpu| gpu.memory.0);
    let memory_left = room.memory.saturating_sub(memory).0.saturating_mul(100).checked_div(gpu_memory);
    u8::try_from(compute_left.min(memory_left.unwrap_or(compute_left))).unwrap_or(100)
}

fn asked(pod: &SimPod) -> f64 {
    f64::from(pod.percent) / 100.0
}

#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 thousandths of a CPU")]
fn milli(cpu: MilliCpu) -> f64 {
    cpu.0 as f64
}

/// The published measure of fragmentation against the published target workload.
///
/// The target is the most common kinds of pods, including pods without GPUs, that make up
/// [`COVERED_PODS`] of the list.
#[derive(Clone, Debug)]
pub(super) struct ClusterFragmentation {
    kinds: Vec<(GpuKind, Fragmentation)>,
}

/// Part of the list that the target workload covers, as published.
const COVERED_PODS: f64 = 0.95;

impl ClusterFragmentation {
    pub(super) fn new<'a>(
        pods: impl Iterator<Item = &'a SimPod>,
        nodes: impl Iterator<Item = &'a NodeState>,
    ) -> Self {
        let mut counts: HashMap<(MilliCpu, Option<PodClass>), usize> = HashMap::new();
        let mut listed = 0;
        for pod in pods {
            listed += 1;
            *counts.entry((pod.request.cpu, PodClass::of(&pod.request))).or_default() += 1;
        }
        let mut classes: Vec<_> = counts.into_iter().collect();
        classes.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let mut covered = 0;
        #[expect(clippy::cast_precision_loss, reason = "a list has fewer than 2^52 pods")]
        classes.retain(|(_, count)| {
            let needed = (covered as f64) < COVERED_PODS * f64::from(listed);
            covered += if needed { *count } else { 0 };
            needed
        });
        #[expect(clippy::cast_precision_loss, reason = "a list has fewer than 2^52 pods")]
        let weights = || {
            let with_gpus = classes.iter().filter_map(|((_, class), count)| Some((class.as_ref()?, *count)));
            with_gpus.map(|(class, count)| (class, count as f64 / covered as f64))
        };
        let mut kinds: Vec<(GpuKind, Fragmentation)> = Vec::new();
        for (kind, _) in nodes.flat_map(|state| state.node().kinds()) {
            if !kinds.iter().any(|(known, _)| known == kind) {
                kinds.push((kind.clone(), Fragmentation::new(weights(), kind)));
            }
        }
        Self { kinds }
    }

    /// Returns the unusable part of a node's GPUs, in GPUs.
    pub(super) fn of(&self, state: &NodeState) -> f64 {
        self.with(state, state.cpu_left(), |gpu| state.percent_left(gpu))
    }

    fn with(&self, state: &NodeState, cpu: MilliCpu, left: impl Fn(GpuIndex) -> u8 + Copy) -> f64 {
        let of_kind = |(kind, gpus): &(GpuKind, GpuSet)| {
            let measure = self.kinds.iter().find(|(known, _)| known == kind);
            measure.map_or(0.0, |(_, measure)| measure.of(cpu, gpus.iter().map(left)))
        };
        state.node().kinds().iter().map(of_kind).sum()
    }

    /// Returns how far a placement lowers the measure, as the published score. The score is
    /// rounded, so small differences are ties.
    fn gradient(&self, state: &NodeState, pod: &SimPod) -> (f64, Option<GpuIndex>) {
        let cpu = state.cpu_left().saturating_sub(pod.request.cpu);
        let before = self.of(state);
        let points = |after: f64| (100.0 / (1.0 + (after - before).exp())).floor();
        if let Some(share) = pod.share() {
            let mut best = (f64::NEG_INFINITY, None);
            for gpu in fitting_gpus(state, pod) {
                let after = percent_left_after(state, gpu, share);
                let left = |other| if other == gpu { after } else { state.percent_left(other) };
                let score = points(self.with(state, cpu, left));
                if score > best.0 {
                    best = (score, Some(gpu));
                }
            }
            return best;
        }
        let taken = state.idle().lowest_n(usize::try_from(pod.percent / 100).unwrap_or(0));
        let left = |other| if taken.contains(other) { 0 } else { state.percent_left(other) };
        (points(self.with(state, cpu, left)), None)
    }
}
