//! Changes annotations of a node, unless the node has changed since it was read.

use std::collections::BTreeMap;

use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;
use tessera_wire::foreign::objects::Node;

use crate::{ApiError, LeanNode};

/// A node and the version at which it was read.
#[derive(Clone, Debug)]
pub struct VersionedNode {
    /// The node object.
    pub node: Node,
    /// Version of the object, for a write that must not undo a change of others.
    pub version: String,
}

/// Reads a node.
///
/// # Errors
/// [`ApiError`] if the node cannot be read.
pub async fn read(client: &Client, name: &str) -> Result<VersionedNode, ApiError> {
    let node = Api::<LeanNode>::all(client.clone()).get(name).await?;
    let version = node.resource_version().unwrap_or_default();
    Ok(VersionedNode { node: node.into(), version })
}

/// Sets annotations of a node, and removes those without a value. Returns false if the node has changed since
/// `version`.
///
/// # Errors
/// [`ApiError`] if the node cannot be written.
pub async fn write(
    client: &Client,
    name: &str,
    version: &str,
    annotations: &BTreeMap<&'static str, Option<String>>,
) -> Result<bool, ApiError> {
    let patch = json!({ "metadata": { "resourceVersion": version, "annotations": annotations } });
    let nodes = Api::<LeanNode>::all(client.clone());
    match nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error.into()),
    }
}
