//! The ledger of all grants. Every dialect books here, so no GPU is granted twice.
//!
//! A node's state is always the sum of the grants on it and is never reduced by subtraction. Any
//! history that leads to the same pods therefore leads to the same ledger.
//!
//! A pod has at most one grant. While the outcome of a Binding is unknown, the pod may in addition
//! have one booking in doubt, so that its GPUs go to no other pod. A pod without a grant may have a
//! place in a reservation, which becomes its grant when it is booked.

mod names;
mod reservation;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use self::names::Names;
use self::reservation::Reservations;
pub use self::reservation::{Reservation, ReservationName};
use crate::grant::PodGrant;
use crate::node::{Kinds, Node, NodeState};
use crate::topology::Topology;
use crate::units::{GpuIndex, NodeName, PodUid};

/// All nodes, all grants, and what is left.
///
/// ```
/// use tessera_core::gpu::Gpu;
/// use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
/// use tessera_core::ledger::{Conflict, Ledger};
/// use tessera_core::node::Node;
/// use tessera_core::request::ContainerRole;
/// use tessera_core::topology::Topology;
/// use tessera_core::units::{GpuIndex, MiB, MilliCpu};
///
/// let gpu = Gpu::new(GpuIndex(0), "GPU-0".into(), "T4".into(), MiB(15_360));
/// let mut ledger = Ledger::default();
/// ledger.set_node(Node::new("n".into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768))?);
/// let grant = |pod: &str| PodGrant {
///     pod: pod.into(),
///     node: "n".into(),
///     cpu: MilliCpu(1000),
///     memory: MiB(1024),
///     containers: vec![ContainerGrant {
///         container: "main".to_owned(),
///         role: ContainerRole::Main,
///         holds: vec![(GpuIndex(0), Hold::Whole)],
///     }],
/// };
/// assert!(ledger.book(grant("first")).is_ok());
/// let conflict = ledger.book(grant("second")).unwrap_err();
/// assert_eq!(conflict, Conflict::Insufficient { node: "n".into(), gpu: GpuIndex(0) });
/// ledger.release(&"first".into());
/// assert!(ledger.book(grant("second")).is_ok());
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// The names of the nodes by position, and their positions by name.
    names: Names,
    /// The nodes side by side, so that a scan reads memory in order; `None` where a node was
    /// removed.
    nodes: Vec<Option<NodeState>>,
    /// The revision of the last change of each node.
    changed: Vec<Revision>,
    /// The revision of the last change of any node.
    now: Revision,
    /// The positions of removed nodes.
    vacant: Vec<NodePosition>,
    pods: HashMap<PodUid, Arc<PodGrant>>,
    /// The bookings in doubt, by pod. There are few of them at any time.
    in_doubt: BTreeMap<PodUid, Arc<PodGrant>>,
    reservations: Reservations,
    /// The pods of each node; also of unknown nodes, because a pod may be seen before its node.
    pods_of: HashMap<NodeName, BTreeSet<PodUid>>,
    /// One copy of each topology, so that the values derived from its links are computed once.
    topologies: HashSet<Topology>,
    /// One copy of each list of GPU kinds, which most nodes have in common.
    kinds: Vec<Kinds>,
}

/// A grant that counts on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeGrant<'a> {
    /// The grant of a pod.
    Held(&'a PodGrant),
    /// A booking in doubt: the scheduler does not know whether the pod was bound to this node, and
    /// may have booked GPUs of another node for it.
    InDoubt(&'a PodGrant),
    /// A place in a reservation, kept for a pod that is not bound yet.
    Reserved(&'a PodGrant),
}

/// The position of a node in the ledger. It belongs to the node until the node is removed and is
/// reused afterwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodePosition(usize);

/// The number of a change of the ledger. A position with an unchanged revision holds the same node
/// in the same state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(u64);

/// The reason why a grant was not booked. The ledger is unchanged then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The ledger does not know the node.
    #[error("node {0} is unknown")]
    UnknownNode(NodeName),
    /// The node has no such GPU.
    #[error("node {node} has no GPU {gpu}")]
    UnknownGpu {
        /// The node that the grant names.
        node: NodeName,
        /// The index that the grant names.
        gpu: GpuIndex,
    },
    /// The GPU has too little left.
    #[error("GPU {gpu} of node {node} has not enough left")]
    Insufficient {
        /// The node that the grant names.
        node: NodeName,
        /// The index that the grant names.
        gpu: GpuIndex,
    },
    /// The pod already holds another grant.
    #[error("pod {pod} already holds another grant on node {node}; release it first")]
    AlreadyBooked {
        /// The pod that asks again.
        pod: PodUid,
        /// The node of the other grant.
        node: NodeName,
    },
    /// A reservation of this name exists.
    #[error("reservation {0} exists already; cancel it first")]
    ReservationExists(ReservationName),
}

/// Whether a call changed the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerChange {
    /// The ledger changed.
    Changed,
    /// The ledger had this content already.
    Unchanged,
}

// === impl NodeGrant ===

