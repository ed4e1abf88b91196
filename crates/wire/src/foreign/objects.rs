//! The parts of Kubernetes objects that Tessera reads, in their JSON form.
//!
//! These types are much smaller than the full types: a node may list fifty images that Tessera
//! never uses. Unknown fields are skipped. `null` means the same as an absent field, as in
//! Kubernetes.

mod node;
mod pod;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize};

pub use self::node::{Node, NodeAddress, NodeSpec, NodeStatus};
pub use self::pod::{
    Container, ContainerStatus, EnvVar, LastState, Pod, PodConditions, PodSpec, PodStatus, Resources,
    SUBMITTER, SchedulingGroup, Terminated,
};

/// Deserializes `null` as the default value.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Identity, labels and annotations of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metadata {
    /// Name, unique among the existing objects of one kind in one namespace.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Namespace, or empty for cluster-wide objects.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// UID, unique over time: a new object of the same name gets another UID.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Labels, which selectors match.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations, for example the grant of a pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Time when the object was created, in RFC 3339 form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_timestamp: Option<String>,
    /// Time when the deletion of the object began, or `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_timestamp: Option<String>,
}

/// A condition in the status of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition, such as `Ready` or `PodScheduled`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Status of the condition: `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason in one word, such as `Unschedulable`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Time of the last change of `status`, in RFC 3339 form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<String>,
    /// Human-readable message.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Amount>;

/// An amount as text, exactly as in the manifest: `4`, `100m`, `16Gi`.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Amount(pub String);

impl fmt::Debug for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Amount({})", self.0)
    }
}

impl<'de> Deserialize<'de> for Amount {
    /// Accepts strings, which Kubernetes sends, and numbers, which users write by hand.
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
