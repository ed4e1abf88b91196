//! One run: pods arrive one at a time. Each pod is placed by the policy or rejected for good.

use std::sync::Arc;
use std::time::Instant;

use tessera_core::forecast::Learner;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::scoreboard::Scoreboard;
use tessera_core::placement::{Placement, Policy, filter, place, score};
use tessera_core::units::GpuIndex;
use tessera_core::workload::Workload;

use super::arrivals::{Draws, arrivals};
use super::peers::{ClusterFragmentation, PublishedPolicy, fitting_gpus};
use super::trace::{PodSize, TracePod};
use super::{Experiment, FillPolicy, WorkloadKnowledge};

/// Result of one run.
#[derive(Clone, Debug, Default)]
pub struct FillResult {
    /// Allocated GPUs at the end, in percent of all GPUs.
    pub allocated_percent: f64,
    /// Number of rejected pods by [`PodSize::WITH_GPUS`].
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
}

/// A node of the simulated cluster.
#[derive(Clone, Debug)]
pub(super) struct SimNode {
    pub(super) state: NodeState,
    /// Number of pods on the node by [`PodSize::WITH_GPUS`].
    sizes: [u32; 5],
}

/// Arrivals at which fragmentation is recorded, in percent of all GPUs.
pub const FRAGMENTATION_AT: [f64; 4] = [50.0, 80.0, 90.0, 130.0];

/// Distance of two points of the curve, in percent of all GPUs.
const CURVE_STEP: f64 = 0.5;

impl SimNode {
    pub(super) fn holds(&self, size: PodSize) -> bool {
        size_position(size).is_some_and(|position| self.sizes[position] > 0)
    }
}

fn size_position(size: PodSize) -> Option<usize> {
    PodSize::WITH_GPUS.iter().position(|known| *known == size)
}

/// Runs one policy on the arrivals of one seed.
#[must_use]
pub fn run(experiment: &Experiment, policy: FillPolicy, seed: u64) -> FillResult {
    let mut draws = Draws::new(seed);
    let gpu_count: usize = experiment.nodes.iter().map(|node| node.gpus().len()).sum();
    let pods = arrivals(&experiment.pods, gpu_count, experiment.fill, &mut draws);
    let mut order: Vec<&Arc<Node>> = experiment.nodes.iter().collect();
    draws.shuffle(&mut order);
    let empty = |node: &&Arc<Node>| SimNode { state: NodeState::empty(Arc::clone(node)), sizes: [0; 5] };
    let nodes: Vec<SimNode> = order.iter().map(empty).collect();
    let measure = ClusterFragmentation::new(&experiment.pods, nodes.iter().map(|node| &node.state));
    let start = Instant::now();
    let mut run = FillRun {
        chooser: NodeChooser::new(policy, experiment, &nodes, &measure, seed),
        board: Scoreboard::new(nodes.len()),
        nodes,
        measure,
        gpu_count: gpu_count as u64,
        arrived: 0,
        allocated: 0,
        outcome: FillResult::default(),
    };
    for pod in pods {
        run.offer(pod);
    }
    run.finish(start)
}

struct FillRun {
    chooser: NodeChooser,
    board: Scoreboard,
    nodes: Vec<SimNode>,
    measure: ClusterFragmentation,
    /// GPUs of the whole cluster.
    gpu_count: u64,
    /// Arrived GPU requests in percent of one GPU.
    arrived: u64,
    /// Allocated GPU time in percent of one GPU.
    allocated: u64,
    outcome: FillResult,
}

impl FillRun {
    fn offer(&mut self, pod: &TracePod) {
        let start = Instant::now();
        let idle = self.gpu_count * 100 - self.allocated;
        if self.chooser.learn(pod, &self.nodes, percent(idle), percent(self.gpu_count * 100)) {
            self.board.clear();
        }
        let chosen = self.chooser.choose(pod, &self.nodes, &mut self.board);
        let nanos = start.elapsed().as_nanos();
        self.outcome.decision_nanos.push(u64::try_from(nanos).unwrap_or(u64::MAX));
        match chosen {
            Some((node, placement)) => self.take(node, pod, &placement),
            None => {
                if let Some(position) = size_position(pod.size) {
                    self.outcome.refused[position] += 1;
                }
            }
        }
        self.arrived += u64::from(pod.percent);
        self.record();
    }

