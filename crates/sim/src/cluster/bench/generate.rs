//! Nodes, arrivals and restarts of a workload, for one seed.

use std::sync::Arc;

use tessera_core::gpu::Gpu;
use tessera_core::node::{BadNode, Node};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu};

use super::catalog::{ArrivalPattern, BenchWorkload, Mix, NodeMix, Phase, Stream};
use super::shapes::GPU_MEMORY;
use crate::cluster::Experiment;
use crate::cluster::arrivals::{Draws, arrivals};
use crate::cluster::pod::SimPod;

/// What happens in one run, whatever the policy.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub(super) nodes: Vec<Arc<Node>>,
    /// The different pods.
    pub(super) shapes: Vec<SimPod>,
    /// All arrivals, earliest first.
    pub(super) arrivals: Vec<Arrival>,
    /// Positions of the arrivals before which the scheduler restarts, ascending.
    pub(super) restarts: Vec<usize>,
    /// True if pods of equal time are created together, so that the scheduler sees all of them
    /// before it places the first.
    pub(super) bursts: bool,
    /// The measured time, if pods end.
    pub(super) measured: Option<MeasuredTime>,
    /// Largest number of nodes that kube-scheduler offers for a pod; `None` for all.
    pub(super) sample: Option<usize>,
    pub(super) seed: u64,
}

/// An arriving pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) at_seconds: u64,
    /// Position in [`Scenario::shapes`].
    pub(super) shape: usize,
    /// Running time, or `None` for a pod that never ends.
    pub(super) lifetime_seconds: Option<u64>,
}

/// The time in which waiting and allocation are measured. Before it, the cluster fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeasuredTime {
    pub(super) from_seconds: u64,
    pub(super) to_seconds: u64,
}

const GPUS_PER_NODE: u8 = 8;
const NODE_CPU: MilliCpu = MilliCpu(128_000);
const NODE_MEMORY: MiB = MiB(1024 * 1024);

const SECONDS_PER_HOUR: f64 = 3600.0;

/// Spread of the lognormal lifetimes: the longest tenth of the pods takes more than half of the GPU
/// time.
const LIFETIME_SIGMA: f64 = 1.5;
/// Upper bound for a lifetime, as a multiple of the mean. Without it single pods would decide.
const MAX_LIFETIME: f64 = 20.0;
/// Mean of a lognormal number with mean 1 and this spread after the cut at the upper bound.
const MEAN_AFTER_CUT: f64 = 0.954;

impl BenchWorkload {
    /// Generates the scenario of a seed on this number of nodes with eight GPUs each.
    pub fn scenario(&self, node_count: usize, seed: u64) -> Result<Scenario, BadNode> {
        let mut draws = Draws::new(seed);
        let mut nodes: Vec<Arc<Node>> =
            (0..node_count).map(|number| node(number, self.nodes).map(Arc::new)).collect::<Result<_, _>>()?;
        draws.shuffle(&mut nodes);
        let gpus = node_count * usize::from(GPUS_PER_NODE);
        let mut pods = Pods::default();
        let measured = match &self.pattern {
            ArrivalPattern::Fill(phases) => {
                for (number, phase) in phases.iter().enumerate() {
                    pods.fill(phase, number as u64, gpus, &mut draws);
                }
                None
            }
            ArrivalPattern::Churn { streams, hours, measured_from_hour } => {
                streams.iter().for_each(|stream| pods.come_and_go(stream, gpus, *hours, &mut draws));
                pods.arrivals.sort_by_key(|arrival| arrival.at_seconds);
                Some(MeasuredTime { from_seconds: measured_from_hour * 3600, to_seconds: hours * 3600 })
            }
        };
        let Pods { shapes, arrivals } = pods;
        let mut restarts: Vec<usize> = (0..self.restarts).map(|_| draws.below(arrivals.len())).collect();
        restarts.sort_unstable();
        Ok(Scenario { nodes, shapes, arrivals, restarts, bursts: self.bursts, measured, sample: None, seed })
    }
}

