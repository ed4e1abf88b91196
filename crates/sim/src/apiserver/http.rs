//! The HTTP interface: parses requests and writes answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::kinds::{self, ResourceKind};
use super::path::ObjectPath;
use super::selector::Selector;
use super::status::Problem;
use super::store::{Store, StoredObject};
use super::write::Deletion;
use super::{patch, protobuf, table, watch};

type Parameters = HashMap<String, String>;

/// Duration of a watch without `timeoutSeconds`.
const DEFAULT_WATCH_TIME: Duration = Duration::from_secs(1800);

pub(super) fn router(store: Arc<Store>) -> Router {
    Router::new().fallback(answer).layer(DefaultBodyLimit::disable()).with_state(store)
}

async fn answer(
    State(store): State<Arc<Store>>,
    method: Method,
    uri: Uri,
    Query(parameters): Query<Parameters>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    store.unheld().await;
    if store.is_down() {
        return Problem::unavailable().into_response();
    }
    if matches!(uri.path(), "/readyz" | "/healthz" | "/livez") {
        return "ok".into_response();
    }
    let text = |name: header::HeaderName| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    if uri.path() == "/openapi/v2" {
        return kinds::schemas_v2(&text(header::ACCEPT));
    }
    if let Some(found) = kinds::discover(uri.path()) {
        return Json(found).into_response();
    }
    let Some(target) = ObjectPath::parse(uri.path()) else { return Problem::no_such_path().into_response() };
    let request = ApiRequest {
        as_table: wants_table(&text(header::ACCEPT), &parameters),
        media: text(header::CONTENT_TYPE),
        target,
        parameters,
        body,
    };
    let answered = match method {
        Method::GET if request.target.name.is_empty() => request.list_or_watch(store),
        method => request.one(&store, &method),
    };
    answered.unwrap_or_else(IntoResponse::into_response)
}

struct ApiRequest {
    target: ObjectPath,
    parameters: Parameters,
    media: String,
    as_table: Option<table::Include>,
    body: Bytes,
}

impl ApiRequest {
    fn parameter(&self, key: &str) -> &str {
        self.parameters.get(key).map(String::as_str).unwrap_or_default()
    }

    fn is_true(&self, key: &str) -> bool {
        matches!(self.parameter(key), "true" | "1")
    }

    fn json(&self) -> Result<Value, Problem> {
        if self.media.starts_with(protobuf::MEDIA) {
            return protobuf::read(&self.body).ok_or_else(|| Problem::unsupported_media(&self.media));
        }
        serde_json::from_slice(&self.body).map_err(|error| Problem::bad_request(error.to_string()))
    }

    /// Handles everything except lists and watches.
    fn one(&self, store: &Store, method: &Method) -> Result<Response, Problem> {
        let target = &self.target;
        if !self.parameter("dryRun").is_empty() {
            return Err(Problem::bad_request("this server has no dry runs".to_owned()));
        }
        let (code, object) = match (method.as_str(), target.part.as_str()) {
            ("GET", "" | "status") => (StatusCode::OK, store.get(target)?),
            ("POST", "binding") => {
                store.bind(target, &self.json()?)?;
                return Ok((StatusCode::CREATED, Json(success(StatusCode::CREATED))).into_response());
            }
            ("POST", "eviction") => {
                store.delete(target, &self.deletion(&self.json()?["deleteOptions"]))?;
                return Ok((StatusCode::CREATED, Json(success(StatusCode::CREATED))).into_response());
            }
            ("POST", "") if target.name.is_empty() => {
                if target.kind.namespaced {
                    let namespaces =
                        ResourceKind::find("", "namespaces").ok_or_else(Problem::no_such_path)?;
                    let known = store.lock().find(namespaces, "", &target.namespace).is_some();
                    known.then_some(()).ok_or_else(|| Problem::not_found(namespaces, &target.namespace))?;
                }
                (StatusCode::CREATED, store.create(target, self.json()?)?)
            }
            ("PUT", "" | "status") => (StatusCode::OK, store.replace(target, &self.json()?)?),
            ("PATCH", "" | "status") => {
                let kind = patch::PatchKind::of(&self.media).ok_or_else(Problem::unsupported_patch)?;
                let is_new = kind == patch::PatchKind::Apply && store.get(target).is_err();
                let code = if is_new { StatusCode::CREATED } else { StatusCode::OK };
                (code, store.patch(target, &self.json()?, kind)?)
            }
            ("DELETE", "") if !target.name.is_empty() => {
                let deleted = store.delete(target, &self.deletion(&self.json().unwrap_or_default()))?;
                if target.kind.plural != "pods" {
                    let mut status = success(StatusCode::OK);
                    let uid = deleted.value()["metadata"]["uid"].clone();
                    status["details"] =
                        json!({ "name": target.name, "kind": target.kind.plural, "uid": uid });
                    return Ok(Json(status).into_response());
                }
                (StatusCode::OK, deleted)
            }
            ("POST" | "DELETE", "" | "status") => return Err(Problem::not_allowed()),
            _ => return Err(Problem::no_such_path()),
        };
        Ok(match self.as_table {
            Some(include) => (code, Json(table::of(target.kind, &[object], include))).into_response(),
            None => (code, [(header::CONTENT_TYPE, "application/json")], object.text.clone()).into_response(),
        })
    }

