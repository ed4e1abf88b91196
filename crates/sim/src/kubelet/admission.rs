//! Admission of pods and start of their containers.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::request::ContainerRole;
use tessera_wire::{
    foreign::objects::{Container, Pod},
    kubelet::{
        device_id::Resource,
        device_plugin::{
            AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
            ContainerPreferredAllocationRequest, PreStartContainerRequest, PreferredAllocationRequest,
        },
    },
};
use tonic::Status;

use super::{ContainerEntry, Kubelet, PodEntry, lock};

/// Environment and mounts of the containers of an admitted pod, all resources merged.
pub type Admitted = BTreeMap<String, ContainerAllocateResponse>;

/// Reasons why the kubelet does not run a pod, in the words of a real kubelet.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// The pod is rejected for good.
    #[error("Pod was rejected: Allocate failed due to {0}, which is unexpected")]
    Rejected(#[source] AllocationError),
    /// The device plugin of a resource is gone.
    #[error("endpoint of {0} has been stopped")]
    PluginStopped(String),
    /// The device plugin rejected the start of a container.
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(#[source] Box<Status>),
}

/// Reasons why a container gets no devices.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// No device plugin serves the resource.
    #[error("no healthy devices present; cannot allocate {0}")]
    NoPlugin(&'static str),
    /// Fewer devices are free than the container requests.
    #[error("requested number of devices unavailable for {0}")]
    TooFewDevices(&'static str),
    /// The device plugin failed to answer GetPreferredAllocation.
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preference(#[source] Box<Status>),
    /// The device plugin rejected Allocate.
    #[error("{0}")]
    Allocate(#[source] Box<Status>),
}

impl Kubelet {
    /// Admits a pod, or rejects it for good.
    pub async fn admit(&self, pod: &Pod) -> Result<Admitted, KubeletError> {
        let _one_at_a_time = self.admitting.lock().await;
        let uid = &pod.metadata.uid;
        let entry = |(container, role): (&Container, ContainerRole)| ContainerEntry {
            name: container.name.clone(),
            listed: role != ContainerRole::Init,
            ids: BTreeMap::new(),
        };
        let listed = PodEntry {
            namespace: pod.metadata.namespace.clone(),
            name: pod.metadata.name.clone(),
            containers: pod.spec.containers_with_roles().map(entry).collect(),
        };
        lock(&self.state.allocations).pods.insert(uid.clone(), listed);
        let admitted = self.allocate_all(pod).await;
        if admitted.is_err() {
            self.remove(uid);
        }
        admitted.map_err(KubeletError::Rejected)
    }

    async fn allocate_all(&self, pod: &Pod) -> Result<Admitted, AllocationError> {
        let mut admitted = Admitted::new();
        let mut reusable: BTreeMap<Resource, BTreeSet<String>> = BTreeMap::new();
        for (container, role) in pod.spec.containers_with_roles() {
            let mut resources: Vec<Resource> =
                Resource::ALL.into_iter().filter(|resource| resource.asked_by(container) > 0).collect();
            self.state.shuffle(&mut resources);
            for resource in resources {
                let reuse = reusable.entry(resource).or_default();
                let (ids, response) = self.allocate(pod, container, resource, reuse).await?;
                match role {
                    ContainerRole::Init => reuse.extend(ids),
                    ContainerRole::Sidecar | ContainerRole::Main => reuse.retain(|id| !ids.contains(id)),
                }
                let given = admitted.entry(container.name.clone()).or_default();
                given.envs.extend(response.envs);
                given.mounts.extend(response.mounts);
                given.annotations.extend(response.annotations);
                given.cdi_devices.extend(response.cdi_devices);
            }
        }
        Ok(admitted)
    }

    async fn allocate(
        &self,
        pod: &Pod,
        container: &Container,
        resource: Resource,
        reusable: &BTreeSet<String>,
    ) -> Result<(BTreeSet<String>, ContainerAllocateResponse), AllocationError> {
        let name = resource.name();
        let plugin = lock(&self.state.plugins).get(name).cloned();
        let mut plugin = plugin.ok_or(AllocationError::NoPlugin(name))?;
        let count = resource.asked_by(container);
        let mut chosen: BTreeSet<String> = reusable.iter().take(count).cloned().collect();
        if chosen.len() < count {
            let held: BTreeSet<String> = {
                let allocations = lock(&self.state.allocations);
                let containers = allocations.pods.values().flat_map(|pod| &pod.containers);
                containers.filter_map(|container| container.ids.get(name)).flatten().cloned().collect()
            };
            let mut available: Vec<String> = plugin.healthy().difference(&held).cloned().collect();
            if available.len() + chosen.len() < count {
                return Err(AllocationError::TooFewDevices(name));
            }
            self.state.shuffle(&mut available);
            let request = PreferredAllocationRequest {
                container_requests: vec![ContainerPreferredAllocationRequest {
                    available_device_i_ds: available.iter().chain(&chosen).cloned().collect(),
                    must_include_device_i_ds: chosen.iter().cloned().collect(),
                    allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
                }],
            };
            let preferred = plugin.client.get_preferred_allocation(request).await;
            let preferred = preferred.map_err(|error| AllocationError::Preference(Box::new(error)))?;
            let preferred =
                preferred.into_inner().container_responses.into_iter().flat_map(|r| r.device_i_ds);
            let usable = preferred.filter(|id| available.contains(id)).collect::<Vec<_>>();
            for id in usable.into_iter().chain(available) {
                if chosen.len() < count {
                    chosen.insert(id);
                }
            }
        }
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                devices_ids: chosen.iter().cloned().collect(),
            }],
        };
        let response = plugin.client.allocate(request).await;
        let response = response.map_err(|error| AllocationError::Allocate(Box::new(error)))?;
        let response = response.into_inner().container_responses.into_iter().next().unwrap_or_default();
        let mut allocations = lock(&self.state.allocations);
        let entry = allocations.pods.get_mut(&pod.metadata.uid);
        let held = entry.into_iter().flat_map(|pod| &mut pod.containers).find(|c| c.name == container.name);
        if let Some(held) = held {
            held.ids.insert(name.to_owned(), chosen.clone());
        }
        Ok((chosen, response))
    }

    /// Starts the containers of an admitted pod, for the first time or again. Only the plugins are
    /// called.
    pub async fn start_containers(&self, pod: &Pod) -> Result<(), KubeletError> {
        for (container, _) in pod.spec.containers_with_roles() {
            for (name, ids) in self.holds(&pod.metadata.uid, &container.name) {
                let plugin = lock(&self.state.plugins).get(&name).cloned();
                let mut plugin = plugin.ok_or(KubeletError::PluginStopped(name))?;
                let request = PreStartContainerRequest { devices_ids: ids.into_iter().collect() };
                let started = plugin.client.pre_start_container(request).await;
                started.map_err(|error| KubeletError::PreStart(Box::new(error)))?;
            }
        }
        Ok(())
    }
}