    fn take(&mut self, node: usize, pod: &TracePod, placement: &Placement) {
        let SimNode { state, sizes } = &mut self.nodes[node];
        let grant = PodGrant {
            pod: format!("{}-{}", pod.name, self.outcome.grants.len()).as_str().into(),
            node: state.node().name.clone(),
            cpu: pod.request.cpu,
            memory: pod.request.memory,
            containers: placement.grants(&pod.request),
        };
        if let Some(gpus) = placement.gpus.first().filter(|gpus| gpus.len() > 1) {
            self.outcome.bandwidth_shares.push(state.node().topology().bandwidth_model().share(*gpus));
        }
        state.add(&grant);
        self.outcome.grants.push(grant);
        self.board.touch(node);
        self.allocated += u64::from(pod.percent);
        if let Some(position) = size_position(pod.size) {
            sizes[position] += 1;
        }
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

/// A policy with its state.
enum NodeChooser {
    /// A random node that fits and a random GPU of it.
    Random(Draws),
    Published(PublishedPolicy),
    Core {
        policy: Policy,
        /// The learner of a forecasting policy.
        learner: Option<Learner>,
        /// True if the learner sees every arrival.
        learns: bool,
    },
}

impl NodeChooser {
    fn new(
        policy: FillPolicy,
        experiment: &Experiment,
        nodes: &[SimNode],
        measure: &ClusterFragmentation,
        seed: u64,
    ) -> Self {
        match policy {
            FillPolicy::Random => Self::Random(Draws::new(!seed)),
            FillPolicy::DotProduct => Self::Published(PublishedPolicy::DotProduct),
            FillPolicy::Clustering => Self::Published(PublishedPolicy::Clustering),
            FillPolicy::Packing => Self::Published(PublishedPolicy::Packing),
            FillPolicy::BestFit => Self::Published(PublishedPolicy::BestFit),
            FillPolicy::Fgd => Self::Published(PublishedPolicy::Fgd(measure.clone())),
            FillPolicy::Core(policy @ Policy::Tessera(_)) => {
                let workload = match experiment.target {
                    WorkloadKnowledge::Learned => Workload::guess(nodes.iter().map(|node| node.state.node())),
                    WorkloadKnowledge::Trace => Workload::of(experiment.pods.iter().map(|pod| &pod.request)),
                };
                let learns = experiment.target == WorkloadKnowledge::Learned;
                Self::Core { policy, learner: Some(Learner::new(workload)), learns }
            }
            FillPolicy::Core(policy) => Self::Core { policy, learner: None, learns: false },
        }
    }

    /// Lets the policy see an arrival. Returns whether scores have changed.
    fn learn(&mut self, pod: &TracePod, nodes: &[SimNode], idle: f64, all: f64) -> bool {
        let Self::Core { policy, learner: Some(learner), learns } = self else { return false };
        if *learns {
            learner.see(&pod.request);
        }
        let due = learner.is_due(idle, all);
        if due {
            let remains = nodes.iter().map(|node| &node.state).collect();
            *policy = Policy::Tessera(Arc::new(learner.forecast(&remains)));
        }
        due
    }

    fn choose(
        &mut self,
        pod: &TracePod,
        nodes: &[SimNode],
        board: &mut Scoreboard,
    ) -> Option<(usize, Placement)> {
        let placed = |node: usize, policy: &Policy| {
            let placement = place(&nodes[node].state, &pod.request, policy, GpuSet::EMPTY).ok()?;
            Some((node, placement))
        };
        match self {
            Self::Core { policy, .. } => {
                let best =
                    board.best(&pod.request, |node| score(&nodes[node].state, &pod.request, policy).ok());
                placed(best?, policy)
            }
            Self::Random(draws) => {
                let fits = |node: &usize| filter(&nodes[*node].state, &pod.request, &Policy::Simple).is_ok();
                let fitting: Vec<usize> = (0..nodes.len()).filter(fits).collect();
                let node = *fitting.get(draws.below(fitting.len()))?;
                let gpus: Vec<GpuIndex> = fitting_gpus(&nodes[node].state, pod).collect();
                on_gpu(placed(node, &Policy::Simple)?, gpus.get(draws.below(gpus.len())))
            }
            Self::Published(peer) => {
                let fits = |node: usize| filter(&nodes[node].state, &pod.request, &Policy::Simple).is_ok();
                let best =
                    board.best(&pod.request, |node| fits(node).then(|| peer.score(&nodes[node], pod).0))?;
                on_gpu(placed(best, &Policy::Simple)?, peer.score(&nodes[best], pod).1.as_ref())
            }
        }
    }
}

/// Moves a share of the placement to another GPU of the node.
fn on_gpu((node, placement): (usize, Placement), gpu: Option<&GpuIndex>) -> Option<(usize, Placement)> {
    let gpus = match gpu {
        Some(gpu) => vec![GpuSet::EMPTY.with(*gpu)],
        None => placement.gpus,
    };
    Some((node, Placement { gpus, ..placement }))
}
