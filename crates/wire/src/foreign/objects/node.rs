//! Nodes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Amounts, Condition, Metadata, null_as_default};
use crate::foreign::taint::{SoftTaint, soft_taints};

/// A node, as far as placing pods on it needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Who it is.
    pub metadata: Metadata,
    /// What is wanted of it.
    pub spec: NodeSpec,
    /// What it offers.
    pub status: NodeStatus,
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
pub struct NodeSpec {
    /// Whether new pods shall stay away, as `kubectl cordon` sets it.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub unschedulable: bool,
    /// Its taints, of those that only ask.
    #[serde(rename = "taints", deserialize_with = "soft_taints", skip_serializing)]
    pub soft_taints: Vec<SoftTaint>,
}
