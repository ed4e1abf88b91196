//! Evicts pods through the eviction API, so that the API server applies PodDisruptionBudgets.

use http::Request;
use http::header::CONTENT_TYPE;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::Client;
use serde_json::json;

use crate::ApiError;

/// The answer of the API server to an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictionOutcome {
    /// The pod ends.
    Accepted,
    /// The pod is gone, or another pod has its name.
    Gone,
    /// A PodDisruptionBudget does not allow the eviction now. The text is the API server's.
    Refused(String),
}

/// Evicts the pod with this UID.
///
/// # Errors
/// [`ApiError`] if the API server does not answer, or refuses for another reason than a budget.
pub async fn evict(
    client: &Client,
    (namespace, name): (&str, &str),
    uid: &str,
) -> Result<EvictionOutcome, ApiError> {
    let body = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": { "name": name, "namespace": namespace },
        "deleteOptions": { "preconditions": { "uid": uid } },
    });
    let request = Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction"))
        .header(CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes())
        .map_err(|error| ApiError::Answer(error.to_string()))?;
    match client.request::<Status>(request).await {
        Ok(_created) => Ok(EvictionOutcome::Accepted),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(EvictionOutcome::Gone),
        Err(kube::Error::Api(status)) if status.code == 429 => {
            Ok(EvictionOutcome::Refused(status.message.clone()))
        }
        Err(error) => Err(error.into()),
    }
}
