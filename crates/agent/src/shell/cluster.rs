//! The API server, as the agent uses it: behind a trait, so that tests need none.

use std::{collections::BTreeMap, future::Future};

use futures::{StreamExt as _, stream::BoxStream};
use tessera_cluster::{
    PodNotice,
    node_agent::{NodeClient, PodEvent, WriteFailure},
    with_causes,
};
use tessera_core::units::PodUid;
use tessera_wire::foreign::objects::{Node, Pod};

use crate::controller::{Event, NodePatch, WriteError};

/// The API server.
pub trait Cluster: Send + Sync + 'static {
    /// The node and its pods, for ever.
    fn watch(&self) -> BoxStream<'static, ClusterEvent>;

    /// The pods of the node, read afresh.
    fn read_pods(&self) -> impl Future<Output = Result<Vec<Pod>, String>> + Send;

    /// Sets annotations of the pod with this UID.
    fn patch_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &PodUid,
        annotations: &BTreeMap<String, String>,
    ) -> impl Future<Output = Result<(), WriteError>> + Send;

    /// Changes the node.
    fn patch_node(&self, patch: &NodePatch) -> impl Future<Output = Result<(), String>> + Send;

    /// Writes an event about a pod.
    fn write_pod_event(&self, notice: &PodNotice) -> impl Future<Output = Result<(), String>> + Send;

    /// Lists the broken GPUs.
    fn set_unhealthy(&self, cards: &[u8]) -> impl Future<Output = Result<(), String>> + Send;
}

/// What became known.
#[derive(Clone, Debug)]
pub enum ClusterEvent {
    /// Of the pods.
    Pod(PodEvent),
    /// Of the node: `None` where there is none of this name.
    Node(Option<Box<Node>>),
}

impl From<ClusterEvent> for Event {
    fn from(event: ClusterEvent) -> Self {
        match event {
            ClusterEvent::Pod(PodEvent::All(pods)) => Self::Pods(pods),
            ClusterEvent::Pod(PodEvent::Applied(pod)) => Self::PodApplied(pod),
            ClusterEvent::Pod(PodEvent::Deleted(uid)) => Self::PodDeleted(PodUid(uid)),
            ClusterEvent::Node(Some(node)) => Self::Node(node),
            ClusterEvent::Node(None) => Self::NodeMissing,
        }
    }
}

impl Cluster for NodeClient {
    fn watch(&self) -> BoxStream<'static, ClusterEvent> {
        let pods = self.watch_pods().map(ClusterEvent::Pod);
        let node = self.watch_node().map(|node| ClusterEvent::Node(node.map(Box::new)));
        futures::stream::select(pods, node).boxed()
    }

    async fn read_pods(&self) -> Result<Vec<Pod>, String> {
        Self::read_pods(self).await.map_err(|error| with_causes(&error))
    }

    async fn patch_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &PodUid,
        annotations: &BTreeMap<String, String>,
    ) -> Result<(), WriteError> {
        Self::patch_pod(self, namespace, name, &uid.0, annotations).await.map_err(|error| match error {
            WriteFailure::Gone(_) => WriteError::Gone,
            WriteFailure::Api(_) | WriteFailure::Silent(_) => WriteError::Later(with_causes(&error)),
        })
    }

    async fn patch_node(&self, patch: &NodePatch) -> Result<(), String> {
        let NodePatch { annotations, labels, status } = patch;
        Self::patch_node(self, annotations, labels, status).await.map_err(|error| with_causes(&error))
    }

    async fn write_pod_event(&self, notice: &PodNotice) -> Result<(), String> {
        Self::write_pod_event(self, notice).await.map_err(|error| with_causes(&error))
    }

    async fn set_unhealthy(&self, cards: &[u8]) -> Result<(), String> {
        Self::set_unhealthy(self, cards).await.map_err(|error| with_causes(&error))
    }
}
