//! A policy with its state: it chooses the node and the GPUs of each pod.

use std::sync::Arc;

use tessera_core::forecast::{CapacitySummary, FreeCapacity, Learner};
use tessera_core::gpu_set::GpuSet;
use tessera_core::node::NodeState;
use tessera_core::placement::scoreboard::Scoreboard;
use tessera_core::placement::{Placement, Policy, filter, place, score};
use tessera_core::request::PodRequest;
use tessera_core::units::GpuIndex;
use tessera_core::workload::Workload;

use super::FillPolicy;
use super::arrivals::Draws;
use super::peers::{ClusterFragmentation, PublishedPolicy, fitting_gpus};
use super::pod::SimPod;
use super::sample::{MAX_TRIES, NodeSampler};
use super::sim_node::SimNode;

/// A policy with its state.
pub(super) struct NodeChooser {
    rule: Rule,
    /// The learner of a forecasting policy.
    learner: Option<Learner>,
    /// True if the learner sees every arrival, false if it knows the workload from the start.
    learns: bool,
    board: Scoreboard,
    /// The samples of nodes that the policy chooses from, unless it chooses from all.
    sampler: Option<NodeSampler>,
}

enum Rule {
    /// A random node that fits and a random GPU of it.
    Random(Draws),
    Published(PublishedPolicy),
    Core(Policy),
}

impl NodeChooser {
    /// Creates a policy for an empty cluster. A forecasting policy learns the workload unless it is
    /// `known`; `measure` returns the target of policy `fgd`.
    pub(super) fn new(
        policy: FillPolicy,
        known: Option<Workload>,
        nodes: &[SimNode],
        measure: impl FnOnce() -> ClusterFragmentation,
        seed: u64,
    ) -> Self {
        let rule = match policy {
            FillPolicy::Random => Rule::Random(Draws::new(!seed)),
            FillPolicy::DotProduct => Rule::Published(PublishedPolicy::DotProduct),
            FillPolicy::Clustering => Rule::Published(PublishedPolicy::Clustering),
            FillPolicy::Packing => Rule::Published(PublishedPolicy::Packing),
            FillPolicy::BestFit => Rule::Published(PublishedPolicy::BestFit),
            FillPolicy::Fgd => Rule::Published(PublishedPolicy::Fgd(measure())),
            FillPolicy::Core(policy) => Rule::Core(policy),
        };
        let learns = known.is_none();
        let learner = matches!(rule, Rule::Core(Policy::Tessera(_)))
            .then(|| known.map_or_else(|| started([].into_iter(), nodes), Learner::new));
        Self { rule, learner, learns, board: Scoreboard::new(nodes.len()), sampler: None }
    }

    /// Lets the policy choose from samples of so many nodes.
    pub(super) fn sampling(mut self, size: Option<usize>, seed: u64) -> Self {
        self.sampler = size.map(|size| NodeSampler::new(size, seed));
        self
    }

    /// Lets the policy see an arrival.
    pub(super) fn see(&mut self, pod: &SimPod) {
        if let Some(learner) = self.learner.as_mut().filter(|_| self.learns) {
            learner.see(&pod.request);
        }
    }

    /// Makes a new forecast if one is due, with this capacity free.
    pub(super) fn refresh(&mut self, nodes: &[SimNode], capacity: CapacitySummary) {
        if self.learner.as_ref().is_some_and(|learner| learner.is_due(capacity)) {
            self.forecast(nodes);
        }
    }

