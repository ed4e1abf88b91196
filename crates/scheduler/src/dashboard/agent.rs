//! Reads the current usage from a node's agent.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_wire::tessera::agent_address::{AgentAddress, BadFingerprint, DEFAULT_PORT, Fingerprint};
use tessera_wire::tessera::node_use::{NodeUse, PATH};
use tokio::sync::Semaphore;

/// Timeout of the request, because a user waits for the page.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Size limit of the answer, ten times what a node with 64 GPUs and 1,000 containers sends.
const MAX_BYTES: usize = 4 << 20;

/// Answers read at a time. Each takes up to 30 MiB while it is parsed.
const MAX_CONCURRENT: usize = 4;

/// Reads the usage of nodes. The node chooses the address, so only the expected fields of the answer are used.
#[derive(Clone, Debug)]
pub struct AgentReader {
    token_file: Option<PathBuf>,
    fetcher: Fetcher,
    /// Limits the answers in memory, because a node can send large ones.
    permits: Arc<Semaphore>,
}

/// The reason why there is no usage.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotMeasured {
    #[error("the node does not say where its agent answers")]
    NoAddress,
    #[error("the agent's address {0:?} is invalid; it should read http://HOST:PORT or https://HOST:PORT")]
    BadAddress(String),
    #[error("the node's annotation with the certificate of its agent is invalid: {0}")]
    BadCertificate(#[from] BadFingerprint),
    #[error("the agent at {0} needs a token, and the scheduler has none; name its file with --agent-token")]
    NoToken(String),
    #[error("cannot read the token for agents from {}: {error}", path.display())]
    TokenFile { path: PathBuf, error: std::io::Error },
    #[error(
        "the server at {0} has another certificate than the node's annotation says, so no token was sent; an agent that \
         has just started publishes a new one within seconds"
    )]
    OtherCertificate(String),
    #[error("the agent at {0} did not answer in time")]
    TooLate(String),
    #[error("the agent at {0} cannot be reached: {1}")]
    Unreachable(String, String),
    #[error("the agent at {0} answered {1}{sep}{2}", sep = if .2.is_empty() { "" } else { ": " })]
    Status(String, u16, String),
    #[error("the agent at {0} sent an answer that cannot be parsed: {1}")]
    Unreadable(String, String),
}

/// How an agent is reached.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    /// Host and port, for messages.
    agent: String,
    url: String,
    /// Certificate of an agent that needs a token. All others get none.
    certificate: Option<Fingerprint>,
}

impl Default for AgentReader {
    fn default() -> Self {
        Self::with_token(None)
    }
}

impl AgentReader {
    /// Returns a reader that sends the token in this file to agents that need one. The file is read for each request,
    /// because the kubelet replaces the token before it expires.
    #[must_use]
    pub fn with_token(token_file: Option<PathBuf>) -> Self {
        let fetcher = Fetcher::new(REQUEST_TIMEOUT).with_max_bytes(MAX_BYTES);
        Self { token_file, fetcher, permits: Arc::new(Semaphore::new(MAX_CONCURRENT)) }
    }

    /// Reads the usage from the agent at `address`.
    pub(super) async fn read(&self, address: Option<AgentAddress>) -> Result<NodeUse, NotMeasured> {
        let Target { agent, url, certificate } = target(address)?;
        let _permit = self.permits.acquire().await;
        // An address without a known certificate may be any server, whose text is not for readers of the dashboard.
        let shows_text = certificate.is_some();
        let fetched = match certificate {
            Some(certificate) => {
                let token = self.token(&agent).await?;
                self.fetcher.get_pinned(&url, certificate, Some(&token)).await
            }
            None => self.fetcher.get(&url).await,
        };
        match fetched {
            Ok(text) => {
                serde_json::from_str(&text).map_err(|error| NotMeasured::Unreadable(agent, error.to_string()))
            }
            Err(FetchError::Late(_)) => Err(NotMeasured::TooLate(agent)),
            Err(FetchError::Certificate) => Err(NotMeasured::OtherCertificate(agent)),
            Err(FetchError::Status { code, text }) => {
                let shown = if shows_text { 500 } else { 0 };
                Err(NotMeasured::Status(agent, code, text.chars().take(shown).collect()))
            }
            Err(error) => Err(NotMeasured::Unreachable(agent, error.to_string())),
        }
    }

    async fn token(&self, agent: &str) -> Result<String, NotMeasured> {
        let path = self.token_file.as_ref().ok_or_else(|| NotMeasured::NoToken(agent.to_owned()))?;
        let read = tokio::fs::read_to_string(path).await;
        let text = read.map_err(|error| NotMeasured::TokenFile { path: path.clone(), error })?;
        Ok(text.trim().to_owned())
    }
}

/// Decides how an agent is reached. A token goes only to the server with the certificate that the node publishes, and
/// never over plain HTTP.
fn target(address: Option<AgentAddress>) -> Result<Target, NotMeasured> {
    let AgentAddress { url, certificate } = address.ok_or(NotMeasured::NoAddress)?;
    let bad = || NotMeasured::BadAddress(url.clone());
    let uri: Uri = url.parse().map_err(|_| bad())?;
    let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https")).ok_or_else(bad)?;
    let agent = format!("{}:{}", uri.host().ok_or_else(bad)?, uri.port_u16().unwrap_or(DEFAULT_PORT));
    let certificate = if scheme == "https" { certificate.transpose()? } else { None };
    Ok(Target { url: format!("{scheme}://{agent}{PATH}"), agent, certificate })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_only_to_https_with_a_known_certificate() {
        let certificate = Fingerprint([1; 32]);
        let reached = |url: &str, certificate: Option<Fingerprint>| {
            let address = AgentAddress { url: url.to_owned(), certificate: certificate.map(Ok) };
            target(Some(address)).unwrap()
        };
        assert_eq!(
            reached("https://10.0.0.5:5678", Some(certificate)),
            Target {
                agent: "10.0.0.5:5678".to_owned(),
                url: "https://10.0.0.5:5678/v1/use".to_owned(),
                certificate: Some(certificate),
            }
        );
        assert_eq!(reached("http://10.0.0.5:5678", Some(certificate)).certificate, None);
        assert_eq!(reached("https://proxy.example", None).certificate, None);
        assert_eq!(reached("http://[fd00::5]", None).url, "http://[fd00::5]:5678/v1/use");
        let unreadable =
            AgentAddress { url: "https://a:1".to_owned(), certificate: Some("no".parse::<Fingerprint>()) };
        assert!(matches!(target(Some(unreadable)), Err(NotMeasured::BadCertificate(_))));
    }
}
