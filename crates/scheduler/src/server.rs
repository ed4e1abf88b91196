//! The HTTP server: our own routes, and the routes of the extenders that this scheduler replaces.

mod app;
mod bind;
mod extender;
mod listen;
mod retry_wait;
mod tls;
mod views;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State as FromApp};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::net::TcpListener;

pub use self::app::{App, Leadership, RequestAborted};
pub use self::retry_wait::RetryWait;
pub use self::tls::{Tls, TlsError};
use crate::dashboard;

/// Default limit of a request body in bytes: enough for whole nodes of a cluster of 2,500 nodes.
pub const BODY_LIMIT: usize = 32 << 20;

/// Calls handled concurrently; more would compete for the same cores.
pub(crate) const MAX_CONCURRENT_CALLS: usize = 64;

/// Timeout of a call. kube-scheduler's own default timeout is 5 s.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The path prefixes of the verbs: our own and those of the original extenders.
const PREFIXES: [&str; 4] =
    ["/scheduler", "/gpushare-scheduler", "/gputopology-scheduler", "/gpu-scheduler-extender"];

/// Creates the router with all routes.
pub fn router(app: Arc<App>, body_limit: usize) -> Router {
    let mut router = Router::new();
    for prefix in PREFIXES {
        router = router
            .route(&format!("{prefix}/filter"), post(extender::filter))
            .route(&format!("{prefix}/predicates"), post(extender::filter))
            .route(&format!("{prefix}/prioritize"), post(extender::prioritize))
            .route(&format!("{prefix}/priorities"), post(extender::prioritize))
            .route(&format!("{prefix}/sort"), post(extender::prioritize))
            .route(&format!("{prefix}/preempt"), post(extender::preempt))
            .route(&format!("{prefix}/bind"), post(bind::bind));
        router = match prefix {
            "/gpushare-scheduler" => router
                .route(&format!("{prefix}/inspect"), get(views::inspect_share))
                .route(&format!("{prefix}/inspect/{{node}}"), get(views::inspect_share_node)),
            _ => router
                .route(&format!("{prefix}/inspect"), get(views::inspect_topology))
                .route(&format!("{prefix}/inspect/{{node}}"), get(views::inspect_topology_node)),
        };
    }
    let worked_on = router
        // The manifest of the original extender has this misspelt path.
        .route("/gputopology-schedulersort", post(extender::prioritize))
        .route("/explain/{namespace}/{pod}", get(views::explain_pod))
        .route("/what-if", post(views::what_if))
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), limit_calls));
    Router::new()
        .route("/version", get(views::version))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(views::ready))
        .route("/metrics", get(views::metrics))
        .merge(worked_on)
        .merge(dashboard::routes(body_limit))
        .with_state(app)
}

/// Serves connections of the listener until it fails.
pub async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>) -> io::Result<()> {
    listen::serve(listener, router, tls).await
}

/// Limits the number of concurrent calls and the duration of each call.
async fn limit_calls(FromApp(app): FromApp<Arc<App>>, request: Request, next: Next) -> Response {
    let answer = async {
        let _permit = app.call_permits.acquire().await;
        next.run(request).await
    };
    let is_ready = app.is_ready();
    let too_late = || {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the scheduler is overloaded, or the request arrived too slowly; retry later",
        )
    };
    let answer = tokio::time::timeout(CALL_TIMEOUT, answer).await;
    let mut answer = answer.unwrap_or_else(|_| too_late().into_response());
    if !is_ready {
        // The client reconnects through the Service and then reaches the leader.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}
