//! Fetches documents over HTTP from servers other than the API server, such as schedulers and
//! agents.

mod pinned;

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::Body;
use tessera_wire::tessera::agent_address::Fingerprint;

use crate::causes::innermost;
use crate::connect::connect_to;

/// Default limit for the size of a document. No page of Tessera is larger.
const MAX_BYTES: usize = 64 << 20;

/// Reason why a document could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL cannot be parsed, or has no host.
    #[error("{0:?} is not an address; write http://HOST:PORT")]
    Address(String),
    /// The connection failed.
    #[error("{0}")]
    Unreachable(String),
    /// The server has another certificate than the expected one.
    #[error("the server has another certificate than the expected one")]
    Certificate,
    /// The token contains characters that no header may contain.
    #[error("the token cannot be sent in a header; check its file")]
    Token,
    /// The server did not answer before the timeout.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// The server answered with an error status.
    #[error("unexpected status code {code}: {text}")]
    Status {
        /// HTTP status code.
        code: u16,
        /// Body of the answer.
        text: String,
    },
}

/// Fetches documents. Connections with plain HTTP are kept for the next request, TLS sessions are not.
#[derive(Clone, Debug)]
pub struct Fetcher {
    plain: Hyper<HttpConnector, Full<bytes::Bytes>>,
    timeout: Duration,
    max_bytes: usize,
}

impl Fetcher {
    /// Returns a fetcher that waits at most `timeout` for an answer.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(timeout));
        Self { plain: Hyper::builder(TokioExecutor::new()).build(connector), timeout, max_bytes: MAX_BYTES }
    }

    /// Returns a fetcher that rejects documents larger than `max_bytes`.
    #[must_use]
    pub fn with_max_bytes(self, max_bytes: usize) -> Self {
        Self { max_bytes, ..self }
    }

    /// Returns the text at `url`.
    pub async fn get(&self, url: &str) -> Result<String, FetchError> {
        let fetched = async {
            if url.starts_with("https:") {
                secure(url, http::Request::get(url), Body::empty(), self.max_bytes).await
            } else {
                self.plain(url, http::Request::get(url), Full::default()).await
            }
        };
        tokio::time::timeout(self.timeout, fetched).await.map_err(|_| FetchError::Late(self.timeout))?
    }

    /// Sends a JSON document to `url` and returns the text of the answer.
    pub async fn post(&self, url: &str, document: String) -> Result<String, FetchError> {
        let request = http::Request::post(url).header(http::header::CONTENT_TYPE, "application/json");
        let fetched = async {
            if url.starts_with("https:") {
                secure(url, request, Body::from(document.into_bytes()), self.max_bytes).await
            } else {
                self.plain(url, request, Full::from(document)).await
            }
        };
        tokio::time::timeout(self.timeout, fetched).await.map_err(|_| FetchError::Late(self.timeout))?
    }

    /// Returns the text at an HTTPS URL whose server has this certificate. Sends the token, if there is one, to this
    /// server only.
    pub async fn get_pinned(
        &self,
        url: &str,
        certificate: Fingerprint,
        token: Option<&str>,
    ) -> Result<String, FetchError> {
        let fetched = async {
            let (parts, body) = pinned::get(url, certificate, token).await?.into_parts();
            read(parts.status, body, self.max_bytes).await
        };
        tokio::time::timeout(self.timeout, fetched).await.map_err(|_| FetchError::Late(self.timeout))?
    }

    async fn plain(
        &self,
        url: &str,
        request: http::request::Builder,
        body: Full<bytes::Bytes>,
    ) -> Result<String, FetchError> {
        let bad = || FetchError::Address(url.to_owned());
        let request = request.body(body).map_err(|_| bad())?;
        if request.uri().host().is_none() || request.uri().scheme_str() != Some("http") {
            return Err(bad());
        }
        let answer =
            self.plain.request(request).await.map_err(|error| FetchError::Unreachable(innermost(&error)))?;
        let (parts, body) = answer.into_parts();
        read(parts.status, body, self.max_bytes).await
    }
}

/// Fetches a document over TLS with the root certificates of the system.
async fn secure(
    url: &str,
    request: http::request::Builder,
    body: Body,
    max_bytes: usize,
) -> Result<String, FetchError> {
    let bad = || FetchError::Address(url.to_owned());
    let mut request = request.body(body).map_err(|_| bad())?;
    let uri = request.uri().clone();
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let authority = uri.authority().ok_or_else(bad)?;
    let client = connect_to(&format!("https://{authority}")).map_err(|_| bad())?;
    *request.uri_mut() = path.parse().map_err(|_| bad())?;
    let answer = client.send(request).await.map_err(|error| FetchError::Unreachable(innermost(&error)))?;
    let (parts, body) = answer.into_parts();
    read(parts.status, body, max_bytes).await
}

async fn read<B>(status: http::StatusCode, body: B, max_bytes: usize) -> Result<String, FetchError>
where
    B: http_body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let bytes = Limited::new(body, max_bytes).collect().await;
    let bytes = bytes.map_err(|error| FetchError::Unreachable(innermost(&*error)))?.to_bytes();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if status.is_success() {
        return Ok(text);
    }
    Err(FetchError::Status { code: status.as_u16(), text: text.trim().to_owned() })
}
