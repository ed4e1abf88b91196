//! Watches of pods, nodes, budgets and ConfigMaps, as plain objects of the wire.

use std::collections::BTreeMap;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tessera_wire::disruption::Budget;
use tessera_wire::objects::{Metadata, Node, Pod};

use crate::causes::innermost;
use crate::{LeanBudget, LeanNode, LeanPod, Selection};

/// What a watch tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<T> {
    /// A list begins, at the start or after the watch was lost: what it does not show is gone when it ends.
    Listing,
    /// An object as it is now.
    Set(T),
    /// An object that is no more.
    Gone(T),
    /// The list is complete.
    Listed,
    /// The API server cannot be reached or does not answer; the watch goes on trying.
    Lost(String),
}

/// Objects asked for at a time when listing.
const PAGE: u32 = 2000;

/// Seconds after which a watch is begun anew where it left off: a connection that died without a word is noticed so soon.
const ANEW_AFTER: u32 = 60;

/// All pods of the cluster.
pub fn pods(client: Client) -> impl Stream<Item = Change<Pod>> + Send {
    selected_pods(client, &Selection::default())
}

/// All nodes of the cluster.
pub fn nodes(client: Client) -> impl Stream<Item = Change<Node>> + Send {
    selected_nodes(client, &Selection::default())
}

/// Some pods of the cluster.
pub fn selected_pods(
    client: Client,
    selection: &Selection,
) -> impl Stream<Item = Change<Pod>> + Send + use<> {
    let api: Api<LeanPod> = Api::all(client);
    changes(watcher(api, config(selection)), |pod: LeanPod| pod.into())
}

/// Some nodes of the cluster.
pub fn selected_nodes(
    client: Client,
    selection: &Selection,
) -> impl Stream<Item = Change<Node>> + Send + use<> {
    let api: Api<LeanNode> = Api::all(client);
    changes(watcher(api, config(selection)), |node: LeanNode| node.into())
}

pub(crate) fn config(selection: &Selection) -> watcher::Config {
    let mut config = watcher::Config::default().page_size(PAGE).timeout(ANEW_AFTER);
    config.label_selector = selection.labels.clone();
    config.field_selector = selection.fields.clone();
    config
}

/// The data of one ConfigMap.
pub fn config_map(
    client: Client,
    namespace: &str,
    name: &str,
) -> impl Stream<Item = Change<BTreeMap<String, String>>> + Send + use<> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let only_it = Selection { fields: Some(format!("metadata.name={name}")), ..Selection::default() };
    changes(watcher(api, config(&only_it)), |map: ConfigMap| map.data.unwrap_or_default())
}

/// The disruption budgets of the cluster.
pub fn budgets(client: Client) -> impl Stream<Item = Change<Budget>> + Send {
    let api: Api<LeanBudget> = Api::all(client);
    changes(watcher(api, config(&Selection::default())), |budget: LeanBudget| Budget {
        metadata: metadata(budget.metadata),
        spec: budget.spec,
        status: budget.status,
    })
}

/// All ConfigMaps of a namespace: their names and data.
pub fn config_maps(
    client: Client,
    namespace: &str,
) -> impl Stream<Item = Change<(String, BTreeMap<String, String>)>> + Send + use<> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    changes(watcher(api, config(&Selection::default())), |map: ConfigMap| {
        (map.metadata.name.unwrap_or_default(), map.data.unwrap_or_default())
    })
}

fn changes<K, T>(
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
    read: impl Fn(K) -> T + Send,
) -> impl Stream<Item = Change<T>> + Send {
    let delays = watcher::DefaultBackoff::default();
    events.backoff(delays).map(move |event| match event {
        Ok(watcher::Event::Init) => Change::Listing,
        Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => Change::Set(read(object)),
        Ok(watcher::Event::InitDone) => Change::Listed,
        Ok(watcher::Event::Delete(object)) => Change::Gone(read(object)),
        Err(error) => Change::Lost(innermost(&error)),
    })
}

// === conversions ===

impl From<LeanPod> for Pod {
    fn from(pod: LeanPod) -> Self {
        Self { metadata: metadata(pod.metadata), spec: pod.spec, status: pod.status }
    }
}

impl From<LeanNode> for Node {
    fn from(node: LeanNode) -> Self {
        Self { metadata: metadata(node.metadata), spec: node.spec, status: node.status }
    }
}

fn metadata(meta: ObjectMeta) -> Metadata {
    Metadata {
        name: meta.name.unwrap_or_default(),
        namespace: meta.namespace.unwrap_or_default(),
        uid: meta.uid.unwrap_or_default(),
        labels: meta.labels.unwrap_or_default(),
        annotations: meta.annotations.unwrap_or_default(),
        deletion_timestamp: meta.deletion_timestamp.map(|time| time.0.to_string()),
    }
}
