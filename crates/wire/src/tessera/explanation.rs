//! Explains for each node and GPU why a pod fits or not. The scheduler serves this JSON at
//! `/explain` and `/what-if`, and the kubectl plugin prints it.

use serde::{Deserialize, Serialize};
use tessera_core::admission::{NodeVerdict, Rejection};
use tessera_core::request::PodRequest;
use tessera_core::units::Count;

/// Whether and where a pod fits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodExplanation {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Node of the pod, or `None` if it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_on: Option<String>,
    /// Placement policy of the pod.
    pub policy: String,
    /// Summary in one sentence.
    pub summary: String,
    /// All nodes, sorted by name.
    pub nodes: Vec<NodeExplanation>,
}

/// Verdict of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeExplanation {
    /// Name of the node.
    pub node: String,
    /// True if the pod fits on the node now.
    pub fits: bool,
    /// Score of the node; a higher score is better.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// GPUs that the pod would get, by container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ContainerGpus>,
    /// Reason why the pod does not fit, with the text of the scheduler's event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// True if evictions could make the pod fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub may_resolve: Option<bool>,
    /// Container that found no GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Every GPU of the node with the reason it cannot serve that container; `null` if it can.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_reasons: Vec<GpuReason>,
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
    /// Creates the explanation and its summary from the verdicts of all nodes.
    #[must_use]
    pub fn new(
        namespace: &str,
        pod: &str,
        placed_on: Option<String>,
        policy: String,
        nodes: Vec<NodeExplanation>,
    ) -> Self {
        let fitting = nodes.iter().filter(|view| view.fits).count();
        let summary = match &placed_on {
            Some(node) => format!("placed on node {node}"),
            None => format!("fits on {fitting} of {}", Count(nodes.len(), "node")),
        };
        Self { namespace: namespace.to_owned(), pod: pod.to_owned(), placed_on, policy, summary, nodes }
    }
}

impl NodeExplanation {
    /// Converts a node's verdict on `request`.
    #[must_use]
    pub fn new(node: &str, request: &PodRequest, verdict: NodeVerdict) -> Self {
        match verdict {
            NodeVerdict::Fits(placement) => {
                let grants = placement.grants(request).into_iter();
                let gpus = grants.map(|grant| ContainerGpus {
                    gpus: grant.holds.iter().map(|(gpu, _)| gpu.0).collect(),
                    container: grant.container,
                });
                Self { fits: true, score: Some(placement.score), gpus: gpus.collect(), ..Self::empty(node) }
            }
            NodeVerdict::Rejected(rejection) => Self::rejected(node, &rejection),
        }
    }

    /// Converts the rejection of a node.
    #[must_use]
    pub fn rejected(node: &str, rejection: &Rejection) -> Self {
        let gpu_reasons = rejection.gpus.iter();
        let gpu_reasons = gpu_reasons
            .map(|(gpu, reason)| GpuReason { gpu: gpu.0, reason: reason.map(|reason| reason.to_string()) });
        Self {
            reason: Some(rejection.reason.to_string()),
            may_resolve: Some(rejection.reason.may_resolve()),
            container: rejection.container.clone(),
            gpu_reasons: gpu_reasons.collect(),
            ..Self::empty(node)
        }
    }

    fn empty(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            fits: false,
            score: None,
            gpus: Vec::new(),
            reason: None,
            may_resolve: None,
            container: None,
            gpu_reasons: Vec::new(),
        }
    }
}
