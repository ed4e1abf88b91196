//! The parts of Kubernetes objects that Tessera reads, as they stand in JSON.
//!
//! Much smaller than the full types: a node alone may list fifty images that nobody here asks for. Unknown fields are
//! skipped, and `null` means the same as absent, as it does to Kubernetes.

mod node;
mod pod;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize};

pub use self::node::{Node, NodeAddress, NodeSpec, NodeStatus};
pub use self::pod::{Container, ContainerStatus, LastState, Pod, PodSpec, PodStatus, Resources, Terminated};

/// Reads `null` as the default value.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
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
