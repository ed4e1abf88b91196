//! Sends calls of kube-scheduler from a replica that waits to the leader, so that a Service may route to all replicas.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tessera_serve::{TlsError, TlsPem, client_configuration};
use tokio::time::Instant;

use super::App;
use super::app::READY_WAIT;
use crate::certificates::plan::SERVER_NAME;

/// Marks a call that another replica has forwarded. It is not forwarded again.
const FORWARDED: &str = "x-tessera-forwarded";

/// Longest time for a connection to the leader. Its address may be that of a pod that has ended.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval of checks for a leader while there is none.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

type HttpsClient = Client<HttpsConnector<HttpConnector>, Body>;

/// Sends calls to another replica, with the certificate of kube-scheduler.
#[derive(Clone, Debug)]
pub struct CallSender {
    client: Arc<RwLock<HttpsClient>>,
}

/// The reason why there is no answer of the leader.
enum NotAnswered {
    /// No leader has seen the call, so it may be sent again.
    NotSent,
    /// The leader may have seen it.
    Broken,
}

impl CallSender {
    /// Sends calls with this certificate to servers of this authority.
    pub fn new(pem: &TlsPem) -> Result<Self, TlsError> {
        Ok(Self { client: Arc::new(RwLock::new(client(pem)?)) })
    }

    /// Uses another certificate for new connections.
    pub fn update(&self, pem: &TlsPem) -> Result<(), TlsError> {
        *self.client.write().unwrap_or_else(PoisonError::into_inner) = client(pem)?;
        Ok(())
    }

    async fn send(&self, leader: SocketAddr, parts: &Parts, body: Bytes) -> Result<Response, NotAnswered> {
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let uri = Uri::builder().scheme("https").authority(leader.to_string()).path_and_query(path).build();
        let mut request = Request::new(Body::from(body));
        *request.uri_mut() = uri.map_err(|_| NotAnswered::Broken)?;
        *request.method_mut() = parts.method.clone();
        let headers = request.headers_mut();
        headers
            .extend(parts.headers.get(header::CONTENT_TYPE).map(|kind| (header::CONTENT_TYPE, kind.clone())));
        headers.insert(FORWARDED, HeaderValue::from_static("1"));
        let client = self.client.read().unwrap_or_else(PoisonError::into_inner).clone();
        match client.request(request).await {
            Ok(answer) if answer.status() == StatusCode::MISDIRECTED_REQUEST => Err(NotAnswered::NotSent),
            Ok(mut answer) => {
                answer.headers_mut().remove(header::CONNECTION);
                Ok(answer.map(Body::new))
            }
            Err(error) if error.is_connect() => Err(NotAnswered::NotSent),
            Err(_) => Err(NotAnswered::Broken),
        }
    }
}

fn client(pem: &TlsPem) -> Result<HttpsClient, TlsError> {
    let name = SERVER_NAME.try_into().map_err(|_| TlsError::ClientName(SERVER_NAME.to_owned()))?;
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(client_configuration(pem)?)
        .https_only()
        .with_server_name_resolver(FixedServerNameResolver::new(name))
        .enable_http1()
        .wrap_connector(connector);
    Ok(Client::builder(TokioExecutor::new()).build(connector))
}

/// Answers a call here if this replica leads, and sends it to the leader otherwise. While there is no leader, the call
/// waits for one, up to [`READY_WAIT`].
pub(super) async fn forward(
    State((app, body_limit)): State<(Arc<App>, usize)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(sender) = app.call_sender().filter(|_| !app.is_ready()) else {
        return next.run(request).await;
    };
    let is_forwarded = request.headers().contains_key(FORWARDED);
    let (parts, body) = request.into_parts();
    // A retry needs the whole body. A body that is too large gets the usual refusal.
    let Ok(body) = to_bytes(body, body_limit).await else {
        return (StatusCode::PAYLOAD_TOO_LARGE, "the body is too large, or ended early").into_response();
    };
    let give_up = Instant::now() + READY_WAIT;
    loop {
        if !app.is_ready()
            && !is_forwarded
            && let Some(leader) = app.dashboard.leader_verbs()
        {
            match sender.send(leader, &parts, body.clone()).await {
                Ok(answer) => return answer,
                Err(NotAnswered::Broken) => {
                    let text = "the leader did not answer; the call may have had an effect";
                    return (StatusCode::BAD_GATEWAY, text).into_response();
                }
                Err(NotAnswered::NotSent) => {}
            }
        }
        if is_forwarded && !app.has_lease() {
            let text = "this replica of the scheduler does not lead any more";
            return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
        }
        if app.is_ready() || Instant::now() >= give_up {
            return next.run(Request::from_parts(parts, Body::from(body))).await;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}
