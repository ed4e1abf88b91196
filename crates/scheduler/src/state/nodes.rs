//! Node events: updates the view of the cluster and the entries of nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_core::cluster_view::PlacedPod;
use tessera_core::constraint::NodeConstraints;
use tessera_core::gpu::Health;
use tessera_core::gpu_set::GpuSet;
use tessera_core::ledger::NodePosition;
use tessera_core::natural::natural;
use tessera_core::node::{self, NodeState};
use tessera_core::quota::QuotaLabels;
use tessera_core::taint::{Taint, TaintEffect, untolerated_soft};
use tessera_core::units::{GpuIndex, NodeName};
use tessera_wire::foreign::constraint;
use tessera_wire::foreign::dialect::DialectSet;
use tessera_wire::foreign::objects::{Node, PodSpec};
use tessera_wire::tessera::parsed_node::ParsedNode;

use super::entries::{UnreadableNode, quota_labels};
use super::{NodeEntry, State, UnhealthyGpus, WatchEvent};

/// The unhealthy GPUs of a node according to gpushare's ConfigMap.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    unhealthy: GpuSet,
    /// The node without the overlay, if it is known and readable.
    reported: Option<Arc<node::Node>>,
}

/// A node whose object could be parsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadableNode<'a> {
    pub(crate) spec: &'a ParsedNode,
    /// The node with the usage of its pods.
    pub(crate) state: &'a NodeState,
    /// The labels by which quotas limit the node.
    pub(crate) quota_labels: &'a QuotaLabels,
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
        let is_soft = |taint: &&Taint| taint.effect == TaintEffect::PreferNoSchedule;
        let soft_taints: Vec<Taint> = object.spec.taints.iter().filter(is_soft).cloned().collect();
        if soft_taints.is_empty() {
            self.soft_taints.remove(&name);
        } else {
            self.soft_taints.insert(name.clone(), soft_taints);
        }
        let entry = self.overlaid(NodeEntry::read(object, &self.settings));
        let offers_others =
            || object.status.allocatable.keys().any(|resource| constraint::is_other_gpu_resource(resource));
        let is_of_interest = entry.has_gpus() || offers_others();
        self.set_constraints(&name, is_of_interest.then(|| constraint::of_node(object)));
        self.put_node(name.clone(), entry, quota_labels(object, &self.settings));
        self.set_node_reservations(&name, &object.metadata.annotations);
    }

    fn put_node(&mut self, name: NodeName, entry: NodeEntry, labels: QuotaLabels) {
        // Quotas do not limit a node that cannot be parsed, because no pod fits there.
        let has_same_labels = entry.spec.is_err() || self.quota_labels(&name) == Some(&labels);
        // Most node events are heartbeats that change nothing here.
        if has_same_labels && self.entry(&name) == Some(&entry) {
            return;
        }
        self.remove_entry(&name);
        match &entry.spec {
            Ok(spec) => {
                self.record_uncordoned(&name, &spec.node);
                let pods = self.placed_on(&name, spec);
                self.view.set_node(node::Node::clone(&spec.node), labels, pods);
                // The memory unit or the dialects may have changed while the GPUs are the same.
                self.view.mark_changed(&name);
                self.readable.resize(self.ledger().positions(), None);
            }
            Err(_) => self.view.remove_node(&name),
        }
        let entry = entry.sharing(self.ledger());
        let position = self.ledger().position(&name.0);
        match position.and_then(|position| self.readable.get_mut(position.index())) {
            Some(place) => *place = Some(entry),
            None => {
                self.unreadable.insert(name.clone(), entry);
            }
        }
        self.settle_claims_on(&name);
    }

    /// Records that pods of all dialects can use GPUs again which were cordoned before.
    fn record_uncordoned(&mut self, name: &NodeName, node: &node::Node) {
        let Some(before) = self.ledger().node(name) else { return };
        let was_cordoned =
            |gpu: &GpuIndex| before.node().gpu(*gpu).is_some_and(|gpu| gpu.health == Health::Cordoned);
        let healthy = node.gpus().iter().filter(|gpu| gpu.health.is_healthy());
        let back: GpuSet = healthy.map(|gpu| gpu.index).filter(was_cordoned).collect();
        if !back.is_empty() {
            self.releases.record(self.event_time, name.clone(), back, DialectSet::default());
        }
    }

    /// Reads the GPU pods of a node again, because its GPUs or its memory unit have changed.
    fn placed_on(&self, name: &NodeName, spec: &ParsedNode) -> Vec<PlacedPod> {
        let pods =
            self.ledger().grants_on(name).filter_map(|grant| Some((&grant.pod, self.pod(&grant.pod)?)));
        let placed = pods.filter(|(_, pod)| pod.node.as_ref() == Some(name));
        placed.map(|(uid, pod)| pod.placed(uid.clone(), name.clone(), Some(spec))).collect()
    }

    /// Returns the number of nodes on which an agent has announced its address.
    pub(crate) fn agents(&self) -> usize {
        let entries = self.readable.iter().flatten().chain(self.unreadable.values());
        entries.filter(|entry| entry.agent.is_some()).count()
    }

    fn remove_node(&mut self, name: &NodeName) {
        self.remove_entry(name);
        if let Some(overlay) = self.unhealthy.get_mut(name) {
            overlay.reported = None;
        }
        self.view.remove_node(name);
        self.set_node_reservations(name, &BTreeMap::new());
        self.soft_taints.remove(name);
        self.set_constraints(name, None);
        self.unlisted_nodes.remove(name);
    }

    /// Marks the GPUs that the gpushare ConfigMap lists as unhealthy.
    fn overlaid(&mut self, mut entry: NodeEntry) -> NodeEntry {
        if let Ok(spec) = &mut entry.spec
            && let Some(overlay) = self.unhealthy.get_mut(&spec.node.name)
        {
            let reported = overlay.reported.insert(Arc::clone(&spec.node));
            spec.node = Arc::new(reported.with_unhealthy(overlay.unhealthy));
        }
        entry
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

    fn set_unhealthy(&mut self, name: NodeName, unhealthy: GpuSet) {
        let earlier = self.unhealthy.remove(&name).and_then(|overlay| overlay.reported);
        if !unhealthy.is_empty() {
            self.unhealthy.insert(name.clone(), Overlay { unhealthy, reported: None });
        }
        let Some(mut entry) = self.entry(&name).cloned() else { return };
        if let (Ok(spec), Some(reported)) = (&mut entry.spec, earlier) {
            spec.node = reported;
        }
        let entry = self.overlaid(entry);
        let labels = self.quota_labels(&name).cloned().unwrap_or_default();
        self.put_node(name, entry, labels);
    }

    /// Removes the entry. The ledger must still hold the node at its position.
    fn remove_entry(&mut self, name: &NodeName) {
        self.unreadable.remove(name);
        let position = self.ledger().position(&name.0);
        if let Some(place) = position.and_then(|position| self.readable.get_mut(position.index())) {
            *place = None;
        }
    }

    /// Returns the entry of a node, and its usage if the node is readable.
    pub(crate) fn node(&self, name: &NodeName) -> Option<(&NodeEntry, Option<&NodeState>)> {
        Some((self.entry(name)?, self.ledger().node(name)))
    }

    /// Returns the node at this position of the ledger.
    pub(crate) fn readable_at(&self, position: NodePosition) -> Option<ReadableNode<'_>> {
        let spec = self.readable.get(position.index())?.as_ref()?.spec.as_ref().ok()?;
        let quota_labels = self.view.quota_labels_at(position)?;
        Some(ReadableNode { spec, state: self.ledger().at(position)?, quota_labels })
    }

    /// Returns why the node's object cannot be parsed, or `None` if it can or the node is unknown.
    pub(crate) fn unreadable(&self, name: &str) -> Option<&str> {
        self.unreadable.get(name)?.spec.as_ref().err().map(UnreadableNode::text)
    }

    /// Returns the labels by which quotas limit the node, if it is readable.
    pub(crate) fn quota_labels(&self, name: &NodeName) -> Option<&QuotaLabels> {
        self.view.quota_labels(name)
    }

    /// Returns the number of the node's PreferNoSchedule taints that the pod does not tolerate.
    pub(crate) fn untolerated_taints(&self, pod: &PodSpec, node: &str) -> usize {
        self.soft_taints.get(node).map_or(0, |taints| untolerated_soft(taints, &pod.tolerations))
    }

    /// Replaces the properties of a node that constraints of pods refer to.
    fn set_constraints(&mut self, name: &NodeName, constraints: Option<NodeConstraints>) {
        let known = match constraints {
            Some(constraints) => {
                for resource in constraints.other_resources.keys() {
                    *self.offered_resources.entry(resource.clone()).or_default() += 1;
                }
                self.constraints.insert(name.clone(), constraints)
            }
            None => self.constraints.remove(name),
        };
        for resource in known.iter().flat_map(|known| known.other_resources.keys()) {
            if let Some(nodes) = self.offered_resources.get_mut(resource) {
                *nodes -= 1;
            }
        }
        self.offered_resources.retain(|_, nodes| *nodes > 0);
    }

    /// Returns whether a node offers this resource, which is in none of Tessera's dialects.
    pub(crate) fn offers_resource(&self, resource: &str) -> bool {
        self.offered_resources.contains_key(resource)
    }

    /// Returns the properties of a GPU node that constraints of pods refer to.
    pub(crate) fn constraints(&self, node: &NodeName) -> Option<&NodeConstraints> {
        self.constraints.get(node)
    }

    /// Returns whether any node has PreferNoSchedule taints.
    pub(crate) fn has_soft_taints(&self) -> bool {
        !self.soft_taints.is_empty()
    }

    pub(super) fn entry(&self, name: &NodeName) -> Option<&NodeEntry> {
        match self.ledger().position(&name.0) {
            Some(position) => self.readable.get(position.index())?.as_ref(),
            None => self.unreadable.get(name),
        }
    }

    /// Returns all nodes, sorted by name as people count.
    pub(crate) fn nodes(&self) -> Vec<(&NodeName, &NodeEntry)> {
        let readable = self.ledger().nodes().filter_map(|state| {
            let name = &state.node().name;
            Some((name, self.entry(name)?))
        });
        let mut all: Vec<_> = readable.chain(&self.unreadable).collect();
        all.sort_by(|(a, _), (b, _)| natural(&a.0, &b.0));
        all
    }
}
