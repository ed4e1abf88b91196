//! Reads and annotates one pod by name.

use std::collections::BTreeMap;

use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tessera_wire::foreign::objects::Pod;

use crate::LeanPod;

/// The API server did not return the pod.
#[derive(Debug, thiserror::Error)]
#[error("cannot read pod {namespace}/{name} from the API server")]
pub struct GetError {
    namespace: String,
    name: String,
    #[source]
    source: Box<kube::Error>,
}

/// Returns the current state of the pod, or `None` if it does not exist.
pub async fn get_pod(client: &Client, namespace: &str, name: &str) -> Result<Option<Pod>, GetError> {
    let api: Api<LeanPod> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(name).await.map_err(|source| GetError {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    })?;
    Ok(found.map(Pod::from))
}

/// The annotations of a pod were not written, or it is unknown whether they were.
#[derive(Debug, thiserror::Error)]
#[error("cannot annotate pod {namespace}/{name}")]
pub struct AnnotateError {
    namespace: String,
    name: String,
    #[source]
    source: Box<kube::Error>,
}

impl AnnotateError {
    /// Returns whether the caller lacks the right, or a policy refuses the change.
    #[must_use]
    pub fn is_forbidden(&self) -> bool {
        matches!(&*self.source, kube::Error::Api(status) if status.code == 403)
    }
}

/// Sets annotations of the pod with this namespace, name and UID. Another pod of that name is not changed.
pub async fn annotate_pod(
    client: &Client,
    (namespace, name, uid): (&str, &str, &str),
    annotations: &BTreeMap<String, String>,
) -> Result<(), AnnotateError> {
    let api: Api<LeanPod> = Api::namespaced(client.clone(), namespace);
    let patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
    let written = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
    written.map(drop).map_err(|source| AnnotateError {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    })
}
