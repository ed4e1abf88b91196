//! Reads the current usage from a node's agent.

use std::time::Duration;

use axum::http::Uri;
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_wire::tessera::node_use::{DEFAULT_PORT, NodeUse, PATH};

/// Timeout of the request, because a user waits for the page.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Size limit of the answer, ten times what a node with 64 GPUs and 1,000 containers sends.
const MAX_BYTES: usize = 4 << 20;

/// The reason why there is no usage.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotMeasured {
    #[error("the node does not say where its agent answers")]
    NoAddress,
    #[error("the agent's address {0:?} is invalid; it should read http://HOST:PORT")]
    BadAddress(String),
    #[error("the agent at {0} did not answer in time")]
    TooLate(String),
    #[error("the agent at {0} cannot be reached: {1}")]
    Unreachable(String, String),
    #[error("the agent at {0} answered {1}")]
    Status(String, u16),
    #[error("the agent at {0} sent an answer that cannot be parsed: {1}")]
    Unreadable(String, String),
}

/// Reads the usage from the agent at `address`. The node chooses the address, so the request
/// carries no credentials, and only the expected fields of the answer are used.
pub(super) async fn ask(address: Option<String>) -> Result<NodeUse, NotMeasured> {
    let address = address.ok_or(NotMeasured::NoAddress)?;
    let bad = || NotMeasured::BadAddress(address.clone());
    let uri: Uri = address.parse().map_err(|_| bad())?;
    let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or_else(bad)?;
    let agent = format!("{}:{}", uri.host().ok_or_else(bad)?, uri.port_u16().unwrap_or(DEFAULT_PORT));
    let fetcher = Fetcher::new(REQUEST_TIMEOUT).with_max_bytes(MAX_BYTES);
    match fetcher.get(&format!("{scheme}://{agent}{PATH}")).await {
        Ok(text) => {
            serde_json::from_str(&text).map_err(|error| NotMeasured::Unreadable(agent, error.to_string()))
        }
        Err(FetchError::Late(_)) => Err(NotMeasured::TooLate(agent)),
        Err(FetchError::Status { code, .. }) => Err(NotMeasured::Status(agent, code)),
        Err(error) => Err(NotMeasured::Unreachable(agent, error.to_string())),
    }
}
