//! Constraints of pods on nodes in Kubernetes' form: taints, tolerations, affinity, spreading,
//! ports, volumes and conditions.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use tessera_core::constraint::other_pods::{HostPort, OtherPod, PodTerm, TermNamespaces};
use tessera_core::constraint::{
    EPHEMERAL_STORAGE, HUGE_PAGES_PREFIX, NodeConstraints, NodeExpression, NodeOperator, NodeTerm,
    PodConstraints,
};
use tessera_core::request::{ContainerRole, peak};
use tessera_core::taint::{Taint, TaintEffect, Toleration};

use crate::foreign::dialect::Dialect;
use crate::foreign::disruption::SelectorObject;
use crate::foreign::objects::{Amount, Amounts, Condition, Node, PodConditions, PodSpec, null_as_default};
use crate::foreign::pod_spec::MIG_PREFIX;
use crate::foreign::quantity::Quantity;

/// Type of the condition by which a scheduler reports on a pod.
const POD_SCHEDULED: &str = "PodScheduled";

/// Type and reason of the condition by which kube-scheduler says that it preempts a pod.
const DISRUPTION_TARGET: &str = "DisruptionTarget";
const PREEMPTION: &str = "PreemptionByScheduler";

/// The constraint of a pod that requests resources of which Tessera does not know what other pods hold.
const RESOURCES_OF_OTHERS: &str = "other resources that pods hold";

/// Affinity of a pod, reduced to what Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affinity {
    /// True if an affinity has preferred terms, which kube-scheduler scores but does not enforce.
    pub has_preferred: bool,
    /// Terms of the required node affinity, of which a node must match one.
    pub node_terms: Option<Vec<NodeTerm>>,
    /// True if the pod requires other pods near its node.
    pub requires_pods: bool,
    /// Terms of the required anti-affinity to other pods.
    pub excluded: Box<[PodTerm]>,
    /// True if the required anti-affinity has further terms that depend on labels of namespaces or of the pod itself.
    pub excludes_more: bool,
}

/// Topology spread constraints of a pod, reduced to what Tessera reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spreading {
    /// True if a constraint is only preferred (`ScheduleAnyway`).
    pub has_preferred: bool,
    /// True if a constraint is required (`DoNotSchedule`).
    pub has_required: bool,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AffinityObject {
    #[serde(deserialize_with = "null_as_default")]
    node_affinity: NodeAffinity,
    #[serde(deserialize_with = "null_as_default")]
    pod_affinity: PodTerms,
    #[serde(deserialize_with = "null_as_default")]
    pod_anti_affinity: PodTerms,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: Option<NodeSelectorObject>,
    #[serde(
        rename = "preferredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "null_as_default"
    )]
    preferred: Vec<IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodTerms {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution", deserialize_with = "null_as_default")]
    required: Vec<PodTermObject>,
    #[serde(
        rename = "preferredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "null_as_default"
    )]
    preferred: Vec<IgnoredAny>,
}

