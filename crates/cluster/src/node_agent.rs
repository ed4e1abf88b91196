//! API requests of a node's agent: its own node, the pods on it, and the list of unhealthy GPUs.

mod dra;

use std::{collections::BTreeMap, time::Duration};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, EventSource};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::unhealthy;

use crate::causes::{FailureLog, innermost};
use crate::{LeanNode, LeanPod, Notice, Selection, watch::config};

/// Client of the API server for the agent of one node.
#[derive(Clone)]
pub struct NodeClient {
    client: Client,
    node: String,
    timeouts: ApiTimeouts,
}

/// Timeouts of requests. Without them, the agent would wait forever on a dead connection.
#[derive(Clone, Copy, Debug)]
pub struct ApiTimeouts {
    /// Timeout for reading pods. It is short, because the kubelet admits no pod until the answer
    /// arrives.
    pub read: Duration,
    /// Timeout for a write. A write that arrives after the timeout is repeated without effect.
    pub write: Duration,
}

impl Default for ApiTimeouts {
    fn default() -> Self {
        Self { read: Duration::from_secs(2), write: Duration::from_secs(10) }
    }
}

/// One change to the pods of a node.
#[derive(Debug, Clone)]
pub enum PodEvent {
    /// Complete list of the pods.
    All(Vec<Pod>),
    /// New or changed pod.
    Applied(Box<Pod>),
    /// UID of a deleted pod.
    Deleted(String),
}

/// Reason why a request of the agent failed.
#[derive(Debug, thiserror::Error)]
pub enum WriteFailure {
    /// The object was deleted, or another object has its name.
    #[error("the object no longer exists: {0}")]
    Gone(String),
    /// The API server rejected the request.
    #[error("the API server rejected the request")]
    Api(#[source] Box<kube::Error>),
    /// The API server did not answer before the timeout.
    #[error("the API server did not answer within {0:?}")]
    Silent(Duration),
}

impl std::fmt::Debug for NodeClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeClient").field("node", &self.node).finish_non_exhaustive()
    }
}

impl NodeClient {
    /// Returns a client for the agent of `node`.
    #[must_use]
    pub fn new(client: Client, node: String) -> Self {
        Self { client, node, timeouts: ApiTimeouts::default() }
    }

    /// Returns the name of the node.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Returns the same client with other timeouts.
    #[must_use]
    pub fn with_timeouts(self, timeouts: ApiTimeouts) -> Self {
        Self { timeouts, ..self }
    }

    async fn write<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, WriteFailure> {
        with_timeout(self.timeouts.write, call).await
    }

    fn pods(&self) -> Api<LeanPod> {
        Api::all(self.client.clone())
    }

    fn on_this_node(&self) -> String {
        format!("spec.nodeName={}", self.node)
    }

    fn this_node(&self) -> String {
        format!("metadata.name={}", self.node)
    }

    /// Watches the pods of the node. The stream never ends: after a failure the watch starts again.
    pub fn watch_pods(&self) -> impl Stream<Item = PodEvent> + use<> {
        let config = config(&Selection { fields: Some(self.on_this_node()), ..Selection::default() });
        let mut all = Vec::new();
        let events = watcher(self.pods(), config).default_backoff();
        events.inspect(log_failures("pods")).filter_map(move |event| {
            let change = match event {
                Ok(watcher::Event::Init) => {
                    all.clear();
                    None
                }
                Ok(watcher::Event::InitApply(pod)) => {
                    all.push(lean_pod(pod));
                    None
                }
                Ok(watcher::Event::InitDone) => Some(PodEvent::All(std::mem::take(&mut all))),
                Ok(watcher::Event::Apply(pod)) => Some(PodEvent::Applied(Box::new(lean_pod(pod)))),
                Ok(watcher::Event::Delete(pod)) => pod.metadata.uid.map(PodEvent::Deleted),
                Err(_watch_restarts) => None,
            };
            async move { change }
        })
    }

