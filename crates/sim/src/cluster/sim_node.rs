//! A node of a simulated cluster and the pods on it.

use std::sync::Arc;

use tessera_core::grant::PodGrant;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::Placement;

use super::pod::{PodSize, SimPod};

/// A node of the simulated cluster.
#[derive(Clone, Debug)]
pub(super) struct SimNode {
    pub(super) state: NodeState,
    /// The pods on the node, in the order of their placement.
    pods: Vec<HeldPod>,
}

#[derive(Clone, Debug)]
struct HeldPod {
    /// Number of the arrival; unique in a run.
    arrival: usize,
    size: PodSize,
    grant: PodGrant,
}

impl SimNode {
    pub(super) fn empty(node: &Arc<Node>) -> Self {
        Self { state: NodeState::empty(Arc::clone(node)), pods: Vec::new() }
    }

    pub(super) fn holds(&self, size: PodSize) -> bool {
        self.pods.iter().any(|held| held.size == size)
    }

    /// Places the pod that arrived as number `arrival`, and returns its grant.
    pub(super) fn add(&mut self, arrival: usize, pod: &SimPod, placement: &Placement) -> &PodGrant {
        let grant = PodGrant {
            pod: format!("{}-{arrival}", pod.name).as_str().into(),
            node: self.state.node().name.clone(),
            cpu: pod.request.cpu,
            memory: pod.request.memory,
            containers: placement.grants(self.state.node(), &pod.request),
        };
        self.state.add(&grant);
        let position = self.pods.len();
        self.pods.push(HeldPod { arrival, size: pod.size, grant });
        &self.pods[position].grant
    }

    /// Removes the pod that arrived as number `arrival`, and sums up the others again.
    pub(super) fn remove(&mut self, arrival: usize) {
        self.pods.retain(|held| held.arrival != arrival);
        self.state = NodeState::empty(self.state.shared_node());
        self.pods.iter().for_each(|held| self.state.add(&held.grant));
    }

    /// Returns the arrival numbers of the pods on the node.
    pub(super) fn arrivals(&self) -> impl Iterator<Item = usize> {
        self.pods.iter().map(|held| held.arrival)
    }
}
