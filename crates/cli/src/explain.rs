//! Explains why a pod waits and what would help, with the same code as the scheduler.

use std::sync::Arc;

use tessera_core::admission::{QuotaState, RejectReason};
use tessera_core::cluster_view::ClusterView;
use tessera_core::constraint::other_pods::OtherPod;
use tessera_core::grant::PodGrant;
use tessera_core::placement::Policy;
use tessera_core::request::Request;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::explanation::{ClusterFacts, Explainer, NodeFacts, PodExplanation};
use tessera_wire::tessera::parsed_pod::{BadPodObject, PolicyResolver};

use crate::survey::{CLAIM_SUFFIX, Instances, PodFacts, Survey};

/// The rule of a scheduler with `--static-strict` and a table of its own.
const STRICT_TABLE: &str = "the sets of GPUs in its static table";

/// Explains a pod. `is_hypothetical` is true for a pod that does not exist.
pub(crate) fn explain(
    survey: &Survey,
    pod: &Pod,
    is_hypothetical: bool,
) -> Result<PodExplanation, BadPodObject> {
    let mut explainer = Explainer::new(survey, pod, is_hypothetical)?;
    if !explainer.is_placed() {
        survey.node_names().into_iter().for_each(|name| explainer.judge(survey, name));
    }
    if explainer.needs_relief() {
        survey.node_names().into_iter().for_each(|name| explainer.find_relief(survey, name));
    }
    Ok(explainer.finish())
}

impl PolicyResolver for Survey {
    fn policy(&self, preferred: Option<Policy>) -> Policy {
        match self.rules.policy(preferred) {
            Policy::Tessera(_) => Policy::Tessera(self.forecast()),
            Policy::Static(_) => Policy::Static(Arc::new(self.rules.table().unwrap_or_default())),
            other => other,
        }
    }
}

impl ClusterFacts for Survey {
    fn node(&self, name: &NodeName) -> Result<NodeFacts<'_>, RejectReason> {
        let facts = self.nodes.get(name).ok_or(RejectReason::UnknownNode)?;
        let state = self.state(name).filter(|_| facts.problem.is_none());
        let state = state.ok_or_else(|| RejectReason::of_missing_node(facts.problem.as_deref()))?;
        Ok(NodeFacts {
            state,
            unit: facts.unit,
            dialects: facts.dialects,
            is_agent_unavailable: facts.is_agent_unavailable,
            quota_labels: &facts.quota_labels,
            constraints: &facts.constraints,
        })
    }

    fn quota(&self) -> QuotaState<'_> {
        self.limits()
    }

    fn grants_on(&self, name: &NodeName) -> Vec<&PodGrant> {
        self.grants(name)
    }

    fn known_grant(&self, uid: &PodUid) -> Option<&PodGrant> {
        self.grant(uid)
    }

    fn knows_ranks(&self, policy: &Policy) -> bool {
        // The plugin does not have the scheduler's forecast, and its table only if it is the shipped one.
        match policy {
            Policy::Tessera(_) => false,
            Policy::Static(_) => self.rules.has_shipped_table,
            _ => true,
        }
    }

    fn unknown_rule(&self, policy: &Policy) -> Option<&'static str> {
        let is_unknown = self.rules.static_strict && !self.rules.has_shipped_table;
        (is_unknown && policy.name() == "static").then_some(STRICT_TABLE)
    }

    fn is_offered(&self, resource: &str) -> bool {
        self.nodes.values().any(|node| node.constraints.other_resources.contains_key(resource))
    }

    fn held_instances(&self, node: &NodeName, resource: &str) -> u64 {
        self.nodes.get(node).and_then(|node| node.instances.get(resource)).map_or(0, Instances::held)
    }

    fn view(&self) -> &ClusterView {
        self.cluster_view()
    }

    fn other_pods(&self) -> Box<dyn Iterator<Item = (&NodeName, OtherPod<'_>)> + '_> {
        Box::new(self.known_pods())
    }

    fn pod_name(&self, uid: &PodUid) -> Option<String> {
        let PodFacts { namespace, name, .. } = self.pod(uid)?;
        Some(match name.strip_suffix(CLAIM_SUFFIX) {
            Some(claim) => format!("claim {namespace}/{claim}"),
            None => format!("{namespace}/{name}"),
        })
    }

    fn reservation_report(&self, uid: &PodUid) -> Option<String> {
        self.nodes.keys().find_map(|node| {
            let all = self.reservations(node);
            let (reservation, _) =
                all.iter().find(|(entry, _)| entry.pod.as_ref().is_some_and(|pod| pod.uid == uid.0))?;
            Some(reservation.describe(node, self.cluster_view().ledger().place(uid).is_some()))
        })
    }

    fn default_unit(&self) -> MemoryUnit {
        self.rules.unit
    }

    fn claim_requests(&self, pod: &Pod) -> Vec<Request> {
        self.waiting_claims(pod)
    }

    fn gang_report(&self, uid: &PodUid) -> Option<String> {
        let (key, progress) = self.gang_progress(uid)?;
        let unplaced = "the scheduler knows whether nodes have GPUs for all of them; ask it with --endpoint";
        Some(progress.describe(key, None, unplaced))
    }
}