    /// Watches the node object. Yields `None` while it does not exist.
    pub fn watch_node(&self) -> impl Stream<Item = Option<Node>> + use<> {
        let nodes: Api<LeanNode> = Api::all(self.client.clone());
        let config = config(&Selection { fields: Some(self.this_node()), ..Selection::default() });
        let events = watcher(nodes, config).default_backoff();
        let mut listed = false;
        events.inspect(log_failures("node")).filter_map(move |event| {
            let change = match event {
                Ok(watcher::Event::Init) => {
                    listed = false;
                    None
                }
                Ok(watcher::Event::InitApply(node)) => {
                    listed = true;
                    Some(Some(node.into()))
                }
                Ok(watcher::Event::Apply(node)) => Some(Some(node.into())),
                Ok(watcher::Event::InitDone) => (!listed).then_some(None),
                Ok(watcher::Event::Delete(_)) => Some(None),
                Err(_watch_restarts) => None,
            };
            async move { change }
        })
    }

    /// Reads the pods of the node from the API server's store, not from its cache.
    pub async fn read_pods(&self) -> Result<Vec<Pod>, WriteFailure> {
        let (pods, parameters) = (self.pods(), ListParams::default().fields(&self.on_this_node()));
        let listed = with_timeout(self.timeouts.read, pods.list(&parameters)).await?;
        Ok(listed.items.into_iter().map(lean_pod).collect())
    }

    /// Returns the container runtime of the node and its version, such as `containerd://2.0.1`.
    pub async fn container_runtime(&self) -> Result<String, WriteFailure> {
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.client.clone());
        let parameters = ListParams::default().fields(&self.this_node());
        let listed = with_timeout(self.timeouts.read, nodes.list(&parameters)).await?;
        let node = listed.items.into_iter().next();
        let info = node.and_then(|node| node.status?.node_info);
        let missing = || WriteFailure::Gone(format!("node {} reports no container runtime", self.node));
        info.map(|info| info.container_runtime_version).filter(|text| !text.is_empty()).ok_or_else(missing)
    }

    /// Sets annotations of a pod. Fails with [`WriteFailure::Gone`] if another pod has its name.
    pub async fn patch_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        annotations: &BTreeMap<String, String>,
    ) -> Result<(), WriteFailure> {
        let pods: Api<LeanPod> = Api::namespaced(self.client.clone(), namespace);
        let patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
        self.write(pods.patch(name, &PatchParams::default(), &Patch::Merge(patch))).await?;
        Ok(())
    }

    /// Creates a new Kubernetes Event for a pod.
    pub async fn write_pod_event(&self, notice: &Notice) -> Result<(), WriteFailure> {
        let metadata =
            ObjectMeta { generate_name: Some(format!("{}.", notice.name)), ..ObjectMeta::default() };
        let component = Some("tessera-agent".to_owned());
        let event = notice.event(metadata, EventSource { component, host: Some(self.node.clone()) });
        self.write(notice.events(&self.client).create(&PostParams::default(), &event)).await?;
        Ok(())
    }

    /// Sets annotations and labels of the node, and capacity and allocatable amounts in its status.
    pub async fn patch_node(
        &self,
        annotations: &BTreeMap<String, String>,
        labels: &BTreeMap<String, String>,
        status: &BTreeMap<String, String>,
    ) -> Result<(), WriteFailure> {
        let nodes: Api<LeanNode> = Api::all(self.client.clone());
        if !annotations.is_empty() || !labels.is_empty() {
            let patch = json!({ "metadata": { "annotations": annotations, "labels": labels } });
            self.write(nodes.patch(&self.node, &PatchParams::default(), &Patch::Merge(patch))).await?;
        }
        if !status.is_empty() {
            let patch = json!({ "status": { "capacity": status, "allocatable": status } });
            let parameters = PatchParams::default();
            self.write(nodes.patch_status(&self.node, &parameters, &Patch::Merge(patch))).await?;
        }
        Ok(())
    }

    /// Publishes the unhealthy GPUs in the ConfigMap that gpushare's scheduler reads. If there are
    /// none, the ConfigMap is deleted, because that scheduler reads an empty list as GPU 0.
    pub async fn set_unhealthy(&self, gpus: &[u8]) -> Result<(), WriteFailure> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), unhealthy::NAMESPACE);
        let name = format!("{}{}", unhealthy::PREFIX, self.node);
        if gpus.is_empty() {
            return match self.write(maps.delete(&name, &DeleteParams::default())).await {
                Ok(_) | Err(WriteFailure::Gone(_)) => Ok(()),
                Err(error) => Err(error),
            };
        }
        let list = gpus.iter().map(u8::to_string).collect::<Vec<_>>().join(",");
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { unhealthy::DATA_KEY: list },
        });
        let parameters = PatchParams::apply("tessera-agent").force();
        self.write(maps.patch(&name, &parameters, &Patch::Apply(map))).await?;
        Ok(())
    }
}

