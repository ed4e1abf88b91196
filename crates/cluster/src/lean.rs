//! Pods and nodes with no more in them than Tessera reads: what a watch of a large cluster keeps in memory.

use std::borrow::Cow;

use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::{Deserialize, Serialize};
use tessera_wire::objects::{NodeStatus, PodSpec, PodStatus};

/// A pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanPod {
    /// Who it is.
    pub metadata: ObjectMeta,
    /// What it asks for.
    pub spec: PodSpec,
    /// What has become of it.
    pub status: PodStatus,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeanNode {
    /// Who it is.
    pub metadata: ObjectMeta,
    /// What it offers.
    pub status: NodeStatus,
}

macro_rules! core_v1_resource {
    ($type:ty, $scope:ty, $kind:literal, $plural:literal) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                "".into()
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

core_v1_resource!(LeanPod, NamespaceResourceScope, "Pod", "pods");
core_v1_resource!(LeanNode, ClusterResourceScope, "Node", "nodes");
