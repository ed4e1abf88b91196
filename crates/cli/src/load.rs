//! Asking the API server, or a scheduler, or agents.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, stream};
use serde::de::DeserializeOwned;
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_cluster::list::{self, ListKind};
use tessera_cluster::{ApiError, Client, connect_in};
use tessera_core::quota::Quota;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::{quota, unhealthy};
use tessera_wire::tessera::node_use::{self, NodeUse};
use tessera_wire::tessera::rules::{self, Rules};

use crate::options::{Reach, Selecting};
use crate::survey::{BrokenGpus, Survey};

/// A scheduler answers from memory; one that does not answer by then will not.
const SCHEDULER_WITHIN: Duration = Duration::from_secs(10);

/// Agents asked at a time.
const AGENTS_AT_ONCE: usize = 64;

/// A connection to the cluster.
pub(crate) async fn client(reach: &Reach) -> Result<Client> {
    Ok(connect_in(reach.kubeconfig.as_deref(), reach.context.as_deref()).await?)
}

/// What the scheduler goes by, as far as it tells and the user may read it; options of the user win.
pub(crate) async fn rules(client: &Client, reach: &Reach) -> Rules {
    let (namespace, lease) = rules::LEASE;
    let mut rules = rules::parse(&list::lease_annotations(client, namespace, lease).await);
    if let Some(unit) = reach.memory_unit {
        rules.unit = unit;
    }
    rules
}

/// The nodes selected and what their pods hold.
pub(crate) async fn survey(client: &Client, reach: &Reach, selecting: &Selecting) -> Result<Survey> {
    let nodes = async {
        match &selecting.node {
            Some(name) => list::node(client, name).await.map(|node| vec![node]),
            None => list::list(client, ListKind::Nodes, &selecting.nodes(), |node: Node| Some(node)).await,
        }
    };
    let (rules, nodes, lists) = futures::join!(rules(client, reach), nodes, broken_lists(client, selecting));
    let broken = broken_gpus(lists?.unwrap_or_default());
    let mut survey = Survey::of_nodes(rules, nodes?, &broken);
    survey.quota = read_quota(client, &survey.rules).await?;
    let none: Vec<()> = list::list(client, ListKind::Pods, &selecting.pods(), |pod: Pod| {
        survey.add(pod);
        None
    })
    .await?;
    drop(none);
    Ok(survey.finish())
}

/// gpushare's lists of broken GPUs, by name; `None` where the user may not read them. What nodes say of themselves must do then.
pub(crate) async fn broken_lists(client: &Client, selecting: &Selecting) -> Result<Option<ConfigMaps>> {
    let lists = match &selecting.node {
        Some(node) => {
            let name = format!("{}{node}", unhealthy::PREFIX);
            let found = list::config_map(client, unhealthy::NAMESPACE, &name).await;
            found.map(|found| found.map(|data| (name, data)).into_iter().collect())
        }
        None => list::config_maps(client, unhealthy::NAMESPACE).await,
    };
    match lists {
        Err(error) if error.is_forbidden() => Ok(None),
        found => Ok(Some(found?)),
    }
}

/// Names of ConfigMaps and what is in them.
type ConfigMaps = Vec<(String, BTreeMap<String, String>)>;

/// The broken GPUs that lists among these ConfigMaps name. What cannot be read in them the scheduler reports.
pub(crate) fn broken_gpus(maps: impl IntoIterator<Item = (String, BTreeMap<String, String>)>) -> BrokenGpus {
    let read = |(name, data): (String, _)| {
        let (node, cards, _) = unhealthy::of_config_map(&name, &data)?;
        Some((node.into(), cards))
    };
    maps.into_iter().filter_map(read).collect()
}

/// The limits of the namespaces, where the scheduler goes by any.
pub(crate) async fn read_quota(client: &Client, rules: &Rules) -> Result<Quota> {
    let Some(settings) = &rules.quota else { return Ok(Quota::default()) };
    let data = match list::config_map(client, &settings.namespace, &settings.name).await {
        // Not everybody may read it; then the scheduler alone knows, and says so in the pod's event.
        Err(error) if error.is_forbidden() => return Ok(Quota::default()),
        found => found?.unwrap_or_default(),
    };
    let Some(text) = data.get(quota::DATA_KEY) else { return Ok(Quota::default()) };
    // What can be told without them is told; what depends on them says why it cannot be.
    let limits = quota::parse(text, &settings.origin());
    Ok(limits.unwrap_or_else(|error| Quota::all_unreadable(error.to_string())))
}

/// A pod, as kubectl would get it.
pub(crate) async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Pod, ApiError> {
    list::pod(client, namespace, name).await
}

/// A document of a scheduler: `path` below the endpoint, or below `prefix` where the endpoint names no path.
pub(crate) async fn from_scheduler<T: DeserializeOwned>(
    endpoint: &str,
    prefix: &str,
    path: &str,
) -> Result<T> {
    let endpoint = endpoint.trim_end_matches('/');
    let host = endpoint.split_once("://").map_or(endpoint, |(_, host)| host);
    let base = if host.contains('/') { endpoint.to_owned() } else { format!("{endpoint}{prefix}") };
    let url = format!("{base}{path}");
    let text = match Fetcher::new(SCHEDULER_WITHIN).get(&url).await {
        Ok(text) => text,
        // Our scheduler and the originals say in JSON what is wrong.
        Err(FetchError::Status { code, text }) => match error_of(&text) {
            Some(error) => bail!("{error}"),
            None => bail!("{url}: unexpected status code {code}"),
        },
        Err(error) => return Err(error).with_context(|| url),
    };
    if let Some(error) = error_of(&text) {
        bail!("{error}");
    }
    serde_json::from_str(&text).with_context(|| format!("{url}: not the answer of a GPU scheduler"))
}

fn error_of(text: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    value["error"].as_str().filter(|error| !error.is_empty()).map(str::to_owned)
}

/// What the agents of these nodes measure, or why they do not tell.
pub(crate) async fn agents(survey: &Survey, within: Duration) -> BTreeMap<String, Result<NodeUse, String>> {
    let fetcher = Fetcher::new(within);
    let asked = survey.with_gpus().map(|(facts, state)| {
        let (name, agent, fetcher) = (state.node().name.to_string(), facts.agent.clone(), fetcher.clone());
        async move {
            let answer = match agent {
                None => Err("the node tells no address".to_owned()),
                Some(agent) => ask_agent(&fetcher, &agent).await,
            };
            (name, answer)
        }
    });
    let asked: Vec<_> = asked.collect();
    stream::iter(asked).buffer_unordered(AGENTS_AT_ONCE).collect().await
}

async fn ask_agent(fetcher: &Fetcher, agent: &str) -> Result<NodeUse, String> {
    let url = format!("{}{}", agent.trim_end_matches('/'), node_use::PATH);
    let text = fetcher.get(&url).await.map_err(|error| format!("no answer from {url}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{url}: {error}"))
}

/// The unit of an extender that does not tell.
pub(crate) fn unit(reach: &Reach) -> MemoryUnit {
    reach.memory_unit.unwrap_or_default()
}
