//! What the node tells of itself: annotations, labels, the number of GPUs, the broken ones. Written only when it changed.

use std::{collections::BTreeMap, time::Duration};

use tessera_core::gpu::Health;
use tessera_wire::{
    foreign::{
        dialect::{Dialect, gpushare},
        gpu_topology,
        objects::{Amount, Node},
    },
    tessera::{inventory, node_use},
};

use super::{Action, Agent, EventTime};

/// Where Kubernetes and clouds keep the type of a machine.
const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";

/// gputopology's annotation for it.
const NODE_TYPE: &str = "NODE_TYPE";

/// gpu-manager's label for the model of the GPUs.
const MODEL: &str = "gaia.tencent.com/gpu-model";

/// How soon a write that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// What to set on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePatch {
    /// In its metadata.
    pub annotations: BTreeMap<String, String>,
    /// In its metadata.
    pub labels: BTreeMap<String, String>,
    /// In capacity and allocatable of its status.
    pub status: BTreeMap<String, String>,
}

impl NodePatch {
    fn is_empty(&self) -> bool {
        self.annotations.is_empty() && self.labels.is_empty() && self.status.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct Published {
    /// The node's object as we know it.
    pub(super) node: Option<Node>,
    in_flight: bool,
    retry_at: Option<Duration>,
    /// What was written since we last saw the node: the watch has yet to show it.
    written: Option<NodePatch>,
    /// The broken GPUs we told last.
    unhealthy: Option<Vec<u8>>,
    unhealthy_in_flight: Option<Vec<u8>>,
    unhealthy_retry_at: Option<Duration>,
}

impl Published {
    /// The node's object as it is now.
    pub(super) fn seen(&mut self, node: Node) {
        self.node = Some(node);
        self.written = None;
    }

    /// There is no such node, so nothing to write to.
    pub(super) fn gone(&mut self) {
        self.node = None;
        self.written = None;
    }

    /// Whether a write that failed may be tried again.
    pub(super) fn has_waited(&self, now: EventTime) -> bool {
        let due = |retry_at: Option<Duration>| retry_at.is_some_and(|at| now.elapsed >= at);
        (due(self.retry_at) && !self.in_flight)
            || (due(self.unhealthy_retry_at) && self.unhealthy_in_flight.is_none())
    }

    pub(super) fn node_patched(
        &mut self,
        now: EventTime,
        outcome: Result<(), String>,
        actions: &mut Vec<Action>,
    ) {
        self.in_flight = false;
        self.retry_at = outcome.err().map(|reason| {
            actions.push(Action::Warn(format!("cannot write the node's annotations: {reason}")));
            self.written = None;
            now.elapsed + RETRY
        });
    }

    pub(super) fn unhealthy_set(
        &mut self,
        now: EventTime,
        outcome: Result<(), String>,
        actions: &mut Vec<Action>,
    ) {
        let told = self.unhealthy_in_flight.take();
        match outcome {
            Ok(()) => (self.unhealthy, self.unhealthy_retry_at) = (told, None),
            Err(reason) => {
                actions.push(Action::Warn(format!("cannot tell which GPUs are unhealthy: {reason}")));
                self.unhealthy_retry_at = Some(now.elapsed + RETRY);
            }
        }
    }
}

impl Agent {
    pub(super) fn reconcile_node(&mut self, now: EventTime, actions: &mut Vec<Action>) {
        let due = |retry_at: Option<Duration>| retry_at.is_none_or(|at| now.elapsed >= at);
        if !self.published.in_flight
            && due(self.published.retry_at)
            && let Some(patch) = self.node_patch().filter(|patch| !patch.is_empty())
            && self.published.written.as_ref() != Some(&patch)
        {
            self.published.in_flight = true;
            self.published.written = Some(patch.clone());
            actions.push(Action::PatchNode(patch));
        }
        let serves_gpushare = self.settings.dialects.contains(&Dialect::Gpushare);
        let unhealthy = self.unhealthy();
        if let Some(unhealthy) = unhealthy.filter(|_| serves_gpushare && self.published.node.is_some())
            && self.published.unhealthy_in_flight.is_none()
            && due(self.published.unhealthy_retry_at)
            && self.published.unhealthy.as_ref() != Some(&unhealthy)
        {
            self.published.unhealthy_in_flight = Some(unhealthy.clone());
            actions.push(Action::SetUnhealthy(unhealthy));
        }
    }

    fn unhealthy(&self) -> Option<Vec<u8>> {
        let gpus = self.cards.as_ref()?.node.gpus();
        Some(gpus.iter().filter(|gpu| gpu.health == Health::Unhealthy).map(|gpu| gpu.index.0).collect())
    }

    /// What the node's object lacks; `None` while we know neither it nor the GPUs.
    fn node_patch(&self) -> Option<NodePatch> {
        let node = self.published.node.as_ref()?;
        let cards = self.cards.as_ref()?;
        let mut patch = NodePatch::default();
        let mut annotate = |key: &str, value: String| {
            if node.metadata.annotations.get(key) != Some(&value) {
                patch.annotations.insert(key.to_owned(), value);
            }
        };
        annotate(inventory::KEY, inventory::print(&self.inventory()?));
        if let Some(topology) = gpu_topology::print(cards.node.topology()) {
            annotate(gpu_topology::KEY, topology);
        }
        if let Some(address) = &self.settings.advertise {
            annotate(node_use::ADDRESS_KEY, address.clone());
        }
        let label = node.metadata.labels.get(INSTANCE_TYPE);
        if let Some(instance_type) = self.settings.instance_type.as_ref().or(label) {
            annotate(NODE_TYPE, instance_type.clone());
        }
        let mut labels = self.settings.labels.clone();
        if let Some(gpu) = cards.node.gpus().first() {
            labels.insert(MODEL.to_owned(), model_label(&gpu.model.0));
        }
        patch.labels =
            labels.into_iter().filter(|(key, value)| node.metadata.labels.get(key) != Some(value)).collect();
        if self.settings.dialects.contains(&Dialect::Gpushare) {
            let count = cards.node.gpus().len().to_string();
            let says = |amounts: &BTreeMap<String, Amount>| {
                amounts.get(gpushare::COUNT).is_some_and(|amount| amount.0 == count)
            };
            if !says(&node.status.capacity) || !says(&node.status.allocatable) {
                patch.status.insert(gpushare::COUNT.to_owned(), count);
            }
        }
        Some(patch)
    }
}

/// A model's name as a label's value: without the maker, and without what a label may not contain. gpu-manager took the
/// second of more than two words and labelled other names not at all.
pub(super) fn model_label(model: &str) -> String {
    let makers = ["NVIDIA", "Tesla", "GeForce", "Quadro"];
    let words: Vec<&str> = model.split_whitespace().collect();
    let own: Vec<&str> = words.iter().copied().filter(|word| !makers.contains(word)).collect();
    let chosen = match own.as_slice() {
        [] => words.join("-"),
        ["RTX" | "GTX" | "TITAN" | "Titan", ..] => own.join("-"),
        [first, ..] => (*first).to_owned(),
    };
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let text: String = chosen.chars().map(allowed).take(63).collect();
    text.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::model_label;

    #[test]
    fn every_model_has_a_label() {
        for (model, label) in [
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("Tesla P40", "P40"),
            ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
            ("GeForce RTX 2080", "RTX-2080"),
            ("NVIDIA GeForce RTX 4090", "RTX-4090"),
            ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
            ("NVIDIA H200", "H200"),
            ("NVIDIA", "NVIDIA"),
            ("(?)", ""),
        ] {
            assert_eq!(model_label(model), label);
        }
    }
}
