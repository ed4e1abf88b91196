//! What the agent of a node reads and writes: its own node, the pods on it, and the list of broken GPUs.

use std::{collections::BTreeMap, time::Duration};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, EventSource};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::json;
use tessera_wire::objects::{Node, Pod};
use tessera_wire::unhealthy;

use crate::causes::{Trouble, innermost};
use crate::{LeanNode, LeanPod, PodNotice, Selection, watch::config};

/// The API server, as one node's agent uses it.
#[derive(Clone)]
pub struct NodeClient {
    client: Client,
    node: String,
    patience: Patience,
}

/// How long the API server may take. Without a limit, a connection that died without a word would be waited for for ever.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For pods: the kubelet waits for them, and nobody is admitted meanwhile.
    pub reading: Duration,
    /// For a change. What came in time after all is written again, to no effect.
    pub writing: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { reading: Duration::from_secs(2), writing: Duration::from_secs(10) }
    }
}

/// What became known of the pods of a node.
#[derive(Debug, Clone)]
pub enum PodEvent {
    /// All there are.
    All(Vec<Pod>),
    /// One is new or has changed.
    Applied(Box<Pod>),
    /// The one with this UID is gone.
    Deleted(String),
}

/// A write that did not work.
#[derive(Debug, thiserror::Error)]
pub enum WriteFailure {
    /// The object is gone, or another one has its name.
    #[error("the object is gone: {0}")]
    Gone(String),
    /// The API server did not take it.
    #[error("the API server did not take it")]
    Api(#[source] Box<kube::Error>),
    /// There was no answer.
    #[error("the API server did not answer within {0:?}")]
    Silent(Duration),
}

impl std::fmt::Debug for NodeClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeClient").field("node", &self.node).finish_non_exhaustive()
    }
}

impl NodeClient {
    /// For the node of this name.
    #[must_use]
    pub fn new(client: Client, node: String) -> Self {
        Self { client, node, patience: Patience::default() }
    }

    /// With another patience.
    #[must_use]
    pub fn with_patience(self, patience: Patience) -> Self {
        Self { patience, ..self }
    }

    async fn write<T>(&self, call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, WriteFailure> {
        within(self.patience.writing, call).await
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

    /// The pods of the node, for ever: after a failure the watch begins again by itself.
    pub fn watch_pods(&self) -> impl Stream<Item = PodEvent> + use<> {
        let config = config(&Selection { fields: Some(self.on_this_node()), ..Selection::default() });
        let mut all = Vec::new();
        let events = watcher(self.pods(), config).default_backoff();
        events.inspect(trouble_is_told("the pods of this node")).filter_map(move |event| {
            let told = match event {
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
                Err(_comes_back) => None,
            };
            async move { told }
        })
    }

    /// The node's own object, now and after every change; `None` where there is none.
    pub fn watch_node(&self) -> impl Stream<Item = Option<Node>> + use<> {
        let nodes: Api<LeanNode> = Api::all(self.client.clone());
        let config = config(&Selection { fields: Some(self.this_node()), ..Selection::default() });
        let events = watcher(nodes, config).default_backoff();
        let mut listed = false;
        events.inspect(trouble_is_told("this node")).filter_map(move |event| {
            let told = match event {
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
                Err(_comes_back) => None,
            };
            async move { told }
        })
    }

    /// The pods of the node as they are now, from the API server's store.
    pub async fn read_pods(&self) -> Result<Vec<Pod>, WriteFailure> {
        let (pods, wanted) = (self.pods(), ListParams::default().fields(&self.on_this_node()));
        let listed = within(self.patience.reading, pods.list(&wanted)).await?;
        Ok(listed.items.into_iter().map(lean_pod).collect())
    }

    /// Sets annotations of a pod, unless another one has its name by now.
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

    /// Tells the owner of a pod something, each time in an event of its own.
    pub async fn tell_owner(&self, notice: &PodNotice) -> Result<(), WriteFailure> {
        let metadata =
            ObjectMeta { generate_name: Some(format!("{}.", notice.pod)), ..ObjectMeta::default() };
        let component = Some("tessera-agent".to_owned());
        let event = notice.event(metadata, EventSource { component, host: Some(self.node.clone()) });
        self.write(notice.events(&self.client).create(&PostParams::default(), &event)).await?;
        Ok(())
    }

    /// Sets annotations and labels of the node, and amounts in its status.
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

    /// Lists the broken GPUs where gpushare's scheduler reads them. Without any the list is removed: an empty one would
    /// mean GPU 0 to it.
    pub async fn set_unhealthy(&self, cards: &[u8]) -> Result<(), WriteFailure> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), unhealthy::NAMESPACE);
        let name = format!("{}{}", unhealthy::PREFIX, self.node);
        if cards.is_empty() {
            return match self.write(maps.delete(&name, &DeleteParams::default())).await {
                Ok(_) | Err(WriteFailure::Gone(_)) => Ok(()),
                Err(error) => Err(error),
            };
        }
        let list = cards.iter().map(u8::to_string).collect::<Vec<_>>().join(",");
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { unhealthy::DATA_KEY: list },
        });
        let parameters = PatchParams::apply("tessera-agent").force();
        self.write(maps.patch(&name, &parameters, &Patch::Apply(map))).await?;
        Ok(())
    }
}

