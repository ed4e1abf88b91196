//! Nodes and pods as the state stores them.

use std::collections::BTreeMap;

use tessera_core::cluster_view::PlacedPod;
use tessera_core::ledger::Ledger;
use tessera_core::quota::QuotaLabels;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::constraint::Affinity;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::{Condition, Metadata, Node, Pod, PodConditions, PodSpec, PodStatus};
use tessera_wire::foreign::time;
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::gang::{self, Membership};
use tessera_wire::tessera::parsed_node::{self, ParsedNode};
use tessera_wire::tessera::placed_pod::PodParts;
use tessera_wire::tessera::{eviction, grant, preferences};

use super::SchedulerSettings;

/// A node, readable or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeEntry {
    /// The parsed node object, or why it cannot be parsed.
    pub(crate) spec: Result<ParsedNode, UnreadableNode>,
    /// The address at which the node's agent serves its pages.
    pub(crate) agent: Option<AgentAddress>,
    /// Value of the node's condition `Ready`, or `None` without it.
    pub(crate) ready: Option<bool>,
    /// True if the node accepts no new pods.
    pub(crate) cordoned: bool,
}

/// The reason why a node object cannot be parsed. It is kept as a text, which can be compared at every event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UnreadableNode(String);

/// A pod that requests GPUs and has not ended.
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
    /// Time when the pod was created, in RFC 3339 form.
    pub(crate) created: Option<String>,
    /// The gang of the pod. A pod whose gang cannot be read is refused before it is placed.
    pub(crate) gang: Option<Membership>,
    /// Last report of a scheduler that could not place the pod. Kept while the pod waits.
    pub(crate) unscheduled: Option<Box<Condition>>,
    /// Time when the kubelet accepted the pod, or else when the pod was created, in seconds since 1970.
    pub(crate) started: Option<i64>,
    /// True if the deletion of the pod has begun.
    pub(crate) is_ending: bool,
    /// True if kube-scheduler preempts the pod.
    pub(crate) is_preempted: bool,
}

// === impl NodeEntry ===

impl NodeEntry {
    pub(super) fn read(object: &Node, settings: &SchedulerSettings) -> Self {
        Self {
            spec: parsed_node::parse(object, settings.memory_unit)
                .map_err(|bad| UnreadableNode(bad.to_string())),
            agent: AgentAddress::of(object),
            ready: object.is_ready(),
            cordoned: object.spec.unschedulable,
        }
    }

    /// Returns whether the node is readable and has GPUs.
    pub(super) fn has_gpus(&self) -> bool {
        self.spec.as_ref().is_ok_and(|spec| !spec.node.gpus().is_empty())
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

// === impl UnreadableNode ===

impl UnreadableNode {
    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

/// Returns the labels by which quotas limit a node.
pub(super) fn quota_labels(object: &Node, settings: &SchedulerSettings) -> QuotaLabels {
    let label = |key: &String| object.metadata.labels.get(key).cloned();
    let quota = settings.quota.as_ref();
    QuotaLabels {
        model: quota.and_then(|quota| label(&quota.model_label)),
        pool: quota.and_then(|quota| label(&quota.pool_label)),
    }
}

// === impl GpuPod ===

impl GpuPod {
    pub(super) fn new(pod: Pod) -> Self {
        let gang = gang::membership(&pod).ok().flatten();
        let Pod { mut metadata, mut spec, status } = pod;
        let node = (!spec.node_name.is_empty()).then(|| NodeName(std::mem::take(&mut spec.node_name)));
        let mut annotations = std::mem::take(&mut metadata.annotations);
        annotations.retain(|key, _| is_relevant(key));
        let Metadata { namespace, name, labels, creation_timestamp: created, deletion_timestamp, .. } =
            metadata;
        let PodConditions { unscheduled, is_preempted } = status.conditions;
        let unscheduled = unscheduled.filter(|_| node.is_none());
        let is_ending = deletion_timestamp.is_some();
        let started = status.start_time.as_ref().or(created.as_ref());
        let started = started.and_then(|text| time::unix_seconds(text));
        if node.is_some() {
            // Constraints only explain why a pod waits. Of a pod on a node they explain why others do.
            spec.node_selector = BTreeMap::new();
            spec.affinity = Affinity { excluded: spec.affinity.excluded, ..Affinity::default() };
            spec.tolerations = Vec::new();
        }
        Self {
            namespace,
            name,
            node,
            spec,
            labels,
            annotations,
            created,
            gang,
            unscheduled,
            started,
            is_ending,
            is_preempted,
        }
    }

    /// Returns the pod as an object, with the fields that explanations read.
    pub(crate) fn to_object(&self, uid: &PodUid) -> Pod {
        let metadata = Metadata {
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            uid: uid.to_string(),
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            ..Metadata::default()
        };
        let node_name = self.node.as_ref().map(ToString::to_string).unwrap_or_default();
        let spec = PodSpec { node_name, ..self.spec.clone() };
        let conditions = PodConditions { unscheduled: self.unscheduled.clone(), ..PodConditions::default() };
        let status = PodStatus { conditions, ..PodStatus::default() };
        Pod { metadata, spec, status }
    }

    /// Returns what the pod holds of `node`, which is parsed if it is known and readable.
    pub(super) fn placed(&self, uid: PodUid, node: NodeName, parsed: Option<&ParsedNode>) -> PlacedPod {
        let Self { namespace, spec, annotations, .. } = self;
        let unit = parsed.map_or_else(MemoryUnit::default, |parsed| parsed.unit);
        PodParts { uid, namespace, node, spec, annotations }.placed(parsed.map(|parsed| &*parsed.node), unit)
    }

    /// Returns whether kube-scheduler reports that nodes have too little of a resource by its own count.
    pub(crate) fn lacks_resources(&self) -> bool {
        self.is_refused_for("Insufficient ")
    }

    /// Returns whether the report on a waiting pod contains this text.
    pub(crate) fn is_refused_for(&self, text: &str) -> bool {
        self.unscheduled.as_ref().is_some_and(|report| report.message.contains(text))
    }

    /// Returns whether the report on a waiting pod names a shortage that evictions could end.
    pub(crate) fn lacks_gpus(&self) -> bool {
        self.lacks_resources() || self.is_refused_for("GPU")
    }

    pub(crate) fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or(0)
    }
}

/// Returns whether the scheduler reads an annotation.
fn is_relevant(key: &str) -> bool {
    preferences::is_key(key) || grant::is_key(key) || eviction::is_key(key)
}
