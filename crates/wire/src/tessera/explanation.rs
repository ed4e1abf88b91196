//! Explains for each node and GPU why it can or cannot take a pod. The scheduler serves this JSON
//! at `/explain` and `/what-if`, and the dashboard and the kubectl plugin show it.
//!
//! A pod that waits is never said to fit. kube-scheduler's own report comes first; Tessera adds on
//! which nodes the GPUs would do, and which constraints of the pod it cannot check.

mod explainer;
mod request_text;

use serde::{Deserialize, Serialize};
use tessera_core::admission::{NodeVerdict, Rejection};
use tessera_core::constraint::UnmetConstraint;
use tessera_core::grant::PodGrant;
use tessera_core::request::PodRequest;

use crate::foreign::objects::Condition;

pub use self::explainer::{ClusterFacts, Explainer, NodeFacts, offered, unserved};

/// Where a pod is or would be, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodExplanation {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Requests of the pod, as in a manifest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub asks: Vec<String>,
    /// Node of the pod, or `None` if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_on: Option<String>,
    /// GPUs that the pod holds, if it is placed and they are known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<String>,
    /// Reason for the choice of these GPUs, if the pod's annotations contain it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement_reason: Option<String>,
    /// True if the pod exists and has no node.
    pub waits: bool,
    /// Last report of kube-scheduler on a pod that waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kube_scheduler: Option<KubeSchedulerReport>,
    /// The pod's `schedulerName` while the pod waits and no scheduler has reported on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreported: Option<String>,
    /// What the gang of a pod that waits lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gang: Option<String>,
    /// The reservation of GPUs for a pod that waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reservation: Option<String>,
    /// Constraints of the pod that only kube-scheduler checks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unchecked: Vec<String>,
    /// A rule of the scheduler that the source of this explanation does not know, so that it can refuse nodes which
    /// would do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown_rule: Option<String>,
    /// Requested GPU resources that no node of the cluster offers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<String>,
    /// Placement policy of the pod.
    pub policy: String,
    /// Summary in one sentence.
    pub summary: String,
    /// All nodes, sorted by name as people count.
    pub nodes: Vec<NodeExplanation>,
    /// Pods whose end would make room, by node, fewest pods first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub relief: Vec<Relief>,
    /// Smaller requests for which GPUs are free now, each with a node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub smaller: Vec<SmallerRequest>,
    /// Number of pods like a hypothetical one that fit on each node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub room: Vec<Room>,
}

/// Returns what is to be said of a waiting pod on which no scheduler has reported.
#[must_use]
pub fn unreported(scheduler_name: &str) -> String {
    format!("kube-scheduler has not reported on the pod yet; its schedulerName is {scheduler_name}")
}

/// Report of kube-scheduler on a pod that it did not place, from the pod's condition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KubeSchedulerReport {
    /// Reason in one word: `Unschedulable`, `SchedulingGated` or `SchedulerError`.
    pub reason: String,
    /// Message, such as `0/3 nodes are available: ...`.
    pub message: String,
    /// Time of the report, in RFC 3339 form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}

/// Pods of one node whose end would make room for the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Relief {
    /// Name of the node.
    pub node: String,
    /// Pods as NAMESPACE/NAME.
    pub pods: Vec<String>,
}

/// A smaller request for which a node has free GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SmallerRequest {
    /// The request, as in a manifest.
    pub request: String,
    /// Name of the node.
    pub node: String,
}

/// Number of pods that fit on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Room {
    /// Name of the node.
    pub node: String,
    /// Number of pods.
    pub pods: usize,
    /// True if more may fit, which was not counted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub or_more: bool,
}

/// Verdict of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeExplanation {
    /// Name of the node.
    pub node: String,
    /// True if a hypothetical pod fits on the node now. Never true for a pod that waits, and for a pod with constraints
    /// that only kube-scheduler checks.
    pub fits: bool,
    /// True if the node passes every check that Tessera can make, so that its GPUs would do.
    pub would_do: bool,
    /// Rank among the nodes that would do; 1 is the best node. Absent if several nodes would do and their order depends
    /// on a forecast that only the scheduler has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// GPUs that the pod would get, by container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ContainerGpus>,
    /// Reason why the node cannot take the pod, with the text of the scheduler's event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// True if evictions could make room for the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub may_resolve: Option<bool>,
    /// Container that found no GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Every GPU of the node with the reason it cannot serve that container; `null` if it can.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu_reasons: Vec<GpuReason>,
    /// The objects for which GPUs of a node that rejects the pod are reserved.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reserved_for: Vec<String>,
}

