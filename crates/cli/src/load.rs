//! Loads data from the API server or a scheduler.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tessera_cluster::fetch::{FetchError, Fetcher};
use tessera_cluster::list::{self, ListKind};
use tessera_cluster::{ApiError, Client, Selection, connect_in, is_served};
use tessera_core::disruption::DisruptionBudget;
use tessera_core::quota::Quota;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::dra::{self, DeviceClass, ResourceClaim};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::resource_quota::ResourceQuota;
use tessera_wire::foreign::{quota, unhealthy};
use tessera_wire::tessera::rules::{self, Rules};

use crate::options::{NodeSelection, SourceOptions};
use crate::survey::{Survey, UnhealthyGpus};

/// Timeout of a query to a scheduler, which answers from memory.
pub(crate) const SCHEDULER_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects to the API server.
pub(crate) async fn client(source: &SourceOptions) -> Result<Client> {
    Ok(connect_in(source.kubeconfig.as_deref(), source.context.as_deref()).await?)
}

/// Returns the namespace of the kubeconfig's context, or `default` without a kubeconfig, which `--endpoint` does not
/// need.
pub(crate) async fn default_namespace(source: &SourceOptions) -> String {
    let client = client(source).await;
    client.map_or_else(|_| "default".to_owned(), |client| client.default_namespace().to_owned())
}

/// Reads the rules that the scheduler publishes, if the user may read them. Options of the user
/// win.
pub(crate) async fn rules(client: &Client, source: &SourceOptions) -> Rules {
    let (namespace, lease) = rules::LEASE;
    let mut rules = rules::parse(&list::lease_annotations(client, namespace, lease).await);
    if let Some(unit) = source.memory_unit {
        rules.unit = unit;
    }
    rules
}

/// Reads the selected nodes and their pods.
pub(crate) async fn survey(
    client: &Client,
    source: &SourceOptions,
    selection: &NodeSelection,
) -> Result<Survey> {
    survey_through(client, source, selection, |pod: Pod| pod).await
}

/// Reads the selected nodes and their pods. Each pod is read as `T` and passes through `pod_of`.
pub(crate) async fn survey_through<T: DeserializeOwned>(
    client: &Client,
    source: &SourceOptions,
    selection: &NodeSelection,
    mut pod_of: impl FnMut(T) -> Pod,
) -> Result<Survey> {
    let nodes = async {
        match &selection.node {
            Some(name) => list::node(client, name).await.map(|node| vec![node]),
            None => list::list(client, ListKind::Nodes, &selection.nodes(), |node: Node| Some(node)).await,
        }
    };
    let (rules, nodes, lists) =
        futures::join!(rules(client, source), nodes, unhealthy_lists(client, selection));
    let unhealthy_gpus = unhealthy_gpus(lists?.unwrap_or_default());
    let mut survey = Survey::of_nodes(rules, nodes?, &unhealthy_gpus);
    survey.now_seconds = now_seconds();
    let (quota, claims) = futures::join!(read_quota(client, &survey.rules), claims(client));
    survey.quota = quota?;
    if let Some((claims, classes)) = claims? {
        survey.set_claims(claims, classes);
    }
    let none: Vec<()> = list::list(client, ListKind::Pods, &selection.pods(), |listed: T| {
        survey.add(pod_of(listed));
        None
    })
    .await?;
    drop(none);
    if selection.node.is_some() {
        survey.waiting_owners = waiting_owners(client, &survey).await;
    }
    Ok(survey.finish())
}

/// Returns the UIDs of the pods that reservations name and that wait. The list of the pods of one node contains none.
pub(crate) async fn waiting_owners(client: &Client, survey: &Survey) -> BTreeSet<String> {
    let reservations = survey.nodes.values().flat_map(|facts| &facts.reservations);
    let mut waiting = BTreeSet::new();
    for owner in reservations.filter_map(|reservation| reservation.pod.as_ref()) {
        if let Ok(found) = pod(client, &owner.namespace, &owner.name).await
            && found.metadata.uid == owner.uid
            && found.spec.node_name.is_empty()
        {
            waiting.insert(owner.uid.clone());
        }
    }
    waiting
}

/// Returns the seconds since 1970.
pub(crate) fn now_seconds() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

/// Reads the claims of dynamic resource allocation and their classes. Returns `None` if the API server does not serve
/// claims or the user may not read them; then only pods are shown as holders of GPUs.
async fn claims(client: &Client) -> Result<Option<(Vec<ResourceClaim>, Vec<DeviceClass>)>> {
    if !is_served(client, dra::GROUP, dra::VERSION, "resourceclaims").await.unwrap_or(false) {
        return Ok(None);
    }
    let all = Selection::default();
    let claims = list::list(client, ListKind::ResourceClaims, &all, |claim: ResourceClaim| Some(claim));
    let classes = list::list(client, ListKind::DeviceClasses, &all, |class: DeviceClass| Some(class));
    match futures::join!(claims, classes) {
        (Err(error), _) if error.is_forbidden() => Ok(None),
        (claims, Err(error)) if error.is_forbidden() => Ok(Some((claims?, Vec::new()))),
        (claims, classes) => Ok(Some((claims?, classes?))),
    }
}

