//! Reads one pod by name.

use kube::{Api, Client};
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
