//! One pod, asked for by name.

use kube::{Api, Client};
use tessera_wire::objects::Pod;

use crate::LeanPod;

/// The API server did not say.
#[derive(Debug, thiserror::Error)]
#[error("the API server did not tell about pod {namespace}/{name}")]
pub struct GetError {
    namespace: String,
    name: String,
    #[source]
    source: Box<kube::Error>,
}

/// The pod as it is now; `None` where there is none.
pub async fn get_pod(client: &Client, namespace: &str, name: &str) -> Result<Option<Pod>, GetError> {
    let api: Api<LeanPod> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(name).await.map_err(|source| GetError {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    })?;
    Ok(found.map(Pod::from))
}
