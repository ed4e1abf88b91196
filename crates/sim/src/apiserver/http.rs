//! Requests and answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Query as Parameters, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::path::Target;
use super::status::Problem;
use super::store::Store;
use super::{patch, watch};

/// What a list or watch asks for.
#[derive(Debug, Clone, Default)]
pub(super) struct Query {
    fields: Vec<(String, String, bool)>,
    labels: Vec<(String, String)>,
    pub(super) bookmarks: bool,
    pub(super) timeout: Option<Duration>,
}

pub(super) fn router(store: Arc<Store>) -> Router {
    Router::new().fallback(answer).layer(DefaultBodyLimit::disable()).with_state(store)
}

async fn answer(
    State(store): State<Arc<Store>>,
    method: Method,
    uri: Uri,
    Parameters(parameters): Parameters<HashMap<String, String>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if store.is_down() {
        return Problem::unavailable().into_response();
    }
    if matches!(uri.path(), "/readyz" | "/healthz" | "/livez") {
        return "ok".into_response();
    }
    let Some(target) = Target::parse(uri.path()) else { return Problem::no_such_path().into_response() };
    if method == Method::GET && target.name.is_empty() {
        return list_or_watch(store, target, &parameters);
    }
    let outcome = match (method, target.part.as_str()) {
        (Method::GET, _) => store.get(&target).map(|object| (StatusCode::OK, object)),
        (Method::POST, "binding") => read(&body)
            .and_then(|binding| store.bind(&target, &binding))
            .map(|answer| (StatusCode::CREATED, answer)),
        (Method::POST, _) if target.name.is_empty() => read(&body)
            .and_then(|object| store.create(&target, object))
            .map(|object| (StatusCode::CREATED, object)),
        (Method::PUT, _) => read(&body)
            .and_then(|object| store.replace(&target, object))
            .map(|object| (StatusCode::OK, object)),
        (Method::PATCH, _) => {
            let media = headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
            patch::Kind::of(media)
                .ok_or_else(Problem::unsupported_patch)
                .and_then(|kind| store.patch(&target, &read(&body)?, kind))
                .map(|object| (StatusCode::OK, object))
        }
        (Method::DELETE, _) => {
            let options = read(&body).unwrap_or_default();
            let asked = parameters.get("gracePeriodSeconds").and_then(|text| text.parse().ok());
            let grace = options["gracePeriodSeconds"].as_u64().or(asked);
            store.delete(&target, grace).map(|object| (StatusCode::OK, object))
        }
        _ => Err(Problem::no_such_path()),
    };
    match outcome {
        Ok((code, object)) => (code, Json(object)).into_response(),
        Err(problem) => problem.into_response(),
    }
}

fn list_or_watch(store: Arc<Store>, target: Target, parameters: &HashMap<String, String>) -> Response {
    let query = Query::read(parameters);
    let is_true = |key: &str| parameters.get(key).is_some_and(|value| value == "true" || value == "1");
    if is_true("watch") {
        let version = parameters.get("resourceVersion").and_then(|text| text.parse().ok());
        let version = version.unwrap_or_else(|| store.list(&target).0);
        return watch::answer(store, target, query, version);
    }
    let (version, mut items) = store.list(&target);
    items.retain(|object| query.selects(&target, object));
    Json(json!({
        "kind": format!("{}List", target.kind()), "apiVersion": target.api_version,
        "metadata": { "resourceVersion": version.to_string() }, "items": items,
    }))
    .into_response()
}

fn read(body: &Bytes) -> Result<Value, Problem> {
    serde_json::from_slice(body).map_err(|error| Problem::bad_request(error.to_string()))
}

// === impl Query ===

impl Query {
    fn read(parameters: &HashMap<String, String>) -> Self {
        let text = |key: &str| parameters.get(key).map(String::as_str).unwrap_or_default();
        let fields = text("fieldSelector").split(',').filter(|part| !part.is_empty()).filter_map(|part| {
            if let Some((field, value)) = part.split_once("!=") {
                return Some((field.to_owned(), value.to_owned(), false));
            }
            let (field, value) = part.split_once('=')?;
            Some((field.to_owned(), value.trim_start_matches('=').to_owned(), true))
        });
        let labels = text("labelSelector").split(',').filter(|part| !part.is_empty()).filter_map(|part| {
            let (label, value) = part.split_once('=')?;
            Some((label.to_owned(), value.trim_start_matches('=').to_owned()))
        });
        Self {
            fields: fields.collect(),
            labels: labels.collect(),
            bookmarks: text("allowWatchBookmarks") == "true",
            timeout: text("timeoutSeconds").parse().ok().map(Duration::from_secs),
        }
    }

    /// Whether an object is of the namespace and the selectors let it through.
    pub(super) fn selects(&self, target: &Target, object: &Value) -> bool {
        let in_namespace =
            target.namespace.is_empty() || object["metadata"]["namespace"] == target.namespace.as_str();
        let field = |path: &str| {
            let found = path.split('.').fold(object, |value, key| &value[key]);
            found.as_str().unwrap_or_default().to_owned()
        };
        in_namespace
            && self.fields.iter().all(|(path, value, equal)| (field(path) == *value) == *equal)
            && self.labels.iter().all(|(label, value)| object["metadata"]["labels"][label] == value.as_str())
    }
}
