//! For every node and card, what stands in the way of a pod: from the same code that filters.

use serde::Serialize;
use tessera_core::gpu_set::GpuSet;
use tessera_core::placement::{explain, place};
use tessera_core::units::NodeName;
use tessera_wire::objects::Pod;

use super::ask::{Ask, BadAsk};
use super::judge::weigh;
use super::reason::Reason;
use crate::state::{GpuPod, State};

/// What would become of a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The node.
    pub node: String,
    /// Whether the pod fits there now.
    pub fits: bool,
    /// How well, comparable between nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// The cards it would get, by container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<ContainerView>,
    /// Why it does not fit, as in the scheduler's event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether evictions could help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub may_resolve: Option<bool>,
    /// The container that found no cards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Every card, and what keeps it from serving that container; `null` where it would.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<CardView>,
}

/// The cards of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ContainerView {
    /// The container.
    pub container: String,
    /// The indexes of its cards.
    pub gpus: Vec<u8>,
}

/// What one card says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CardView {
    /// Its index.
    pub gpu: u8,
    /// What keeps it from serving.
    pub reason: Option<String>,
}

impl State {
    /// Explains a pod the watch has shown; `None` for pods nobody knows, or that ask for no card.
    #[must_use]
    pub fn explain(&self, namespace: &str, name: &str) -> Option<Result<Explanation, BadAsk>> {
        let is_it = |pod: &GpuPod| pod.namespace == namespace && pod.name == name;
        let (_, pod) = self.gpu_pods().find(|(_, pod)| is_it(pod))?;
        Some(Ask::new(self, &pod.namespace, &pod.spec, &pod.annotations).map(|ask| {
            let node = pod.node.as_ref().map(ToString::to_string);
            self.views(&ask, namespace, name, node)
        }))
    }

    /// Explains a pod that need not exist.
    pub fn what_if(&self, pod: &Pod) -> Result<Explanation, BadAsk> {
        let ask = Ask::of(self, pod)?;
        Ok(self.views(&ask, &pod.metadata.namespace, &pod.metadata.name, None))
    }

    fn views(&self, ask: &Ask<'_>, namespace: &str, pod: &str, placed_on: Option<String>) -> Explanation {
        let nodes: Vec<NodeView> = self.nodes().into_iter().map(|(name, _)| self.view(name, ask)).collect();
        let fitting = nodes.iter().filter(|view| view.fits).count();
        let summary = match &placed_on {
            Some(node) => format!("placed on node {node}"),
            None => format!("fits on {fitting} of {} nodes", nodes.len()),
        };
        Explanation {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            placed_on,
            policy: ask.policy.to_string(),
            summary,
            nodes,
        }
    }

    /// What one node says.
    pub(crate) fn view(&self, name: &NodeName, ask: &Ask<'_>) -> NodeView {
        let empty = NodeView {
            node: name.to_string(),
            fits: false,
            score: None,
            gpus: Vec::new(),
            reason: None,
            may_resolve: None,
            container: None,
            cards: Vec::new(),
        };
        let refused = |reason: &Reason| NodeView {
            reason: Some(reason.to_string()),
            may_resolve: Some(reason.may_resolve()),
            ..empty.clone()
        };
        let judged = match self.judge(name, ask) {
            Ok(judged) => judged,
            Err(reason) => return refused(&reason),
        };
        let request = ask.request(judged.spec.unit);
        let weighed = weigh(judged.state, request);
        match place(judged.state, &weighed, &ask.policy, GpuSet::EMPTY) {
            Ok(placement) => {
                let grants = placement.grants(request).into_iter();
                let gpus = grants.map(|grant| ContainerView {
                    gpus: grant.cards.iter().map(|(gpu, _)| gpu.0).collect(),
                    container: grant.container,
                });
                NodeView { fits: true, score: Some(placement.score), gpus: gpus.collect(), ..empty }
            }
            Err(refusal) => {
                let detail = explain(judged.state, &weighed, &ask.policy);
                let cards = detail.iter().flat_map(|detail| &detail.cards);
                let cards = cards.map(|(gpu, reason)| CardView {
                    gpu: gpu.0,
                    reason: reason.map(|reason| reason.to_string()),
                });
                NodeView {
                    cards: cards.collect(),
                    container: detail.as_ref().and_then(|detail| detail.container.clone()),
                    ..refused(&Reason::Cards(refusal))
                }
            }
        }
    }
}
