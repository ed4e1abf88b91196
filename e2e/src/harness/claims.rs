//! Objects of dynamic resource allocation, and pods that use them.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod, PodResourceClaim, ResourceClaim as UsedClaim};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tessera_wire::{
    foreign::dra::ResourceClaim,
    tessera::{
        dra::{NodeDevices, Sharing, slice, slice_name},
        inventory,
    },
};

use super::Cluster;

impl Cluster {
    /// Returns the API of a kind in the group `resource.k8s.io`.
    pub(crate) fn resources(&self, kind: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("resource.k8s.io", "v1", kind));
        match kind {
            "ResourceSlice" => Api::all_with(self.client(), &resource),
            _ => Api::default_namespaced_with(self.client(), &resource),
        }
    }

    /// Creates an object of the group `resource.k8s.io` with this specification.
    pub(crate) async fn create_resource(&self, kind: &str, name: &str, spec: Value) -> Result<()> {
        self.resources(kind).create(&PostParams::default(), &resource(kind, name, spec)?).await?;
        Ok(())
    }

    pub(crate) async fn claim(&self, name: &str) -> Result<ResourceClaim> {
        let object = self.resources("ResourceClaim").get(name).await?;
        Ok(serde_json::from_value(serde_json::to_value(object)?)?)
    }
}

/// Returns an object of the group `resource.k8s.io`.
pub(crate) fn resource(kind: &str, name: &str, spec: Value) -> Result<DynamicObject> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": { "name": name }, "spec": spec,
    }))?)
}

/// Returns the slice that an agent writes for a virtual node with this inventory.
pub(crate) fn slice_of(node: &Node) -> Result<DynamicObject> {
    let name = node.metadata.name.as_deref().context("a node without a name")?;
    let annotations = node.metadata.annotations.as_ref();
    let text = annotations.and_then(|all| all.get(inventory::KEY)).context("a node without an inventory")?;
    let inventory = inventory::parse(text)?;
    let devices = NodeDevices {
        node: name,
        gpus: &inventory.gpus,
        topology: &inventory.topology,
        details: &[],
        driver_version: None,
        sharing: Sharing::Shares,
    };
    resource("ResourceSlice", &slice_name(name), serde_json::to_value(slice(&devices, 1))?)
}

/// Adds a claim to a pod and to its container.
pub(crate) fn add_claim(pod: &mut Pod, claim: PodResourceClaim) -> Result<()> {
    let spec = pod.spec.as_mut().context("a pod without a specification")?;
    let container = spec.containers.first_mut().context("a pod without a container")?;
    let used = UsedClaim { name: claim.name.clone(), request: None };
    container.resources.get_or_insert_default().claims.get_or_insert_default().push(used);
    spec.resource_claims.get_or_insert_default().push(claim);
    Ok(())
}
