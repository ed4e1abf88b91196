//! From what the kernel says of a process to the container it belongs to.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::units::PodUid;
use tessera_wire::foreign::cgroup::CgroupOwner;

use crate::controller::PodView;

/// A container of a pod of this node. The name is empty where only the pod is known, as with a sandbox that opens the GPU itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerKey {
    /// The pod.
    pub uid: PodUid,
    /// The container's name.
    pub container: String,
}

/// To whom something is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Consumer {
    /// A container of a pod.
    Container(ContainerKey),
    /// The machine itself, and containers that no pod has.
    Host,
    /// Nobody can tell: the process is gone, or its pod is not known.
    Unknown,
}

/// The pods of the node, by what the kernel knows of them.
#[derive(Debug, Default)]
pub struct ContainerIndex {
    /// By the UID that the kubelet uses.
    pods: BTreeMap<String, PodUid>,
    /// By the container's ID; also of earlier runs that the API server has forgotten.
    containers: BTreeMap<String, ContainerKey>,
    alive: BTreeSet<PodUid>,
}

impl ContainerIndex {
    /// All pods of the node, as they are now.
    pub fn learn(&mut self, pods: &[PodView]) {
        self.pods.clear();
        for pod in pods {
            self.pods.insert(pod.uid.0.to_lowercase(), pod.uid.clone());
            let other = pod.kubelet_uid.as_ref();
            self.pods.extend(other.map(|uid| (uid.to_lowercase(), pod.uid.clone())));
        }
        let there: BTreeSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
        self.containers.retain(|_, key| there.contains(&key.uid));
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
    }

    /// To whom a process of this owner is counted.
    #[must_use]
    pub fn holder(&self, owner: Option<&CgroupOwner>) -> Consumer {
        let container = |id: &String| self.containers.get(id).cloned().map(Consumer::Container);
        match owner {
            None => Consumer::Unknown,
            Some(CgroupOwner::Host) => Consumer::Host,
            // A private cgroup namespace hides the pod of our own neighbours.
            Some(CgroupOwner::Container(id)) => container(id).unwrap_or(Consumer::Host),
            Some(CgroupOwner::Pod { uid, container: id }) => {
                let of_pod = || {
                    let uid = self.pods.get(uid)?.clone();
                    Some(Consumer::Container(ContainerKey { uid, container: String::new() }))
                };
                id.as_ref().and_then(container).or_else(of_pod).unwrap_or(Consumer::Unknown)
            }
        }
    }

    /// Whether a pod is there and not over.
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
    fn containers_are_found_by_id_and_pods_by_either_uid() {
        let mut book = ContainerIndex::default();
        let mut mirrored = pod("mirror", &[]);
        mirrored.kubelet_uid = Some("hash".into());
        book.learn(&[pod("a", &[("1", "main"), ("2", "side")]), mirrored]);
        assert_eq!(book.holder(Some(&in_pod("a", "2"))), key("a", "side"));
        assert_eq!(book.holder(Some(&in_pod("a", "sandbox"))), key("a", ""));
        assert_eq!(book.holder(Some(&in_pod("hash", "9"))), key("mirror", ""));
        assert_eq!(book.holder(Some(&CgroupOwner::Container("1".into()))), key("a", "main"));
        assert_eq!(book.holder(Some(&CgroupOwner::Container("7".into()))), Consumer::Host);
        assert_eq!(book.holder(Some(&CgroupOwner::Host)), Consumer::Host);
        assert_eq!(book.holder(Some(&in_pod("other", "9"))), Consumer::Unknown);
        assert_eq!(book.holder(None), Consumer::Unknown);
    }

    #[test]
    fn a_container_started_again_and_again_stays_itself_until_its_pod_goes() {
        let mut book = ContainerIndex::default();
        for id in ["1", "2", "3"] {
            book.learn(&[pod("a", &[(id, "main")])]);
        }
        assert_eq!(book.holder(Some(&in_pod("a", "1"))), key("a", "main"));
        book.learn(&[]);
        assert_eq!(book.holder(Some(&in_pod("a", "1"))), Consumer::Unknown);
        assert!(!book.is_alive(&PodUid("a".into())));
    }
}