/// A term of an affinity to pods. The API server writes the labels that the keys name into the selector; in a manifest
/// they are not yet there.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodTermObject {
    label_selector: Option<SelectorObject>,
    #[serde(deserialize_with = "null_as_default")]
    namespaces: Vec<String>,
    namespace_selector: Option<SelectorObject>,
    #[serde(deserialize_with = "null_as_default")]
    topology_key: String,
    #[serde(deserialize_with = "null_as_default")]
    match_label_keys: Vec<IgnoredAny>,
    #[serde(deserialize_with = "null_as_default")]
    mismatch_label_keys: Vec<IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct NodeSelectorObject {
    #[serde(deserialize_with = "null_as_default")]
    node_selector_terms: Vec<TermObject>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct TermObject {
    #[serde(deserialize_with = "null_as_default")]
    match_expressions: Vec<ExpressionObject>,
    #[serde(deserialize_with = "null_as_default")]
    match_fields: Vec<ExpressionObject>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ExpressionObject {
    #[serde(deserialize_with = "null_as_default")]
    key: String,
    #[serde(deserialize_with = "null_as_default")]
    operator: String,
    #[serde(deserialize_with = "null_as_default")]
    values: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TaintObject {
    #[serde(deserialize_with = "null_as_default")]
    key: String,
    #[serde(deserialize_with = "null_as_default")]
    operator: String,
    #[serde(deserialize_with = "null_as_default")]
    value: String,
    #[serde(deserialize_with = "null_as_default")]
    effect: String,
}

/// Deserializes the affinity of a pod.
pub(crate) fn affinity<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Affinity, D::Error> {
    let AffinityObject { node_affinity, pod_affinity, pod_anti_affinity } = null_as_default(deserializer)?;
    let preferred = [&node_affinity.preferred, &pod_affinity.preferred, &pod_anti_affinity.preferred];
    let has_preferred = preferred.iter().any(|terms| !terms.is_empty());
    let terms = node_affinity.required.map(|selector| selector.node_selector_terms.into_iter());
    // A term without a selector excludes no pod.
    let terms_of_pods = pod_anti_affinity.required.into_iter().filter(|term| term.label_selector.is_some());
    let terms_of_pods: Vec<PodTermObject> = terms_of_pods.collect();
    let all_excluded = terms_of_pods.len();
    let excluded: Box<[PodTerm]> = terms_of_pods.into_iter().filter_map(PodTermObject::read).collect();
    Ok(Affinity {
        has_preferred,
        node_terms: terms.map(|terms| terms.map(NodeTerm::from).collect()),
        requires_pods: !pod_affinity.required.is_empty(),
        excludes_more: excluded.len() < all_excluded,
        excluded,
    })
}

impl PodTermObject {
    /// Returns the term, or `None` if it depends on more than the labels and namespaces of other pods.
    fn read(self) -> Option<PodTerm> {
        let has_keys = !self.match_label_keys.is_empty() || !self.mismatch_label_keys.is_empty();
        let namespaces = match self.namespace_selector {
            Some(selector) if selector.is_empty() => TermNamespaces::All,
            Some(_) => return None,
            None if self.namespaces.is_empty() => TermNamespaces::Own,
            None => TermNamespaces::Named(self.namespaces),
        };
        let selector = self.label_selector.filter(|_| !has_keys)?.into();
        Some(PodTerm { selector, namespaces, topology_key: self.topology_key })
    }
}

/// Deserializes the topology spread constraints of a pod.
pub(crate) fn spreading<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Spreading, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Constraint {
        #[serde(deserialize_with = "null_as_default")]
        when_unsatisfiable: String,
    }
    let all: Vec<Constraint> = null_as_default(deserializer)?;
    let is_preferred = |constraint: &Constraint| constraint.when_unsatisfiable == "ScheduleAnyway";
    Ok(Spreading {
        has_preferred: all.iter().any(is_preferred),
        has_required: all.iter().any(|constraint| !is_preferred(constraint)),
    })
}

/// Deserializes the taints of a node. Taints of unknown effects are skipped.
pub(crate) fn taints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Taint>, D::Error> {
    let all: Vec<TaintObject> = null_as_default(deserializer)?;
    let read = |taint: TaintObject| {
        Some(Taint { effect: effect(&taint.effect)?, key: taint.key, value: taint.value })
    };
    Ok(all.into_iter().filter_map(read).collect())
}

/// Deserializes the tolerations of a pod. Those that the API server adds to every pod are skipped:
/// they concern evictions, and thousands of pods would carry them.
pub(crate) fn tolerations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Toleration>, D::Error> {
    const ADDED: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
    let all: Vec<TaintObject> = null_as_default(deserializer)?;
    let is_added = |taint: &TaintObject| taint.effect == "NoExecute" && ADDED.contains(&taint.key.as_str());
    let read = |taint: TaintObject| {
        let value = match taint.operator.as_str() {
            "Exists" => None,
            "" | "Equal" => Some(taint.value),
            _ => return None,
        };
        let effect = if taint.effect.is_empty() { None } else { Some(effect(&taint.effect)?) };
        Some(Toleration { key: taint.key, value, effect })
    };
    Ok(all.into_iter().filter(|taint| !is_added(taint)).filter_map(read).collect())
}

fn effect(text: &str) -> Option<TaintEffect> {
    match text {
        "NoSchedule" => Some(TaintEffect::NoSchedule),
        "PreferNoSchedule" => Some(TaintEffect::PreferNoSchedule),
        "NoExecute" => Some(TaintEffect::NoExecute),
        _ => None,
    }
}

/// A port of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerPort {
    /// The port of the host that the container uses, if it uses one.
    pub host: HostPort,
    /// True if the container uses a port of the host only because its pod uses the host's network.
    pub is_of_host_network: bool,
}

/// Deserializes the ports of a container. A port without `hostPort` is one of the host if the pod uses the host's
/// network: the API server writes the number of the container into `hostPort` then, and a manifest lacks it.
pub(crate) fn ports<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ContainerPort>, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Port {
        host_port: Option<u32>,
        container_port: Option<u32>,
        #[serde(deserialize_with = "null_as_default")]
        protocol: String,
        #[serde(rename = "hostIP", deserialize_with = "null_as_default")]
        host_ip: String,
    }
    let all: Vec<Port> = null_as_default(deserializer)?;
    let read = |Port { host_port, container_port, protocol, host_ip }: Port| {
        let host_port = host_port.filter(|port| *port > 0);
        let port = u16::try_from(host_port.or(container_port)?).ok().filter(|port| *port > 0)?;
        let protocol = if protocol.is_empty() { "TCP".to_owned() } else { protocol };
        let address = Some(host_ip).filter(|address| !["", "0.0.0.0"].contains(&address.as_str()));
        let host = HostPort { port, protocol, address };
        Some(ContainerPort { host, is_of_host_network: host_port.is_none() })
    };
    Ok(all.into_iter().filter_map(read).collect())
}

