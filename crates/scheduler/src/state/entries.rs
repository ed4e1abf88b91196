//! What is kept of nodes and pods.

use std::collections::BTreeMap;

use tessera_core::ledger::Ledger;
use tessera_core::quota::{GpuAmount, QuotaLabels};
use tessera_core::units::NodeName;
use tessera_wire::foreign::objects::{Metadata, Node, Pod, PodSpec};
use tessera_wire::tessera::parsed_node::{self, ParsedNode};
use tessera_wire::tessera::{grant, node_use, preferences};

use super::SchedulerSettings;

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeEntry {
    /// What it offers, or why that cannot be read.
    pub(crate) spec: Result<ParsedNode, String>,
    /// What it is to a quota.
    pub(crate) place: QuotaLabels,
    /// Where its agent answers.
    pub(crate) agent: Option<String>,
}

/// A pod.
#[derive(Clone, Debug)]
pub(super) enum PodEntry {
    /// On a node, without GPUs: only its CPU and memory count, in the ledger.
    Plain,
    /// With GPUs, waiting or on a node.
    Gpu(Box<GpuPod>),
}

/// A pod with GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuPod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Where it is bound.
    pub(crate) node: Option<NodeName>,
    pub(crate) spec: PodSpec,
    /// By which budgets protect it.
    pub(crate) labels: BTreeMap<String, String>,
    /// Only those about placement and grants.
    pub(crate) annotations: BTreeMap<String, String>,
}

/// What a namespace was charged for a pod.
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
            place: QuotaLabels {
                model: quota.and_then(|quota| label(&quota.model_label)),
                pool: quota.and_then(|quota| label(&quota.pool_label)),
            },
            agent: node_use::address(object),
        }
    }

    /// The same record, its GPUs and links where the ledger has them.
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
        annotations.retain(|key, _| matters(key));
        let Metadata { namespace, name, labels, .. } = metadata;
        Self { namespace, name, node, spec, labels, annotations }
    }

    pub(crate) fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or(0)
    }
}

/// Annotations worth their memory.
fn matters(key: &str) -> bool {
    key == preferences::POLICY || key == preferences::TRAFFIC || grant::is_key(key)
}
