//! ResourceClaim: what pods want, and in the status what was allocated.

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Amounts, Condition, Metadata, null_as_default};

/// A claim for devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceClaim {
    /// Identity, labels and annotations.
    pub metadata: Metadata,
    /// What is requested.
    #[serde(deserialize_with = "null_as_default")]
    pub spec: ClaimSpec,
    /// What was allocated, and for which pods.
    #[serde(deserialize_with = "null_as_default")]
    pub status: ClaimStatus,
}

/// What a claim requests. It is immutable.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimSpec {
    /// Requests for devices.
    #[serde(deserialize_with = "null_as_default")]
    pub devices: ClaimDevices,
}

/// Requests of a claim, with constraints between them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimDevices {
    /// Requests, each with a name of its own. All must be fulfilled on one node.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<DeviceRequest>,
    /// Conditions on the devices of several requests.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub constraints: Vec<Constraint>,
    /// Settings for drivers.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<ClaimConfig>,
}

/// A request: either exactly one, or a list of alternatives by falling preference.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DeviceRequest {
    /// Name, unique in the claim.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// The request, if it has no alternatives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exactly: Option<ExactRequest>,
    /// Alternatives, of which the first that is possible is taken.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub first_available: Vec<SubRequest>,
}

/// A request without alternatives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExactRequest {
    /// Class, selectors, count and amounts.
    #[serde(flatten)]
    pub devices: RequestedDevices,
    /// Whether the claim only looks at the devices, also at those of other claims.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
}

/// One of several alternatives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SubRequest {
    /// Name, unique in the request.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Class, selectors, count and amounts.
    #[serde(flatten)]
    pub devices: RequestedDevices,
}

/// Devices of one class that a request names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RequestedDevices {
    /// Name of the class.
    #[serde(deserialize_with = "null_as_default")]
    pub device_class_name: String,
    /// Expressions that a device must fulfil.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub selectors: Vec<Selector>,
    /// `ExactCount`, or `All` for every device that matches.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub allocation_mode: String,
    /// Number of different devices. The API server sets 1 if it is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<i64>,
    /// Amounts of each device.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "CapacityRequest::is_empty")]
    pub capacity: CapacityRequest,
}

/// Amounts of capacities that a request names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CapacityRequest {
    /// Amounts by the name of the capacity.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Amounts::is_empty")]
    pub requests: Amounts,
}

/// A condition on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Selector {
    /// An expression in CEL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cel: Option<CelSelector>,
}

/// An expression in CEL.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CelSelector {
    /// Text of the expression.
    #[serde(deserialize_with = "null_as_default")]
    pub expression: String,
}

/// A condition on the devices of several requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Constraint {
    /// Names of the requests; all if empty.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<String>,
    /// Attribute in which all devices must agree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub match_attribute: Option<String>,
    /// Attribute in which all devices must differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_attribute: Option<String>,
}

/// Settings of a claim for a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimConfig {
    /// Names of the requests; all if empty.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<String>,
    /// Settings in a format of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opaque: Option<OpaqueConfig>,
}

/// Settings in a format of a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpaqueConfig {
    /// Name of the driver.
    #[serde(deserialize_with = "null_as_default")]
    pub driver: String,
    /// The settings.
    pub parameters: serde_json::Value,
}

/// What was allocated for a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClaimStatus {
    /// The devices, or `None` while nothing is allocated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocation: Option<Allocation>,
    /// Pods that may use the devices.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub reserved_for: Vec<Consumer>,
    /// What the drivers report about the devices.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceStatus>,
}

/// The allocated devices. They cannot be changed, only cleared and set anew.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Allocation {
    /// The devices and the settings for them.
    #[serde(deserialize_with = "null_as_default")]
    pub devices: AllocatedDevices,
    /// Time of the allocation, in RFC 3339 form. kube-scheduler rejects an allocation without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocation_timestamp: Option<String>,
}

/// Devices of an allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AllocatedDevices {
    /// The devices, in the order of the requests.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub results: Vec<AllocationResult>,
    /// Settings for drivers, from the classes and from the claim.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<AllocationConfig>,
}

/// One allocated device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AllocationResult {
    /// Name of the request, or `request/alternative` for one of several alternatives.
    #[serde(deserialize_with = "null_as_default")]
    pub request: String,
    /// Name of the driver.
    #[serde(deserialize_with = "null_as_default")]
    pub driver: String,
    /// Pool of the device.
    #[serde(deserialize_with = "null_as_default")]
    pub pool: String,
    /// Name of the device.
    #[serde(deserialize_with = "null_as_default")]
    pub device: String,
    /// Whether the claim only looks at the device and holds nothing of it.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "std::ops::Not::not")]
    pub admin_access: bool,
    /// Identifies the share of a device that several claims can hold.
    #[serde(rename = "shareID", skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Amounts that the claim holds, by the name of the capacity.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Amounts::is_empty")]
    pub consumed_capacity: Amounts,
}

/// Settings for a driver in an allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AllocationConfig {
    /// Author of the settings: `FromClass` or `FromClaim`.
    #[serde(deserialize_with = "null_as_default")]
    pub source: String,
    /// Names of the requests; all if empty.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<String>,
    /// Settings in a format of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opaque: Option<OpaqueConfig>,
}

/// A pod, or another object, that may use the devices of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Consumer {
    /// API group; empty for pods.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    /// Kind in lower case and plural: `pods`.
    #[serde(deserialize_with = "null_as_default")]
    pub resource: String,
    /// Name in the namespace of the claim.
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// UID of the object.
    #[serde(deserialize_with = "null_as_default")]
    pub uid: String,
}

/// Report of a driver about one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceStatus {
    /// Name of the driver.
    #[serde(deserialize_with = "null_as_default")]
    pub driver: String,
    /// Pool of the device.
    #[serde(deserialize_with = "null_as_default")]
    pub pool: String,
    /// Name of the device.
    #[serde(deserialize_with = "null_as_default")]
    pub device: String,
    /// Identifies the share of the device.
    #[serde(rename = "shareID", skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Conditions of the device.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

// === impl CapacityRequest ===

impl CapacityRequest {
    fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }
}

// === impl ResourceClaim ===

impl ResourceClaim {
    /// Returns the allocated devices of one driver; none while nothing is allocated.
    pub fn results<'a>(&'a self, driver: &'a str) -> impl Iterator<Item = &'a AllocationResult> {
        let results = self.status.allocation.iter().flat_map(|allocation| &allocation.devices.results);
        results.filter(move |result| result.driver == driver)
    }

    /// Returns whether the claim is reserved for the pod with this UID.
    #[must_use]
    pub fn is_reserved_for(&self, pod_uid: &str) -> bool {
        self.consumer_pods().any(|pod| pod.uid == pod_uid)
    }

    /// Returns the pods for which the claim is reserved.
    pub fn consumer_pods(&self) -> impl Iterator<Item = &Consumer> {
        let consumers = self.status.reserved_for.iter();
        consumers.filter(|consumer| consumer.api_group.is_empty() && consumer.resource == "pods")
    }
}

// === impl AllocationResult ===

impl AllocationResult {
    /// Returns the name of the request in the claim, without the alternative.
    #[must_use]
    pub fn main_request(&self) -> &str {
        self.request.split_once('/').map_or(&self.request, |(main, _)| main)
    }
}
