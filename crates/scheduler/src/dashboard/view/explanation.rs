//! Groups an explanation by reason, for a page that cannot show thousands of nodes.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::explanation::PodExplanation;
use tessera_wire::tessera::parsed_pod::BadPodObject;

use crate::state::StateAccess;
use crate::verb::explain::{self, NodeExplanation};

/// The answers of all nodes for one pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplanationSummary {
    /// The explanation with the nodes left out.
    #[serde(flatten)]
    pub explanation: PodExplanation,
    /// Number of nodes that were checked.
    pub checked: usize,
    /// Number of nodes whose GPUs would do.
    pub would_do: usize,
    /// The best of these nodes, best first.
    pub best: Vec<NodeExplanation>,
    /// Rejection reasons of the other nodes, most common first.
    pub refusals: Vec<RejectionGroup>,
    /// Number of pods like a hypothetical one that fit on all nodes together.
    #[serde(rename = "roomTotal")]
    pub room: usize,
    /// True if even more may fit.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub room_or_more: bool,
    /// Error in the pod itself. No node takes the pod until the error is corrected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Nodes that reject the pod for the same reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RejectionGroup {
    /// The reason, with the same text as in the scheduler's event.
    pub reason: String,
    /// True if evictions could make room.
    pub may_resolve: bool,
    /// Number of nodes with this reason.
    pub nodes: usize,
    /// Some of these nodes, with the reasons of each GPU.
    pub examples: Vec<NodeExplanation>,
}

/// Nodes shown for each group: those that would do, and those with the same rejection reason.
const SHOWN: usize = 5;

/// Explains the named pod. Returns `None` if no GPU pod of this name is known.
pub fn of_pod(access: &impl StateAccess, namespace: &str, name: &str) -> Option<ExplanationSummary> {
    explain::explain(access, namespace, name).map(summary)
}

/// Explains where a hypothetical pod would fit.
pub fn what_if(access: &impl StateAccess, pod: &Pod) -> ExplanationSummary {
    summary(explain::what_if(access, pod))
}

fn summary(explained: Result<PodExplanation, BadPodObject>) -> ExplanationSummary {
    let mut explanation = match explained {
        Ok(explanation) => explanation,
        Err(bad) => {
            return ExplanationSummary { problem: Some(bad.to_string()), ..ExplanationSummary::default() };
        }
    };
    let best = explanation.best();
    let would_do = best.len();
    let best = best.into_iter().take(SHOWN).cloned().collect();
    let nodes = std::mem::take(&mut explanation.nodes);
    let mut refusals: BTreeMap<String, RejectionGroup> = BTreeMap::new();
    let checked = nodes.len();
    for view in nodes {
        let Some(reason) = view.reason.clone() else { continue };
        let group = refusals.entry(reason).or_insert_with_key(|reason| RejectionGroup {
            reason: reason.clone(),
            may_resolve: view.may_resolve.unwrap_or(false),
            nodes: 0,
            examples: Vec::new(),
        });
        group.nodes += 1;
        if group.examples.len() < SHOWN {
            group.examples.push(view);
        }
    }
    explanation.relief.truncate(SHOWN);
    let rooms = std::mem::take(&mut explanation.room);
    let (room, room_or_more) =
        (rooms.iter().map(|room| room.pods).sum(), rooms.iter().any(|room| room.or_more));
    let mut refusals: Vec<RejectionGroup> = refusals.into_values().collect();
    refusals.sort_by_key(|refusal| Reverse(refusal.nodes));
    ExplanationSummary { explanation, checked, would_do, best, refusals, room, room_or_more, problem: None }
}