/// Deserializes the volumes of a pod into whether one of them may exist on some nodes only.
pub(crate) fn has_bound_volumes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Volume {
        persistent_volume_claim: Option<IgnoredAny>,
        ephemeral: Option<IgnoredAny>,
    }
    let all: Vec<Volume> = null_as_default(deserializer)?;
    Ok(all.iter().any(|volume| volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some()))
}

/// Deserializes the preemption policy of a pod into whether it forbids preemption.
pub(crate) fn never_preempts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let policy: String = null_as_default(deserializer)?;
    Ok(policy == "Never")
}

/// Deserializes the conditions of a pod into those that Tessera reads.
pub(crate) fn pod_conditions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PodConditions, D::Error> {
    let all: Vec<Condition> = null_as_default(deserializer)?;
    let is_preempted = all.iter().any(|condition| {
        condition.kind == DISRUPTION_TARGET && condition.status == "True" && condition.reason == PREEMPTION
    });
    let mut found =
        all.into_iter().filter(|condition| condition.kind == POD_SCHEDULED && condition.status == "False");
    Ok(PodConditions { unscheduled: found.next().map(Box::new), is_preempted })
}

impl From<TermObject> for NodeTerm {
    fn from(TermObject { match_expressions, match_fields }: TermObject) -> Self {
        let read = |all: Vec<ExpressionObject>| all.into_iter().map(NodeExpression::from).collect();
        Self { labels: read(match_expressions), fields: read(match_fields) }
    }
}

impl From<ExpressionObject> for NodeExpression {
    fn from(ExpressionObject { key, operator, values }: ExpressionObject) -> Self {
        let operator = match operator.as_str() {
            "In" => NodeOperator::In,
            "NotIn" => NodeOperator::NotIn,
            "Exists" => NodeOperator::Exists,
            "DoesNotExist" => NodeOperator::DoesNotExist,
            "Gt" => NodeOperator::Gt,
            "Lt" => NodeOperator::Lt,
            _ => NodeOperator::Undefined,
        };
        Self { key, operator, values }
    }
}

/// Returns the properties of a node that constraints of pods refer to.
#[must_use]
pub fn of_node(node: &Node) -> NodeConstraints {
    NodeConstraints {
        unschedulable: node.spec.unschedulable,
        taints: node.spec.taints.clone(),
        labels: node.metadata.labels.clone(),
        other_resources: other_resources(&node.status.allocatable),
        max_pods: node.status.allocatable.get("pods").and_then(whole_amount),
    }
}

impl PodSpec {
    /// Returns the constraints that can be checked against a single node.
    #[must_use]
    pub fn constraints(&self) -> PodConstraints {
        PodConstraints {
            node_selector: self.node_selector.clone(),
            node_terms: self.affinity.node_terms.clone(),
            tolerations: self.tolerations.clone(),
            other_resources: self.other_resources(),
        }
    }

    /// Returns the amounts of other resources that kube-scheduler counts for the pod: those of containers that run at
    /// the same time add up, and the overhead of the pod is added.
    fn other_resources(&self) -> BTreeMap<String, u64> {
        let needs: Vec<_> = self
            .containers_with_roles()
            .map(|(container, role)| (role, other_resources(&container.resources.effective_requests())))
            .collect();
        let mut overhead = other_resources(&self.overhead);
        let names = needs.iter().map(|(_, amounts)| amounts).chain([&overhead]).flat_map(BTreeMap::keys);
        let names: BTreeSet<String> = names.cloned().collect();
        let requested = names.into_iter().map(|name| {
            let amount =
                |need: &(ContainerRole, BTreeMap<String, u64>)| need.1.get(&name).copied().unwrap_or(0);
            let containers = peak(&needs, |need| need.0, amount, u64::saturating_add, u64::max);
            let total = containers.saturating_add(overhead.remove(&name).unwrap_or(0));
            (name, total)
        });
        requested.collect()
    }

