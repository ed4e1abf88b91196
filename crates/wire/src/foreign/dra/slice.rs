//! ResourceSlice: the devices that a driver offers on a node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Amount, Metadata, null_as_default};

/// A list of devices of one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceSlice {
    /// Identity, labels and annotations.
    pub metadata: Metadata,
    /// The devices.
    pub spec: SliceSpec,
}

/// Content of a slice. All fields but the devices and the pool's numbers are immutable.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SliceSpec {
    /// Name of the driver that serves the devices.
    #[serde(deserialize_with = "null_as_default")]
    pub driver: String,
    /// The pool to which the devices belong.
    #[serde(deserialize_with = "null_as_default")]
    pub pool: Pool,
    /// Node that can use the devices, or empty if other fields select nodes.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// The devices in the order in which an allocator tries them.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
}

/// A pool: all slices of one driver that are updated together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Pool {
    /// Name of the pool, unique for the driver.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Generation. Slices of lower generations are ignored.
    pub generation: i64,
    /// Number of slices of this generation.
    pub resource_slice_count: i64,
}

/// One device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Device {
    /// Name, unique in the pool.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Attributes by qualified name. Names without a domain belong to the driver's.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by qualified name.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, Capacity>,
    /// Whether several claims can hold the device, each a part of its capacities. An API server whose gate
    /// `DRAConsumableCapacity` is off drops the field.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub allow_multiple_allocations: bool,
    /// Taints, which keep claims away that do not tolerate them.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<DeviceTaint>,
}

/// Value of an attribute. Kubernetes sets exactly one of the fields, or a field that Tessera does not know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attribute {
    /// A number.
    #[serde(rename = "int", skip_serializing_if = "Option::is_none")]
    pub int: Option<i64>,
    /// A truth value.
    #[serde(rename = "bool", skip_serializing_if = "Option::is_none")]
    pub boolean: Option<bool>,
    /// A text of at most 64 bytes.
    #[serde(rename = "string", skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// A semantic version of at most 64 bytes.
    #[serde(rename = "version", skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// Capacity of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Capacity {
    /// All that the device has.
    pub value: Amount,
    /// Amounts that claims may consume, for a device that can be allocated several times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_policy: Option<RequestPolicy>,
}

/// Rules for the amounts that claims consume of a capacity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RequestPolicy {
    /// Amount that a claim consumes if it names none.
    #[serde(rename = "default", skip_serializing_if = "Option::is_none")]
    pub default_amount: Option<Amount>,
    /// Amounts that a claim can consume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_range: Option<RequestRange>,
}

/// A range of amounts. Requests are rounded up to the next step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestRange {
    /// Smallest amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<Amount>,
    /// Largest amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<Amount>,
    /// Distance of two valid amounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<Amount>,
}

/// Taint of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DeviceTaint {
    /// Key, which tolerations name.
    #[serde(deserialize_with = "null_as_default")]
    pub key: String,
    /// Value, which tolerations may name.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// Effect: `NoSchedule`, `NoExecute` or `None`.
    #[serde(deserialize_with = "null_as_default")]
    pub effect: String,
    /// Time at which the taint was added, in RFC 3339 form. The API server sets it if it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}

// === impl Attribute ===

impl Attribute {
    /// Returns a number.
    #[must_use]
    pub fn int(value: i64) -> Self {
        Self { int: Some(value), ..Self::default() }
    }

    /// Returns a text.
    #[must_use]
    pub fn text(value: impl Into<String>) -> Self {
        Self { text: Some(value.into()), ..Self::default() }
    }

    /// Returns a version.
    #[must_use]
    pub fn version(value: impl Into<String>) -> Self {
        Self { version: Some(value.into()), ..Self::default() }
    }
}

// === impl SliceSpec ===

impl SliceSpec {
    /// Returns whether both slices offer the same. The time of a taint, which the API server adds, does not count.
    #[must_use]
    pub fn offers_same(&self, other: &Self) -> bool {
        let without_times = |slice: &Self| {
            let mut slice = slice.clone();
            for taint in slice.devices.iter_mut().flat_map(|device| &mut device.taints) {
                taint.time_added = None;
            }
            slice
        };
        without_times(self) == without_times(other)
    }
}
