//! Finds out which kinds of objects the API server serves.

use kube::Client;
use serde::Deserialize;

use crate::ApiError;

#[derive(Deserialize)]
struct ResourceList {
    #[serde(default)]
    resources: Vec<ServedResource>,
}

#[derive(Deserialize)]
struct ServedResource {
    name: String,
}

/// Returns whether the API server serves objects by this name in paths, in one version of an API group.
///
/// # Errors
/// Fails if the API server does not answer.
pub async fn is_served(client: &Client, group: &str, version: &str, plural: &str) -> Result<bool, ApiError> {
    let request = http::Request::get(format!("/apis/{group}/{version}"))
        .body(Vec::new())
        .map_err(|error| ApiError::Answer(error.to_string()))?;
    match client.request::<ResourceList>(request).await {
        Ok(list) => Ok(list.resources.iter().any(|resource| resource.name == plural)),
        // The answer for an unknown API group is plain text, so only its code says so.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error.into()),
    }
}