impl Scenario {
    /// Returns the scenario of the experiment on a trace.
    #[must_use]
    pub fn of_trace(experiment: &Experiment, seed: u64) -> Self {
        let mut draws = Draws::new(seed);
        let gpus = experiment.nodes.iter().map(|node| node.gpus().len()).sum();
        let order = arrivals(&experiment.pods, gpus, experiment.fill, &mut draws);
        let shapes: Vec<SimPod> = order.into_iter().cloned().collect();
        let mut nodes = experiment.nodes.clone();
        draws.shuffle(&mut nodes);
        let arrivals =
            (0..shapes.len()).map(|shape| Arrival { at_seconds: 0, shape, lifetime_seconds: None });
        let arrivals = arrivals.collect();
        let (restarts, sample) = (Vec::new(), experiment.sample);
        Self { nodes, arrivals, shapes, restarts, bursts: false, measured: None, sample, seed }
    }

    /// Returns the scenario in which kube-scheduler offers at most so many nodes for a pod.
    #[must_use]
    pub fn sampled(self, sample: Option<usize>) -> Self {
        Self { sample, ..self }
    }

    #[cfg(test)]
    pub(in crate::cluster) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    pub(in crate::cluster) fn pod(&self, arrival: usize) -> &SimPod {
        &self.shapes[self.arrivals[arrival].shape]
    }
}

fn node(number: usize, mix: NodeMix) -> Result<Node, BadNode> {
    let (model, memory) = match (mix, number % 4) {
        (NodeMix::Alike, _) | (NodeMix::Kinds, 3) => ("80GiB", GPU_MEMORY),
        (NodeMix::Kinds, 0) => ("16GiB", MiB(16 * 1024)),
        (NodeMix::Kinds, 1) => ("24GiB", MiB(24 * 1024)),
        (NodeMix::Kinds, _) => ("40GiB", MiB(40 * 1024)),
    };
    let name = format!("n{number}");
    let gpu = |index| {
        Gpu::new(GpuIndex(index), format!("GPU-{name}-{index}").as_str().into(), model.into(), memory)
    };
    let gpus = (0..GPUS_PER_NODE).map(gpu).collect();
    let topology = Topology::unknown(usize::from(GPUS_PER_NODE));
    Node::new(name.as_str().into(), gpus, topology, NODE_CPU, NODE_MEMORY)
}

/// The pods generated so far.
#[derive(Default)]
struct Pods {
    shapes: Vec<SimPod>,
    arrivals: Vec<Arrival>,
}

impl Pods {
    /// Adds pods until the next one would exceed the part of the GPUs that the phase requests.
    fn fill(&mut self, phase: &Phase, at_seconds: u64, gpus: usize, draws: &mut Draws) {
        let shapes = self.add_shapes(&phase.mix);
        let mut left = 100.0 * phase.fill * as_f64(gpus);
        loop {
            let shape = shapes[draw(&phase.mix, draws)];
            left -= f64::from(self.shapes[shape].percent);
            if left < 0.0 {
                return;
            }
            self.arrivals.push(Arrival { at_seconds, shape, lifetime_seconds: None });
        }
    }