async fn with_timeout<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, WriteFailure> {
    match tokio::time::timeout(timeout, call).await {
        Ok(answer) => answer.map_err(failure),
        Err(_) => Err(WriteFailure::Silent(timeout)),
    }
}

/// Returns whether the API server rejected a patch because another pod has the name by now. A patch
/// carries the UID, which is immutable.
fn is_other_object(message: &str) -> bool {
    message.contains("metadata.uid") && message.contains("field is immutable")
}

fn failure(error: kube::Error) -> WriteFailure {
    match error {
        kube::Error::Api(status) if matches!(status.code, 404 | 409) || is_other_object(&status.message) => {
            WriteFailure::Gone(status.message.clone())
        }
        other => WriteFailure::Api(Box::new(other)),
    }
}

/// Logs why a watch fails: each reason once, until the watch works again.
fn log_failures<K>(resource: &'static str) -> impl FnMut(&watcher::Result<watcher::Event<K>>) {
    let mut failures = FailureLog::default();
    move |event| match event {
        // Every attempt starts with this event, including those that fail afterwards.
        Ok(watcher::Event::Init) => {}
        Ok(_) => {
            if failures.clear() {
                tracing::info!(resource, "the watch on the API server works again");
            }
        }
        Err(error) => {
            let error = innermost(error);
            if failures.record(&error) {
                tracing::warn!(resource, %error, "cannot watch the API server; will retry");
            }
        }
    }
}

fn lean_pod(pod: LeanPod) -> Pod {
    pod.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NoticeKind;

    #[tokio::test]
    async fn times_out_when_the_api_server_never_answers() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = crate::connect_to(&format!("http://{}", silent.local_addr().unwrap())).unwrap();
        let soon = Duration::from_millis(10);
        let agent =
            NodeClient::new(client, "n".to_owned()).with_timeouts(ApiTimeouts { read: soon, write: soon });
        let notice = Notice {
            kind: NoticeKind::Pod,
            namespace: "team".to_owned(),
            name: "p".to_owned(),
            uid: "u".to_owned(),
            is_warning: true,
            reason: "Why".to_owned(),
            message: "because".to_owned(),
        };
        let outcomes = [
            agent.read_pods().await.map(drop),
            agent.container_runtime().await.map(drop),
            agent.patch_pod("team", "p", "u", &BTreeMap::new()).await,
            agent
                .patch_node(&BTreeMap::from([("a".into(), "b".into())]), &BTreeMap::new(), &BTreeMap::new())
                .await,
            agent
                .patch_node(&BTreeMap::new(), &BTreeMap::new(), &BTreeMap::from([("a".into(), "1".into())]))
                .await,
            agent.set_unhealthy(&[1]).await,
            agent.set_unhealthy(&[]).await,
            agent.write_pod_event(&notice).await,
        ];
        for outcome in outcomes {
            assert_eq!(outcome.unwrap_err().to_string(), "the API server did not answer within 10ms");
        }
    }
}
