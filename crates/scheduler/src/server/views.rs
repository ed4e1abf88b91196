//! Routes for users and monitoring.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Query, State as FromApp};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::metrics::Format;
use tessera_wire::tessera::parsed_pod::BadPodObject;

use super::extender::{Body, read_of};
use super::{App, Caller};
use crate::dashboard::run_view;
use crate::metrics;
use crate::verb::explain::{self, PodExplanation};

type Parameters = Query<HashMap<String, String>>;

pub(super) async fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Answers the probe of the kube-scheduler in the same pod.
pub(super) async fn neighbour_health(FromApp(app): FromApp<Arc<App>>) -> Response {
    if app.is_neighbour_unserved() {
        let text = "kube-scheduler leads without its extender; a restart lets another pod lead";
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    "ok".into_response()
}

pub(super) async fn ready(FromApp(app): FromApp<Arc<App>>) -> Response {
    if app.is_ready() || app.leadership.follows() {
        "ok".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "this replica is not the leader, or is still reading the cluster")
            .into_response()
    }
}

pub(super) async fn metrics(FromApp(app): FromApp<Arc<App>>, headers: HeaderMap) -> Response {
    let format = format_for(&headers);
    let text = app.metrics.text(app.is_ready().then(|| app.read()), format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

pub(super) async fn metrics_by_node(FromApp(app): FromApp<Arc<App>>, headers: HeaderMap) -> Response {
    let format = format_for(&headers);
    let text = metrics::text_by_node(app.read(), format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

/// Returns the format of metrics that a reader accepts. Media types are case-insensitive.
fn format_for(headers: &HeaderMap) -> Format {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    Format::accepted(&accepted.collect::<Vec<_>>().join(",").to_ascii_lowercase())
}

pub(super) async fn inspect_topology(
    FromApp(app): FromApp<Arc<App>>,
    Query(parameters): Parameters,
) -> Response {
    Json(app.read().inspect_topology(None, wants_detail(&parameters))).into_response()
}

pub(super) async fn inspect_topology_node(
    FromApp(app): FromApp<Arc<App>>,
    Path(node): Path<String>,
    Query(parameters): Parameters,
) -> Response {
    let view = app.read().inspect_topology(Some(&node), wants_detail(&parameters));
    (found(&view.error), Json(view)).into_response()
}

pub(super) async fn inspect_share(FromApp(app): FromApp<Arc<App>>) -> Response {
    Json(app.read().inspect_share(None)).into_response()
}

pub(super) async fn inspect_share_node(
    FromApp(app): FromApp<Arc<App>>,
    Path(node): Path<String>,
) -> Response {
    let view = app.read().inspect_share(Some(&node));
    (found(&view.error), Json(view)).into_response()
}

/// Explains a pod on every node and GPU.
pub(super) async fn explain_pod(
    FromApp(app): FromApp<Arc<App>>,
    Path((namespace, pod)): Path<(String, String)>,
) -> Response {
    let error = format!("pod {namespace}/{pod} is not known, has ended, or asks for no GPU");
    let is_invalid = format!("the GPU request of pod {namespace}/{pod} is invalid");
    match run_view(&app, move |app| explain::explain(app, &namespace, &pod)).await {
        Ok(Some(explained)) => explained_response(explained, |bad| format!("{is_invalid}: {bad}")),
        Ok(None) => (StatusCode::NOT_FOUND, Json(json!({ "error": error }))).into_response(),
        Err(answer) => answer,
    }
}

/// Explains where the pod of the request body, a manifest in JSON, would fit.
pub(super) async fn what_if(FromApp(app): FromApp<Arc<App>>, body: Body) -> Response {
    let pod = match read_of::<Pod>(Caller::PageClient, &app, &body) {
        Ok(pod) => pod,
        Err(error) => {
            return (StatusCode::BAD_REQUEST, Json(json!({ "error": error.to_string() }))).into_response();
        }
    };
    run_view(&app, move |app| explain::what_if(app, &pod))
        .await
        .map_or_else(|answer| answer, |explained| explained_response(explained, ToString::to_string))
}

/// Answers with an explanation, or with the text of `describe` for a pod that cannot be parsed.
fn explained_response(
    explained: Result<PodExplanation, BadPodObject>,
    describe: impl FnOnce(&BadPodObject) -> String,
) -> Response {
    match explained {
        Ok(explanation) => Json(explanation).into_response(),
        Err(bad) => Json(json!({ "error": describe(&bad), "nodes": [] })).into_response(),
    }
}

fn wants_detail(parameters: &HashMap<String, String>) -> bool {
    parameters.get("detail").is_some_and(|value| value == "true")
}

fn found(error: &str) -> StatusCode {
    if error.is_empty() { StatusCode::OK } else { StatusCode::NOT_FOUND }
}