    /// Restarts the scheduler: its learner is lost, and a new one sees the pods that the cluster
    /// has at this moment.
    pub(super) fn restart<'a>(&mut self, pods: impl Iterator<Item = &'a SimPod>, nodes: &[SimNode]) {
        if self.learner.is_some() && self.learns {
            self.learner = Some(started(pods.map(|pod| &pod.request), nodes));
            self.forecast(nodes);
        }
    }

    /// Notes that pods have been placed on a node or removed from it.
    pub(super) fn touch(&mut self, node: usize) {
        self.board.touch(node);
    }

    /// Chooses the node and the GPUs of a pod.
    pub(super) fn choose(&mut self, pod: &SimPod, nodes: &[SimNode]) -> Option<(usize, Placement)> {
        let Some(mut sampler) = self.sampler.take() else { return self.choose_among(None, pod, nodes) };
        let chosen = (0..MAX_TRIES).find_map(|_| {
            let offered = sampler.next(pod, nodes);
            self.choose_among(Some((&mut sampler, &offered)), pod, nodes)
        });
        self.sampler = Some(sampler);
        chosen
    }

    /// Chooses among the nodes that a sampler offers, or among all.
    fn choose_among(
        &mut self,
        mut sample: Option<(&mut NodeSampler, &[usize])>,
        pod: &SimPod,
        nodes: &[SimNode],
    ) -> Option<(usize, Placement)> {
        let placed = |node: usize, policy: &Policy| {
            let placement = place(&nodes[node].state, &pod.request, policy, GpuSet::EMPTY).ok()?;
            Some((node, placement))
        };
        let fits = |node: usize| fits(&nodes[node].state, pod);
        let board = &mut self.board;
        let offered = sample.as_ref().map(|(_, offered)| *offered);
        let mut best = |score: &dyn Fn(usize) -> Option<f64>| match &mut sample {
            None => board.best(&pod.request, score),
            Some((sampler, offered)) => sampler.best(offered, score),
        };
        match &mut self.rule {
            Rule::Core(policy) => {
                let score = |node: usize| score(&nodes[node].state, &pod.request, policy).ok();
                placed(best(&score)?, policy)
            }
            Rule::Random(draws) => {
                let among = offered.map_or_else(|| (0..nodes.len()).collect(), <[usize]>::to_vec);
                let fitting: Vec<usize> = among.into_iter().filter(|node| fits(*node)).collect();
                let node = *fitting.get(draws.below(fitting.len()))?;
                let gpus: Vec<GpuIndex> = fitting_gpus(&nodes[node].state, pod).collect();
                on_gpu(placed(node, &Policy::Simple)?, gpus.get(draws.below(gpus.len())))
            }
            Rule::Published(peer) => {
                let score = |node: usize| fits(node).then(|| peer.score(&nodes[node], pod).0);
                let best = best(&score)?;
                on_gpu(placed(best, &Policy::Simple)?, peer.score(&nodes[best], pod).1.as_ref())
            }
        }
    }

    fn forecast(&mut self, nodes: &[SimNode]) {
        let Some(learner) = &mut self.learner else { return };
        let remains: FreeCapacity = nodes.iter().map(|node| &node.state).collect();
        self.rule = Rule::Core(Policy::Tessera(Arc::new(learner.forecast(&remains))));
        self.board.clear();
    }
}

/// Returns the learner of a scheduler that has just started and listed these pods.
fn started<'a>(pods: impl Iterator<Item = &'a PodRequest>, nodes: &[SimNode]) -> Learner {
    let with_gpus = nodes.iter().map(|node| node.state.node()).filter(|node| !node.gpus().is_empty());
    let mut learner = Learner::new(Workload::guess(with_gpus));
    pods.for_each(|pod| learner.see(pod));
    learner
}

/// Returns whether a node can take a pod.
pub(super) fn fits(state: &NodeState, pod: &SimPod) -> bool {
    filter(state, &pod.request, &Policy::Simple).is_ok()
}

/// Moves a share of the placement to another GPU of the node.
fn on_gpu((node, placement): (usize, Placement), gpu: Option<&GpuIndex>) -> Option<(usize, Placement)> {
    let gpus = match gpu {
        Some(gpu) => vec![GpuSet::EMPTY.with(*gpu)],
        None => placement.gpus,
    };
    Some((node, Placement { gpus, ..placement }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::bench::BenchWorkload;

    #[test]
    fn a_restart_keeps_only_the_pods_of_the_cluster() {
        let scenario = BenchWorkload::named("alike-25").unwrap().scenario(1, 1).unwrap();
        let nodes: Vec<SimNode> = scenario.nodes().iter().map(SimNode::empty).collect();
        let pod = scenario.pod(0);
        let measure = || unreachable!("only policy fgd has a target");
        let mut chooser = NodeChooser::new("tessera".parse().unwrap(), None, &nodes, measure, 1);
        let learned = |chooser: &NodeChooser| chooser.learner.as_ref().unwrap().workload();
        let assumed = Workload::guess(nodes.iter().map(|node| node.state.node()));
        assert_eq!(learned(&chooser), assumed);
        (0..100).for_each(|_| chooser.see(pod));
        chooser.restart([pod, pod].into_iter(), &nodes);
        let mut two = Workload::default();
        (0..2).for_each(|_| two.see(&pod.request));
        assert_eq!(learned(&chooser), two.with(&assumed));
        chooser.restart([].into_iter(), &nodes);
        assert_eq!(learned(&chooser), assumed);
    }
}
