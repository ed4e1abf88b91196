//! Looks up the container of a process by what the kernel reports about the process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_core::units::PodUid;
use tessera_wire::foreign::cgroup::CgroupOwner;

use crate::controller::PodView;

/// A container of a pod on this node. The container name is empty if only the pod is known, for example
/// when a sandbox opens the GPU itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerKey {
    /// UID of the pod.
    pub uid: PodUid,
    /// Name of the container.
    pub container: String,
}

impl ContainerKey {
    /// Returns the key of a container of which only the pod is known.
    #[must_use]
    pub fn unnamed(uid: &PodUid) -> Self {
        Self { uid: uid.clone(), container: String::new() }
    }
}

/// The consumer to which usage is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Consumer {
    /// A container of a pod.
    Container(ContainerKey),
    /// Processes of the host, including containers that belong to no pod.
    Host,
    /// A process that has ended or whose pod is not known.
    Unknown,
}

/// The pods and containers of the node, indexed by the identifiers that appear in cgroup paths.
#[derive(Debug, Default)]
pub struct ContainerIndex {
    /// Pods by the UID that the kubelet uses.
    pods: BTreeMap<String, PodUid>,
    /// Containers by their ID, including earlier runs that are no longer in the pod's status.
    containers: BTreeMap<String, ContainerKey>,
    alive: BTreeSet<PodUid>,
    known: Arc<BTreeSet<ContainerKey>>,
}

impl ContainerIndex {
    /// Replaces the pods of the node. Earlier container IDs of a pod are kept until the pod is gone.
    pub fn set_pods(&mut self, pods: &[PodView]) {
        self.pods.clear();
        for pod in pods {
            self.pods.insert(pod.uid.0.to_lowercase(), pod.uid.clone());
            let other = pod.kubelet_uid.as_ref();
            self.pods.extend(other.map(|uid| (uid.to_lowercase(), pod.uid.clone())));
        }
        let present: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
        self.containers.retain(|_, key| present.contains(&key.uid));
        for pod in pods {
            for (id, name) in &pod.containers {
                let known =
                    self.containers.get(id).is_some_and(|key| key.uid == pod.uid && key.container == *name);
                if !known {
                    let key = ContainerKey { uid: pod.uid.clone(), container: name.clone() };
                    self.containers.insert(id.to_lowercase(), key);
                }
            }
        }
        self.alive = pods.iter().filter(|pod| !pod.ended).map(|pod| pod.uid.clone()).collect();
        let unnamed = pods.iter().map(|pod| ContainerKey::unnamed(&pod.uid));
        let known: BTreeSet<ContainerKey> = self.containers.values().cloned().chain(unnamed).collect();
        if known != *self.known {
            self.known = Arc::new(known);
        }
    }

    /// Returns the containers whose processes are recognized.
    #[must_use]
    pub fn known(&self) -> Arc<BTreeSet<ContainerKey>> {
        Arc::clone(&self.known)
    }

    /// Returns the consumer to which a process of this owner is counted.
    #[must_use]
    pub fn consumer(&self, owner: Option<&CgroupOwner>) -> Consumer {
        let container = |id: &String| self.containers.get(id).cloned().map(Consumer::Container);
        match owner {
            None => Consumer::Unknown,
            Some(CgroupOwner::Host) => Consumer::Host,
            // In a private cgroup namespace, the path of another container does not name its pod.
            Some(CgroupOwner::Container(id)) => container(id).unwrap_or(Consumer::Host),
            Some(CgroupOwner::Pod { uid, container: id }) => {
                let of_pod = || Some(Consumer::Container(ContainerKey::unnamed(self.pods.get(uid)?)));
                id.as_ref().and_then(container).or_else(of_pod).unwrap_or(Consumer::Unknown)
            }
        }
    }

    /// Returns whether a pod exists and has not ended.
    #[must_use]
    pub fn is_alive(&self, uid: &PodUid) -> bool {
        self.alive.contains(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, containers: &[(&str, &str)]) -> PodView {
        PodView {
            uid: PodUid(uid.into()),
            namespace: "n".into(),
            name: uid.into(),
            kubelet_uid: None,
            containers: containers.iter().map(|(id, name)| ((*id).into(), (*name).into())).collect(),
            ended: false,
        }
    }

    fn key(uid: &str, container: &str) -> Consumer {
        Consumer::Container(ContainerKey { uid: PodUid(uid.into()), container: container.into() })
    }

    fn in_pod(uid: &str, id: &str) -> CgroupOwner {
        CgroupOwner::Pod { uid: uid.into(), container: Some(id.into()) }
    }

    #[test]
    fn finds_containers_by_id_and_pods_by_either_uid() {
        let mut index = ContainerIndex::default();
        let mut mirrored = pod("mirror", &[]);
        mirrored.kubelet_uid = Some("hash".into());
        index.set_pods(&[pod("a", &[("1", "main"), ("2", "side")]), mirrored]);
        assert_eq!(index.consumer(Some(&in_pod("a", "2"))), key("a", "side"));
        assert_eq!(index.consumer(Some(&in_pod("a", "sandbox"))), key("a", ""));
        assert_eq!(index.consumer(Some(&in_pod("hash", "9"))), key("mirror", ""));
        assert_eq!(index.consumer(Some(&CgroupOwner::Container("1".into()))), key("a", "main"));
        assert_eq!(index.consumer(Some(&CgroupOwner::Container("7".into()))), Consumer::Host);
        assert_eq!(index.consumer(Some(&CgroupOwner::Host)), Consumer::Host);
        assert_eq!(index.consumer(Some(&in_pod("other", "9"))), Consumer::Unknown);
        assert_eq!(index.consumer(None), Consumer::Unknown);
    }

    #[test]
    fn keeps_earlier_container_ids_until_the_pod_is_gone() {
        let mut index = ContainerIndex::default();
        for id in ["1", "2", "3"] {
            index.set_pods(&[pod("a", &[(id, "main")])]);
        }
        assert_eq!(index.consumer(Some(&in_pod("a", "1"))), key("a", "main"));
        index.set_pods(&[]);
        assert_eq!(index.consumer(Some(&in_pod("a", "1"))), Consumer::Unknown);
        assert!(!index.is_alive(&PodUid("a".into())));
    }
}
