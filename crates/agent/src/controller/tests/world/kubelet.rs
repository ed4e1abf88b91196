//! The kubelet of the simulated node: lists, admits, starts and removes pods.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{request::ContainerRole, units::PodUid};
use tessera_node::{
    device_plugin::{Allocation, PreferenceRequest},
    pod_resources::{ContainerDevices, PodDevices},
};
use tessera_wire::{
    foreign::objects::{Container, Pod},
    kubelet::device_id::Resource,
};

use super::World;
use crate::controller::{CallAnswer, CallError, Event};

/// A container in the kubelet's checkpoint: its name, whether it is listed, its devices.
pub(super) type Held = (String, bool, BTreeMap<String, BTreeSet<String>>);

/// Reason why the kubelet rejects a pod.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("requested number of devices unavailable for {0}")]
    TooFewDevices(Resource),
    #[error(transparent)]
    Agent(#[from] CallError),
}

impl World {
    pub(crate) fn listed(&self) -> Vec<PodDevices> {
        let entry = |(pod, containers): &(Pod, Vec<Held>)| PodDevices {
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            containers: containers
                .iter()
                .filter(|(_, listed, _)| *listed)
                .map(|(name, _, ids)| ContainerDevices {
                    name: name.clone(),
                    ids: ids.clone(),
                    ..ContainerDevices::default()
                })
                .collect(),
        };
        self.kubelet.values().map(entry).collect()
    }

    /// Admits a pod as a kubelet does. Returns what its containers were given.
    pub(crate) fn admit(&mut self, pod: &Pod) -> Result<BTreeMap<String, Allocation>, Refusal> {
        let uid = pod.metadata.uid.clone();
        let held = |(container, role): (&Container, ContainerRole)| {
            (container.name.clone(), role != ContainerRole::Init, BTreeMap::new())
        };
        let containers = pod.spec.containers_with_roles().map(held).collect();
        self.kubelet.insert(uid.clone(), (pod.clone(), containers));
        let outcome = self.allocate_all(pod);
        match &outcome {
            Ok(_) => self.set_status(&uid, "Pending", true),
            Err(_) => {
                self.kubelet.remove(&uid);
                self.set_status(&uid, "Failed", true);
            }
        }
        outcome
    }

    /// Allocates one resource for the first container of a pod, and then rejects the pod, as a
    /// kubelet does that runs short of another resource.
    pub(crate) fn admit_only(&mut self, pod: &Pod, resource: &str) {
        let resource = Resource::named(resource).unwrap();
        let (container, _) = pod.spec.containers_with_roles().next().unwrap();
        let empty = (container.name.clone(), true, BTreeMap::new());
        self.kubelet.insert(pod.metadata.uid.clone(), (pod.clone(), vec![empty]));
        let ids = self.choose(resource, resource.asked_by(container), &BTreeSet::new()).unwrap();
        let answer = self.call(|call| Event::Allocate(call, resource, ids));
        assert!(matches!(answer, CallAnswer::Allocated(Ok(_))), "{answer:?}");
        self.kubelet.remove(&pod.metadata.uid);
    }

    fn allocate_all(&mut self, pod: &Pod) -> Result<BTreeMap<String, Allocation>, Refusal> {
        let mut given: BTreeMap<String, Allocation> = BTreeMap::new();
        let mut reusable: BTreeMap<Resource, BTreeSet<String>> = BTreeMap::new();
        for (container, role) in pod.spec.containers_with_roles() {
            let mut resources: Vec<Resource> =
                Resource::ALL.into_iter().filter(|resource| resource.asked_by(container) > 0).collect();
            if self.roll(2) == 1 {
                resources.reverse();
            }
            for resource in resources {
                let reuse = reusable.entry(resource).or_default();
                let ids = self.choose(resource, resource.asked_by(container), reuse)?;
                let allocated = match self.call(|call| Event::Allocate(call, resource, ids.clone())) {
                    CallAnswer::Allocated(answer) => *answer?,
                    other => panic!("{other:?}"),
                };
                match role {
                    ContainerRole::Init => reuse.extend(ids.clone()),
                    ContainerRole::Sidecar | ContainerRole::Main => reuse.retain(|id| !ids.contains(id)),
                }
                let entry = given.entry(container.name.clone()).or_default();
                entry.envs.extend(allocated.envs);
                entry.mounts.extend(allocated.mounts);
                let (_, containers) = self.kubelet.get_mut(&pod.metadata.uid).unwrap();
                let held = containers.iter_mut().find(|(name, ..)| *name == container.name).unwrap();
                held.2.insert(resource.name().to_owned(), ids);
            }
        }
        Ok(given)
    }

