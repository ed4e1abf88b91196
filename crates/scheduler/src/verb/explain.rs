//! Explains for every node and GPU why it can or cannot take a pod. Filter decides with the same code.

use tessera_core::admission::{QuotaState, RejectReason};
use tessera_core::cluster_view::ClusterView;
use tessera_core::constraint::NodeConstraints;
use tessera_core::constraint::other_pods::OtherPod;
use tessera_core::grant::PodGrant;
use tessera_core::request::Request;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::explanation::{ClusterFacts, Explainer, NodeFacts};
use tessera_wire::tessera::parsed_pod::BadPodObject;

use crate::state::{GpuPod, State, StateAccess};

pub use tessera_wire::tessera::explanation::{ContainerGpus, GpuReason, NodeExplanation, PodExplanation};

/// Explains a pod that the watch has shown, or one that uses the GPUs of claims. Returns `None` if no such pod of this
/// name is known.
pub fn explain(
    access: &impl StateAccess,
    namespace: &str,
    name: &str,
) -> Option<Result<PodExplanation, BadPodObject>> {
    let matches = |pod: &GpuPod| pod.namespace == namespace && pod.name == name;
    let find =
        |state: &State| state.gpu_pods().find(|(_, pod)| matches(pod)).map(|(uid, pod)| pod.to_object(uid));
    match access.with_state(find) {
        Some(pod) => Some(explain_on_all_nodes(access, &pod, false)),
        None => access.with_state(|state| by_claims(state, namespace, name)).map(Ok),
    }
}

/// Explains a pod that uses the GPUs of claims.
fn by_claims(state: &State, namespace: &str, name: &str) -> Option<PodExplanation> {
    let (_, claims) = state.claims_of_placed(namespace, name)?;
    PodExplanation::by_claims(namespace, name, &claims)
}

/// Explains a pod that need not exist.
pub fn what_if(access: &impl StateAccess, pod: &Pod) -> Result<PodExplanation, BadPodObject> {
    explain_on_all_nodes(access, pod, true)
}

fn explain_on_all_nodes(
    access: &impl StateAccess,
    pod: &Pod,
    is_hypothetical: bool,
) -> Result<PodExplanation, BadPodObject> {
    let mut explainer = access.with_state(|state| Explainer::new(state, pod, is_hypothetical))?;
    if !explainer.is_placed() {
        access.for_each_node(|state, name| explainer.judge(state, name));
    }
    if explainer.needs_relief() {
        access.for_each_node(|state, name| explainer.find_relief(state, name));
    }
    Ok(explainer.finish())
}

impl ClusterFacts for State {
    fn node(&self, name: &NodeName) -> Result<NodeFacts<'_>, RejectReason> {
        static NONE: NodeConstraints = NodeConstraints {
            unschedulable: false,
            taints: Vec::new(),
            labels: std::collections::BTreeMap::new(),
            other_resources: std::collections::BTreeMap::new(),
            max_pods: None,
        };
        let node = self.readable_node(&name.0)?;
        Ok(NodeFacts {
            state: node.state,
            unit: node.spec.unit,
            dialects: self.served_dialects(node.spec.dialects),
            is_agent_unavailable: node.spec.is_agent_unavailable,
            quota_labels: node.quota_labels,
            constraints: self.constraints(name).unwrap_or(&NONE),
        })
    }

    fn quota(&self) -> QuotaState<'_> {
        self.quota_state()
    }

    fn grants_on(&self, name: &NodeName) -> Vec<&PodGrant> {
        let is_known = |holder: &PodUid| self.pod(holder).is_some() || self.claim_name(holder).is_some();
        self.ledger().grants_on(name).filter(|grant| is_known(&grant.pod)).collect()
    }

    fn known_grant(&self, uid: &PodUid) -> Option<&PodGrant> {
        self.ledger().grant(uid).filter(|grant| !self.is_set_aside(grant))
    }

    fn is_offered(&self, resource: &str) -> bool {
        self.offers_resource(resource)
    }

    fn held_instances(&self, node: &NodeName, resource: &str) -> u64 {
        self.instance_holders(node).filter_map(|(_, held)| held.get(resource).copied()).sum()
    }

    fn view(&self) -> &ClusterView {
        self.cluster_view()
    }

    fn other_pods(&self) -> Box<dyn Iterator<Item = (&NodeName, OtherPod<'_>)> + '_> {
        Box::new(self.gpu_pods().filter_map(|(_, pod)| {
            Some((pod.node.as_ref()?, pod.spec.as_other_pod(&pod.namespace, &pod.labels)))
        }))
    }

    fn pod_name(&self, uid: &PodUid) -> Option<String> {
        let pod = self.pod(uid).map(|pod| format!("{}/{}", pod.namespace, pod.name));
        pod.or_else(|| self.claim_name(uid).map(|(namespace, name)| format!("claim {namespace}/{name}")))
    }

    fn default_unit(&self) -> MemoryUnit {
        self.memory_unit()
    }

    fn claim_requests(&self, pod: &Pod) -> Vec<Request> {
        self.waiting_claims(pod)
    }

    fn gang_report(&self, uid: &PodUid) -> Option<String> {
        self.describe_waiting_gang(uid)
    }

    fn reservation_report(&self, uid: &PodUid) -> Option<String> {
        self.describe_reserved(uid).or_else(|| self.describe_guarantee(uid))
    }
}
