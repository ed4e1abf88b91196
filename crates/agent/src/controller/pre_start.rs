//! Answers `PreStartContainer`: finds the container that is about to start by its devices.

use std::collections::BTreeSet;

use tessera_core::{gpu_set::GpuSet, request::ContainerRole, units::PodUid};
use tessera_node::pod_resources::ContainerDevices;
use tessera_wire::{foreign::objects::Pod, kubelet::device_id::Resource};

use super::{PodContainer, grants::GrantDirectories, holdings::Holdings, pods::has_ended};

/// Finds the container that holds given devices.
pub(super) struct HolderFinder<'a> {
    pub(super) holdings: Holdings<'a>,
    pub(super) grants: &'a GrantDirectories,
}

impl HolderFinder<'_> {
    /// Returns the containers that hold exactly these devices.
    ///
    /// The kubelet lists most of them. It does not list ordinary init containers, so those come from
    /// our own records.
    pub(super) fn holders(&self, resource: Resource, ids: &BTreeSet<String>) -> Vec<PodContainer> {
        let Holdings { pods, admissions, .. } = self.holdings;
        let mut holders: Vec<PodContainer> = Vec::new();
        for (uid, pod) in pods.active() {
            let entry = self.holdings.entry_of(uid, pod);
            let containers = entry.into_iter().flat_map(|entry| &entry.containers);
            let holding = containers.filter(|container| container.ids.get(resource.name()) == Some(ids));
            holders.extend(holding.map(|container| (uid.clone(), container.name.clone())));
        }
        let listed: BTreeSet<PodUid> = holders.iter().map(|(uid, _)| uid.clone()).collect();
        for (uid, container) in admissions.holders(resource, ids) {
            let Some(pod) = pods.get(&uid).filter(|pod| !has_ended(pod)) else { continue };
            let is_contradicted = !listed.is_empty() && !listed.contains(&uid);
            let entry = self.holdings.entry_of(&uid, pod);
            let shown = entry.and_then(|entry| entry.containers.iter().find(|c| c.name == container));
            let is_listed_otherwise =
                shown.and_then(|shown| shown.ids.get(resource.name())).is_some_and(|other| other != ids);
            let holder = (uid, container);
            if !is_contradicted && !is_listed_otherwise && !holders.contains(&holder) {
                holders.push(holder);
            }
        }
        holders
    }

    /// Returns the ordinary init containers to which an earlier agent may have given these devices.
    ///
    /// The kubelet does not list such containers, and the earlier agent's records are gone. Their
    /// pods have been admitted, and their annotations grant these GPUs.
    pub(super) fn init_holders(&self, resource: Resource, ids: &BTreeSet<String>) -> Vec<PodContainer> {
        let Holdings { pods, admissions, gpus: Some(gpus), .. } = self.holdings else { return Vec::new() };
        let gpus: GpuSet = gpus.of_ids(resource, ids).into_iter().collect();
        let is_admitted = |pod: &Pod| pod.status.phase == "Pending" && pod.status.start_time.is_some();
        let mut holders = Vec::new();
        for (uid, pod) in pods.iter().filter(|(_, pod)| is_admitted(pod)) {
            let inits = pod.spec.containers_with_roles().filter(|(_, role)| *role == ContainerRole::Init);
            for (container, _) in inits.filter(|(container, _)| resource.asked_by(container) == ids.len()) {
                let granted = pods.annotated(uid).iter().find(|granted| granted.container == container.name);
                let is_unknown = admissions.recorded(uid, &container.name, resource).is_none();
                // A few blocks of memory beside whole GPUs need not lie on each of the GPUs.
                if is_unknown && granted.is_some_and(|granted| granted.gpus().is_superset(gpus)) {
                    holders.push((uid.clone(), container.name.clone()));
                }
            }
        }
        holders
    }

    /// Returns whether a container may start although the API server has not reported its pod.
    ///
    /// It may start again if it has whole GPUs, or if its limits are still on the node.
    pub(super) fn may_restart(&self, resource: Resource, ids: &BTreeSet<String>) -> bool {
        let Holdings { pods, kubelet, gpus, .. } = self.holdings;
        let slots = gpus.and_then(|gpus| gpus.ids.slots());
        if pods.is_complete() {
            return false;
        }
        let mut containers =
            kubelet.listed().iter().flat_map(|pod| pod.containers.iter().map(move |c| (pod, c)));
        containers.any(|(pod, container)| {
            container.ids.get(resource.name()) == Some(ids)
                && (has_whole_gpus(container, slots)
                    || self.grants.has_limits_named(&pod.namespace, &pod.name, &container.name))
        })
    }
}

/// Returns whether a container has whole GPUs, by the number of its devices. A device of `nvidia.com/gpu` may be
/// a part of one if there are `slots`.
fn has_whole_gpus(container: &ContainerDevices, slots: Option<u16>) -> bool {
    let count = |resource: Resource| container.ids.get(resource.name()).map_or(0, BTreeSet::len);
    let compute_percent = count(Resource::VcudaCore);
    (slots.is_none() && count(Resource::NvidiaGpu) > 0)
        || count(Resource::AliyunGpu) > 0
        || (compute_percent > 0 && compute_percent.is_multiple_of(100))
}
