//! What stands in the way of a pod, node by node and GPU by GPU: the JSON the scheduler answers at `/explain` and `/what-if`, and the
//! command line shows.

use serde::{Deserialize, Serialize};
use tessera_core::admission::{NodeVerdict, Rejection};
use tessera_core::request::PodRequest;

/// What would become of a pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// Where it is, if it has been placed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_on: Option<String>,
    /// The policy it is placed by.
    pub policy: String,
    /// In short.
    pub summary: String,
    /// Every node, by name.
    pub nodes: Vec<NodeView>,
}

/// What one node says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The node.
    pub node: String,
    /// Whether the pod fits there now.
    pub fits: bool,
    /// How well, comparable between nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// The GPUs it would get, by container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ContainerView>,
    /// Why it does not fit, as in the scheduler's event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether evictions could help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub may_resolve: Option<bool>,
    /// The container that found no GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Every GPU of the node with the reason it cannot serve that container; `null` if it can.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_reasons: Vec<GpuView>,
}

/// The GPUs of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerView {
    /// The container.
    pub container: String,
    /// The indexes of its GPUs.
    pub gpus: Vec<u8>,
}

/// What one GPU says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuView {
    /// Its index.
    pub gpu: u8,
    /// What keeps it from serving.
    pub reason: Option<String>,
}

impl Explanation {
    /// The nodes' answers, summed up.
    #[must_use]
    pub fn new(
        namespace: &str,
        pod: &str,
        placed_on: Option<String>,
        policy: String,
        nodes: Vec<NodeView>,
    ) -> Self {
        let fitting = nodes.iter().filter(|view| view.fits).count();
        let summary = match &placed_on {
            Some(node) => format!("placed on node {node}"),
            None => format!("fits on {fitting} of {} nodes", nodes.len()),
        };
        Self { namespace: namespace.to_owned(), pod: pod.to_owned(), placed_on, policy, summary, nodes }
    }
}

impl NodeView {
    /// What a node says to a pod that asks for `request`.
    #[must_use]
    pub fn new(node: &str, request: &PodRequest, verdict: NodeVerdict) -> Self {
        match verdict {
            NodeVerdict::Fits(placement) => {
                let grants = placement.grants(request).into_iter();
                let gpus = grants.map(|grant| ContainerView {
                    gpus: grant.holds.iter().map(|(gpu, _)| gpu.0).collect(),
                    container: grant.container,
                });
                Self { fits: true, score: Some(placement.score), gpus: gpus.collect(), ..Self::empty(node) }
            }
            NodeVerdict::Rejected(obstacle) => Self::refused(node, &obstacle),
        }
    }

    /// What a node says where something stands in the way.
    #[must_use]
    pub fn refused(node: &str, obstacle: &Rejection) -> Self {
        let gpu_reasons = obstacle.gpus.iter();
        let gpu_reasons = gpu_reasons
            .map(|(gpu, reason)| GpuView { gpu: gpu.0, reason: reason.map(|reason| reason.to_string()) });
        Self {
            reason: Some(obstacle.reason.to_string()),
            may_resolve: Some(obstacle.reason.may_resolve()),
            container: obstacle.container.clone(),
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
