//! Node objects.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_core::taint::Taint;

use super::{Amounts, Condition, Metadata, null_as_default};
use crate::foreign::constraint;

/// The parts of a node that placement needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Identity, labels and annotations.
    pub metadata: Metadata,
    /// Desired state of the node.
    pub spec: NodeSpec,
    /// Observed state of the node.
    pub status: NodeStatus,
}

/// Observed state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Total resources of the node.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: Amounts,
    /// Resources that are available to pods.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub allocatable: Amounts,
    /// Addresses of the node.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<NodeAddress>,
    /// Conditions of the node, such as `Ready`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

impl Node {
    /// Returns the value of the condition `Ready`, or `None` without it.
    #[must_use]
    pub fn is_ready(&self) -> Option<bool> {
        let ready = self.status.conditions.iter().find(|condition| condition.kind == "Ready");
        ready.map(|condition| condition.status == "True")
    }
}

/// One address of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeAddress {
    /// Type of the address, such as `InternalIP` or `Hostname`.
    #[serde(rename = "type", deserialize_with = "null_as_default")]
    pub kind: String,
    /// IP address or host name.
    #[serde(deserialize_with = "null_as_default")]
    pub address: String,
}

/// Desired state of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// True if the node accepts no new pods. `kubectl cordon` sets it.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub unschedulable: bool,
    /// Taints, which keep pods away.
    #[serde(deserialize_with = "constraint::taints", skip_serializing)]
    pub taints: Vec<Taint>,
}