    fn choose(
        &mut self,
        resource: Resource,
        count: usize,
        reusable: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Refusal> {
        let mut chosen: BTreeSet<String> = reusable.iter().take(count).cloned().collect();
        if chosen.len() == count {
            return Ok(chosen);
        }
        let containers = self.kubelet.values().flat_map(|(_, containers)| containers);
        let held: BTreeSet<&String> =
            containers.filter_map(|(_, _, ids)| ids.get(resource.name())).flatten().collect();
        let ids = &self.agent.inventory.gpus().unwrap().ids;
        let is_healthy = |id: &String| !self.unhealthy.get(&resource).is_some_and(|ids| ids.contains(id));
        let all = ids.all(resource).map(|(id, ..)| id);
        let available: Vec<String> = all.filter(|id| is_healthy(id) && !held.contains(id)).collect();
        if available.len() + chosen.len() < count {
            return Err(Refusal::TooFewDevices(resource));
        }
        let wish = PreferenceRequest {
            available: available.iter().chain(&chosen).cloned().collect(),
            required: chosen.iter().cloned().collect(),
            count,
        };
        let preferred = match self.call(|call| Event::Prefer(call, resource, wish)) {
            CallAnswer::Preferred(answer) => answer?,
            other => panic!("{other:?}"),
        };
        assert_eq!(preferred.iter().collect::<BTreeSet<_>>().len(), count, "wrong count: {preferred:?}");
        chosen.extend(preferred);
        Ok(chosen)
    }

    /// Starts all containers of a pod.
    pub(crate) fn start(&mut self, uid: &str) -> Result<(), Refusal> {
        let containers = self.kubelet.get(uid).map(|(_, containers)| containers.clone()).unwrap_or_default();
        for (_, _, ids) in containers {
            for (name, ids) in ids {
                let resource = Resource::named(&name).unwrap();
                match self.call(|call| Event::PreStart(call, resource, ids)) {
                    CallAnswer::Started(answer) => answer?,
                    other => panic!("{other:?}"),
                }
            }
        }
        self.set_status(uid, "Running", true);
        Ok(())
    }

    pub(crate) fn run(
        &mut self,
        pod: Pod,
        grants: &[(&str, &[u8])],
    ) -> Result<BTreeMap<String, Allocation>, Refusal> {
        let pod = self.bind(pod, grants);
        let given = self.admit(&pod)?;
        self.start(&pod.metadata.uid)?;
        Ok(given)
    }

    pub(crate) fn remove(&mut self, uid: &str) {
        self.kubelet.remove(uid);
        self.pods.remove(uid);
        self.event(Event::PodDeleted(PodUid(uid.to_owned())));
    }

    /// Returns the GPUs of a container, by the kubelet's checkpoint.
    pub(crate) fn gpus_of(&self, uid: &str, container: &str) -> BTreeSet<u8> {
        let gpus = self.agent.inventory.gpus().unwrap();
        let (_, containers) = &self.kubelet[uid];
        let (_, _, ids) = containers.iter().find(|(name, ..)| name == container).unwrap();
        let of = |(name, ids): (&String, &BTreeSet<String>)| gpus.of_ids(Resource::named(name).unwrap(), ids);
        ids.iter().flat_map(of).map(|gpu| gpu.0).collect()
    }
}
