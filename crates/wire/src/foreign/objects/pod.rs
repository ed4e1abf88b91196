//! Pods.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use super::{Amounts, Metadata, null_as_default};
use crate::foreign::taint::{SoftToleration, soft_tolerations};

/// A pod, as far as placing it needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Who it is.
    pub metadata: Metadata,
    /// What it asks for.
    pub spec: PodSpec,
    /// What has become of it.
    pub status: PodStatus,
}

/// What a pod asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    /// Where it is bound; empty while it waits.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Which scheduler shall place it.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub scheduler_name: String,
    /// Higher goes first and may displace lower.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Run one after the other before the containers (or beside them, as sidecars).
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<Container>,
    /// Run side by side.
    #[serde(deserialize_with = "null_as_default")]
    pub containers: Vec<Container>,
    /// Whether it would rather be on some nodes than on others, or near or far from other pods, without insisting on it.
    #[serde(rename = "affinity", deserialize_with = "any_preferred", skip_serializing)]
    pub prefers_nodes: bool,
    /// The same of spreading.
    #[serde(rename = "topologySpreadConstraints", deserialize_with = "any_wished", skip_serializing)]
    pub prefers_spreading: bool,
    /// The taints it does not mind, of those that only ask.
    #[serde(rename = "tolerations", deserialize_with = "soft_tolerations", skip_serializing)]
    pub soft_tolerations: Vec<SoftToleration>,
    /// What the runtime itself needs for each pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub overhead: Amounts,
}

/// Whether an affinity of any kind has terms that are only preferred.
fn any_preferred<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Terms {
        #[serde(
            rename = "preferredDuringSchedulingIgnoredDuringExecution",
            deserialize_with = "null_as_default"
        )]
        preferred: Vec<IgnoredAny>,
    }
    let kinds = Option::<BTreeMap<String, Option<Terms>>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(kinds.into_values().flatten().any(|terms| !terms.preferred.is_empty()))
}

/// Whether spreading over some domain is only wished for.
fn any_wished<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Constraint {
        #[serde(deserialize_with = "null_as_default")]
        when_unsatisfiable: String,
    }
    let all = Option::<Vec<Constraint>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(all.iter().any(|constraint| constraint.when_unsatisfiable == "ScheduleAnyway"))
}

/// One container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    /// Unique in its pod.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// `Always` makes a sidecar of an init container.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub restart_policy: String,
    /// What it needs.
    #[serde(deserialize_with = "null_as_default")]
    pub resources: Resources,
}

/// What a container needs, by resource name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// May use no more than this. For extended resources the same as `requests`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: Amounts,
    /// Is promised this.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: Amounts,
}

impl Resources {
    /// The resources of device plugins and the like that it asks for: unlike Kubernetes's own, they have a domain in their names.
    pub fn extended(&self) -> impl Iterator<Item = &str> {
        let names = self.limits.keys().chain(self.requests.keys());
        names.map(String::as_str).filter(|name| name.contains('/'))
    }
}

/// What has become of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub phase: String,
    /// When the kubelet took it; absent while it is being admitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<String>,
    /// Why it is in this phase, where there is more to say.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// What has become of its containers.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub container_statuses: Vec<ContainerStatus>,
    /// Of its init containers, sidecars among them.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub init_container_statuses: Vec<ContainerStatus>,
    /// Of those that were put in for looking around.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub ephemeral_container_statuses: Vec<ContainerStatus>,
}

/// What has become of a container: under which IDs the runtime knows it and knew it before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// Its name in the pod.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// `containerd://13f1...`; empty before it was made.
    #[serde(
        rename = "containerID",
        deserialize_with = "null_as_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub id: String,
    /// How it ended before it was started again.
    #[serde(
        rename = "lastState",
        deserialize_with = "null_as_default",
        skip_serializing_if = "LastState::is_none"
    )]
    pub last_state: LastState,
}

/// How a container ended before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastState {
    /// Its end, if it had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminated: Option<Terminated>,
}

/// A container's end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Terminated {
    /// The ID it had.
    #[serde(rename = "containerID", deserialize_with = "null_as_default")]
    pub id: String,
}

impl LastState {
    fn is_none(&self) -> bool {
        self.terminated.is_none()
    }
}

impl PodStatus {
    /// The IDs by which runtimes know the containers of the pod, each with the container's name; without the runtime's own name.
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
