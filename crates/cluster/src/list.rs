//! Lists, page by page, of which only what the caller keeps stays in memory.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::ListParams;
use kube::core::Request;
use kube::{Api, Client};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use tessera_wire::objects::{Condition, Node, Pod};

use crate::causes::innermost;

/// Objects asked for at a time: more save round trips, fewer save memory.
const PAGE: u32 = 1000;

/// Which objects are meant; all by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// `key=value,...`
    pub labels: Option<String>,
    /// `spec.nodeName=n,...`
    pub fields: Option<String>,
}

/// What kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nodes.
    Nodes,
    /// Pods of all namespaces.
    Pods,
}

/// What the API server did not do. The words are those `kubectl` uses.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// It says no.
    #[error("Error from server ({reason}): {message}")]
    Refused {
        /// In a word: `Forbidden`, `NotFound`.
        reason: String,
        /// In a sentence.
        message: String,
    },
    /// It cannot be reached.
    #[error("Unable to connect to the server: {0}")]
    Unreachable(String),
    /// It answers what nobody understands.
    #[error("Error from server: {0}")]
    Answer(String),
}

#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: PageMetadata,
    items: Vec<T>,
}

#[derive(Default, Deserialize)]
struct PageMetadata {
    #[serde(rename = "continue", default)]
    rest: Option<String>,
}

/// All objects of a kind that are selected, as far as `keep` keeps them. One that begins anew, because its pages have expired,
/// forgets what it kept.
pub async fn list<T, K>(
    client: &Client,
    kind: Kind,
    selection: &Selection,
    mut keep: impl FnMut(T) -> Option<K>,
) -> Result<Vec<K>, ApiError>
where
    T: DeserializeOwned,
{
    let mut kept = Vec::new();
    let mut parameters = ListParams { limit: Some(PAGE), ..ListParams::default() };
    parameters.label_selector.clone_from(&selection.labels);
    parameters.field_selector.clone_from(&selection.fields);
    let request = Request::new(kind.path());
    loop {
        let page = request.list(&parameters).map_err(|error| ApiError::Answer(error.to_string()))?;
        let text = match client.request_text(page).await.map_err(ApiError::from) {
            // The pages were too slow for a busy cluster: all at once, as kubectl does.
            Err(ApiError::Refused { reason, .. }) if reason == "Expired" && parameters.limit.is_some() => {
                kept.clear();
                (parameters.limit, parameters.continue_token) = (None, None);
                continue;
            }
            answer => answer?,
        };
        let page: Page<T> =
            serde_json::from_str(&text).map_err(|error| ApiError::Answer(error.to_string()))?;
        drop(text);
        kept.extend(page.items.into_iter().filter_map(&mut keep));
        match page.metadata.rest.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok(kept),
        }
    }
}

/// One node.
pub async fn node(client: &Client, name: &str) -> Result<Node, ApiError> {
    get(client, &format!("/api/v1/nodes/{name}")).await
}

/// One pod.
pub async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Pod, ApiError> {
    get(client, &format!("/api/v1/namespaces/{namespace}/pods/{name}")).await
}

/// What kube-scheduler last said of a pod it did not place.
pub async fn unschedulable(client: &Client, namespace: &str, name: &str) -> Result<Option<String>, ApiError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Told {
        status: Conditions,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Conditions {
        conditions: Vec<Condition>,
    }
    let told: Told = get(client, &format!("/api/v1/namespaces/{namespace}/pods/{name}")).await?;
    let refusal =
        told.status.conditions.into_iter().find(|told| told.kind == "PodScheduled" && told.status == "False");
    Ok(refusal.map(|told| told.message).filter(|message| !message.is_empty()))
}

/// The annotations of a lease; none where there is no such lease, or it may not be read.
pub async fn lease_notes(client: &Client, namespace: &str, name: &str) -> BTreeMap<String, String> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let found = leases.get_opt(name).await.ok().flatten();
    found.and_then(|lease| lease.metadata.annotations).unwrap_or_default()
}

/// The names of all namespaces.
pub async fn namespaces(client: &Client) -> Result<Vec<String>, ApiError> {
    let found = Api::<Namespace>::all(client.clone()).list_metadata(&ListParams::default()).await?;
    Ok(found.items.into_iter().filter_map(|namespace| namespace.metadata.name).collect())
}

/// The data of a ConfigMap; `None` where there is none.
pub async fn config_map(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<Option<BTreeMap<String, String>>, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    Ok(maps.get_opt(name).await?.map(|map| map.data.unwrap_or_default()))
}

/// All ConfigMaps of a namespace: their names and data.
pub async fn config_maps(
    client: &Client,
    namespace: &str,
) -> Result<Vec<(String, BTreeMap<String, String>)>, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let found = maps.list(&ListParams::default()).await?;
    let read = |map: ConfigMap| (map.metadata.name.unwrap_or_default(), map.data.unwrap_or_default());
    Ok(found.items.into_iter().map(read).collect())
}

async fn get<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T, ApiError> {
    let request =
        http::Request::get(path).body(Vec::new()).map_err(|error| ApiError::Answer(error.to_string()))?;
    Ok(client.request(request).await?)
}

// === impl Kind ===

impl Kind {
    fn path(self) -> &'static str {
        match self {
            Self::Nodes => "/api/v1/nodes",
            Self::Pods => "/api/v1/pods",
        }
    }
}

// === impl ApiError ===

impl ApiError {
    /// Whether the user lacks a right.
    #[must_use]
    pub fn is_forbidden(&self) -> bool {
        matches!(self, Self::Refused { reason, .. } if reason == "Forbidden")
    }
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.reason.is_empty() => Self::Answer(status.message.clone()),
            kube::Error::Api(status) => {
                Self::Refused { reason: status.reason.clone(), message: status.message.clone() }
            }
            kube::Error::SerdeError(error) => Self::Answer(error.to_string()),
            other => Self::Unreachable(innermost(&other)),
        }
    }
}
