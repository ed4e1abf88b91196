//! Nodes as the watch tells them.

use std::sync::Arc;

use tessera_core::gpu_set::GpuSet;
use tessera_core::ledger::NodePosition;
use tessera_core::node::{self, NodeState};
use tessera_core::quota::QuotaLabels;
use tessera_core::taint::untolerated;
use tessera_core::units::NodeName;
use tessera_wire::foreign::objects::{Node, PodSpec};
use tessera_wire::tessera::parsed_node::ParsedNode;

use super::{NodeEntry, State, UnhealthyGpus, WatchEvent};

/// What gpushare's lists say of a node's GPUs.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    /// Those that are broken.
    broken: GpuSet,
    /// What the node says of itself, where it is known and can be read.
    told: Option<Arc<node::Node>>,
}

/// A node that can be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadableNode<'a> {
    pub(crate) spec: &'a ParsedNode,
    /// What is left of it.
    pub(crate) state: &'a NodeState,
    /// What it is to a quota.
    pub(crate) place: &'a QuotaLabels,
}

impl State {
    pub(super) fn handle_node(&mut self, change: WatchEvent<Node>) {
        match change {
            WatchEvent::Listing => {
                self.unlisted_nodes = self.nodes().into_iter().map(|(name, _)| name.clone()).collect()
            }
            WatchEvent::Set(node) => self.set_node(&node),
            WatchEvent::Gone(node) => self.remove_node(&NodeName(node.metadata.name)),
            WatchEvent::Listed => {
                for name in std::mem::take(&mut self.unlisted_nodes) {
                    self.remove_node(&name);
                }
            }
        }
    }

    fn set_node(&mut self, object: &Node) {
        let name = NodeName(object.metadata.name.clone());
        self.unlisted_nodes.remove(&name);
        if object.spec.soft_taints.is_empty() {
            self.soft_taints.remove(&name);
        } else {
            self.soft_taints.insert(name.clone(), object.spec.soft_taints.clone());
        }
        let record = self.overlaid(NodeEntry::read(object, &self.settings));
        self.put_node(name, record);
    }

    fn put_node(&mut self, name: NodeName, record: NodeEntry) {
        // Most events of a node are its heartbeat.
        if self.record(&name) == Some(&record) {
            return;
        }
        self.forget_record(&name);
        match &record.spec {
            Ok(spec) => {
                self.ledger.set_node(node::Node::clone(&spec.node));
                // Also where its GPUs are the same and only its unit or its vocabularies are not.
                self.ledger.mark_changed(&name);
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
        self.soft_taints.remove(name);
        self.unlisted_nodes.remove(name);
        // They may be deleted later, or their node may come back.
        self.reread_pods(name);
    }

    /// The record as the node tells it, with the GPUs that somebody else calls broken.
    fn overlaid(&mut self, mut record: NodeEntry) -> NodeEntry {
        if let Ok(spec) = &mut record.spec
            && let Some(overlay) = self.unhealthy.get_mut(&spec.node.name)
        {
            let told = overlay.told.insert(Arc::clone(&spec.node));
            spec.node = Arc::new(told.with_unhealthy(overlay.broken));
        }
        record
    }

    pub(super) fn handle_unhealthy(&mut self, change: WatchEvent<UnhealthyGpus>) {
        match change {
            WatchEvent::Listing => self.unlisted_unhealthy = self.unhealthy.keys().cloned().collect(),
            WatchEvent::Set(UnhealthyGpus { node, gpus }) => {
                self.unlisted_unhealthy.remove(&node);
                self.set_unhealthy(node, gpus);
            }
            WatchEvent::Gone(UnhealthyGpus { node, .. }) => self.set_unhealthy(node, GpuSet::EMPTY),
            WatchEvent::Listed => {
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
    pub(crate) fn node(&self, name: &NodeName) -> Option<(&NodeEntry, Option<&NodeState>)> {
        Some((self.record(name)?, self.ledger.node(name)))
    }

    /// The node that stands there in the book.
    pub(crate) fn readable_at(&self, position: NodePosition) -> Option<ReadableNode<'_>> {
        let NodeEntry { spec, place, .. } = self.readable.get(position.index())?.as_ref()?;
        Some(ReadableNode { spec: spec.as_ref().ok()?, state: self.ledger.at(position)?, place })
    }

    /// Why a node cannot be read, if it is one of those.
    pub(crate) fn unreadable(&self, name: &str) -> Option<&str> {
        self.unreadable.get(name)?.spec.as_ref().err().map(String::as_str)
    }

    /// How many taints of a node ask the pod to stay away.
    pub(crate) fn shunned_by(&self, pod: &PodSpec, node: &str) -> usize {
        self.soft_taints.get(node).map_or(0, |taints| untolerated(taints, &pod.soft_tolerations))
    }

    /// Whether any node has taints that only ask.
    pub(crate) fn has_soft_taints(&self) -> bool {
        !self.soft_taints.is_empty()
    }

    pub(super) fn record(&self, name: &NodeName) -> Option<&NodeEntry> {
        match self.ledger.position(&name.0) {
            Some(position) => self.readable.get(position.index())?.as_ref(),
            None => self.unreadable.get(name),
        }
    }

    /// All nodes by name.
    pub(crate) fn nodes(&self) -> Vec<(&NodeName, &NodeEntry)> {
        let readable = self.ledger.nodes().filter_map(|state| {
            let name = &state.node().name;
            Some((name, self.record(name)?))
        });
        let mut all: Vec<_> = readable.chain(&self.unreadable).collect();
        all.sort_by_key(|(name, _)| *name);
        all
    }
}
