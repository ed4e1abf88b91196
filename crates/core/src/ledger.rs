//! The book of all grants. Every dialect books here, so no GPU is promised twice.
//!
//! A node's state is always the sum of the grants of the pods on it, so any history that leads to the same
//! pods leads to the same book; nothing is ever subtracted.

mod names;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use self::names::Names;
use crate::grant::PodGrant;
use crate::node::{Kinds, Node, NodeState};
use crate::topology::Topology;
use crate::units::{GpuIndex, NodeName, PodUid};

/// All nodes, all grants, and what is left.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// Where each node stands in `names`, `nodes` and `changed`.
    positions: HashMap<NodeName, NodePosition>,
    names: Names,
    /// Side by side, for those who look at all of them; `None` where one was removed.
    nodes: Vec<Option<NodeState>>,
    /// When each last changed.
    changed: Vec<Revision>,
    /// The last change of any.
    now: Revision,
    /// Where nodes were removed.
    vacant: Vec<NodePosition>,
    pods: HashMap<PodUid, Arc<PodGrant>>,
    /// Also for nodes not known yet: a pod may be seen before its node is.
    pods_of: HashMap<NodeName, BTreeSet<PodUid>>,
    /// One of each kind of machine, so that what is derived from its links is derived once.
    topologies: HashSet<Topology>,
    /// One of each list of kinds of GPUs: nodes mostly have the same.
    kinds: Vec<Kinds>,
}

/// Where a node stands in the book: its own for as long as it is known, another's after that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodePosition(usize);

/// Counts the changes of a book: the same position at the same moment is the same node in the same state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(u64);

/// Why a grant was not booked. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The node is not in the book.
    #[error("node {0} is unknown")]
    UnknownNode(NodeName),
    /// The node has no such GPU.
    #[error("node {node} has no GPU {gpu}")]
    UnknownGpu {
        /// Which node.
        node: NodeName,
        /// Which GPU.
        gpu: GpuIndex,
    },
    /// Others hold too much of the GPU.
    #[error("GPU {gpu} of node {node} has not enough left")]
    Insufficient {
        /// Which node.
        node: NodeName,
        /// Which GPU.
        gpu: GpuIndex,
    },
    /// The pod already holds something else.
    #[error("pod {pod} already holds another grant on node {node}; release it first")]
    AlreadyBooked {
        /// Which pod.
        pod: PodUid,
        /// Where.
        node: NodeName,
    },
}

/// Whether a call changed the book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerChange {
    /// It did.
    Changed,
    /// The book said so already.
    Unchanged,
}

// === impl NodePosition ===

impl NodePosition {
    /// Counted from zero, without large gaps: for lists by node.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

// === impl Ledger ===

impl Ledger {
    /// Enters a decision of ours: refused unless every GPU has the room, and unless the pod holds nothing else.
    pub fn book(&mut self, grant: PodGrant) -> Result<LedgerChange, Conflict> {
        if let Some(booked) = self.pods.get(&grant.pod) {
            return if **booked == grant {
                Ok(LedgerChange::Unchanged)
            } else {
                Err(Conflict::AlreadyBooked { pod: grant.pod, node: booked.node.clone() })
            };
        }
        let state = self.node(&grant.node).ok_or_else(|| Conflict::UnknownNode(grant.node.clone()))?;
        for (gpu, usage) in grant.footprint() {
            let node = || grant.node.clone();
            let found = state.node().gpu(gpu).ok_or_else(|| Conflict::UnknownGpu { node: node(), gpu })?;
            if state.used(gpu).plus(usage).exceeds(found.memory) {
                return Err(Conflict::Insufficient { node: node(), gpu });
            }
        }
        self.enter(grant);
        Ok(LedgerChange::Changed)
    }

    /// Enters a fact: what a pod holds, whoever granted it. It replaces what the book said of that pod and is
    /// never refused, since the pod is there; [`Ledger::overbooked`] tells the GPUs that carry too much.
    pub fn observe(&mut self, grant: PodGrant) -> LedgerChange {
        if self.pods.get(&grant.pod).is_some_and(|booked| **booked == grant) {
            return LedgerChange::Unchanged;
        }
        self.release(&grant.pod);
        self.enter(grant);
        LedgerChange::Changed
    }

    /// Ends a pod's grant. A pod the book does not know changes nothing.
    pub fn release(&mut self, pod: &PodUid) -> LedgerChange {
        let Some(grant) = self.pods.remove(pod) else {
            return LedgerChange::Unchanged;
        };
        if let Some(neighbours) = self.pods_of.get_mut(&grant.node) {
            neighbours.remove(pod);
            if neighbours.is_empty() {
                self.pods_of.remove(&grant.node);
            }
        }
        if let Some(node) = self.node(&grant.node).map(NodeState::shared_node) {
            self.recount(node);
        }
        LedgerChange::Changed
    }

    /// Enters a node, or what has become of it; the grants on it stay.
    pub fn set_node(&mut self, node: Node) -> LedgerChange {
        if self.node(&node.name).is_some_and(|known| *known.node() == node) {
            return LedgerChange::Unchanged;
        }
        let topology = match self.topologies.get(node.topology()) {
            Some(known) => known.clone(),
            None => node.topology().clone(),
        };
        // Now, so that no decision has to wait for it.
        let _ = topology.bandwidth_model();
        let kinds = self.kinds.iter().find(|known| **known == *node.shared_kinds()).cloned();
        let kinds = kinds.unwrap_or_else(|| Arc::clone(node.shared_kinds()));
        self.share(&topology, &kinds);
        self.recount(Arc::new(node.sharing(topology, kinds)));
        LedgerChange::Changed
    }

