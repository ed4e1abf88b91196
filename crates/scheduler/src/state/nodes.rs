//! Nodes as the watch tells them.

use tessera_core::ledger::Position;
use tessera_core::node::{self, NodeState};
use tessera_core::units::NodeName;
use tessera_wire::objects::Node;

use super::{NodeRecord, State, Watched};

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
        let record = NodeRecord::read(object, &self.settings);
        let name = NodeName(object.metadata.name.clone());
        self.unlisted_nodes.remove(&name);
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
        self.ledger.remove_node(name);
        self.unlisted_nodes.remove(name);
        // They may be deleted later, or their node may come back.
        self.reread_pods(name);
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