/// Reads gpushare's lists of unhealthy GPUs. Returns `None` if the user may not read them; then
/// only the nodes' own inventories count.
pub(crate) async fn unhealthy_lists(
    client: &Client,
    selection: &NodeSelection,
) -> Result<Option<ConfigMaps>> {
    let lists = match &selection.node {
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

/// Names and data of ConfigMaps.
type ConfigMaps = Vec<(String, BTreeMap<String, String>)>;

/// Returns the unhealthy GPUs that these ConfigMaps list. Invalid entries are skipped; the
/// scheduler reports them.
pub(crate) fn unhealthy_gpus(
    maps: impl IntoIterator<Item = (String, BTreeMap<String, String>)>,
) -> UnhealthyGpus {
    let read = |(name, data): (String, _)| {
        let (node, gpus, _) = unhealthy::of_config_map(&name, &data)?;
        Some((node.into(), gpus))
    };
    maps.into_iter().filter_map(read).collect()
}

/// Reads the limits of the namespaces: those of the scheduler's ConfigMap and those of ResourceQuotas.
pub(crate) async fn read_quota(client: &Client, rules: &Rules) -> Result<Quota> {
    let cap = |quota: ResourceQuota| Some((quota.metadata.namespace.clone(), quota.cap()?));
    let all = Selection::default();
    let caps = list::list(client, ListKind::ResourceQuotas, &all, cap);
    let (configured, caps) = futures::join!(configured_quota(client, rules), caps);
    let caps = match caps {
        // Without permission to read them, only the pod's event reports an exceeded quota.
        Err(error) if error.is_forbidden() => Vec::new(),
        caps => caps?,
    };
    Ok(configured?.capped(caps.iter().map(|(namespace, cap)| (namespace.as_str(), *cap))))
}

async fn configured_quota(client: &Client, rules: &Rules) -> Result<Quota> {
    let Some(settings) = &rules.quota else { return Ok(Quota::default()) };
    let data = match list::config_map(client, &settings.namespace, &settings.name).await {
        // Without permission to read the ConfigMap, only the pod's event reports an exceeded quota.
        Err(error) if error.is_forbidden() => return Ok(Quota::default()),
        found => found?.unwrap_or_default(),
    };
    let Some(text) = data.get(quota::DATA_KEY) else { return Ok(Quota::default()) };
    // Unreadable limits become the rejection reason of the pods that they concern.
    let limits = quota::parse(text, &settings.origin());
    Ok(limits.unwrap_or_else(|error| Quota::all_unreadable(error.to_string())))
}

/// Reads all PodDisruptionBudgets.
pub(crate) async fn budgets(client: &Client) -> Result<Vec<DisruptionBudget>> {
    let all = Selection::default();
    let keep = |budget: Budget| Some(DisruptionBudget::from(budget));
    Ok(list::list(client, ListKind::DisruptionBudgets, &all, keep).await?)
}

/// Reads one pod.
pub(crate) async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Pod, ApiError> {
    list::pod(client, namespace, name).await
}

/// Reads JSON from a scheduler at `path` below the endpoint. `prefix` comes first if the endpoint
/// has no path.
pub(crate) async fn from_scheduler<T: DeserializeOwned>(
    endpoint: &str,
    prefix: &str,
    path: &str,
) -> Result<T> {
    let endpoint = endpoint.trim_end_matches('/');
    let host = endpoint.split_once("://").map_or(endpoint, |(_, host)| host);
    let base = if host.contains('/') { endpoint.to_owned() } else { format!("{endpoint}{prefix}") };
    let url = format!("{base}{path}");
    parse_answer(Fetcher::new(SCHEDULER_TIMEOUT).get(&url).await, url)
}

/// Sends a document to a scheduler and reads the answer.
pub(crate) async fn post_to_scheduler<T: DeserializeOwned>(
    endpoint: &str,
    path: &str,
    document: &impl Serialize,
) -> Result<T> {
    let url = format!("{}{path}", endpoint.trim_end_matches('/'));
    let body = serde_json::to_string(document)?;
    parse_answer(Fetcher::new(SCHEDULER_TIMEOUT).post(&url, body).await, url)
}

/// The answer of a scheduler that there is nothing to show, such as for an unknown node.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct SchedulerRefusal(String);

fn parse_answer<T: DeserializeOwned>(answer: Result<String, FetchError>, url: String) -> Result<T> {
    let text = match answer {
        Ok(text) => text,
        // Tessera's scheduler and the other extenders report errors as JSON.
        Err(FetchError::Status { code, text }) => match error_of(&text) {
            Some(error) => return Err(SchedulerRefusal(error).into()),
            None => bail!("{url}: unexpected status code {code}"),
        },
        Err(error @ (FetchError::Unreachable(_) | FetchError::Late(_))) => {
            return Err(anyhow!(
                "cannot reach {url}: {error}; check the address of --endpoint and the port-forward"
            ));
        }
        Err(error) => return Err(error).with_context(|| url),
    };
    if let Some(error) = error_of(&text) {
        return Err(SchedulerRefusal(error).into());
    }
    serde_json::from_str(&text).with_context(|| format!("{url}: the response is not that of a GPU scheduler"))
}

fn error_of(text: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    value["error"].as_str().filter(|error| !error.is_empty()).map(str::to_owned)
}

/// Returns the memory unit for an extender that does not report one.
pub(crate) fn unit(source: &SourceOptions) -> MemoryUnit {
    source.memory_unit.unwrap_or_default()
}