impl<'a> NodeGrant<'a> {
    /// Returns what counts on the node.
    #[must_use]
    pub fn grant(self) -> &'a PodGrant {
        match self {
            Self::Held(grant) | Self::InDoubt(grant) | Self::Reserved(grant) => grant,
        }
    }
}

// === impl NodePosition ===

impl NodePosition {
    /// Returns the position as an index, counted from zero without large gaps.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

// === impl Ledger ===

impl Ledger {
    /// Books a decision of the scheduler. It fails where a GPU lacks room or the pod holds another
    /// grant. A place that is reserved for the pod does not count against it and is given up.
    pub fn book(&mut self, grant: PodGrant) -> Result<LedgerChange, Conflict> {
        if let Some(booked) = self.pods.get(&grant.pod) {
            return if **booked == grant {
                Ok(LedgerChange::Unchanged)
            } else {
                Err(Conflict::AlreadyBooked { pod: grant.pod, node: booked.node.clone() })
            };
        }
        let state = self.node(&grant.node).ok_or_else(|| Conflict::UnknownNode(grant.node.clone()))?;
        match self.without_place(&grant.node, &grant.pod) {
            Some(without) => check_room(&without, &grant)?,
            None => check_room(state, &grant)?,
        }
        self.enter(grant);
        Ok(LedgerChange::Changed)
    }

    /// Enters what a pod holds in fact, and replaces what the ledger had for the pod.
    ///
    /// This never fails, because the pod is there. [`Ledger::overbooked`] returns the GPUs that
    /// carry too much.
    pub fn observe(&mut self, grant: PodGrant) -> LedgerChange {
        if self.pods.get(&grant.pod).is_some_and(|booked| **booked == grant) {
            return LedgerChange::Unchanged;
        }
        self.release(&grant.pod);
        self.enter(grant);
        LedgerChange::Changed
    }

    /// Releases a pod's grant. An unknown pod changes nothing.
    pub fn release(&mut self, pod: &PodUid) -> LedgerChange {
        let Some(grant) = self.take(pod) else {
            return LedgerChange::Unchanged;
        };
        self.recount_known(&grant.node);
        LedgerChange::Changed
    }

    /// Turns a pod's grant into a booking in doubt: the grant counts on its node as before, and the
    /// pod may get another grant. An earlier booking in doubt of the pod is released.
    pub fn put_in_doubt(&mut self, pod: &PodUid) -> LedgerChange {
        let Some(grant) = self.take(pod) else {
            return LedgerChange::Unchanged;
        };
        if let Some(earlier) = self.in_doubt.insert(pod.clone(), grant) {
            self.recount_known(&earlier.node);
        }
        LedgerChange::Changed
    }

    /// Releases a pod's booking in doubt. The pod's grant stays.
    pub fn release_in_doubt(&mut self, pod: &PodUid) -> LedgerChange {
        let Some(grant) = self.in_doubt.remove(pod) else {
            return LedgerChange::Unchanged;
        };
        self.recount_known(&grant.node);
        LedgerChange::Changed
    }

    /// Adds a node or replaces its description. The grants on it stay.
    pub fn set_node(&mut self, node: Node) -> LedgerChange {
        if self.node(&node.name).is_some_and(|known| *known.node() == node) {
            return LedgerChange::Unchanged;
        }
        let topology = match self.topologies.get(node.topology()) {
            Some(known) => known.clone(),
            None => node.topology().clone(),
        };
        // The model is built here, so that no decision has to wait for it.
        let _ = topology.bandwidth_model();
        let kinds = self.kinds.iter().find(|known| **known == *node.shared_kinds()).cloned();
        let kinds = kinds.unwrap_or_else(|| Arc::clone(node.shared_kinds()));
        self.share(&topology, &kinds);
        self.recount(Arc::new(node.sharing(topology, kinds)));
        LedgerChange::Changed
    }

    /// Removes a node. Its pods stay until they are released, because the node may come back.
    pub fn remove_node(&mut self, name: &NodeName) -> LedgerChange {
        let Some(position) = self.position(&name.0) else { return LedgerChange::Unchanged };
        self.names.clear(position.0);
        self.put(position, None);
        self.vacant.push(position);
        LedgerChange::Changed
    }

    /// Returns a node and what is left of it.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<&NodeState> {
        self.at(self.position(&name.0)?)
    }

    /// Returns the position of a node.
    #[must_use]
    pub fn position(&self, name: &str) -> Option<NodePosition> {
        self.names.position(name).map(NodePosition)
    }

    /// Returns the node at a position.
    #[must_use]
    pub fn at(&self, position: NodePosition) -> Option<&NodeState> {
        self.nodes.get(position.0)?.as_ref()
    }

    /// Returns the revision of the last change of the node at a position.
    #[must_use]
    pub fn changed(&self, position: NodePosition) -> Revision {
        self.changed.get(position.0).copied().unwrap_or_default()
    }

    /// Returns the revision of the last change of any node.
    #[must_use]
    pub fn last_change(&self) -> Revision {
        self.now
    }

