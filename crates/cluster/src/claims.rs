//! Reads claims of dynamic resource allocation and writes their status.
//!
//! Claims are exchanged as JSON values, because a status that is written back must keep the fields that Tessera does
//! not know.

use http::{Method, Request, header::CONTENT_TYPE};
use kube::Client;
use serde_json::Value;
use tessera_wire::foreign::dra::{GROUP, VERSION};

use crate::{ApiError, is_served};

/// Returns whether the API server serves version `v1` of dynamic resource allocation, which Kubernetes has from 1.34 on.
///
/// # Errors
/// Fails if the API server does not answer.
pub async fn are_served(client: &Client) -> Result<bool, ApiError> {
    is_served(client, GROUP, VERSION, "resourceclaims").await
}

/// Returns the current state of a claim.
///
/// # Errors
/// Fails if the claim does not exist or the API server does not answer.
pub async fn read(client: &Client, namespace: &str, name: &str) -> Result<Value, ApiError> {
    send(client, Method::GET, &path(namespace, name), Vec::new()).await
}

/// Replaces the status of a claim and returns the claim. The API server rejects the write if `claim` does not have the
/// newest resource version.
///
/// # Errors
/// Fails if the API server rejects the write or does not answer.
pub async fn write_status(
    client: &Client,
    namespace: &str,
    name: &str,
    claim: &Value,
) -> Result<Value, ApiError> {
    let path = format!("{}/status", path(namespace, name));
    send(client, Method::PUT, &path, claim.to_string().into_bytes()).await
}

fn path(namespace: &str, name: &str) -> String {
    format!("/apis/{GROUP}/{VERSION}/namespaces/{namespace}/resourceclaims/{name}")
}

async fn send(client: &Client, method: Method, path: &str, body: Vec<u8>) -> Result<Value, ApiError> {
    let request =
        Request::builder().method(method).uri(path).header(CONTENT_TYPE, "application/json").body(body);
    Ok(client.request(request.map_err(|error| ApiError::Answer(error.to_string()))?).await?)
}
