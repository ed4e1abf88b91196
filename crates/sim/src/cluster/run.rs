//! One run: pods arrive one at a time, each is placed where the rule says or refused for good.

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

/// What came of one run.
#[derive(Clone, Debug, Default)]
pub struct FillResult {
    /// GPUs allocated at the end, in percent of all.
    pub allocated_percent: f64,
    /// Pods that fitted nowhere, by [`PodSize::WITH_GPUS`].
    pub refused: [u32; 5],
    /// Allocated against arrived, both in percent of all GPUs.
    pub curve: Vec<(f64, f64)>,
    /// Useless GPUs when so much had arrived: (arrived, of all GPUs, of the idle ones), in percent.
    pub fragmentation: Vec<(f64, f64, f64)>,
    /// How long each decision took, ascending.
    pub decision_nanos: Vec<u64>,
    /// How long the run took.
    pub seconds: f64,
    /// For each pod with several GPUs: its bandwidth as a share of the best on that machine.
    pub bandwidth_shares: Vec<f64>,
    /// What was granted, in order.
    pub grants: Vec<PodGrant>,
}

/// A node of the simulated cluster.
#[derive(Clone, Debug)]
pub(super) struct SimNode {
    pub(super) state: NodeState,
    /// Pods it holds, by size.
    sizes: [u32; 5],
}

/// When fragmentation is reported, in percent of all GPUs that have arrived.
pub const FRAGMENTATION_AT: [f64; 4] = [50.0, 80.0, 90.0, 130.0];

/// Steps of the curve, in percent of all GPUs that have arrived.
const CURVE_STEP: f64 = 0.5;

impl SimNode {
    pub(super) fn holds(&self, size: PodSize) -> bool {
        size_position(size).is_some_and(|position| self.sizes[position] > 0)
    }
}

fn size_position(size: PodSize) -> Option<usize> {
    PodSize::WITH_GPUS.iter().position(|known| *known == size)
}

/// Runs one rule on the arrivals of one seed.
#[must_use]
pub fn run(experiment: &Experiment, rule: FillPolicy, seed: u64) -> FillResult {
    let mut draws = Draws::new(seed);
    let gpu_count: usize = experiment.nodes.iter().map(|node| node.gpus().len()).sum();
    let pods = arrivals(&experiment.pods, gpu_count, experiment.fill, &mut draws);
    let mut order: Vec<&Arc<Node>> = experiment.nodes.iter().collect();
    draws.shuffle(&mut order);
    let empty = |node: &&Arc<Node>| SimNode { state: NodeState::empty(Arc::clone(node)), sizes: [0; 5] };
    let nodes: Vec<SimNode> = order.iter().map(empty).collect();
    let measure = ClusterFragmentation::new(&experiment.pods, nodes.iter().map(|node| &node.state));
    let start = Instant::now();
    let mut run = Run {
        chooser: NodeChooser::new(rule, experiment, &nodes, &measure, seed),
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

struct Run {
    chooser: NodeChooser,
    board: Scoreboard,
    nodes: Vec<SimNode>,
    measure: ClusterFragmentation,
    /// Of the whole cluster.
    gpu_count: u64,
    /// In percent of one GPU.
    arrived: u64,
    allocated: u64,
    outcome: FillResult,
}

impl Run {
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

    /// Notes the curve and the fragmentation where a step was passed.
    fn record(&mut self) {
        let (arrived, allocated) = (self.of_all(self.arrived), self.of_all(self.allocated));
        let curve = &mut self.outcome.curve;
        if curve.last().is_none_or(|(last, _)| arrived >= last + CURVE_STEP) {
            curve.push((arrived, allocated));
        }
        let next = FRAGMENTATION_AT.get(self.outcome.fragmentation.len());
        // The last mark is where the arrivals end, which may be a little before it.
        if next.is_some_and(|mark| arrived >= *mark) {
            self.note_fragmentation();
        }
    }

    fn note_fragmentation(&mut self) {
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
            self.note_fragmentation();
        }
        self.outcome.decision_nanos.sort_unstable();
        self.outcome
    }
}

/// Percent of one GPU as GPUs.
fn percent(amount: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a cluster has fewer than 2^52 GPUs")]
    let amount = amount as f64;
    amount / 100.0
}

/// A rule at work.
enum NodeChooser {
    /// A node that fits, and a GPU of it, by lot.
    Random(Draws),
    PublishedPolicy(PublishedPolicy),
    Core {
        policy: Policy,
        /// Where the policy looks ahead: from what, and whether it learns on the way.
        learner: Option<Learner>,
        learns: bool,
    },
}

impl NodeChooser {
    fn new(
        rule: FillPolicy,
        experiment: &Experiment,
        nodes: &[SimNode],
        measure: &ClusterFragmentation,
        seed: u64,
    ) -> Self {
        match rule {
            FillPolicy::Random => Self::Random(Draws::new(!seed)),
            FillPolicy::DotProduct => Self::PublishedPolicy(PublishedPolicy::DotProduct),
            FillPolicy::Clustering => Self::PublishedPolicy(PublishedPolicy::Clustering),
            FillPolicy::Packing => Self::PublishedPolicy(PublishedPolicy::Packing),
            FillPolicy::BestFit => Self::PublishedPolicy(PublishedPolicy::BestFit),
            FillPolicy::Fgd => Self::PublishedPolicy(PublishedPolicy::Fgd(measure.clone())),
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

    /// Takes note of an arrival. Whether scores have changed by it.
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
            Self::PublishedPolicy(peer) => {
                let fits = |node: usize| filter(&nodes[node].state, &pod.request, &Policy::Simple).is_ok();
                let best =
                    board.best(&pod.request, |node| fits(node).then(|| peer.score(&nodes[node], pod).0))?;
                on_gpu(placed(best, &Policy::Simple)?, peer.score(&nodes[best], pod).1.as_ref())
            }
        }
    }
}

/// The same placement with a share on another GPU of the node.
fn on_gpu((node, placement): (usize, Placement), gpu: Option<&GpuIndex>) -> Option<(usize, Placement)> {
    let gpus = match gpu {
        Some(gpu) => vec![GpuSet::EMPTY.with(*gpu)],
        None => placement.gpus,
    };
    Some((node, Placement { gpus, ..placement }))
}
