//! DeviceClass: what users name in a claim.

use serde::{Deserialize, Serialize};

use super::claim::{OpaqueConfig, Selector};
use crate::foreign::objects::{Metadata, null_as_default};

/// A class of devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceClass {
    /// Identity, labels and annotations.
    pub metadata: Metadata,
    /// Which devices belong to the class.
    pub spec: ClassSpec,
}

/// Content of a class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClassSpec {
    /// Expressions that a device must fulfil.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub selectors: Vec<Selector>,
    /// Settings for the driver of each device of the class.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<ClassConfig>,
    /// Resource name in pods that the class serves without a claim, or `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_resource_name: Option<String>,
}

/// Settings of a class for a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassConfig {
    /// Settings in a format of the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opaque: Option<OpaqueConfig>,
}