    /// Forgets a node. Its pods stay in the book until they are released: the node may come back.
    pub fn remove_node(&mut self, name: &NodeName) -> LedgerChange {
        let Some(position) = self.positions.remove(name) else { return LedgerChange::Unchanged };
        self.names.set(position.0, "");
        self.put(position, None);
        self.vacant.push(position);
        LedgerChange::Changed
    }

    /// One node and what is left of it.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<&NodeState> {
        self.at(self.position(&name.0)?)
    }

    /// Where a node stands.
    #[must_use]
    pub fn position(&self, name: &str) -> Option<NodePosition> {
        self.positions.get(name).copied()
    }

    /// Whether the node of this name stands there: cheaper than [`Ledger::position`] for those who have a guess.
    #[must_use]
    pub fn is_at(&self, position: NodePosition, name: &str) -> bool {
        self.names.is_at(position.0, name)
    }

    /// The node that stands there.
    #[must_use]
    pub fn at(&self, position: NodePosition) -> Option<&NodeState> {
        self.nodes.get(position.0)?.as_ref()
    }

    /// When the node that stands there last changed.
    #[must_use]
    pub fn changed(&self, position: NodePosition) -> Revision {
        self.changed.get(position.0).copied().unwrap_or_default()
    }

    /// When any node last changed.
    #[must_use]
    pub fn last_change(&self) -> Revision {
        self.now
    }

    /// How many positions there are: every one is below.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.nodes.len()
    }

    /// The positions where nodes stand, among these.
    pub fn positions_in(&self, indices: std::ops::Range<usize>) -> impl Iterator<Item = NodePosition> {
        let is_taken = |index: &usize| self.nodes.get(*index).is_some_and(Option::is_some);
        indices.filter(is_taken).map(NodePosition)
    }

    /// Counts a change of something that belongs to the node and stands elsewhere.
    pub fn mark_changed(&mut self, name: &NodeName) {
        if let Some(position) = self.position(&name.0) {
            self.touch(position);
        }
    }

    /// All nodes, in no particular order.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().flatten()
    }

    /// What a pod holds.
    #[must_use]
    pub fn grant(&self, pod: &PodUid) -> Option<&PodGrant> {
        self.pods.get(pod).map(AsRef::as_ref)
    }

    /// The grants on one node, by pod UID.
    pub fn grants_on(&self, node: &NodeName) -> impl Iterator<Item = &PodGrant> {
        self.pods_of.get(node).into_iter().flatten().filter_map(|pod| self.grant(pod))
    }

    /// GPUs that carry more than they have, because pods bypassed us or a GPU shrank.
    #[must_use]
    pub fn overbooked(&self) -> BTreeMap<NodeName, Vec<GpuIndex>> {
        let mut found = BTreeMap::new();
        for state in self.nodes() {
            let over = state.node().gpus().iter().filter(|gpu| state.used(gpu.index).exceeds(gpu.memory));
            let gpus: Vec<GpuIndex> = over.map(|gpu| gpu.index).collect();
            if !gpus.is_empty() {
                found.insert(state.node().name.clone(), gpus);
            }
        }
        found
    }

    fn enter(&mut self, grant: PodGrant) {
        if let Some(position) = self.position(&grant.node.0) {
            if let Some(Some(state)) = self.nodes.get_mut(position.0) {
                state.add(&grant);
            }
            self.touch(position);
        }
        self.pods_of.entry(grant.node.clone()).or_default().insert(grant.pod.clone());
        self.pods.insert(grant.pod.clone(), Arc::new(grant));
    }

    /// Keeps these for nodes to come. What is new takes the place of what no node has any more: GPUs break and links fail.
    fn share(&mut self, topology: &Topology, kinds: &Kinds) {
        if !self.topologies.contains(topology) {
            self.topologies.retain(Topology::is_shared);
            self.topologies.insert(topology.clone());
        }
        if !self.kinds.contains(kinds) {
            self.kinds.retain(|known| Arc::strong_count(known) > 1);
            self.kinds.push(Arc::clone(kinds));
        }
    }

    /// Sums up the grants on a node anew.
    fn recount(&mut self, node: Arc<Node>) {
        let mut state = NodeState::empty(Arc::clone(&node));
        self.grants_on(&node.name).for_each(|grant| state.add(grant));
        let position = self.position(&node.name.0).unwrap_or_else(|| self.settle(node.name.clone()));
        self.put(position, Some(state));
    }

    /// Finds a place for a node that is new.
    fn settle(&mut self, name: NodeName) -> NodePosition {
        let position = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.changed.push(Revision::default());
            NodePosition(self.nodes.len() - 1)
        });
        self.names.set(position.0, &name.0);
        self.positions.insert(name, position);
        position
    }

    fn put(&mut self, position: NodePosition, state: Option<NodeState>) {
        if let Some(place) = self.nodes.get_mut(position.0) {
            *place = state;
        }
        self.touch(position);
    }

    fn touch(&mut self, position: NodePosition) {
        self.now = Revision(self.now.0 + 1);
        if let Some(changed) = self.changed.get_mut(position.0) {
            *changed = self.now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::node_of_memories;

    #[test]
    fn what_no_node_has_any_more_is_not_kept() {
        let mut ledger = Ledger::default();
        for memory in 1..100 {
            let count = usize::try_from(memory % 7 + 1).unwrap();
            ledger.set_node(node_of_memories(&vec![memory; count]));
        }
        assert!(ledger.kinds.len() <= 2 && ledger.topologies.len() <= 2, "{ledger:?}");
    }
}
