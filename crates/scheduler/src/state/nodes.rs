//! Nodes as the watch tells them.

use std::sync::Arc;

use tessera_core::gpu_set::GpuSet;
use tessera_core::ledger::Position;
use tessera_core::node::{self, NodeState};
use tessera_core::units::NodeName;
use tessera_wire::objects::Node;

use super::{NodeRecord, State, Unhealthy, Watched};

/// What gpushare's lists say of a node's cards.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    /// Those that are broken.
    broken: GpuSet,
    /// What the node says of itself, where it is known and can be read.
    told: Option<Arc<node::Node>>,
}

impl State {
    pub(super) fn handle_node(&mut self, change: Watched<Node>) {
        match change {
            Watched::Listing => {
                self.unlisted_nodes = self.nodes().into_iter().map(|(name, _)| name.clone()).collect()
            }
            Watched::Set(node) => self.set_node(&node),
            Watched::Gone(node) => self.remove_node(&NodeName(node.metadata.name)),
            Watched::Listed => {
                for name in std::mem::take(&mut self.unlisted_nodes) {
                    self.remove_node(&name);
                }
            }
        }
    }

    fn set_node(&mut self, object: &Node) {
        let name = NodeName(object.metadata.name.clone());
        self.unlisted_nodes.remove(&name);
        let record = self.overlaid(NodeRecord::read(object, &self.settings));
        self.put_node(name, record);
    }

    fn put_node(&mut self, name: NodeName, record: NodeRecord) {
        // Most events of a node are its heartbeat.
        if self.record(&name) == Some(&record) {
            return;
        }
        self.forget_record(&name);
        match &record.spec {
            Ok(spec) => {
                self.ledger.set_node(node::Node::clone(&spec.node));
                self.readable.resize(self.ledger.positions(), None);
            }
            Err(_) => {
                self.ledger.remove_node(&name);
            }
        }
        match self.ledger.position(&name.0).and_then(|position| self.readable.get_mut(position.index())) {
            Some(place) => *place = Some(record.sharing(&self.ledger)),
            None => {
                self.unreadable.insert(name.clone(), record);
            }
        }
        self.reread_pods(&name);
    }

    fn remove_node(&mut self, name: &NodeName) {
        self.forget_record(name);
        if let Some(overlay) = self.unhealthy.get_mut(name) {
            overlay.told = None;
        }
        self.ledger.remove_node(name);
        self.unlisted_nodes.remove(name);
        // They may be deleted later, or their node may come back.
        self.reread_pods(name);
    }

    /// The record as the node tells it, with the cards that somebody else calls broken.
    fn overlaid(&mut self, mut record: NodeRecord) -> NodeRecord {
        if let Ok(spec) = &mut record.spec
            && let Some(overlay) = self.unhealthy.get_mut(&spec.node.name)
        {
            let told = overlay.told.insert(Arc::clone(&spec.node));
            spec.node = Arc::new(told.with_unhealthy(overlay.broken));
        }
        record
    }

    pub(super) fn handle_unhealthy(&mut self, change: Watched<Unhealthy>) {
        match change {
            Watched::Listing => self.unlisted_unhealthy = self.unhealthy.keys().cloned().collect(),
            Watched::Set(Unhealthy { node, cards }) => {
                self.unlisted_unhealthy.remove(&node);
                self.set_unhealthy(node, cards);
            }
            Watched::Gone(Unhealthy { node, .. }) => self.set_unhealthy(node, GpuSet::EMPTY),
            Watched::Listed => {
                for node in std::mem::take(&mut self.unlisted_unhealthy) {
                    self.set_unhealthy(node, GpuSet::EMPTY);
                }
            }
        }
    }

    fn set_unhealthy(&mut self, name: NodeName, broken: GpuSet) {
        let earlier = self.unhealthy.remove(&name).and_then(|overlay| overlay.told);
        if !broken.is_empty() {
            self.unhealthy.insert(name.clone(), Overlay { broken, told: None });
        }
        let Some(mut record) = self.record(&name).cloned() else { return };
        if let (Ok(spec), Some(told)) = (&mut record.spec, earlier) {
            spec.node = told;
        }
        let record = self.overlaid(record);
        self.put_node(name, record);
    }

    /// As long as the ledger still has the node where it was.
    fn forget_record(&mut self, name: &NodeName) {
        self.unreadable.remove(name);
        let position = self.ledger.position(&name.0);
        if let Some(place) = position.and_then(|position| self.readable.get_mut(position.index())) {
            *place = None;
        }
    }

    /// A node, and what is left of it where it can be read.
    pub(crate) fn node(&self, name: &NodeName) -> Option<(&NodeRecord, Option<&NodeState>)> {
        let (record, position) = self.known(&name.0)?;
        Some((record, position.and_then(|position| self.ledger.at(position))))
    }

    /// A node, and where it stands in the book if it can be read.
    pub(crate) fn known(&self, name: &str) -> Option<(&NodeRecord, Option<Position>)> {
        match self.ledger.position(name) {
            Some(position) => Some((self.readable.get(position.index())?.as_ref()?, Some(position))),
            None => Some((self.unreadable.get(name)?, None)),
        }
    }

    pub(super) fn record(&self, name: &NodeName) -> Option<&NodeRecord> {
        self.known(&name.0).map(|(record, _)| record)
    }

    /// All nodes by name.
    pub(crate) fn nodes(&self) -> Vec<(&NodeName, &NodeRecord)> {
        let readable = self.ledger.nodes().filter_map(|state| {
            let name = &state.node().name;
            Some((name, self.record(name)?))
        });
        let mut all: Vec<_> = readable.chain(&self.unreadable).collect();
        all.sort_by_key(|(name, _)| *name);
        all
    }
}