    /// Returns the number of positions; all indexes are below it.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the positions in this range that hold a node.
    pub fn positions_in(&self, indices: std::ops::Range<usize>) -> impl Iterator<Item = NodePosition> {
        let is_taken = |index: &usize| self.nodes.get(*index).is_some_and(Option::is_some);
        indices.filter(is_taken).map(NodePosition)
    }

    /// Marks a node as changed because of data that the caller keeps for it.
    pub fn mark_changed(&mut self, name: &NodeName) {
        if let Some(position) = self.position(&name.0) {
            self.touch(position);
        }
    }

    /// Returns all nodes, in no particular order.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().flatten()
    }

    /// Returns what a pod holds.
    #[must_use]
    pub fn grant(&self, pod: &PodUid) -> Option<&PodGrant> {
        self.pods.get(pod).map(AsRef::as_ref)
    }

    /// Returns all pods that have a grant, in no particular order.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.pods.keys()
    }

    /// Returns the booking in doubt of a pod.
    #[must_use]
    pub fn in_doubt(&self, pod: &PodUid) -> Option<&PodGrant> {
        self.in_doubt.get(pod).map(AsRef::as_ref)
    }

    /// Returns the grants that pods hold on one node, by pod UID.
    pub fn grants_on(&self, node: &NodeName) -> impl Iterator<Item = &PodGrant> {
        self.pods_of.get(node).into_iter().flatten().filter_map(|pod| self.grant(pod))
    }

    /// Returns everything that counts on one node: the grants that pods hold, then the bookings in
    /// doubt, then the reserved places, each by pod UID.
    pub fn counted_on(&self, node: &NodeName) -> impl Iterator<Item = NodeGrant<'_>> {
        let in_doubt = self.in_doubt.values().filter(move |grant| grant.node == *node);
        let held = self.grants_on(node).map(NodeGrant::Held);
        let reserved = self.reservations.on(node).map(NodeGrant::Reserved);
        held.chain(in_doubt.map(|grant| NodeGrant::InDoubt(grant))).chain(reserved)
    }

    /// Returns the GPUs that carry more than they have, because pods bypassed the scheduler or a
    /// GPU was replaced.
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
        self.release_place(&grant.pod);
        self.count(&grant);
        self.pods_of.entry(grant.node.clone()).or_default().insert(grant.pod.clone());
        self.pods.insert(grant.pod.clone(), Arc::new(grant));
    }

    /// Adds a grant or a place to the state of its node.
    fn count(&mut self, grant: &PodGrant) {
        if let Some(position) = self.position(&grant.node.0) {
            if let Some(Some(state)) = self.nodes.get_mut(position.0) {
                state.add(grant);
            }
            self.touch(position);
        }
    }

    /// Keeps these values for further nodes, and drops those that no node uses any more.
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

    /// Removes a pod's grant without counting its node again.
    fn take(&mut self, pod: &PodUid) -> Option<Arc<PodGrant>> {
        let grant = self.pods.remove(pod)?;
        if let Some(neighbours) = self.pods_of.get_mut(&grant.node) {
            neighbours.remove(pod);
            if neighbours.is_empty() {
                self.pods_of.remove(&grant.node);
            }
        }
        Some(grant)
    }

    fn recount_known(&mut self, node: &NodeName) {
        if let Some(node) = self.node(node).map(NodeState::shared_node) {
            self.recount(node);
        }
    }

    /// Computes the state of a node from the grants on it.
    fn recount(&mut self, node: Arc<Node>) {
        let mut state = NodeState::empty(Arc::clone(&node));
        self.counted_on(&node.name).for_each(|counted| state.add(counted.grant()));
        let position = self.position(&node.name.0).unwrap_or_else(|| self.settle(&node.name));
        self.put(position, Some(state));
    }

    /// Assigns a position to a new node.
    fn settle(&mut self, name: &NodeName) -> NodePosition {
        let position = self.vacant.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.changed.push(Revision::default());
            NodePosition(self.nodes.len() - 1)
        });
        self.names.set(position.0, &name.0);
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

/// Checks that every GPU of a grant has room for it.
fn check_room(state: &NodeState, grant: &PodGrant) -> Result<(), Conflict> {
    for (gpu, usage) in grant.footprint() {
        let node = || grant.node.clone();
        let found = state.node().gpu(gpu).ok_or_else(|| Conflict::UnknownGpu { node: node(), gpu })?;
        if state.used(gpu).plus(usage).exceeds(found.memory) {
            return Err(Conflict::Insufficient { node: node(), gpu });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::node_of_memories;

    #[test]
    fn drops_shared_values_that_no_node_uses() {
        let mut ledger = Ledger::default();
        for memory in 1..100 {
            let count = usize::try_from(memory % 7 + 1).unwrap();
            ledger.set_node(node_of_memories(&vec![memory; count]));
        }
        assert!(ledger.kinds.len() <= 2 && ledger.topologies.len() <= 2, "{ledger:?}");
    }
}
