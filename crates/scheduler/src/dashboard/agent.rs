//! Asking a node's agent what is used there right now.

use std::time::Duration;

use axum::http::Uri;
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_wire::tessera::node_use::{DEFAULT_PORT, NodeUse, PATH};

/// Somebody waits for the page.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// A node of 64 GPUs and a thousand containers writes a tenth of this.
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
    let bad = || NotMeasured::BadAddress(address.clone());
    let uri: Uri = address.parse().map_err(|_| bad())?;
    let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or_else(bad)?;
    let agent = format!("{}:{}", uri.host().ok_or_else(bad)?, uri.port_u16().unwrap_or(DEFAULT_PORT));
    let fetcher = Fetcher::new(ANSWER_WITHIN).with_max_bytes(MOST_BYTES);
    match fetcher.get(&format!("{scheme}://{agent}{PATH}")).await {
        Ok(text) => {
            serde_json::from_str(&text).map_err(|error| NotMeasured::Unreadable(agent, error.to_string()))
        }
        Err(FetchError::Late(_)) => Err(NotMeasured::TooLate(agent)),
        Err(FetchError::Status { code, .. }) => Err(NotMeasured::Status(agent, code)),
        Err(error) => Err(NotMeasured::Unreachable(agent, error.to_string())),
    }
}
