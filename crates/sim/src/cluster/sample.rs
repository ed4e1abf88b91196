//! The nodes that kube-scheduler offers for a pod in a large cluster.

use tessera_core::node::NodeState;
use tessera_core::request::Request;

use super::arrivals::Draws;
use super::pod::SimPod;
use super::sim_node::SimNode;

/// Chooses samples of nodes as kube-scheduler does.
///
/// kube-scheduler looks through the nodes in a fixed order until it has found enough that fit by its own count. The
/// search for the next pod begins where this one ended.
#[derive(Debug)]
pub(super) struct NodeSampler {
    /// Largest number of nodes in a sample.
    size: usize,
    /// Position at which the next search begins.
    start: usize,
    draws: Draws,
}

/// How often kube-scheduler tries a pod if another node than the offered ones has a suitable GPU: once, and
/// again as often as the verb `filter` answers with an error.
pub(super) const MAX_TRIES: usize = 4;

impl NodeSampler {
    pub(super) fn new(size: usize, seed: u64) -> Self {
        Self { size, start: 0, draws: Draws::new(!seed) }
    }

    /// Returns the positions of the nodes that are offered for a pod.
    pub(super) fn next(&mut self, pod: &SimPod, nodes: &[SimNode]) -> Vec<usize> {
        let (behind, before) = (self.start..nodes.len(), 0..self.start.min(nodes.len()));
        let mut offered = Vec::with_capacity(self.size.min(nodes.len()));
        let mut checked = 0;
        for node in behind.chain(before) {
            if offered.len() == self.size {
                break;
            }
            checked += 1;
            if fits_in_sum(&nodes[node].state, pod) {
                offered.push(node);
            }
        }
        self.start = (self.start + checked).checked_rem(nodes.len()).unwrap_or(0);
        offered
    }

    /// Returns a random one of the offered nodes with the highest score: kube-scheduler breaks ties at random.
    pub(super) fn best(&mut self, offered: &[usize], score: &dyn Fn(usize) -> Option<f64>) -> Option<usize> {
        let mut best: (Option<f64>, Vec<usize>) = (None, Vec::new());
        for node in offered {
            let Some(score) = score(*node) else { continue };
            if best.0.is_none_or(|highest| score > highest) {
                best = (Some(score), Vec::new());
            }
            if best.0 == Some(score) {
                best.1.push(*node);
            }
        }
        let position = self.draws.below(best.1.len().max(1));
        best.1.get(position).copied()
    }
}

/// Returns whether a pod fits by the sums that kube-scheduler knows. Shares of several GPUs add up there.
fn fits_in_sum(state: &NodeState, pod: &SimPod) -> bool {
    let has_gpus = pod.request.containers.iter().all(|container| match container.request {
        None => true,
        Some(Request::Whole(count)) => state.idle().len() >= usize::from(count),
        Some(Request::Share(_)) => 100.0 * state.gpus_left() + 0.5 >= f64::from(pod.percent),
    });
    has_gpus && state.cpu_left() >= pod.request.cpu && state.memory_left() >= pod.request.memory
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tessera_core::gpu_set::GpuSet;
    use tessera_core::placement::{Policy, place};

    use super::*;
    use crate::cluster::bench::BenchWorkload;

    #[test]
    fn a_search_begins_where_the_last_one_ended_and_skips_full_nodes() {
        let scenario = BenchWorkload::named("alike-50").unwrap().scenario(5, 1).unwrap();
        let mut nodes: Vec<SimNode> = scenario.nodes().iter().map(SimNode::empty).collect();
        let pod = scenario.pod(0);
        for arrival in 0..16 {
            let placement = place(&nodes[1].state, &pod.request, &Policy::Binpack, GpuSet::EMPTY).unwrap();
            nodes[1].add(arrival, pod, &placement);
        }
        let mut sampler = NodeSampler::new(3, 1);
        assert_eq!(sampler.next(pod, &nodes), [0, 2, 3]);
        assert_eq!(sampler.next(pod, &nodes), [4, 0, 2]);
        assert_eq!(sampler.next(pod, &nodes), [3, 4, 0]);
        assert_eq!(NodeSampler::new(9, 1).next(pod, &nodes), [0, 2, 3, 4]);
        assert_eq!(NodeSampler::new(9, 1).next(pod, &[]), [] as [usize; 0]);
        let score = |node: usize| [None, Some(1.0), Some(2.0), Some(2.0), Some(1.0)][node];
        let chosen: BTreeSet<usize> =
            (0..20).filter_map(|_| sampler.best(&[0, 1, 2, 3, 4], &score)).collect();
        assert_eq!(chosen, BTreeSet::from([2, 3]));
        assert_eq!(sampler.best(&[0], &score), None);
    }
}
