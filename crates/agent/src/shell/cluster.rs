//! The agent's interface to the API server. It is a trait, so that tests need no API server.

use std::{collections::BTreeMap, future::Future};

use futures::{StreamExt as _, stream::BoxStream};
use tessera_cluster::{
    Notice,
    node_agent::{NodeClient, PodEvent, WriteFailure},
    with_causes,
};
use tessera_core::units::PodUid;
use tessera_wire::{
    foreign::{
        dra::{ResourceClaim, SliceSpec},
        objects::{Node, Pod},
    },
    tessera::dra::{DRIVER, slice_name},
};

use crate::controller::{Event, NodePatch, WriteError};

/// Client of the API server.
pub trait Cluster: Send + Sync + 'static {
    /// Watches the node and its pods. The stream never ends.
    fn watch(&self) -> BoxStream<'static, ClusterEvent>;

    /// Reads the current pods of the node.
    fn read_pods(&self) -> impl Future<Output = Result<Vec<Pod>, WriteFailure>> + Send;

    /// Sets annotations of the pod with this UID.
    fn patch_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &PodUid,
        annotations: &BTreeMap<String, String>,
    ) -> impl Future<Output = Result<(), WriteError>> + Send;

    /// Changes annotations, labels and status of the node.
    fn patch_node(&self, patch: &NodePatch) -> impl Future<Output = Result<(), WriteFailure>> + Send;

    /// Writes a Kubernetes Event about a pod.
    fn write_pod_event(&self, notice: &Notice) -> impl Future<Output = Result<(), WriteFailure>> + Send;

    /// Publishes the unhealthy GPUs by index.
    fn set_unhealthy(&self, gpus: &[u8]) -> impl Future<Output = Result<(), WriteFailure>> + Send;

    /// Watches the ResourceSlice of the node. The stream never ends, and is silent where there are no slices.
    fn watch_slice(&self) -> BoxStream<'static, Option<SliceSpec>> {
        futures::stream::pending().boxed()
    }

    /// Writes the ResourceSlice of the node, and returns it as it was stored.
    fn write_slice(
        &self,
        _node_uid: &str,
        _spec: &SliceSpec,
    ) -> impl Future<Output = Result<SliceSpec, WriteFailure>> + Send {
        async { Err(WriteFailure::Gone("this cluster has no ResourceSlices".to_owned())) }
    }

    /// Reads a ResourceClaim.
    fn read_claim(
        &self,
        _namespace: &str,
        name: &str,
    ) -> impl Future<Output = Result<ResourceClaim, WriteFailure>> + Send {
        let missing = WriteFailure::Gone(format!("there is no ResourceClaim {name}"));
        async { Err(missing) }
    }
}

/// One change seen by a watch of the API server.
#[derive(Clone, Debug)]
pub enum ClusterEvent {
    /// Change of the pods.
    Pod(PodEvent),
    /// Current node, or `None` if it does not exist.
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

    async fn read_pods(&self) -> Result<Vec<Pod>, WriteFailure> {
        Self::read_pods(self).await
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

    async fn patch_node(&self, patch: &NodePatch) -> Result<(), WriteFailure> {
        let NodePatch { annotations, labels, status } = patch;
        Self::patch_node(self, annotations, labels, status).await
    }

    async fn write_pod_event(&self, notice: &Notice) -> Result<(), WriteFailure> {
        Self::write_pod_event(self, notice).await
    }

    async fn set_unhealthy(&self, gpus: &[u8]) -> Result<(), WriteFailure> {
        Self::set_unhealthy(self, gpus).await
    }

    fn watch_slice(&self) -> BoxStream<'static, Option<SliceSpec>> {
        Self::watch_slice(self, DRIVER, &slice_name(self.node())).boxed()
    }

    async fn write_slice(&self, node_uid: &str, spec: &SliceSpec) -> Result<SliceSpec, WriteFailure> {
        Self::write_slice(self, &slice_name(self.node()), node_uid, spec).await
    }

    async fn read_claim(&self, namespace: &str, name: &str) -> Result<ResourceClaim, WriteFailure> {
        Self::read_claim(self, namespace, name).await
    }
}
