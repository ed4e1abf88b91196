//! The HTTP servers. Each has routes and a listener of its own: the verbs for kube-scheduler, the pages for users and
//! monitoring, the probes of the kubelet, and the admission webhook for the API server.

mod admission;
mod app;
mod bind;
mod calls;
mod claims;
mod extender;
mod forward;
mod listeners;
mod reserve;
mod retry_wait;
mod views;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use tessera_serve::browser::{ForeignRequest, check_call, check_page};

pub use self::app::{App, Leadership, RequestAborted};
pub(crate) use self::calls::{Caller, limit as limit_calls};
pub use self::forward::CallSender;
pub use self::listeners::{ALL, PAGES, PROBES, VERBS, WEBHOOK, serve_all};
pub use self::retry_wait::RetryWait;
use crate::dashboard;
use crate::dashboard::login::Login;

/// Default limit of a request body in bytes: enough for whole nodes of a cluster of 2,500 nodes.
pub const BODY_LIMIT: usize = 32 << 20;

/// The path prefixes of the verbs: our own and those of the original extenders.
const PREFIXES: [&str; 4] =
    ["/scheduler", "/gpushare-scheduler", "/gputopology-scheduler", "/gpu-scheduler-extender"];

/// Returns the host names of the Service of `deploy/scheduler` in this namespace.
#[must_use]
pub fn service_names(namespace: &str) -> [String; 4] {
    [
        String::new(),
        format!(".{namespace}"),
        format!(".{namespace}.svc"),
        format!(".{namespace}.svc.cluster.local"),
    ]
    .map(|domain| format!("tessera-scheduler{domain}"))
}

/// Creates the router of the verbs, which only kube-scheduler may call.
pub fn verbs(app: Arc<App>, body_limit: usize) -> Router {
    let mut router = Router::new();
    for prefix in PREFIXES {
        router = router
            .route(&format!("{prefix}/filter"), post(extender::filter))
            .route(&format!("{prefix}/predicates"), predicates(prefix))
            .route(&format!("{prefix}/prioritize"), post(extender::prioritize))
            .route(&format!("{prefix}/priorities"), post(extender::prioritize))
            .route(&format!("{prefix}/sort"), post(extender::prioritize))
            .route(&format!("{prefix}/preempt"), post(extender::preempt))
            .route(&format!("{prefix}/bind"), post(bind::bind));
    }
    router
        // The manifest of the original extender has this misspelt path.
        .route("/gputopology-schedulersort", post(extender::prioritize))
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn_with_state((Arc::clone(&app), body_limit), forward::forward))
        .layer(middleware::from_fn_with_state(
            (Arc::clone(&app), Caller::KubeScheduler, body_limit),
            calls::limit,
        ))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), wait_until_ready))
        .layer(middleware::from_fn(refuse_browsers))
        .with_state(app)
}

/// Returns the handler of the filter verb under its older name. Below gpu-admission's own path the verb chooses and
/// books the GPUs, because kube-scheduler is configured with this verb alone there.
fn predicates(prefix: &str) -> MethodRouter<Arc<App>> {
    if prefix == "/scheduler" { post(extender::filter_and_reserve) } else { post(extender::filter) }
}

/// Creates the router of the pages and of the API for reading. They are served under IP addresses, `localhost` and
/// these names, to everyone or to callers with a login.
pub fn pages(app: Arc<App>, body_limit: usize, names: &[String], login: Option<Login>) -> Router {
    let body_limit = body_limit.min(dashboard::MAX_MANIFEST_BYTES);
    let mut router = Router::new();
    for prefix in PREFIXES {
        router = match prefix {
            "/gpushare-scheduler" => router
                .route(&format!("{prefix}/inspect"), get(views::inspect_share))
                .route(&format!("{prefix}/inspect/{{node}}"), get(views::inspect_share_node)),
            _ => router
                .route(&format!("{prefix}/inspect"), get(views::inspect_topology))
                .route(&format!("{prefix}/inspect/{{node}}"), get(views::inspect_topology_node)),
        };
    }
    let names: Arc<[String]> = names.into();
    let check = move |request: Request, next: Next| refuse_foreign(Arc::clone(&names), request, next);
    let router = router
        .route("/explain/{namespace}/{pod}", get(views::explain_pod))
        .route("/what-if", post(views::what_if))
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn_with_state(
            (Arc::clone(&app), Caller::PageClient, body_limit),
            calls::limit,
        ))
        .route("/version", get(views::version))
        .route("/metrics", get(views::metrics))
        .route("/metrics/nodes", get(views::metrics_by_node))
        .merge(dashboard::routes(&app, body_limit));
    // What readers send to a replica with a login must not go to one without.
    let router = match login {
        Some(login) => login.protect(router),
        None => {
            let forwarded = (Arc::clone(&app), dashboard::Forwarder::default());
            router.layer(middleware::from_fn_with_state(forwarded, dashboard::forward))
        }
    };
    router.layer(middleware::from_fn(check)).with_state(app)
}

/// Creates the router of the probes.
pub fn probes(app: Arc<App>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/healthz/kube-scheduler", get(views::neighbour_health))
        .route("/readyz", get(views::ready))
        .with_state(app)
}

/// Creates the router of the admission webhook. Callers need no credential, because an answer tells nothing and changes
/// nothing.
pub fn webhook(app: Arc<App>) -> Router {
    let limits = (Arc::clone(&app), Caller::ApiServer, admission::BODY_LIMIT);
    Router::new()
        .route(admission::PATH, post(admission::admit))
        .layer(DefaultBodyLimit::max(admission::BODY_LIMIT))
        .layer(middleware::from_fn_with_state(limits, calls::limit))
        .layer(middleware::from_fn(refuse_browsers))
        .with_state(app)
}

/// Creates a router with all routes, for one listener whose verbs need no authentication.
pub fn router(app: Arc<App>, body_limit: usize, names: &[String], login: Option<Login>) -> Router {
    let pages = pages(Arc::clone(&app), body_limit, names, login);
    verbs(Arc::clone(&app), body_limit).merge(pages).merge(probes(app))
}

/// Lets calls of a kube-scheduler wait that began to lead a moment before the extender in its pod.
async fn wait_until_ready(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    app.wait_until_ready().await;
    next.run(request).await
}

async fn refuse_browsers(request: Request, next: Next) -> Response {
    match check_call(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(foreign) => refusal(&foreign),
    }
}

async fn refuse_foreign(names: Arc<[String]>, request: Request, next: Next) -> Response {
    match check_page(request.method(), request.uri(), request.headers(), &names) {
        Ok(()) => next.run(request).await,
        Err(foreign) => refusal(&foreign),
    }
}

fn refusal(foreign: &ForeignRequest) -> Response {
    let code = match foreign {
        ForeignRequest::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
        ForeignRequest::Host(_) | ForeignRequest::Origin(_) => StatusCode::FORBIDDEN,
    };
    (code, foreign.to_string()).into_response()
}
