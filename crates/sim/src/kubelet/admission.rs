//! Admitting a pod, and starting its containers.

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

use super::{ContainerEntry, Kubelet, PodEntry, lock};

/// What the containers of an admitted pod were given: environment and mounts, all resources together.
pub type Admitted = BTreeMap<String, ContainerAllocateResponse>;

impl Kubelet {
    /// Admits a pod, or rejects it for good.
    pub async fn admit(&self, pod: &Pod) -> Result<Admitted, String> {
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
        admitted.map_err(|reason| {
            format!("Pod was rejected: Allocate failed due to {reason}, which is unexpected")
        })
    }

    async fn allocate_all(&self, pod: &Pod) -> Result<Admitted, String> {
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
    ) -> Result<(BTreeSet<String>, ContainerAllocateResponse), String> {
        let name = resource.name();
        let plugin = lock(&self.state.plugins).get(name).cloned();
        let mut plugin =
            plugin.ok_or_else(|| format!("no healthy devices present; cannot allocate {name}"))?;
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
                return Err(format!("requested number of devices unavailable for {name}"));
            }
            self.state.shuffle(&mut available);
            let request = PreferredAllocationRequest {
                container_requests: vec![ContainerPreferredAllocationRequest {
                    available_device_i_ds: available.iter().chain(&chosen).cloned().collect(),
                    must_include_device_i_ds: chosen.iter().cloned().collect(),
                    allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
                }],
            };
            let preferred = plugin.client.get_preferred_allocation(request).await.map_err(|error| {
                format!("device plugin GetPreferredAllocation rpc failed with err: {error}")
            })?;
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
        let response = plugin.client.allocate(request).await.map_err(|error| error.to_string())?;
        let response = response.into_inner().container_responses.into_iter().next().unwrap_or_default();
        let mut allocations = lock(&self.state.allocations);
        let entry = allocations.pods.get_mut(&pod.metadata.uid);
        let held = entry.into_iter().flat_map(|pod| &mut pod.containers).find(|c| c.name == container.name);
        if let Some(held) = held {
            held.ids.insert(name.to_owned(), chosen.clone());
        }
        Ok((chosen, response))
    }

    /// Starts the containers of an admitted pod, for the first time or again: only the plugins notice.
    pub async fn start_containers(&self, pod: &Pod) -> Result<(), String> {
        for (container, _) in pod.spec.containers_with_roles() {
            for (name, ids) in self.holds(&pod.metadata.uid, &container.name) {
                let plugin = lock(&self.state.plugins).get(&name).cloned();
                let mut plugin = plugin.ok_or_else(|| format!("endpoint of {name} has been stopped"))?;
                let request = PreStartContainerRequest { devices_ids: ids.into_iter().collect() };
                plugin.client.pre_start_container(request).await.map_err(|error| {
                    format!("device plugin PreStartContainer rpc failed with err: {error}")
                })?;
            }
        }
        Ok(())
    }
}
