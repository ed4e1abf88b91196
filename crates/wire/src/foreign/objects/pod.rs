//! Pod objects.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use tessera_core::taint::Toleration;

use super::{Amounts, Condition, Metadata, null_as_default};
use crate::foreign::constraint::{self, Affinity, ContainerPort, Spreading};
use crate::foreign::dra::{
    ContainerClaim, ExtendedResourceClaimStatus, PodResourceClaim, PodResourceClaimStatus,
};

/// The parts of a pod that placement needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Identity, labels and annotations.
    pub metadata: Metadata,
    /// Desired state of the pod.
    pub spec: PodSpec,
    /// Observed state of the pod.
    pub status: PodStatus,
}

/// Desired state of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// Node the pod is bound to, or empty while it waits.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Name of the scheduler that places the pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub scheduler_name: String,
    /// Priority. A pod may preempt pods of lower priority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// True if no pod may be preempted for this one.
    #[serde(rename = "preemptionPolicy", deserialize_with = "constraint::never_preempts", skip_serializing)]
    pub never_preempts: bool,
    /// Init containers, which run one after the other before the main containers. Sidecars keep
    /// running beside them.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<Container>,
    /// Main containers, which run concurrently.
    #[serde(deserialize_with = "null_as_default")]
    pub containers: Vec<Container>,
    /// True if the pod uses the network of the host.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub host_network: bool,
    /// Labels that the node of the pod must have.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub node_selector: BTreeMap<String, String>,
    /// Affinity to nodes and to other pods.
    #[serde(deserialize_with = "constraint::affinity", skip_serializing)]
    pub affinity: Affinity,
    /// Topology spread constraints.
    #[serde(
        rename = "topologySpreadConstraints",
        deserialize_with = "constraint::spreading",
        skip_serializing
    )]
    pub spreading: Spreading,
    /// Tolerations of taints.
    #[serde(deserialize_with = "constraint::tolerations", skip_serializing)]
    pub tolerations: Vec<Toleration>,
    /// True if a volume of the pod may exist on some nodes only.
    #[serde(rename = "volumes", deserialize_with = "constraint::has_bound_volumes", skip_serializing)]
    pub has_bound_volumes: bool,
    /// Resources that the container runtime needs for each pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub overhead: Amounts,
    /// Claims for devices of dynamic resource allocation.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub resource_claims: Vec<PodResourceClaim>,
    /// The group of pods that Kubernetes schedules together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduling_group: Option<SchedulingGroup>,
}

/// Reference of a pod to its group in Kubernetes' own API.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SchedulingGroup {
    /// Name of the PodGroup in the pod's namespace.
    #[serde(deserialize_with = "null_as_default")]
    pub pod_group_name: String,
}

/// One container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    /// Name, unique within the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Restart policy. `Always` turns an init container into a sidecar.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub restart_policy: String,
    /// Requested resources and limits.
    #[serde(deserialize_with = "null_as_default")]
    pub resources: Resources,
    /// Ports of the container.
    #[serde(deserialize_with = "constraint::ports", skip_serializing)]
    pub ports: Vec<ContainerPort>,
    /// Environment variables that Tessera reads.
    #[serde(deserialize_with = "read_variables", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
}

/// An environment variable of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EnvVar {
    /// Name of the variable.
    pub name: String,
    /// Value, or empty if it comes from another object.
    #[serde(deserialize_with = "null_as_default")]
    pub value: String,
}

/// Variable with the person who submitted a pod, which gpu-manager's usage shows.
pub const SUBMITTER: &str = "SUBMITTER";

/// Keeps only the variables that Tessera reads. A container may have hundreds of others.
fn read_variables<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<EnvVar>, D::Error> {
    let all: Vec<EnvVar> = null_as_default(deserializer)?;
    Ok(all.into_iter().filter(|variable| variable.name == SUBMITTER).collect())
}

/// Requested resources and limits of a container, by resource name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Upper limits. For extended resources they equal `requests`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: Amounts,
    /// Guaranteed amounts.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: Amounts,
    /// Claims of the pod that the container uses.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ContainerClaim>,
}

impl Resources {
    /// Returns the names of the requested extended resources, such as those of device plugins.
    /// Unlike the built-in resources, their names contain a domain.
    pub fn extended(&self) -> impl Iterator<Item = &str> {
        let names = self.limits.keys().chain(self.requests.keys());
        names.map(String::as_str).filter(|name| name.contains('/'))
    }

    /// Returns the amounts that count for scheduling: the requests, and the limits of resources that have no request,
    /// like the API server's defaulting.
    #[must_use]
    pub fn effective_requests(&self) -> Amounts {
        let mut amounts = self.limits.clone();
        amounts.extend(self.requests.clone());
        amounts
    }
}

/// Observed state of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    /// Phase: `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// Time when the kubelet accepted the pod, or `None` before it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<String>,
    /// Human-readable reason for the phase, or empty.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Conditions of the pod.
    #[serde(deserialize_with = "constraint::pod_conditions", skip_serializing)]
    pub conditions: PodConditions,
    /// Statuses of the main containers.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub container_statuses: Vec<ContainerStatus>,
    /// Statuses of the init containers, including sidecars.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub init_container_statuses: Vec<ContainerStatus>,
    /// Statuses of the ephemeral containers, which users add for debugging.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub ephemeral_container_statuses: Vec<ContainerStatus>,
    /// Claims that were made for the pod from templates.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub resource_claim_statuses: Vec<PodResourceClaimStatus>,
    /// Claim that kube-scheduler made for the extended resources of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_resource_claim_status: Option<Box<ExtendedResourceClaimStatus>>,
}

/// The conditions of a pod that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodConditions {
    /// Last report of a scheduler that could not place the pod.
    pub unscheduled: Option<Box<Condition>>,
    /// True if kube-scheduler deletes the pod in favour of one with a higher priority.
    pub is_preempted: bool,
}

/// Observed state of a container: its current and its previous ID in the container runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// Name of the container in the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// ID with the runtime's name, such as `containerd://13f1...`, or empty before it exists.
    #[serde(
        rename = "containerID",
        deserialize_with = "null_as_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub id: String,
    /// State of the container before its last restart.
    #[serde(
        rename = "lastState",
        deserialize_with = "null_as_default",
        skip_serializing_if = "LastState::is_none"
    )]
    pub last_state: LastState,
}

/// State of a container before its last restart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastState {
    /// Termination of the previous container, or `None` if it never restarted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminated: Option<Terminated>,
}

/// Termination of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Terminated {
    /// ID of the terminated container.
    #[serde(rename = "containerID", deserialize_with = "null_as_default")]
    pub id: String,
}

impl LastState {
    fn is_none(&self) -> bool {
        self.terminated.is_none()
    }
}

impl PodStatus {
    /// Returns all current and previous container IDs of the pod, each with the container's name.
    /// The IDs do not include the runtime's name.
    pub fn container_ids(&self) -> impl Iterator<Item = (&str, &str)> {
        let all =
            [&self.container_statuses, &self.init_container_statuses, &self.ephemeral_container_statuses];
        all.into_iter().flatten().flat_map(|status| {
            let before = status.last_state.terminated.as_ref().map(|end| end.id.as_str());
            let ids = [Some(status.id.as_str()), before].into_iter().flatten();
            ids.map(|id| id.rsplit_once("://").map_or(id, |(_, id)| id))
                .filter(|id| !id.is_empty())
                .map(|id| (id, status.name.as_str()))
        })
    }
}
