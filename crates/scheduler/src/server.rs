//! HTTP: every route of the extenders this one replaces, and a few of its own.

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

pub use self::app::{App, Leadership};
pub use self::retry_wait::RetryWait;
pub use self::tls::{Tls, TlsError};
use crate::dashboard;

/// How much of a body is read: whole nodes of a cluster of 2,500, or the names of one of a million.
pub const BODY_LIMIT: usize = 32 << 20;

/// Calls worked on at a time; others wait their turn. More would only compete for the same cores.
const CALLS: usize = 64;

/// Past this kube-scheduler has given up: its own limit is 5 s unless set otherwise.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// The prefixes under which the originals, and we, offer the verbs.
const PREFIXES: [&str; 4] =
    ["/scheduler", "/gpushare-scheduler", "/gputopology-scheduler", "/gpu-scheduler-extender"];

/// All routes.
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
        // As the original's manifest misspells it.
        .route("/gputopology-schedulersort", post(extender::prioritize))
        .route("/explain/{namespace}/{pod}", get(views::explain_pod))
        .route("/what-if", post(views::what_if))
        .layer(DefaultBodyLimit::max(body_limit))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), in_turn));
    Router::new()
        .route("/version", get(views::version))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(views::ready))
        .route("/metrics", get(views::metrics))
        .merge(worked_on)
        .merge(dashboard::routes(body_limit))
        .with_state(app)
}

/// Serves on a listener until it fails.
pub async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>) -> io::Result<()> {
    listen::serve(listener, router, tls).await
}

/// So many at a time, and none for ever.
async fn in_turn(FromApp(app): FromApp<Arc<App>>, request: Request, next: Next) -> Response {
    let answer = async {
        let _turn = app.turns.acquire().await;
        next.run(request).await
    };
    let is_ready = app.is_ready();
    let too_late = || (StatusCode::SERVICE_UNAVAILABLE, "too busy, or the request came too slowly");
    let answer = tokio::time::timeout(ANSWER_WITHIN, answer).await;
    let mut answer = answer.unwrap_or_else(|_| too_late().into_response());
    if !is_ready {
        // Whoever has a connection to us shall look for the leader.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}
