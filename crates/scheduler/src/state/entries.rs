//! Nodes and pods as the state stores them.

use std::collections::BTreeMap;

use tessera_core::ledger::Ledger;
use tessera_core::quota::{GpuAmount, QuotaLabels};
use tessera_core::units::NodeName;
use tessera_wire::foreign::objects::{Metadata, Node, Pod, PodSpec};
use tessera_wire::tessera::parsed_node::{self, ParsedNode};
use tessera_wire::tessera::{grant, node_use, preferences};

use super::SchedulerSettings;

/// A node, readable or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeEntry {
    /// The parsed node object, or why it cannot be parsed.
    pub(crate) spec: Result<ParsedNode, String>,
    /// The labels by which quotas limit the node.
    pub(crate) quota_labels: QuotaLabels,
    /// The address at which the node's agent serves HTTP.
    pub(crate) agent: Option<String>,
}

/// A pod that has not ended.
#[derive(Clone, Debug)]
pub(super) enum PodEntry {
    /// A pod without GPUs on a node. Only its CPU and memory count, in the ledger.
    Plain,
    /// A pod that requests GPUs, waiting or on a node.
    Gpu(Box<GpuPod>),
}

/// A pod that requests GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuPod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The node that the pod is bound to.
    pub(crate) node: Option<NodeName>,
    pub(crate) spec: PodSpec,
    /// The labels that PodDisruptionBudgets select.
    pub(crate) labels: BTreeMap<String, String>,
    /// The annotations about placement and grants; others are dropped.
    pub(crate) annotations: BTreeMap<String, String>,
}

/// The amount charged to a namespace for one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Charge {
    pub(super) namespace: String,
    pub(super) model: String,
    pub(super) taken: GpuAmount,
}

// === impl NodeRecord ===

impl NodeEntry {
    pub(super) fn read(object: &Node, settings: &SchedulerSettings) -> Self {
        let label = |key: &String| object.metadata.labels.get(key).cloned();
        let quota = settings.quota.as_ref();
        Self {
            spec: parsed_node::parse(object, settings.memory_unit).map_err(|error| error.to_string()),
            quota_labels: QuotaLabels {
                model: quota.and_then(|quota| label(&quota.model_label)),
                pool: quota.and_then(|quota| label(&quota.pool_label)),
            },
            agent: node_use::address(object),
        }
    }

    /// Replaces the GPUs and links by the ledger's copy, so that they are stored once.
    pub(super) fn sharing(mut self, ledger: &Ledger) -> Self {
        if let Ok(spec) = &mut self.spec
            && let Some(known) = ledger.node(&spec.node.name)
        {
            spec.node = known.shared_node();
        }
        self
    }
}

// === impl GpuPod ===

impl GpuPod {
    pub(super) fn new(pod: Pod) -> Self {
        let Pod { mut metadata, mut spec, .. } = pod;
        let node = (!spec.node_name.is_empty()).then(|| NodeName(std::mem::take(&mut spec.node_name)));
        spec.scheduler_name = String::new();
        let mut annotations = std::mem::take(&mut metadata.annotations);
        annotations.retain(|key, _| is_relevant(key));
        let Metadata { namespace, name, labels, .. } = metadata;
        Self { namespace, name, node, spec, labels, annotations }
    }

    pub(crate) fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or(0)
    }
}

/// Returns whether the scheduler reads an annotation.
fn is_relevant(key: &str) -> bool {
    key == preferences::POLICY || key == preferences::TRAFFIC || grant::is_key(key)
}