    fn deletion(&self, options: &Value) -> Deletion {
        let asked = self.parameter("gracePeriodSeconds").parse().ok();
        Deletion {
            grace: options["gracePeriodSeconds"].as_u64().or(asked),
            uid: options["preconditions"]["uid"].as_str().map(str::to_owned),
        }
    }

    fn list_or_watch(&self, store: Arc<Store>) -> Result<Response, Problem> {
        let kind = self.target.kind;
        let (fields, labels) = (self.parameter("fieldSelector"), self.parameter("labelSelector"));
        let selector = Selector::parse(kind, &self.target.namespace, fields, labels)?;
        if self.is_true("sendInitialEvents") {
            let why = "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList \
                       feature gate is enabled";
            return Err(Problem::invalid_options(why));
        }
        let version = match self.parameter("resourceVersion") {
            "" | "0" => None,
            text => Some(text.parse().map_err(|_| Problem::bad_version(text))?),
        };
        if self.is_true("watch") {
            Ok(self.watch(store, selector, version))
        } else {
            self.list(&store, &selector)
        }
    }

    fn watch(&self, store: Arc<Store>, selector: Selector, version: Option<u64>) -> Response {
        let kind = self.target.kind;
        let subscription = match store.watch(kind, selector, version) {
            Ok(subscription) => subscription,
            // The real API server reports an expired version as an event of the watch.
            Err(problem) => {
                return Json(json!({ "type": "ERROR", "object": problem.into_body() })).into_response();
            }
        };
        let options = watch::WatchOptions {
            bookmarks: self.is_true("allowWatchBookmarks"),
            timeout: self.parameter("timeoutSeconds").parse().map_or(DEFAULT_WATCH_TIME, Duration::from_secs),
            as_table: self.as_table,
        };
        watch::answer(store, kind, subscription, options)
    }

    /// Writes one page of a list and the token of the next one.
    fn list(&self, store: &Store, selector: &Selector) -> Result<Response, Problem> {
        let kind = self.target.kind;
        let begun = match self.parameter("continue") {
            "" => None,
            token => Some(ContinueToken::read(token).ok_or_else(|| {
                Problem::bad_request("continue key is not valid: it was not made by this server".to_owned())
            })?),
        };
        let limit = self.parameter("limit").parse().ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        let after = begun.as_ref().map(|place| (place.namespace.as_str(), place.name.as_str()));
        let page = store.list(kind, selector, after, limit);
        // All pages have the version of the first one, so a watch from there sees the changes
        // between pages.
        let version = begun.as_ref().map_or(page.version, |place| place.version);
        let mut metadata = json!({ "resourceVersion": version.to_string() });
        if let Some(last) = page.items.last().filter(|_| page.remaining > 0) {
            metadata["continue"] = ContinueToken::of(version, last).print().into();
            metadata["remainingItemCount"] = page.remaining.into();
        }
        if let Some(include) = self.as_table {
            let mut table = table::of(kind, &page.items, include);
            table["metadata"] = metadata;
            return Ok(Json(table).into_response());
        }
        let items: Vec<&str> = page.items.iter().map(|object| object.text.as_str()).collect();
        let (api_version, items) = (kind.api_version(), items.join(","));
        let list = format!(
            r#"{{"kind":"{}List","apiVersion":"{api_version}","metadata":{metadata},"items":[{items}]}}"#,
            kind.name
        );
        Ok(([(header::CONTENT_TYPE, "application/json")], list).into_response())
    }
}

/// Position at which a list continues.
struct ContinueToken {
    version: u64,
    namespace: String,
    name: String,
}

impl ContinueToken {
    fn of(version: u64, last: &StoredObject) -> Self {
        Self { version, namespace: last.namespace.clone(), name: last.name.clone() }
    }

    fn print(&self) -> String {
        format!("{}.{}/{}", self.version, self.namespace, self.name)
    }

    fn read(token: &str) -> Option<Self> {
        let (version, place) = token.split_once('.')?;
        let (namespace, name) = place.split_once('/')?;
        Some(Self { version: version.parse().ok()?, namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

fn success(code: StatusCode) -> Value {
    let mut status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success" });
    if code == StatusCode::CREATED {
        status["code"] = code.as_u16().into();
    }
    status
}

/// Returns whether the client wants a table, and how much of the objects it includes.
fn wants_table(accept: &str, parameters: &Parameters) -> Option<table::Include> {
    let first = accept.split(',').next().unwrap_or_default();
    let wanted = first.contains("as=Table") && first.contains("g=meta.k8s.io");
    let include = parameters.get("includeObject").map(String::as_str).unwrap_or_default();
    wanted.then(|| table::Include::read(include))
}
