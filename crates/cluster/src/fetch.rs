//! Documents beside the API server: a scheduler's views, an agent's figures.

use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::Body;

use crate::causes::innermost;
use crate::connect::connect_to;

/// A document larger than this is none of ours.
const LARGEST: usize = 64 << 20;

/// No document.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The address is none.
    #[error("{0:?} is no address; write http://HOST:PORT")]
    Address(String),
    /// Nobody answers there.
    #[error("{0}")]
    Unreachable(String),
    /// Nobody answers in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// It answers with an error.
    #[error("unexpected status code {code}: {text}")]
    Status {
        /// The HTTP status.
        code: u16,
        /// What it says.
        text: String,
    },
}

/// Fetches documents over one pool of connections.
#[derive(Clone, Debug)]
pub struct Fetcher {
    plain: Hyper<HttpConnector, Empty<bytes::Bytes>>,
    within: Duration,
    most: usize,
}

impl Fetcher {
    /// One that waits so long for an answer.
    #[must_use]
    pub fn new(within: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(within));
        Self { plain: Hyper::builder(TokioExecutor::new()).build(connector), within, most: LARGEST }
    }

    /// One that takes no document of more bytes.
    #[must_use]
    pub fn at_most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The text at `url`.
    pub async fn get(&self, url: &str) -> Result<String, FetchError> {
        let fetched = async {
            if url.starts_with("https:") { secure(url, self.most).await } else { self.plain(url).await }
        };
        tokio::time::timeout(self.within, fetched).await.map_err(|_| FetchError::Late(self.within))?
    }

    async fn plain(&self, url: &str) -> Result<String, FetchError> {
        let uri: http::Uri = url.parse().map_err(|_| FetchError::Address(url.to_owned()))?;
        if uri.host().is_none() || uri.scheme_str() != Some("http") {
            return Err(FetchError::Address(url.to_owned()));
        }
        let answer = self.plain.get(uri).await.map_err(|error| FetchError::Unreachable(innermost(&error)))?;
        let (parts, body) = answer.into_parts();
        read(parts.status, body, self.most).await
    }
}

/// Over TLS, with the roots of trust the system has.
async fn secure(url: &str, most: usize) -> Result<String, FetchError> {
    let bad = || FetchError::Address(url.to_owned());
    let uri: http::Uri = url.parse().map_err(|_| bad())?;
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str).to_owned();
    let authority = uri.authority().ok_or_else(bad)?;
    let client = connect_to(&format!("https://{authority}")).map_err(|_| bad())?;
    let request = http::Request::get(path).body(Body::empty()).map_err(|_| bad())?;
    let answer = client.send(request).await.map_err(|error| FetchError::Unreachable(innermost(&error)))?;
    let (parts, body) = answer.into_parts();
    read(parts.status, body, most).await
}

async fn read<B>(status: http::StatusCode, body: B, most: usize) -> Result<String, FetchError>
where
    B: http_body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let bytes = Limited::new(body, most).collect().await;
    let bytes = bytes.map_err(|error| FetchError::Unreachable(innermost(&*error)))?.to_bytes();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if status.is_success() {
        return Ok(text);
    }
    Err(FetchError::Status { code: status.as_u16(), text: text.trim().to_owned() })
}