    /// Returns the pod as the constraints of other pods meet it.
    #[must_use]
    pub fn as_other_pod<'a>(
        &'a self,
        namespace: &'a str,
        labels: &'a BTreeMap<String, String>,
    ) -> OtherPod<'a> {
        OtherPod { namespace, labels, excluded: &self.affinity.excluded, ports: self.host_ports().collect() }
    }

    /// Returns the ports of the host that kube-scheduler counts: those of main containers and sidecars.
    fn host_ports(&self) -> impl Iterator<Item = &HostPort> {
        let runs = self.containers_with_roles().filter(|(_, role)| *role != ContainerRole::Init);
        let ports = runs.flat_map(|(container, _)| &container.ports);
        ports.filter(|port| self.host_network || !port.is_of_host_network).map(|port| &port.host)
    }

    /// Returns the constraints of the pod that depend on other pods, volumes, ports or claims, and that only
    /// kube-scheduler checks. Of other resources, Tessera knows what a node offers and, except for MIG instances, not
    /// what pods hold.
    #[must_use]
    pub fn unchecked_constraints(&self) -> Vec<&'static str> {
        let holds_others = self.other_resources().keys().any(|resource| !resource.starts_with(MIG_PREFIX));
        let related = self.relations_to_others();
        related.into_iter().chain(holds_others.then_some(RESOURCES_OF_OTHERS)).collect()
    }

    /// Returns the constraints that tie the pod to other pods, volumes, ports or claims, so that another node may be
    /// none for it, and that only kube-scheduler checks.
    #[must_use]
    pub fn relations_to_others(&self) -> Vec<&'static str> {
        let has_ports = self.host_ports().next().is_some();
        let Affinity { requires_pods, excluded, excludes_more, .. } = &self.affinity;
        let all = [
            (*requires_pods, "required pod affinity"),
            (*excludes_more, "required pod anti-affinity"),
            (!excluded.is_empty() && !excludes_more, "required pod anti-affinity to pods without GPUs"),
            (self.spreading.has_required, "topology spread constraints"),
            (self.has_bound_volumes, "the nodes of its volumes"),
            (has_ports, "ports of the host that pods without GPUs use"),
            (!self.resource_claims.is_empty(), "the devices of its claims"),
        ];
        all.into_iter().filter(|(applies, _)| *applies).map(|(_, text)| text).collect()
    }

    /// Returns the names of requested GPU resources outside Tessera's dialects, such as `nvidia.com/mig-1g.5gb` or
    /// `amd.com/gpu`, sorted. Some nodes may offer them.
    #[must_use]
    pub fn other_gpu_resources(&self) -> Vec<String> {
        let names = self.containers_with_roles().flat_map(|(container, _)| container.resources.extended());
        let mut others: Vec<String> =
            names.filter(|name| is_other_gpu_resource(name)).map(str::to_owned).collect();
        others.sort_unstable();
        others.dedup();
        others
    }
}

/// Returns whether this resource is about GPUs and in none of Tessera's dialects.
#[must_use]
pub fn is_other_gpu_resource(name: &str) -> bool {
    const PREFIXES: [&str; 7] = [
        "nvidia.com/",
        "aliyun.com/gpu",
        "tencent.com/vcuda",
        "volcano.sh/vgpu",
        "amd.com/gpu",
        "gpu.intel.com/",
        "4paradigm.com/vgpu",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !Dialect::RESOURCES.contains(&name)
}

fn whole_amount(amount: &Amount) -> Option<u64> {
    amount.0.parse::<Quantity>().ok().and_then(Quantity::whole)
}

/// Returns the amounts of resources besides CPU, memory and the GPU resources of Tessera.
fn other_resources(all: &Amounts) -> BTreeMap<String, u64> {
    let is_other = |name: &str| {
        let is_extended = name.contains('/') && !Dialect::RESOURCES.contains(&name);
        is_extended || name == EPHEMERAL_STORAGE || name.starts_with(HUGE_PAGES_PREFIX)
    };
    let others = all.iter().filter(|(name, _)| is_other(name));
    let amounts = others.filter_map(|(name, amount)| Some((name.clone(), whole_amount(amount)?)));
    amounts.filter(|(_, amount)| *amount > 0).collect()
}

#[cfg(test)]
mod tests;