/// The GPUs of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerGpus {
    /// Name of the container.
    pub container: String,
    /// Indexes of the GPUs.
    pub gpus: Vec<u8>,
}

/// Rejection reason of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReason {
    /// Index of the GPU.
    pub gpu: u8,
    /// Reason why the GPU cannot serve the container, or `None` if it can.
    pub reason: Option<String>,
}

impl PodExplanation {
    /// Returns the explanation of a pod on a node whose GPUs are held by claims, each with its name and grant. Returns
    /// `None` without a claim.
    #[must_use]
    pub fn by_claims(namespace: &str, pod: &str, claims: &[(&str, &PodGrant)]) -> Option<Self> {
        let (_, first) = claims.first()?;
        let names: Vec<&str> = claims.iter().map(|(name, _)| *name).collect();
        let node = first.node.to_string();
        Some(Self {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            holds: claims.iter().flat_map(|(_, grant)| explainer::holds(Some(grant))).collect(),
            placement_reason: Some(format!("they are the devices of claim {}", names.join(", "))),
            summary: format!("placed on node {node}"),
            placed_on: Some(node),
            ..Self::default()
        })
    }

    /// Returns whether only kube-scheduler or the scheduler can tell if the pod fits on the nodes whose GPUs would do.
    #[must_use]
    pub fn is_undecided(&self) -> bool {
        self.waits || !self.unchecked.is_empty() || self.unknown_rule.is_some()
    }

    /// Returns whether the nodes that would do have ranks.
    #[must_use]
    pub fn is_ranked(&self) -> bool {
        self.nodes.iter().any(|view| view.rank.is_some())
    }

    /// Returns the nodes that would do, best first, or by name if they have no ranks.
    #[must_use]
    pub fn best(&self) -> Vec<&NodeExplanation> {
        let mut best: Vec<&NodeExplanation> = self.nodes.iter().filter(|view| view.would_do).collect();
        best.sort_by_key(|view| view.rank);
        best
    }
}

impl From<Condition> for KubeSchedulerReport {
    fn from(condition: Condition) -> Self {
        let Condition { reason, message, last_transition_time, .. } = condition;
        Self { reason, message, since: last_transition_time }
    }
}

impl NodeExplanation {
    /// Converts a node's verdict on `request`. Returns the score too, by which nodes are ranked.
    fn new(node: &str, request: &PodRequest, verdict: NodeVerdict) -> (Self, Option<f64>) {
        match verdict {
            NodeVerdict::Fits(placement) => {
                let asking = request.containers.iter().zip(&placement.gpus);
                let asking = asking.filter(|(container, _)| container.request.is_some());
                let gpus = asking.map(|(container, gpus)| ContainerGpus {
                    gpus: gpus.iter().map(|gpu| gpu.0).collect(),
                    container: container.name.clone(),
                });
                let view = Self { would_do: true, gpus: gpus.collect(), ..Self::of(node) };
                (view, Some(placement.score))
            }
            NodeVerdict::Rejected(rejection) => (Self::rejected(node, &rejection), None),
        }
    }

    /// Converts the rejection of a node.
    fn rejected(node: &str, rejection: &Rejection) -> Self {
        let gpu_reasons = rejection.gpus.iter();
        let gpu_reasons = gpu_reasons
            .map(|(gpu, reason)| GpuReason { gpu: gpu.0, reason: reason.map(|reason| reason.to_string()) });
        Self {
            reason: Some(rejection.reason.to_string()),
            may_resolve: Some(rejection.reason.may_resolve()),
            container: rejection.container.clone(),
            gpu_reasons: gpu_reasons.collect(),
            ..Self::of(node)
        }
    }

    /// Converts a constraint that the node does not meet.
    fn unmet(node: &str, constraint: &UnmetConstraint) -> Self {
        let may_resolve = Some(constraint.may_resolve());
        Self { reason: Some(constraint.to_string()), may_resolve, ..Self::of(node) }
    }

    fn of(node: &str) -> Self {
        Self { node: node.to_owned(), ..Self::default() }
    }
}
