//! Explains why a pod waits, or where a hypothetical pod would fit. It counts the answers of
//! `/explain` by reason.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;
use tessera_wire::foreign::objects::{Metadata, Pod};
use tessera_wire::tessera::parsed_pod::ParsedPod;

use super::super::lookup;
use crate::state::{State, StateAccess};
use crate::verb::explain::NodeExplanation;

/// The answers of all nodes for one pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplanationSummary {
    /// Placement policy of the pod.
    pub policy: String,
    /// Number of nodes that were checked.
    pub nodes: usize,
    /// Number of nodes on which the pod fits now.
    pub fitting: usize,
    /// The best fitting nodes, best first.
    pub best: Vec<NodeExplanation>,
    /// Rejection reasons of the other nodes, most common first.
    pub refusals: Vec<RejectionGroup>,
    /// Error in the pod itself. The pod fits nowhere until the error is corrected.
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

/// Nodes shown for each group: those that fit, and those with the same rejection reason.
const SHOWN: usize = 5;

/// Returns the named pod as the input of [`explain`].
#[must_use]
pub fn question(state: &State, namespace: &str, name: &str) -> Option<Pod> {
    let (uid, pod) = lookup::pod(state, namespace, name)?;
    let metadata = Metadata {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        uid: uid.to_string(),
        annotations: pod.annotations.clone(),
        ..Metadata::default()
    };
    Some(Pod { metadata, spec: pod.spec.clone(), ..Pod::default() })
}

/// Checks a pod against every node.
pub fn explain(access: &impl StateAccess, pod: &Pod) -> ExplanationSummary {
    let parsed = match access.with_state(|state| ParsedPod::of(state, pod)) {
        Ok(parsed) => parsed,
        Err(bad) => {
            return ExplanationSummary { problem: Some(bad.to_string()), ..ExplanationSummary::default() };
        }
    };
    let mut sum = Sum::default();
    access.for_each_node(|state, name| sum.add(state.explain_on(name, &parsed)));
    sum.explanation(parsed.policy.to_string())
}

#[derive(Default)]
struct Sum {
    nodes: usize,
    fitting: usize,
    /// Fitting nodes by descending score, then by name.
    best: Vec<NodeExplanation>,
    refusals: BTreeMap<String, RejectionGroup>,
}

impl Sum {
    fn add(&mut self, view: NodeExplanation) {
        self.nodes += 1;
        if view.fits {
            self.fitting += 1;
            let score = |view: &NodeExplanation| view.score.unwrap_or(f64::NEG_INFINITY);
            let place = self.best.partition_point(|better| score(better) >= score(&view));
            if place < SHOWN {
                self.best.insert(place, view);
                self.best.truncate(SHOWN);
            }
            return;
        }
        let reason = view.reason.clone().unwrap_or_default();
        let group = self.refusals.entry(reason).or_insert_with_key(|reason| RejectionGroup {
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

    fn explanation(self, policy: String) -> ExplanationSummary {
        let Self { nodes, fitting, best, refusals } = self;
        let mut refusals: Vec<RejectionGroup> = refusals.into_values().collect();
        refusals.sort_by_key(|refusal| Reverse(refusal.nodes));
        ExplanationSummary { policy, nodes, fitting, best, refusals, problem: None }
    }
}
