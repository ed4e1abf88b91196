//! Asking a node's agent what is used there right now.

use std::time::Duration;

use axum::http::Uri;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use tessera_wire::node_use::{DEFAULT_PORT, NodeUse, PATH};
use tokio::net::TcpStream;

/// Somebody waits for the page.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// A node of 64 cards and a thousand containers writes a tenth of this.
const MOST_BYTES: usize = 4 << 20;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotMeasured {
    #[error("the node does not say where its agent answers")]
    NoAddress,
    #[error("the agent's address {0:?} is none; it should read http://HOST:PORT")]
    BadAddress(String),
    #[error("the agent at {0} did not answer in time")]
    TooLate(String),
    #[error("the agent at {0} cannot be reached: {1}")]
    Unreachable(String, String),
    #[error("the agent at {0} answered {1}")]
    Status(String, u16),
    #[error("the agent at {0} answered what cannot be read: {1}")]
    Unreadable(String, String),
}

/// What is used on the node whose agent answers at `address`. The address is the node's own word: nothing is sent there but
/// the question, and nothing of the answer is used but what has the expected form.
pub(super) async fn ask(address: Option<String>) -> Result<NodeUse, NotMeasured> {
    let address = address.ok_or(NotMeasured::NoAddress)?;
    let uri: Uri = address.parse().map_err(|_| NotMeasured::BadAddress(address.clone()))?;
    let host = uri.host().filter(|_| uri.scheme_str() == Some("http"));
    let host = host.ok_or_else(|| NotMeasured::BadAddress(address.clone()))?;
    let authority = format!("{host}:{}", uri.port_u16().unwrap_or(DEFAULT_PORT));
    match tokio::time::timeout(ANSWER_WITHIN, get(&authority)).await {
        Ok(answer) => answer,
        Err(_) => Err(NotMeasured::TooLate(authority)),
    }
}

async fn get(authority: &str) -> Result<NodeUse, NotMeasured> {
    let unreachable = |error: String| NotMeasured::Unreachable(authority.to_owned(), error);
    let unreadable = |error: String| NotMeasured::Unreadable(authority.to_owned(), error);
    let stream = TcpStream::connect(authority).await.map_err(|error| unreachable(error.to_string()))?;
    let shaken = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = shaken.map_err(|error| unreachable(error.to_string()))?;
    let request = Request::get(PATH)
        .header(header::HOST, authority)
        .body(Empty::<Bytes>::new())
        .map_err(|error| unreachable(error.to_string()))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(|error| unreachable(error.to_string()))?;
        if !answer.status().is_success() {
            return Err(NotMeasured::Status(authority.to_owned(), answer.status().as_u16()));
        }
        let body = Limited::new(answer.into_body(), MOST_BYTES).collect().await;
        let bytes = body.map_err(|error| unreadable(error.to_string()))?.to_bytes();
        serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))
    };
    // The connection works only while it is polled, and ends with the exchange.
    tokio::select! {
        answer = exchange => answer,
        ended = connection => Err(unreachable(ended.err().map_or_else(|| "it hung up".to_owned(), |error| error.to_string()))),
    }
}
