//! Pods, nodes, budgets and quotas reduced to the fields that Tessera reads, so that a watch of a large
//! cluster needs little memory.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::Resource;
use serde::{Deserialize, Deserializer, Serialize};
use tessera_wire::foreign::disruption::{BudgetSpec, BudgetStatus};
use tessera_wire::foreign::dra::{ClaimSpec, ClaimStatus, ClassSpec, SliceSpec};
use tessera_wire::foreign::objects::{NodeSpec, NodeStatus, PodSpec, PodStatus};
use tessera_wire::foreign::resource_quota::ResourceQuotaSpec;

/// A pod with only the fields that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanPod {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// Requests and placement constraints.
    pub spec: PodSpec,
    /// Phase and container states.
    pub status: PodStatus,
}

/// A node with only the fields that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanNode {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// Taints and other wishes of the administrator.
    pub spec: NodeSpec,
    /// Capacity and conditions.
    pub status: NodeStatus,
}

/// Deserializes metadata without `managedFields`, which are most of its size and are never read.
fn lean_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Lean {
        name: Option<String>,
        generate_name: Option<String>,
        namespace: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        labels: Option<BTreeMap<String, String>>,
        annotations: Option<BTreeMap<String, String>>,
        creation_timestamp: Option<Time>,
        deletion_timestamp: Option<Time>,
        deletion_grace_period_seconds: Option<i64>,
    }
    let lean = Option::<Lean>::deserialize(deserializer)?.unwrap_or_default();
    Ok(ObjectMeta {
        name: lean.name,
        generate_name: lean.generate_name,
        namespace: lean.namespace,
        uid: lean.uid,
        resource_version: lean.resource_version,
        labels: lean.labels,
        annotations: lean.annotations,
        creation_timestamp: lean.creation_timestamp,
        deletion_timestamp: lean.deletion_timestamp,
        deletion_grace_period_seconds: lean.deletion_grace_period_seconds,
        ..ObjectMeta::default()
    })
}

/// A PodDisruptionBudget with only the fields that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanBudget {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// Selector of the protected pods.
    pub spec: BudgetSpec,
    /// Number of disruptions still allowed.
    pub status: BudgetStatus,
}

/// A ResourceQuota with only the fields that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanResourceQuota {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// Limits of the quota.
    pub spec: ResourceQuotaSpec,
}

/// A ResourceSlice with only the fields that Tessera reads or writes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanSlice {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// The devices.
    pub spec: SliceSpec,
}

/// A ResourceClaim with only the fields that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanClaim {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// What is requested.
    pub spec: ClaimSpec,
    /// What was allocated, and for which pods.
    pub status: ClaimStatus,
}

/// A DeviceClass with only the fields that Tessera reads.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanClass {
    /// Metadata without `managedFields`.
    #[serde(deserialize_with = "lean_metadata")]
    pub metadata: ObjectMeta,
    /// Which devices belong to the class.
    pub spec: ClassSpec,
}

macro_rules! v1_resource {
    ($type:ty, $scope:ty, $group:literal, $kind:literal, $plural:literal) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

v1_resource!(LeanPod, NamespaceResourceScope, "", "Pod", "pods");
v1_resource!(LeanNode, ClusterResourceScope, "", "Node", "nodes");
v1_resource!(LeanSlice, ClusterResourceScope, "resource.k8s.io", "ResourceSlice", "resourceslices");
v1_resource!(LeanClaim, NamespaceResourceScope, "resource.k8s.io", "ResourceClaim", "resourceclaims");
v1_resource!(LeanClass, ClusterResourceScope, "resource.k8s.io", "DeviceClass", "deviceclasses");
v1_resource!(LeanBudget, NamespaceResourceScope, "policy", "PodDisruptionBudget", "poddisruptionbudgets");
v1_resource!(LeanResourceQuota, NamespaceResourceScope, "", "ResourceQuota", "resourcequotas");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_managed_fields_and_keeps_the_rest() {
        let json = r#"{"metadata":{"name":"p","uid":"u","resourceVersion":"7","annotations":{"a":"b"},
            "creationTimestamp":"2026-01-01T00:00:00Z","managedFields":[{"manager":"m","fieldsV1":{"f:spec":{}}}]},
            "spec":{"containers":[]}}"#;
        let pod: LeanPod = serde_json::from_str(json).unwrap();
        assert_eq!(pod.metadata.resource_version.as_deref(), Some("7"));
        assert_eq!(pod.metadata.annotations.unwrap()["a"], "b");
        assert!(pod.metadata.creation_timestamp.is_some());
        assert!(pod.metadata.managed_fields.is_none());
    }
}
