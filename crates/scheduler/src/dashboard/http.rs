//! The routes of the pages and of the API.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, Query, Request, State as FromApp};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tessera_wire::bounded::Counted;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::node_use::{MeasuredUse, NodeUse};

use super::decisions::{Decision, KEPT};
use super::view::explanation;
use super::view::waste::waste;
use super::view::{ListQuery, MOST_ITEMS, cluster, node, nodes, pods, quota};
use super::{assets, stream};
use crate::server::{App, Caller, limit_calls};
use crate::state::{State, StateAccess as _};

/// Longest time a view waits for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Size limit of a manifest in bytes, above what Kubernetes accepts.
pub(crate) const MAX_MANIFEST_BYTES: usize = 2 << 20;

/// Headers of every answer: only our own files may run, no page may frame the dashboard, and no
/// other site learns its address.
pub(super) const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Returns all routes of the dashboard.
pub fn routes(app: &Arc<App>, body_limit: usize) -> Router<Arc<App>> {
    let limited =
        middleware::from_fn_with_state((Arc::clone(app), Caller::PageClient, body_limit), limit_calls);
    let api = Router::new()
        .route("/status", get(status))
        .route("/stream", get(stream::follow))
        .route("/cluster", get(|app: Shared| view(app, cluster::cluster)))
        .route("/map", get(|app: Shared| view(app, cluster::map)))
        .route("/nodes", get(list_nodes))
        .route("/nodes/{name}", get(one_node))
        .route("/nodes/{name}/use", get(node_use))
        .route("/pods", get(list_pods))
        .route("/pods/{namespace}/{name}", get(one_pod))
        .route("/pods/{namespace}/{name}/use", get(pod_use))
        .route("/pods/{namespace}/{name}/explanation", get(pod_explanation))
        .route("/waste", get(list_waste))
        .route("/quota", get(|app: Shared| view(app, |app| app.with_state(quota::quota))))
        .route("/what-if", post(what_if).layer(limited))
        .route("/decisions", get(decisions))
        .fallback(|| async {
            problem(StatusCode::NOT_FOUND, "no such path; docs/dashboard.md lists all paths")
        })
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn(never_kept));
    Router::new()
        .route("/", get(assets::index))
        .route("/assets/{name}", get(assets::asset))
        .nest("/api/v1", api)
        .layer(middleware::from_fn(guarded))
}

type Shared = FromApp<Arc<App>>;

async fn guarded(request: Request, next: Next) -> Response {
    let mut answer = next.run(request).await;
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

async fn never_kept(request: Request, next: Next) -> Response {
    let mut answer = next.run(request).await;
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

/// Returns an answer with an error message.
pub(super) fn problem(code: StatusCode, text: impl Into<String>) -> Response {
    (code, Json(json!({ "error": text.into() }))).into_response()
}

/// The query parameters. Bad parameters get the same JSON error as other problems.
struct QueryParams<T>(T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let read = Query::from_request_parts(parts, state).await;
        read.map(|Query(parameters)| Self(parameters)).map_err(|bad| problem(bad.status(), bad.body_text()))
    }
}

/// Makes a view on a blocking thread, so that it does not delay answers to kube-scheduler.
pub(crate) async fn run_view<T: Send + 'static>(
    app: &Arc<App>,
    make: impl FnOnce(&App) -> T + Send + 'static,
) -> Result<T, Response> {
    if !app.is_ready() {
        return Err(not_leading(app));
    }
    let permit = tokio::time::timeout(PERMIT_TIMEOUT, app.dashboard.view_permits.acquire()).await;
    let Ok(Ok(_permit)) = permit else {
        return Err(problem(StatusCode::SERVICE_UNAVAILABLE, "too many requests at once; retry later"));
    };
    let worker = Arc::clone(app);
    let made = tokio::task::spawn_blocking(move || make(&worker)).await;
    made.map_err(|_| {
        problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the view failed with an internal error; the log has the cause",
        )
    })
}

fn not_leading(app: &App) -> Response {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    (status, Json(ReplicaStatus::of(app))).into_response()
}

/// Readiness of this replica, and the name of the leader.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplicaStatus {
    version: &'static str,
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    leader: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ReplicaStatus {
    fn of(app: &App) -> Self {
        let (ready, leader) = (app.is_ready(), app.dashboard.leader());
        let error = (!ready).then(|| match &leader {
            Some(leader) => format!("this replica is not the leader; the leader is {leader}"),
            None => "this replica is not the leader, or has not read the cluster yet".to_owned(),
        });
        Self { version: env!("CARGO_PKG_VERSION"), ready, leader: leader.filter(|_| !ready), error }
    }
}

async fn status(FromApp(app): Shared) -> Json<ReplicaStatus> {
    Json(ReplicaStatus::of(&app))
}

async fn view<T: Serialize + Send + 'static>(
    FromApp(app): Shared,
    make: impl FnOnce(&App) -> T + Send + 'static,
) -> Response {
    match run_view(&app, make).await {
        Ok(made) => Json(made).into_response(),
        Err(answer) => answer,
    }
}

