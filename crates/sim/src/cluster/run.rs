//! One run: pods arrive one at a time. Each pod is placed by the policy or rejected for good.

use std::sync::Arc;
use std::time::Instant;

use tessera_core::forecast::CapacitySummary;
use tessera_core::grant::PodGrant;
use tessera_core::node::Node;
use tessera_core::placement::Placement;
use tessera_core::workload::Workload;

use super::arrivals::{Draws, arrivals};
use super::chooser::NodeChooser;
use super::peers::ClusterFragmentation;
use super::pod::SimPod;
use super::sim_node::SimNode;
use super::{Experiment, FillPolicy, WorkloadKnowledge};

/// Result of one run.
#[derive(Clone, Debug, Default)]
pub struct FillResult {
    /// Allocated GPUs at the end, in percent of all GPUs.
    pub allocated_percent: f64,
    /// Number of rejected pods by [`PodSize::WITH_GPUS`](super::pod::PodSize::WITH_GPUS).
    pub refused: [u32; 5],
    /// Allocated over arrived GPUs, both in percent of all GPUs.
    pub curve: Vec<(f64, f64)>,
    /// Unusable GPUs at the marks of [`FRAGMENTATION_AT`]: (arrived, unusable of all GPUs, unusable
    /// of the idle GPUs), in percent.
    pub fragmentation: Vec<(f64, f64, f64)>,
    /// Time of each decision in nanoseconds, ascending.
    pub decision_nanos: Vec<u64>,
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// For each pod with several GPUs, its bandwidth relative to the best on that node.
    pub bandwidth_shares: Vec<f64>,
    /// Grants in the order of arrival.
    pub grants: Vec<PodGrant>,
    /// Positions of the rejected pods among the arrivals.
    pub rejected: Vec<usize>,
}

/// Arrivals at which fragmentation is recorded, in percent of all GPUs.
pub const FRAGMENTATION_AT: [f64; 4] = [50.0, 80.0, 90.0, 130.0];

/// Distance of two points of the curve, in percent of all GPUs.
const CURVE_STEP: f64 = 0.5;

/// Runs one policy on the arrivals of one seed.
#[must_use]
pub fn run(experiment: &Experiment, policy: FillPolicy, seed: u64) -> FillResult {
    let mut draws = Draws::new(seed);
    let gpu_count = experiment.gpu_count();
    let pods = arrivals(&experiment.pods, gpu_count, experiment.fill, &mut draws);
    let mut order: Vec<&Arc<Node>> = experiment.nodes.iter().collect();
    draws.shuffle(&mut order);
    let nodes: Vec<SimNode> = order.into_iter().map(SimNode::empty).collect();
    let measure = ClusterFragmentation::new(experiment.pods.iter(), nodes.iter().map(|node| &node.state));
    let known = (experiment.target == WorkloadKnowledge::Trace)
        .then(|| Workload::of(experiment.pods.iter().map(|pod| &pod.request)));
    let start = Instant::now();
    let mut run = FillRun {
        chooser: NodeChooser::new(policy, known, &nodes, || measure.clone(), seed)
            .sampling(experiment.sample, seed),
        nodes,
        measure,
        gpu_count: gpu_count as u64,
        arrived: 0,
        allocated: 0,
        free_on_partly_used: 0.0,
        outcome: FillResult::default(),
    };
    for (position, pod) in pods.into_iter().enumerate() {
        run.offer(position, pod);
    }
    run.finish(start)
}

struct FillRun {
    chooser: NodeChooser,
    nodes: Vec<SimNode>,
    measure: ClusterFragmentation,
    /// GPUs of the whole cluster.
    gpu_count: u64,
    /// Arrived GPU requests in percent of one GPU.
    arrived: u64,
    /// Allocated GPU time in percent of one GPU.
    allocated: u64,
    /// Free capacity of the GPUs that are partly used, in GPUs.
    free_on_partly_used: f64,
    outcome: FillResult,
}

impl FillRun {
    fn offer(&mut self, position: usize, pod: &SimPod) {
        let start = Instant::now();
        self.chooser.see(pod);
        let capacity = CapacitySummary {
            all_gpus: percent(self.gpu_count * 100),
            free: percent(self.gpu_count * 100 - self.allocated),
            free_on_partly_used: self.free_on_partly_used,
        };
        self.chooser.refresh(&self.nodes, capacity);
        let chosen = self.chooser.choose(pod, &self.nodes);
        let nanos = start.elapsed().as_nanos();
        self.outcome.decision_nanos.push(u64::try_from(nanos).unwrap_or(u64::MAX));
        match chosen {
            Some((node, placement)) => self.take(node, pod, &placement),
            None => {
                self.outcome.rejected.push(position);
                if let Some(size) = pod.size.position() {
                    self.outcome.refused[size] += 1;
                }
            }
        }
        self.arrived += u64::from(pod.percent);
        self.record();
    }

    fn take(&mut self, node: usize, pod: &SimPod, placement: &Placement) {
        self.free_on_partly_used -= self.nodes[node].state.left_on_partly_used();
        let grant = self.nodes[node].add(self.outcome.grants.len(), pod, placement).clone();
        self.free_on_partly_used += self.nodes[node].state.left_on_partly_used();
        if let Some(gpus) = placement.gpus.first().filter(|gpus| gpus.len() > 1) {
            let topology = self.nodes[node].state.node().topology();
            self.outcome.bandwidth_shares.push(topology.bandwidth_model().share(*gpus));
        }
        self.outcome.grants.push(grant);
        self.chooser.touch(node);
        self.allocated += u64::from(pod.percent);
    }

    /// Records a point of the curve and the fragmentation when arrivals pass the next mark.
    fn record(&mut self) {
        let (arrived, allocated) = (self.of_all(self.arrived), self.of_all(self.allocated));
        let curve = &mut self.outcome.curve;
        if curve.last().is_none_or(|(last, _)| arrived >= last + CURVE_STEP) {
            curve.push((arrived, allocated));
        }
        let next = FRAGMENTATION_AT.get(self.outcome.fragmentation.len());
        // Arrivals may end shortly before the last mark. `finish` records it then.
        if next.is_some_and(|mark| arrived >= *mark) {
            self.record_fragmentation();
        }
    }

    fn record_fragmentation(&mut self) {
        let useless: f64 = self.nodes.iter().map(|node| self.measure.of(&node.state)).sum();
        let useless = 100.0 * useless / percent(self.gpu_count * 100);
        let idle = 100.0 - self.of_all(self.allocated);
        let of_idle = if idle > 0.0 { 100.0 * useless / idle } else { 0.0 };
        self.outcome.fragmentation.push((self.of_all(self.arrived), useless, of_idle));
    }

    fn of_all(&self, part: u64) -> f64 {
        if self.gpu_count == 0 { 0.0 } else { 100.0 * percent(part) / percent(self.gpu_count * 100) }
    }

    fn finish(mut self, start: Instant) -> FillResult {
        self.outcome.seconds = start.elapsed().as_secs_f64();
        self.outcome.allocated_percent = self.of_all(self.allocated);
        self.outcome.curve.push((self.of_all(self.arrived), self.of_all(self.allocated)));
        if self.outcome.fragmentation.len() < FRAGMENTATION_AT.len() {
            self.record_fragmentation();
        }
        self.outcome.decision_nanos.sort_unstable();
        self.outcome
    }
}

/// Converts percent of one GPU to GPUs.
fn percent(amount: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a cluster has fewer than 2^52 GPUs")]
    let amount = amount as f64;
    amount / 100.0
}
