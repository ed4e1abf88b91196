//! Watches pods, nodes, budgets, quotas, PodGroups and ConfigMaps and returns them as objects of `tessera_wire`.

use std::collections::BTreeMap;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::dra::{DeviceClass, ResourceClaim, ResourceSlice};
use tessera_wire::foreign::objects::{Metadata, Node, Pod};
use tessera_wire::foreign::pod_group::{PodGroup, PodGroupApi};
use tessera_wire::foreign::resource_quota::ResourceQuota;

use crate::causes::innermost;
use crate::protobuf::watching_pods;
use crate::{LeanBudget, LeanClaim, LeanClass, LeanNode, LeanPod, LeanResourceQuota, LeanSlice, Selection};

/// One event of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchChange<T> {
    /// A list begins, at the start or after the watch was lost. Objects that are not in the list no
    /// longer exist.
    Listing,
    /// A new or changed object.
    Set(T),
    /// A deleted object.
    Gone(T),
    /// The list is complete.
    Listed,
    /// The API server cannot be reached or does not answer. The watch retries.
    Lost(String),
}

/// Objects per page of the initial list.
const PAGE_SIZE: u32 = 2000;

/// Seconds after which a watch is resumed on a new request. This bounds how long a dead connection
/// goes unnoticed.
const TIMEOUT_SECONDS: u32 = 60;

/// Watches all pods of the cluster.
pub fn pods(client: Client) -> impl Stream<Item = WatchChange<Pod>> + Send {
    selected_pods(client, &Selection::default())
}

/// Watches all nodes of the cluster.
pub fn nodes(client: Client) -> impl Stream<Item = WatchChange<Node>> + Send {
    selected_nodes(client, &Selection::default())
}

/// Watches the selected pods of the cluster.
pub fn selected_pods(
    client: Client,
    selection: &Selection,
) -> impl Stream<Item = WatchChange<Pod>> + Send + use<> {
    let api: Api<LeanPod> = Api::all(watching_pods(client));
    changes(watcher(api, config(selection)), |pod: LeanPod| pod.into())
}

/// Watches the selected nodes of the cluster.
pub fn selected_nodes(
    client: Client,
    selection: &Selection,
) -> impl Stream<Item = WatchChange<Node>> + Send + use<> {
    let api: Api<LeanNode> = Api::all(client);
    changes(watcher(api, config(selection)), |node: LeanNode| node.into())
}

pub(crate) fn config(selection: &Selection) -> watcher::Config {
    let mut config = watcher::Config::default().page_size(PAGE_SIZE).timeout(TIMEOUT_SECONDS);
    config.label_selector = selection.labels.clone();
    config.field_selector = selection.fields.clone();
    config
}

/// Watches the data of one ConfigMap.
pub fn config_map(
    client: Client,
    namespace: &str,
    name: &str,
) -> impl Stream<Item = WatchChange<BTreeMap<String, String>>> + Send + use<> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let by_name = Selection { fields: Some(format!("metadata.name={name}")), ..Selection::default() };
    changes(watcher(api, config(&by_name)), |map: ConfigMap| map.data.unwrap_or_default())
}

/// Watches the disruption budgets of the cluster.
pub fn budgets(client: Client) -> impl Stream<Item = WatchChange<Budget>> + Send {
    let api: Api<LeanBudget> = Api::all(client);
    changes(watcher(api, config(&Selection::default())), |budget: LeanBudget| Budget {
        metadata: metadata(budget.metadata),
        spec: budget.spec,
        status: budget.status,
    })
}

/// Watches the ResourceQuotas of the cluster.
pub fn resource_quotas(client: Client) -> impl Stream<Item = WatchChange<ResourceQuota>> + Send {
    let api: Api<LeanResourceQuota> = Api::all(client);
    changes(watcher(api, config(&Selection::default())), |quota: LeanResourceQuota| ResourceQuota {
        metadata: metadata(quota.metadata),
        spec: quota.spec,
    })
}

/// Watches the claims of the cluster.
pub fn claims(client: Client) -> impl Stream<Item = WatchChange<ResourceClaim>> + Send {
    let api: Api<LeanClaim> = Api::all(client);
    changes(watcher(api, config(&Selection::default())), |claim: LeanClaim| claim.into())
}

/// Watches the device classes of the cluster.
pub fn classes(client: Client) -> impl Stream<Item = WatchChange<DeviceClass>> + Send {
    let api: Api<LeanClass> = Api::all(client);
    changes(watcher(api, config(&Selection::default())), |class: LeanClass| DeviceClass {
        metadata: metadata(class.metadata),
        spec: class.spec,
    })
}

/// Watches the slices of this driver.
pub fn slices(client: Client, driver: &str) -> impl Stream<Item = WatchChange<ResourceSlice>> + Send + use<> {
    let api: Api<LeanSlice> = Api::all(client);
    let selection = config(&Selection::default()).fields(&format!("spec.driver={driver}"));
    changes(watcher(api, selection), |slice: LeanSlice| ResourceSlice {
        metadata: metadata(slice.metadata),
        spec: slice.spec,
    })
}

/// Watches the objects of one kind with the sizes of gangs in all namespaces.
pub fn pod_groups(client: Client, api: PodGroupApi) -> impl Stream<Item = WatchChange<PodGroup>> + Send {
    let PodGroupApi { origin, group, version, kind, plural } = api;
    let kind = GroupVersionKind::gvk(group, version, kind);
    let objects: Api<DynamicObject> =
        Api::all_with(client, &ApiResource::from_gvk_with_plural(&kind, plural));
    changes(watcher(objects, config(&Selection::default())), move |object: DynamicObject| {
        let meta = metadata(object.metadata);
        let spec = object.data.get("spec").unwrap_or(&serde_json::Value::Null);
        PodGroup::new(origin, &meta.namespace, &meta.name, spec)
    })
}

/// Watches the names and data of all ConfigMaps of a namespace.
pub fn config_maps(
    client: Client,
    namespace: &str,
) -> impl Stream<Item = WatchChange<(String, BTreeMap<String, String>)>> + Send + use<> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    changes(watcher(api, config(&Selection::default())), |map: ConfigMap| {
        (map.metadata.name.unwrap_or_default(), map.data.unwrap_or_default())
    })
}

fn changes<K, T>(
    events: impl Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send,
    read: impl Fn(K) -> T + Send,
) -> impl Stream<Item = WatchChange<T>> + Send {
    let backoff = watcher::DefaultBackoff::default();
    events.backoff(backoff).map(move |event| match event {
        Ok(watcher::Event::Init) => WatchChange::Listing,
        Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => {
            WatchChange::Set(read(object))
        }
        Ok(watcher::Event::InitDone) => WatchChange::Listed,
        Ok(watcher::Event::Delete(object)) => WatchChange::Gone(read(object)),
        Err(error) => WatchChange::Lost(innermost(&error)),
    })
}

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

impl From<LeanClaim> for ResourceClaim {
    fn from(claim: LeanClaim) -> Self {
        Self { metadata: metadata(claim.metadata), spec: claim.spec, status: claim.status }
    }
}

fn metadata(meta: ObjectMeta) -> Metadata {
    Metadata {
        name: meta.name.unwrap_or_default(),
        namespace: meta.namespace.unwrap_or_default(),
        uid: meta.uid.unwrap_or_default(),
        labels: meta.labels.unwrap_or_default(),
        annotations: meta.annotations.unwrap_or_default(),
        creation_timestamp: meta.creation_timestamp.map(|time| time.0.to_string()),
        deletion_timestamp: meta.deletion_timestamp.map(|time| time.0.to_string()),
    }
}
