//! Loads the measured use of nodes: from agents with open pages directly, from others through the scheduler, which has
//! a token for them.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_cluster::{ApiError, Client, list};
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::node_use::{self, MeasuredUse, NodeUse};

use crate::load::{SCHEDULER_TIMEOUT, from_scheduler};
use crate::options::SourceOptions;
use crate::survey::Survey;

/// Timeout of a query to an agent.
const AGENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of nodes that are queried concurrently.
const MAX_CONCURRENT_NODES: usize = 64;

/// Service and port of the scheduler's pages in `deploy/scheduler`.
const SCHEDULER_SERVICE: &str = "tessera-scheduler:dashboard";

/// Measurements that are not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UsageError {
    #[error("the node publishes no address")]
    NoAddress,
    #[error("no answer from {url}: {source}")]
    Fetch { url: String, source: FetchError },
    #[error("{url}: {source}")]
    Json { url: String, source: serde_json::Error },
    #[error("{0}")]
    NotMeasured(String),
    #[error(
        "the agent needs a token, which the scheduler has, and --endpoint {endpoint} does not answer: {reason}"
    )]
    Endpoint { endpoint: String, reason: String },
    #[error(
        "the agent needs a token, which the scheduler has, and the Service {namespace}/{SCHEDULER_SERVICE} does not \
         answer through the API server: {reason}; name the scheduler with --endpoint URL or --scheduler-namespace NAME, \
         or ask for get on services/proxy"
    )]
    Service { namespace: String, reason: String },
}

/// Queries the measurements of all nodes.
pub(crate) async fn of_nodes(
    client: Option<&Client>,
    source: &SourceOptions,
    survey: &Survey,
) -> BTreeMap<String, Result<NodeUse, UsageError>> {
    let fetcher = Fetcher::new(AGENT_TIMEOUT);
    let queries = survey.with_gpus().map(|(facts, state)| {
        let (name, agent, fetcher) = (state.node().name.to_string(), facts.agent.clone(), fetcher.clone());
        async move {
            let answer = match agent {
                _ if client.is_none() => by_scheduler(client, source, &name).await,
                None => Err(UsageError::NoAddress),
                Some(AgentAddress { url, certificate: None }) => by_agent(&fetcher, &url).await,
                Some(AgentAddress { certificate: Some(_), .. }) => by_scheduler(client, source, &name).await,
            };
            (name, answer)
        }
    });
    let queries: Vec<_> = queries.collect();
    stream::iter(queries).buffer_unordered(MAX_CONCURRENT_NODES).collect().await
}

async fn by_agent(fetcher: &Fetcher, agent: &str) -> Result<NodeUse, UsageError> {
    let url = format!("{}{}", agent.trim_end_matches('/'), node_use::PATH);
    match fetcher.get(&url).await {
        Ok(text) => serde_json::from_str(&text).map_err(|source| UsageError::Json { url, source }),
        Err(source) => Err(UsageError::Fetch { url, source }),
    }
}

async fn by_scheduler(
    client: Option<&Client>,
    source: &SourceOptions,
    node: &str,
) -> Result<NodeUse, UsageError> {
    let path = node_use::scheduler_path(node);
    let measured = match &source.endpoint {
        Some(endpoint) => from_scheduler(endpoint, "", &path).await.map_err(|error| {
            UsageError::Endpoint { endpoint: endpoint.clone(), reason: format!("{error:#}") }
        })?,
        None => match client {
            Some(client) => by_service(client, &source.scheduler_namespace, &path).await?,
            None => return Err(UsageError::NoAddress),
        },
    };
    let MeasuredUse { used, not_measured } = measured;
    used.ok_or_else(|| UsageError::NotMeasured(not_measured.unwrap_or_else(|| "not measured".to_owned())))
}

async fn by_service(client: &Client, namespace: &str, path: &str) -> Result<MeasuredUse, UsageError> {
    let failed = |reason: String| UsageError::Service { namespace: namespace.to_owned(), reason };
    let asked = list::from_service(client, namespace, SCHEDULER_SERVICE, path);
    match tokio::time::timeout(SCHEDULER_TIMEOUT, asked).await {
        Ok(answer) => answer.map_err(|error: ApiError| failed(error.to_string())),
        Err(_) => Err(failed(format!("no answer within {SCHEDULER_TIMEOUT:?}"))),
    }
}