    /// Adds the pods of a stream: the times between arrivals are exponential, lifetimes lognormal.
    fn come_and_go(&mut self, stream: &Stream, gpus: usize, hours: u64, draws: &mut Draws) {
        let shapes = self.add_shapes(&stream.mix);
        let weights: u32 = stream.mix.iter().map(|(_, weight)| weight).sum();
        let percents: u32 = stream.mix.iter().map(|(pod, weight)| pod.percent * weight).sum();
        let mean_percent = f64::from(percents) / f64::from(weights);
        let pods_at_once = 100.0 * stream.load * as_f64(gpus) / mean_percent;
        let mean_gap_hours = stream.mean_lifetime_hours / pods_at_once;
        let mut active_hours = 0.0;
        loop {
            active_hours += draws.exponential() * mean_gap_hours;
            let at_seconds = seconds(stream.hour_of_run(active_hours));
            if at_seconds >= hours * 3600 {
                return;
            }
            let deviation = LIFETIME_SIGMA * draws.normal() - LIFETIME_SIGMA * LIFETIME_SIGMA / 2.0;
            let lifetime = stream.mean_lifetime_hours * deviation.exp().min(MAX_LIFETIME) / MEAN_AFTER_CUT;
            self.arrivals.push(Arrival {
                at_seconds,
                shape: shapes[draw(&stream.mix, draws)],
                lifetime_seconds: Some(seconds(lifetime).max(1)),
            });
        }
    }

    /// Adds the pods of a mix and returns their positions.
    fn add_shapes(&mut self, mix: &Mix) -> Vec<usize> {
        let position = |(pod, _): &(SimPod, u32)| {
            self.shapes.iter().position(|known| known == pod).unwrap_or_else(|| {
                self.shapes.push(pod.clone());
                self.shapes.len() - 1
            })
        };
        mix.iter().map(position).collect()
    }
}

impl Stream {
    /// Returns the hour of the run at which so many hours of arrivals have passed.
    fn hour_of_run(&self, active_hours: f64) -> f64 {
        let (first, last) = self.hours_of_day;
        #[expect(clippy::cast_precision_loss, reason = "hours of a day")]
        let (first, per_day) = (first as f64, (last - first) as f64);
        24.0 * (active_hours / per_day).floor() + first + active_hours % per_day
    }
}

/// Draws a position in the mix.
fn draw(mix: &Mix, draws: &mut Draws) -> usize {
    let weight = |position: usize| mix[position].1 as usize;
    let mut drawn = draws.below((0..mix.len()).map(weight).sum());
    let mut position = 0;
    while position + 1 < mix.len() && drawn >= weight(position) {
        drawn -= weight(position);
        position += 1;
    }
    position
}

fn as_f64(gpus: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a cluster has fewer than 2^52 GPUs")]
    let gpus = gpus as f64;
    gpus
}

fn seconds(hours: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and is never negative"
    )]
    let seconds = (hours * SECONDS_PER_HOUR).round() as u64;
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_offer_the_load_of_their_name() {
        let (nodes, seeds) = (50, 0..8);
        let offered: f64 = seeds
            .map(|seed| {
                let scenario = BenchWorkload::named("churn-80").unwrap().scenario(nodes, seed).unwrap();
                let pods = scenario.arrivals.iter().enumerate();
                let gpu_seconds = pods.map(|(arrival, known)| {
                    f64::from(scenario.pod(arrival).percent) / 100.0 * known.lifetime_seconds.unwrap() as f64
                });
                let capacity = as_f64(nodes * 8) * scenario.measured.unwrap().to_seconds as f64;
                gpu_seconds.sum::<f64>() / capacity / 8.0
            })
            .sum();
        assert!((offered - 0.8).abs() < 0.02, "{offered}");
    }

    #[test]
    fn shares_arrive_by_day_and_large_jobs_by_night() {
        let scenario = BenchWorkload::named("day-night").unwrap().scenario(10, 1).unwrap();
        for (arrival, known) in scenario.arrivals.iter().enumerate() {
            let is_day = (8..20).contains(&(known.at_seconds / 3600 % 24));
            assert_eq!(is_day, scenario.pod(arrival).share().is_some(), "{known:?}");
        }
    }

    #[test]
    fn a_phase_requests_its_part_of_the_cluster() {
        let scenario = BenchWorkload::named("mixed").unwrap().scenario(10, 1).unwrap();
        let requested: u32 = (0..scenario.arrivals.len()).map(|arrival| scenario.pod(arrival).percent).sum();
        assert!((10_400 - 800..=10_400).contains(&requested), "{requested}");
    }
}
