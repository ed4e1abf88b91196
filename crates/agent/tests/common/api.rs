//! An API server in memory. It reports its changes, so that tests wait without polling.

use std::{collections::BTreeMap, sync::Mutex};

use futures::{StreamExt as _, stream::BoxStream};
use tessera_agent::{
    controller::{NodePatch, WriteError},
    shell::{Cluster, ClusterEvent},
};
use tessera_cluster::{
    Notice,
    node_agent::{PodEvent, WriteFailure},
};
use tessera_core::units::PodUid;
use tessera_wire::foreign::objects::{ContainerStatus, Pod};
use tokio::sync::{mpsc, watch};

use super::with_timeout;

#[derive(Default)]
pub(crate) struct Api {
    pods: Mutex<BTreeMap<String, Pod>>,
    pub(crate) node: Mutex<NodePatch>,
    pub(crate) unhealthy: Mutex<Option<Vec<u8>>>,
    pub(crate) notices: Mutex<Vec<Notice>>,
    watchers: Mutex<Vec<Watcher>>,
    /// Number of changes.
    changes: watch::Sender<u64>,
}

/// The sending end of a watch.
struct Watcher {
    events: mpsc::UnboundedSender<ClusterEvent>,
    sent: u64,
    /// Number of events that the agent has put into its queue.
    taken: watch::Receiver<u64>,
}

impl Api {
    pub(crate) fn apply(&self, pod: Pod) {
        self.pods.lock().unwrap().insert(pod.metadata.uid.clone(), pod.clone());
        self.notify(&ClusterEvent::Pod(PodEvent::Applied(Box::new(pod))));
        self.changed();
    }

    pub(crate) fn delete(&self, uid: &str) {
        self.pods.lock().unwrap().remove(uid);
        self.notify(&ClusterEvent::Pod(PodEvent::Deleted(uid.to_owned())));
        self.changed();
    }

    pub(crate) fn pod(&self, uid: &str) -> Pod {
        self.pods.lock().unwrap()[uid].clone()
    }

    pub(crate) fn uids(&self) -> Vec<String> {
        self.pods.lock().unwrap().keys().cloned().collect()
    }

    pub(crate) fn set_phase(&self, uid: &str, phase: &str) {
        let mut pod = self.pod(uid);
        pod.status.phase = phase.into();
        pod.status.start_time = Some("2026-11-15T05:00:00Z".into());
        self.apply(pod);
    }

    /// Sets the container IDs in the pod's status, as the kubelet does for running containers.
    pub(crate) fn set_containers(&self, uid: &str, containers: &[(&str, &str)]) {
        let mut pod = self.pod(uid);
        let status = |(name, id): &(&str, &str)| ContainerStatus {
            name: (*name).into(),
            id: format!("containerd://{id}"),
            ..ContainerStatus::default()
        };
        pod.status.container_statuses = containers.iter().map(status).collect();
        self.apply(pod);
    }

    /// Waits until a condition on this API server holds. It is checked after each change.
    pub(crate) async fn until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let mut changes = self.changes.subscribe();
        with_timeout(what, changes.wait_for(|_| condition(self))).await.unwrap();
    }

    /// Waits until the agent has written a Kubernetes event with this reason for a pod.
    pub(crate) async fn until_noticed(&self, reason: &str) {
        let is_there = |api: &Self| api.notices.lock().unwrap().iter().any(|notice| notice.reason == reason);
        self.until(reason, is_there).await;
    }

    /// Waits until every event of this API server is in the agent's queue. The agent handles later
    /// requests after these events.
    pub(crate) async fn until_taken(&self) {
        let open: Vec<_> =
            self.watchers.lock().unwrap().iter().map(|one| (one.sent, one.taken.clone())).collect();
        for (sent, mut taken) in open {
            // An agent that has ended takes no more events.
            let _ended =
                with_timeout("the agent to take all events", taken.wait_for(|taken| *taken >= sent)).await;
        }
    }

    fn all(&self) -> Vec<Pod> {
        self.pods.lock().unwrap().values().cloned().collect()
    }

    fn notify(&self, event: &ClusterEvent) {
        self.watchers.lock().unwrap().retain_mut(|watcher| {
            watcher.sent += 1;
            watcher.events.send(event.clone()).is_ok()
        });
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

impl Cluster for Api {
    fn watch(&self) -> BoxStream<'static, ClusterEvent> {
        let (events, received) = mpsc::unbounded_channel();
        let (taking, taken) = watch::channel(0);
        let mut watcher = Watcher { events, sent: 0, taken };
        for event in [ClusterEvent::Node(Some(Box::default())), ClusterEvent::Pod(PodEvent::All(self.all()))]
        {
            let _listening = watcher.events.send(event);
            watcher.sent += 1;
        }
        self.watchers.lock().unwrap().push(watcher);
        // The agent asks for the next event after it has put the last one into its queue.
        futures::stream::unfold((received, taking, 0), |(mut received, taking, taken)| async move {
            taking.send_replace(taken);
            Some((received.recv().await?, (received, taking, taken + 1)))
        })
        .boxed()
    }

    async fn read_pods(&self) -> Result<Vec<Pod>, WriteFailure> {
        Ok(self.all())
    }

    async fn patch_pod(
        &self,
        _namespace: &str,
        _name: &str,
        uid: &PodUid,
        annotations: &BTreeMap<String, String>,
    ) -> Result<(), WriteError> {
        let mut pod = self.pods.lock().unwrap().get(&uid.0).cloned().ok_or(WriteError::Gone)?;
        pod.metadata.annotations.extend(annotations.clone());
        self.apply(pod);
        Ok(())
    }

    async fn patch_node(&self, patch: &NodePatch) -> Result<(), WriteFailure> {
        *self.node.lock().unwrap() = patch.clone();
        self.changed();
        Ok(())
    }

    async fn write_pod_event(&self, notice: &Notice) -> Result<(), WriteFailure> {
        self.notices.lock().unwrap().push(notice.clone());
        self.changed();
        Ok(())
    }

    async fn set_unhealthy(&self, gpus: &[u8]) -> Result<(), WriteFailure> {
        *self.unhealthy.lock().unwrap() = Some(gpus.to_vec());
        self.changed();
        Ok(())
    }
}
