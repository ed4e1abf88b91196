//! Which pod the kubelet is admitting.
//!
//! The kubelet does not say. But it admits one pod at a time, adds it to its list just before, and
//! shows it there without the resource it is about to give it. So the pod is the listed one that
//! requests this much of the resource and does not have it. Pods that look alike are left out:
//! ended ones, refused ones, and those that were listed before. The order of creation or binding
//! plays no role.

use std::{
    collections::{BTreeSet, HashSet},
    time::Duration,
};

use tessera_core::{
    request::ContainerRole,
    units::{GpuIndex, PodUid},
};
use tessera_node::pod_resources::PodDevices;
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

use super::{
    AgentSettings, EventTime,
    admission::Admissions,
    calls::PendingCall,
    capacity::Withdrawn,
    inventory::NodeGpus,
    kubelet::KubeletView,
    pods::{Pods, has_ended, name_of},
};

/// Longest pause between the calls for one pod, which the kubelet makes in a row. After a longer
/// pause a call may be for another pod.
const SAME_POD_WINDOW: Duration = Duration::from_secs(2);

/// Finds the pod and container that a call of the kubelet is for.
pub(super) struct PodFinder<'a> {
    pub(super) settings: &'a AgentSettings,
    pub(super) gpus: Option<&'a NodeGpus>,
    pub(super) pods: &'a Pods,
    pub(super) kubelet: &'a KubeletView,
    pub(super) admissions: &'a Admissions,
    /// Devices that the kubelet does not give out.
    pub(super) withdrawn: &'a Withdrawn,
}

impl PodFinder<'_> {
    /// Returns the container of the last answer, if this call can only be its next one.
    ///
    /// That holds for another resource of the same container. The kubelet may break off in between
    /// and go on with another pod that requests as much. It does so if it runs short of a resource,
    /// ours or another plugin's. After a container it also does so if it finds no CPUs for it.
    pub(super) fn follow_up(
        &self,
        now: EventTime,
        resource: Resource,
        count: usize,
    ) -> Option<(PodUid, String)> {
        let current = self.admissions.current()?;
        if now.elapsed.saturating_sub(current.at) > SAME_POD_WINDOW || self.free_devices(resource) < count {
            return None;
        }
        let pod = self.pods.get(&current.uid).filter(|pod| !has_ended(pod))?;
        let mut containers = pod.spec.containers_with_roles().map(|(container, _)| container);
        let container = containers.find(|container| container.name == current.container)?;
        let is_next = resource.asked_by(container) == count
            && !self.admissions.is_answered(&current.uid, &container.name, resource)
            && container.resources.extended().all(|name| self.serves(name));
        is_next.then(|| (current.uid.clone(), container.name.clone()))
    }

    /// Returns the pod that is being admitted and its container that the call is for.
    ///
    /// Returns `None` while that is not clear.
    pub(super) fn identify(
        &self,
        call: &PendingCall,
        resource: Resource,
        count: usize,
    ) -> Option<(PodUid, String)> {
        if !call.is_well_informed() && self.lists_unknown_pods(resource) {
            return None;
        }
        let mut candidates = self.candidates(resource, count, call.is_last_chance);
        candidates.pop().filter(|_| candidates.is_empty())
    }

    /// Returns the UIDs of all pods whose name the kubelet lists.
    pub(super) fn listed_uids(&self) -> Vec<PodUid> {
        let listed: BTreeSet<(&str, &str)> = self.kubelet.listed().iter().map(entry_name).collect();
        let is_listed = |(_, pod): &(&PodUid, &Pod)| listed.contains(&name_of(pod));
        self.pods.iter().filter(is_listed).map(|(uid, _)| uid.clone()).collect()
    }

    fn serves(&self, name: &str) -> bool {
        self.settings.resources().any(|resource| resource.name() == name)
    }

    /// Returns how many healthy devices are free, by the kubelet's list and by our records.
    fn free_devices(&self, resource: Resource) -> usize {
        let Some(gpus) = self.gpus else { return 0 };
        let listed = self.kubelet.listed().iter().flat_map(|pod| &pod.containers);
        let listed = listed.filter_map(|container| container.ids.get(resource.name())).flatten();
        let ids = listed.chain(self.admissions.all_recorded(resource));
        let held = ids.filter_map(|id| gpus.ids.read(resource, id)).filter(|(gpu, _)| gpus.is_healthy(*gpu));
        let held: HashSet<(GpuIndex, u64)> = held.collect();
        let healthy = gpus.node.topology().gpus().iter().filter(|gpu| gpus.is_healthy(*gpu));
        let all: u64 = healthy.map(|gpu| gpus.ids.per_gpu(resource, gpu)).sum();
        let withdrawn = self.withdrawn.count(resource, |gpu| gpus.is_healthy(gpu));
        usize::try_from(all).unwrap_or(usize::MAX).saturating_sub(held.len() + withdrawn)
    }

    /// Returns whether the kubelet lists a pod without this resource that the watch has not
    /// reported yet.
    fn lists_unknown_pods(&self, resource: Resource) -> bool {
        let known: BTreeSet<(&str, &str)> = self.pods.iter().map(|(_, pod)| name_of(pod)).collect();
        let lacks = |pod: &&PodDevices| pod.containers.iter().any(|c| !c.ids.contains_key(resource.name()));
        self.kubelet.listed().iter().filter(lacks).any(|pod| !known.contains(&entry_name(pod)))
    }

    /// Returns all pods that a call could be for.
    ///
    /// A pod with a start time was admitted long ago. It counts only as a last chance, when its
    /// kubelet must have lost its checkpoint.
    fn candidates(&self, resource: Resource, count: usize, is_last_chance: bool) -> Vec<(PodUid, String)> {
        let candidate = |(uid, pod): (&PodUid, &Pod)| {
            let is_earlier = self.admissions.is_passed_over(uid) || pod.status.start_time.is_some();
            if has_ended(pod) || self.admissions.is_refused(uid) || (is_earlier && !is_last_chance) {
                return None;
            }
            let entries: Vec<&PodDevices> = self.kubelet.entries_named(pod).collect();
            let has_resource = |container: &str| {
                let mut shown =
                    entries.iter().flat_map(|entry| &entry.containers).filter(|c| c.name == container);
                shown.clone().next().is_some() && shown.all(|c| c.ids.contains_key(resource.name()))
            };
            let mut containers = pod.spec.containers_with_roles();
            let open = containers.find(|(container, role)| {
                resource.asked_by(container) == count
                    && !self.admissions.is_answered(uid, &container.name, resource)
                    && (*role == ContainerRole::Init || !has_resource(&container.name))
            });
            let (container, _) = open.filter(|_| !entries.is_empty())?;
            Some((uid.clone(), container.name.clone()))
        };
        self.pods.iter().filter_map(candidate).collect()
    }
}

fn entry_name(pod: &PodDevices) -> (&str, &str) {
    (&pod.namespace, &pod.name)
}
