//! The parts of Kubernetes objects that Tessera reads, as they stand in JSON.
//!
//! Much smaller than the full types: a node alone may list fifty images that nobody here asks for. Unknown fields are
//! skipped, and `null` means the same as absent, as it does to Kubernetes.

use std::{collections::BTreeMap, fmt};

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use crate::taint::{SoftTaint, SoftToleration, soft_taints, soft_tolerations};

/// Reads `null` as the default value.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

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

/// A node, as far as placing pods on it needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Who it is.
    pub metadata: Metadata,
    /// What is wanted of it.
    pub spec: NodeWish,
    /// What it offers.
    pub status: NodeStatus,
}

/// Who an object is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// Unique among living objects of its kind and namespace.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Empty for objects that belong to no namespace.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Unique for all time: a new object of the same name has another one.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Names for selecting.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Notes of any kind, among them grants.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// When its deletion began, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_timestamp: Option<String>,
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

/// What a node offers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// All there is.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: Amounts,
    /// What pods may have of it.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub allocatable: Amounts,
    /// Where it is found.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<NodeAddress>,
    /// How it is.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// One of a node's addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeAddress {
    /// `InternalIP`, `Hostname` and others.
    #[serde(rename = "type", deserialize_with = "null_as_default")]
    pub kind: String,
    /// The address.
    #[serde(deserialize_with = "null_as_default")]
    pub address: String,
}

/// What is wanted of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeWish {
    /// Whether new pods shall stay away, as `kubectl cordon` sets it.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub unschedulable: bool,
    /// Its taints, of those that only ask.
    #[serde(rename = "taints", deserialize_with = "soft_taints", skip_serializing)]
    pub soft_taints: Vec<SoftTaint>,
}

/// Something that holds of an object, or does not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// `Ready`, `PodScheduled`, ...
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// In words.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Amount>;

/// An amount as it was written: `4`, `100m`, `16Gi`.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Amount(pub String);

impl fmt::Debug for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Amount({})", self.0)
    }
}

impl<'de> Deserialize<'de> for Amount {
    /// Kubernetes sends strings; people who write JSON by hand also send numbers.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Number(serde_json::Number),
        }
        Ok(match Written::deserialize(deserializer)? {
            Written::Text(text) => Self(text),
            Written::Number(number) => Self(number.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_that_are_not_insisted_on() {
        let check = |spec: &str, expected: (bool, bool)| {
            let read: PodSpec = serde_json::from_str(spec).unwrap();
            assert_eq!((read.prefers_nodes, read.prefers_spreading), expected, "{spec}");
        };
        check("{}", (false, false));
        check(r#"{"affinity":null,"topologySpreadConstraints":null}"#, (false, false));
        check(
            r#"{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[]}},"podAffinity":null}}"#,
            (false, false),
        );
        check(
            r#"{"affinity":{"podAntiAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[{"weight":1,"podAffinityTerm":{}}]}}}"#,
            (true, false),
        );
        check(r#"{"topologySpreadConstraints":[{"whenUnsatisfiable":"DoNotSchedule"}]}"#, (false, false));
        check(
            r#"{"topologySpreadConstraints":[{"maxSkew":1},{"whenUnsatisfiable":"ScheduleAnyway"}]}"#,
            (false, true),
        );
    }

    #[test]
    fn reads_nulls_and_unknown_fields_as_kubernetes_does() {
        let pod: Pod = serde_json::from_str(
            r#"{"kind":"Pod","metadata":{"name":"p","annotations":null,"managedFields":[{}]},
                "spec":{"containers":[{"name":"c","resources":{"limits":{"a.b/c":3,"cpu":"100m"}}}],"initContainers":null}}"#,
        )
        .unwrap();
        let limits = &pod.spec.containers[0].resources.limits;
        assert_eq!(limits["a.b/c"], Amount("3".into()));
        assert_eq!(limits["cpu"], Amount("100m".into()));
        assert!(pod.metadata.annotations.is_empty());
    }

    #[test]
    fn containers_are_known_by_all_their_ids() {
        let status: PodStatus = serde_json::from_str(
            r#"{"containerStatuses":[{"name":"main","containerID":"containerd://abc","state":{"running":{}},
                    "lastState":{"terminated":{"containerID":"containerd://old","exitCode":1}}},{"name":"new","containerID":null}],
                "initContainerStatuses":[{"name":"load","containerID":"cri-o://def","lastState":{}}],
                "ephemeralContainerStatuses":[{"name":"look","containerID":"docker://ghi"}]}"#,
        )
        .unwrap();
        let ids: Vec<_> = status.container_ids().collect();
        assert_eq!(ids, [("abc", "main"), ("old", "main"), ("def", "load"), ("ghi", "look")]);
    }

    #[test]
    fn writes_only_what_is_set() {
        let mut pod = Pod::default();
        pod.metadata.name = "p".into();
        let json = serde_json::to_string(&pod).unwrap();
        assert_eq!(json, r#"{"metadata":{"name":"p"},"spec":{"containers":[]},"status":{}}"#);
    }
}
