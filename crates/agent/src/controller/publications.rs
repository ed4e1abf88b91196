//! Publishes the node's GPUs: annotations, labels, the number of GPUs, and the unhealthy ones.
//!
//! The agent writes only what differs from the node's object.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_wire::{
    foreign::{
        dialect::{Dialect, gpushare},
        gpu_topology,
        objects::{Amount, Node},
    },
    tessera::{
        agent_address::{self, AgentAddress},
        gpu_cordon,
        inventory::{self, Inventory},
    },
};

use super::{
    Action, AgentSettings, EventTime, ShellError, Warning, availability::Phase, inventory::NodeGpus,
};

/// Label in which Kubernetes and clouds store the instance type of a node.
const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";

/// gputopology's annotation for the instance type.
const NODE_TYPE: &str = "NODE_TYPE";

/// gpu-manager's label for the model of the GPUs.
const MODEL: &str = "gaia.tencent.com/gpu-model";

/// Delay before a failed write is tried again.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// Values to set on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePatch {
    /// Annotations of the node.
    pub annotations: BTreeMap<String, String>,
    /// Labels of the node.
    pub labels: BTreeMap<String, String>,
    /// Resources in capacity and allocatable of the node's status.
    pub status: BTreeMap<String, String>,
}

impl NodePatch {
    fn is_empty(&self) -> bool {
        self.annotations.is_empty() && self.labels.is_empty() && self.status.is_empty()
    }
}

/// What the agent has published about its node.
#[derive(Debug, Default)]
pub(super) struct NodePublication {
    /// The node's object, as the watch last showed it.
    node: Option<Node>,
    is_in_flight: bool,
    retry_at: Option<Duration>,
    /// Patch that was written since the watch last showed the node.
    written: Option<NodePatch>,
    /// Unhealthy GPUs that were last published.
    unhealthy: Option<Vec<u8>>,
    unhealthy_in_flight: Option<Vec<u8>>,
    unhealthy_retry_at: Option<Duration>,
}

impl NodePublication {
    /// Returns the labels of the node, if its object is known.
    pub(super) fn node_labels(&self) -> Option<&BTreeMap<String, String>> {
        self.node.as_ref().map(|node| &node.metadata.labels)
    }

    /// Returns the UUIDs of GPUs that an admin keeps free of new pods.
    pub(super) fn cordoned(&self) -> BTreeSet<&str> {
        self.node.as_ref().map(|node| gpu_cordon::cordoned(&node.metadata.annotations)).unwrap_or_default()
    }

    /// Returns the UID of the node's object, if it exists.
    pub(super) fn node_uid(&self) -> Option<String> {
        self.node.as_ref().map(|node| node.metadata.uid.clone())
    }

    /// Returns whether the node's object says that this agent does not serve pods.
    pub(super) fn is_unavailable(&self, settings: &AgentSettings) -> bool {
        let identity = settings.advertise.as_ref().map(AgentAddress::identity);
        let announced = |node: &Node| node.metadata.annotations.get(agent_address::UNAVAILABLE_KEY).cloned();
        identity.is_some() && self.node.as_ref().and_then(announced) == identity
    }

    /// Returns whether the last write to the node has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.retry_at.is_some()
    }

    /// Takes over the current object of the node.
    pub(super) fn set_node(&mut self, node: Node) {
        self.node = Some(node);
        self.written = None;
    }

    /// Notes that the node has no object, so nothing can be written.
    pub(super) fn node_is_missing(&mut self) {
        self.node = None;
        self.written = None;
    }

    /// Returns whether a failed write may be tried again.
    pub(super) fn is_retry_due(&self, now: EventTime) -> bool {
        let is_due = |retry_at: Option<Duration>| retry_at.is_some_and(|at| now.elapsed >= at);
        (is_due(self.retry_at) && !self.is_in_flight)
            || (is_due(self.unhealthy_retry_at) && self.unhealthy_in_flight.is_none())
    }

    pub(super) fn node_patched(
        &mut self,
        now: EventTime,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) {
        self.is_in_flight = false;
        self.retry_at = outcome.err().map(|reason| {
            let warning =
                Warning::new("cannot write annotations, labels or status of the node, will try again");
            actions.push(Action::Warn(warning.error(&reason)));
            self.written = None;
            now.elapsed + RETRY_DELAY
        });
    }

    pub(super) fn unhealthy_set(
        &mut self,
        now: EventTime,
        outcome: Result<(), ShellError>,
        actions: &mut Vec<Action>,
    ) {
        let published = self.unhealthy_in_flight.take();
        match outcome {
            Ok(()) => (self.unhealthy, self.unhealthy_retry_at) = (published, None),
            Err(reason) => {
                let warning = Warning::new("cannot publish which GPUs are unhealthy, will try again");
                actions.push(Action::Warn(warning.error(&reason)));
                self.unhealthy_retry_at = Some(now.elapsed + RETRY_DELAY);
            }
        }
    }

    /// Writes what the node's object lacks. `state` is the phase of the agent, and the resources it withholds.
    pub(super) fn reconcile(
        &mut self,
        now: EventTime,
        settings: &AgentSettings,
        state: (Phase, &[String]),
        gpus: Option<&NodeGpus>,
        actions: &mut Vec<Action>,
    ) {
        let (Some(node), Some(gpus)) = (&self.node, gpus) else { return };
        let may_write = |retry_at: Option<Duration>| retry_at.is_none_or(|at| now.elapsed >= at);
        if !self.is_in_flight && may_write(self.retry_at) {
            let patch = node_patch(node, settings, state, gpus);
            if !patch.is_empty() && self.written.as_ref() != Some(&patch) {
                self.is_in_flight = true;
                self.written = Some(patch.clone());
                actions.push(Action::PatchNode(patch));
            }
        }
        let unhealthy = gpus.unhealthy();
        if settings.dialects.contains(&Dialect::Gpushare)
            && self.unhealthy_in_flight.is_none()
            && may_write(self.unhealthy_retry_at)
            && self.unhealthy.as_ref() != Some(&unhealthy)
        {
            self.unhealthy_in_flight = Some(unhealthy.clone());
            actions.push(Action::SetUnhealthy(unhealthy));
        }
    }
}