async fn found<T: Serialize + Send + 'static>(
    app: Shared,
    what: String,
    make: impl FnOnce(&State) -> Option<T> + Send + 'static,
) -> Response {
    match run_view(&app, |app| app.with_state(make)).await {
        Ok(Some(made)) => Json(made).into_response(),
        Ok(None) => problem(StatusCode::NOT_FOUND, format!("{what} does not exist or has ended")),
        Err(answer) => answer,
    }
}

async fn list_waste(app: Shared, QueryParams(query): QueryParams<ListQuery>) -> Response {
    let page = move |app: &App| {
        let now = u64::try_from(app.now().unix_nanos / 1_000_000).unwrap_or(u64::MAX);
        let log = app.dashboard.usage.read().unwrap_or_else(PoisonError::into_inner);
        app.with_state(|state| waste(state, &log, now, &query))
    };
    view(app, page).await
}

async fn list_nodes(app: Shared, QueryParams(query): QueryParams<ListQuery>) -> Response {
    view(app, move |app| nodes::nodes(app, &query)).await
}

async fn one_node(app: Shared, Path(name): Path<String>) -> Response {
    found(app, format!("node {name}"), move |state| node::node(state, &name)).await
}

async fn list_pods(app: Shared, QueryParams(query): QueryParams<ListQuery>) -> Response {
    let page = move |app: &App| {
        let mut page = pods::pods(app, &query);
        let decisions = &app.dashboard.decisions;
        let is_refusal = |decision: &Decision| decision.outcome.word() == "fits-nowhere";
        pods::add_refusals(&mut page.items, &decisions.newest(is_refusal, KEPT));
        page
    };
    view(app, page).await
}

async fn one_pod(app: Shared, Path((namespace, name)): Path<(String, String)>) -> Response {
    found(app, format!("pod {namespace}/{name}"), move |state| pods::pod(state, &namespace, &name)).await
}

async fn measured(
    app: &App,
    address: Result<Option<AgentAddress>, Response>,
    keep: impl FnOnce(&mut NodeUse),
) -> Response {
    let address = match address {
        Ok(address) => address,
        Err(answer) => return answer,
    };
    Json(match app.agents.read(address).await {
        Ok(mut used) => {
            keep(&mut used);
            MeasuredUse { used: Some(used), not_measured: None }
        }
        Err(error) => MeasuredUse { used: None, not_measured: Some(error.to_string()) },
    })
    .into_response()
}

async fn node_use(FromApp(app): Shared, Path(name): Path<String>) -> Response {
    let address = run_view(&app, move |app| app.with_state(|state| node::agent(state, &name))).await;
    measured(&app, address, |_| {}).await
}

async fn pod_use(FromApp(app): Shared, Path((namespace, name)): Path<(String, String)>) -> Response {
    let wanted = (namespace.clone(), name.clone());
    let address =
        run_view(&app, move |app| app.with_state(|state| pods::agent(state, &namespace, &name))).await;
    measured(&app, address, |used| {
        used.containers.retain(|container| container.namespace == wanted.0 && container.pod == wanted.1);
    })
    .await
}

async fn pod_explanation(FromApp(app): Shared, Path((namespace, name)): Path<(String, String)>) -> Response {
    let what = format!("pod {namespace}/{name}");
    let made = run_view(&app, move |app| explanation::of_pod(app, &namespace, &name));
    match made.await {
        Ok(Some(explanation)) => Json(explanation).into_response(),
        Ok(None) => {
            problem(StatusCode::NOT_FOUND, format!("{what} does not exist, has ended, or requests no GPU"))
        }
        Err(answer) => answer,
    }
}

/// Explains where the pod of the request body, a manifest in JSON, would fit.
async fn what_if(FromApp(app): Shared, body: Result<Bytes, BytesRejection>) -> Response {
    let bytes = match body {
        Ok(bytes) => bytes,
        Err(rejection) => return problem(StatusCode::BAD_REQUEST, rejection.body_text()),
    };
    let pod: Counted<Pod> = match app.parse(Caller::PageClient, &bytes) {
        Ok(pod) => pod,
        Err(error) => {
            let text = format!("the body is not a pod manifest in JSON: {error}");
            return problem(StatusCode::BAD_REQUEST, text);
        }
    };
    match run_view(&app, move |app| explanation::what_if(app, &pod)).await {
        Ok(explanation) => Json(explanation).into_response(),
        Err(answer) => answer,
    }
}

/// The filter of decisions.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DecisionQuery {
    namespace: String,
    pod: String,
    uid: String,
    outcome: String,
    limit: Option<usize>,
}

async fn decisions(FromApp(app): Shared, QueryParams(wanted): QueryParams<DecisionQuery>) -> Response {
    if !app.is_ready() {
        return not_leading(&app);
    }
    let is = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
    let newest = app.dashboard.decisions.newest(
        |decision| {
            is(&wanted.namespace, &decision.namespace)
                && is(&wanted.uid, &decision.uid)
                && is(&wanted.outcome, decision.outcome.word())
                && (wanted.pod.is_empty() || decision.pod.contains(&wanted.pod))
        },
        wanted.limit.unwrap_or(MOST_ITEMS).min(MOST_ITEMS),
    );
    Json(newest).into_response()
}
