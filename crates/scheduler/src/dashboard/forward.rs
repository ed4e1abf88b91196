//! Sends readers of a replica that does not lead on to the leader. Only needed where a Service routes to all replicas.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use super::http::problem;
use crate::server::App;

/// Marks a request that another replica has forwarded. It is not forwarded again.
const FORWARDED: &str = "x-tessera-forwarded";

/// Pages about this replica itself. `/metrics/nodes` is not one of them: readers reach it through the Service, and only
/// the leader knows the cluster.
const OWN_PATHS: [&str; 2] = ["/metrics", "/version"];

/// Time in which the leader must begin to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections to the leader.
#[derive(Clone, Debug)]
pub(crate) struct Forwarder {
    client: Client<HttpConnector, Body>,
}

impl Default for Forwarder {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(Duration::from_secs(2)));
        Self { client: Client::builder(TokioExecutor::new()).build(connector) }
    }
}

/// Answers a request here if this replica leads or knows no leader that accepts forwarded requests.
pub(crate) async fn forward(
    State((app, forwarder)): State<(Arc<App>, Forwarder)>,
    request: Request,
    next: Next,
) -> Response {
    let is_own = OWN_PATHS.contains(&request.uri().path()) || request.headers().contains_key(FORWARDED);
    let leader = if is_own || app.is_ready() { None } else { app.dashboard.leader_pages() };
    match leader {
        Some(leader) => forwarder.send(leader, request).await,
        None => next.run(request).await,
    }
}

impl Forwarder {
    async fn send(&self, leader: SocketAddr, mut request: Request) -> Response {
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let Ok(uri) =
            Uri::builder().scheme("http").authority(leader.to_string()).path_and_query(path).build()
        else {
            return problem(StatusCode::BAD_REQUEST, "the path cannot be forwarded to the leader");
        };
        *request.uri_mut() = uri;
        let headers = request.headers_mut();
        headers.insert(FORWARDED, HeaderValue::from_static("1"));
        headers.remove(header::CONNECTION);
        match tokio::time::timeout(ANSWER_TIMEOUT, self.client.request(request)).await {
            Ok(Ok(mut answer)) => {
                answer.headers_mut().remove(header::CONNECTION);
                answer.map(Body::new)
            }
            Ok(Err(_)) | Err(_) => problem(
                StatusCode::BAD_GATEWAY,
                format!("the leader at {leader} does not answer; retry when another replica leads"),
            ),
        }
    }
}