/// Returns what the node's object lacks.
fn node_patch(
    node: &Node,
    settings: &AgentSettings,
    (phase, withheld): (Phase, &[String]),
    gpus: &NodeGpus,
) -> NodePatch {
    let mut patch = NodePatch::default();
    let mut annotate = |key: &str, value: String| {
        if node.metadata.annotations.get(key) != Some(&value) {
            patch.annotations.insert(key.to_owned(), value);
        }
    };
    let whole_gpus_only = settings.isolation.refuses_all_shares(&node.metadata.labels);
    let published = Inventory { whole_gpus_only, withheld: withheld.to_vec(), ..gpus.inventory() };
    annotate(inventory::KEY, inventory::print(&published));
    if let Some(topology) = gpu_topology::print(gpus.node.topology()) {
        annotate(gpu_topology::KEY, topology);
    }
    if let Some(address @ AgentAddress { url, certificate }) = &settings.advertise {
        let announced = node.metadata.annotations.get(agent_address::UNAVAILABLE_KEY);
        let is_announced = announced.is_some_and(|identity| !identity.is_empty());
        match phase {
            Phase::Stopping => annotate(agent_address::UNAVAILABLE_KEY, address.identity()),
            // The announcement of the agent before this one must not end with the new address.
            Phase::Starting if is_announced => annotate(agent_address::UNAVAILABLE_KEY, address.identity()),
            Phase::Serving if is_announced => annotate(agent_address::UNAVAILABLE_KEY, String::new()),
            Phase::Starting | Phase::Serving => {}
        }
        annotate(agent_address::URL_KEY, url.clone());
        // Without a certificate, the value of an earlier agent is cleared.
        let fingerprint = certificate.iter().flatten().next().map(ToString::to_string);
        if fingerprint.is_some() || node.metadata.annotations.contains_key(agent_address::CERTIFICATE_KEY) {
            annotate(agent_address::CERTIFICATE_KEY, fingerprint.unwrap_or_default());
        }
    }
    let label = node.metadata.labels.get(INSTANCE_TYPE);
    if let Some(instance_type) = settings.instance_type.as_ref().or(label) {
        annotate(NODE_TYPE, instance_type.clone());
    }
    let mut labels = settings.labels.clone();
    if let Some(gpu) = gpus.node.gpus().first() {
        labels.insert(MODEL.to_owned(), model_label(&gpu.model.0));
    }
    patch.labels =
        labels.into_iter().filter(|(key, value)| node.metadata.labels.get(key) != Some(value)).collect();
    if settings.dialects.contains(&Dialect::Gpushare) {
        let count = gpus.node.gpus().len().to_string();
        let has_count = |amounts: &BTreeMap<String, Amount>| {
            amounts.get(gpushare::COUNT).is_some_and(|amount| amount.0 == count)
        };
        if !has_count(&node.status.capacity) || !has_count(&node.status.allocatable) {
            patch.status.insert(gpushare::COUNT.to_owned(), count);
        }
    }
    patch
}

/// Returns a model's name as a label value: without the maker, and without characters that labels
/// forbid.
///
/// gpu-manager took the second of more than two words, and set no label for other names.
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
    fn labels_name_the_model_without_the_maker() {
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