async fn within<T>(
    patience: Duration,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, WriteFailure> {
    match tokio::time::timeout(patience, call).await {
        Ok(answer) => answer.map_err(failure),
        Err(_) => Err(WriteFailure::Silent(patience)),
    }
}

/// A patch that names the UID of a pod that is gone is refused so, once another pod has its name.
fn is_another(message: &str) -> bool {
    message.contains("metadata.uid") && message.contains("field is immutable")
}

fn failure(error: kube::Error) -> WriteFailure {
    match error {
        kube::Error::Api(status) if matches!(status.code, 404 | 409) || is_another(&status.message) => {
            WriteFailure::Gone(status.message.clone())
        }
        other => WriteFailure::Api(Box::new(other)),
    }
}

/// Logs why a watch does not work, each reason once until it works again.
fn trouble_is_told<K>(what: &'static str) -> impl FnMut(&watcher::Result<watcher::Event<K>>) {
    let mut trouble = Trouble::default();
    move |event| match event {
        // So begins every try.
        Ok(watcher::Event::Init) => {}
        Ok(_) => {
            if trouble.is_over() {
                tracing::info!("the API server tells of {what} again");
            }
        }
        Err(error) => {
            let why = innermost(error);
            if trouble.is_news(&why) {
                tracing::warn!("cannot watch {what}, will try again: {why}");
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

    #[tokio::test]
    async fn an_api_server_that_never_answers_is_given_up() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = crate::connect_to(&format!("http://{}", silent.local_addr().unwrap())).unwrap();
        let soon = Duration::from_millis(10);
        let agent =
            NodeClient::new(client, "n".to_owned()).with_patience(Patience { reading: soon, writing: soon });
        let notice = PodNotice {
            namespace: "team".to_owned(),
            pod: "p".to_owned(),
            uid: "u".to_owned(),
            is_warning: true,
            reason: "Why".to_owned(),
            message: "because".to_owned(),
        };
        let given_up = [
            agent.read_pods().await.map(drop),
            agent.patch_pod("team", "p", "u", &BTreeMap::new()).await,
            agent
                .patch_node(&BTreeMap::from([("a".into(), "b".into())]), &BTreeMap::new(), &BTreeMap::new())
                .await,
            agent
                .patch_node(&BTreeMap::new(), &BTreeMap::new(), &BTreeMap::from([("a".into(), "1".into())]))
                .await,
            agent.set_unhealthy(&[1]).await,
            agent.set_unhealthy(&[]).await,
            agent.tell_owner(&notice).await,
        ];
        for outcome in given_up {
            assert_eq!(outcome.unwrap_err().to_string(), "the API server did not answer within 10ms");
        }
    }
}
