//! Lists objects page by page and keeps only what the caller selects.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::ListParams;
use kube::core::Request;
use kube::{Api, Client};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::pod_group::{PodGroup, PodGroupApi};
use tessera_wire::tessera::gang::GangKey;

use crate::causes::innermost;

/// Objects per page. A larger page saves round trips, a smaller one saves memory.
const PAGE_SIZE: u32 = 1000;

/// Selects objects of a list or a watch. The default selects all objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Label selector, such as `key=value,...`.
    pub labels: Option<String>,
    /// Field selector, such as `spec.nodeName=n,...`.
    pub fields: Option<String>,
}

/// Kind of the listed objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListKind {
    /// Nodes of the cluster.
    Nodes,
    /// Pods of all namespaces.
    Pods,
    /// ResourceQuotas of all namespaces.
    ResourceQuotas,
    /// PodDisruptionBudgets of all namespaces.
    DisruptionBudgets,
    /// ResourceClaims of all namespaces. Not every API server serves them.
    ResourceClaims,
    /// DeviceClasses. Not every API server serves them.
    DeviceClasses,
}

/// Error of a read from the API server, in the words of `kubectl`.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The API server rejected the request.
    #[error("Error from server ({reason}): {message}")]
    Refused {
        /// Reason in one word, such as `Forbidden` or `NotFound`.
        reason: String,
        /// Message of the API server.
        message: String,
    },
    /// The API server cannot be reached.
    #[error("Unable to connect to the server: {0}")]
    Unreachable(String),
    /// The answer cannot be parsed.
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

/// Lists the selected objects of a kind and returns what `keep` returns for each of them. If the
/// pages expire, the list starts again from the first object.
pub async fn list<T, K>(
    client: &Client,
    kind: ListKind,
    selection: &Selection,
    mut keep: impl FnMut(T) -> Option<K>,
) -> Result<Vec<K>, ApiError>
where
    T: DeserializeOwned,
{
    let mut kept = Vec::new();
    let mut parameters = ListParams { limit: Some(PAGE_SIZE), ..ListParams::default() };
    parameters.label_selector.clone_from(&selection.labels);
    parameters.field_selector.clone_from(&selection.fields);
    let request = Request::new(kind.path());
    loop {
        let page = request.list(&parameters).map_err(|error| ApiError::Answer(error.to_string()))?;
        let text = match client.request_text(page).await.map_err(ApiError::from) {
            // The pages expired before they were read. As kubectl does, read everything at once.
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

/// Reads one node.
pub async fn node(client: &Client, name: &str) -> Result<Node, ApiError> {
    get(client, &format!("/api/v1/nodes/{name}")).await
}

/// Reads one pod.
pub async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Pod, ApiError> {
    get(client, &format!("/api/v1/namespaces/{namespace}/pods/{name}")).await
}

/// Reads the object with the size of a gang, or returns `None` if there is none, or none that may be read.
pub async fn pod_group(client: &Client, gang: &GangKey) -> Option<PodGroup> {
    #[derive(Deserialize)]
    struct Object {
        #[serde(default)]
        spec: serde_json::Value,
    }
    let PodGroupApi { group, version, plural, .. } = PodGroupApi::of(gang.origin)?;
    let GangKey { namespace, name, origin } = gang;
    let path = format!("/apis/{group}/{version}/namespaces/{namespace}/{plural}/{name}");
    let object: Object = get(client, &path).await.ok()?;
    Some(PodGroup::new(*origin, namespace, name, &object.spec))
}

/// Returns the annotations of a lease, or an empty map if the lease is missing or may not be read.
pub async fn lease_annotations(client: &Client, namespace: &str, name: &str) -> BTreeMap<String, String> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let found = leases.get_opt(name).await.ok().flatten();
    found.and_then(|lease| lease.metadata.annotations).unwrap_or_default()
}

/// Reads JSON from a Service through the API server. `service` is `NAME:PORT`, and `path` begins with a slash.
pub async fn from_service<T: DeserializeOwned>(
    client: &Client,
    namespace: &str,
    service: &str,
    path: &str,
) -> Result<T, ApiError> {
    get(client, &format!("/api/v1/namespaces/{namespace}/services/{service}/proxy{path}")).await
}

/// Returns the names of all namespaces.
pub async fn namespaces(client: &Client) -> Result<Vec<String>, ApiError> {
    let found = Api::<Namespace>::all(client.clone()).list_metadata(&ListParams::default()).await?;
    Ok(found.items.into_iter().filter_map(|namespace| namespace.metadata.name).collect())
}

/// Returns the data of a ConfigMap, or `None` if it does not exist.
pub async fn config_map(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<Option<BTreeMap<String, String>>, ApiError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    Ok(maps.get_opt(name).await?.map(|map| map.data.unwrap_or_default()))
}

/// Returns the names and data of all ConfigMaps of a namespace.
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

impl ListKind {
    fn path(self) -> &'static str {
        match self {
            Self::Nodes => "/api/v1/nodes",
            Self::Pods => "/api/v1/pods",
            Self::ResourceQuotas => "/api/v1/resourcequotas",
            Self::DisruptionBudgets => "/apis/policy/v1/poddisruptionbudgets",
            Self::ResourceClaims => "/apis/resource.k8s.io/v1/resourceclaims",
            Self::DeviceClasses => "/apis/resource.k8s.io/v1/deviceclasses",
        }
    }
}

impl ApiError {
    /// Returns whether the user lacks a permission.
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
