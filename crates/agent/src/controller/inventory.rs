//! GPUs of the node: as the driver reports them, and as the agent offers them to the kubelet.

use std::collections::BTreeSet;

use tessera_core::{
    gpu::{Gpu, GpuUuid, Health},
    node::Node,
    units::{GpuIndex, MiB, MilliCpu, NodeName},
};
use tessera_node::{
    device_plugin::PluginDevice,
    gpus::{DiscoveredGpus, Incident},
};
use tessera_wire::{
    foreign::dialect::MemoryUnit,
    kubelet::device_id::{DeviceIds, Resource},
    tessera::inventory::Inventory,
};

use super::{Action, AgentSettings, EventTime, ShellError, Warning, capacity::Withdrawn, health::GpuHealth};

/// GPUs that have been discovered, and the IDs of their devices.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeGpus {
    /// Result of the last successful discovery.
    pub(super) found: DiscoveredGpus,
    pub(super) ids: DeviceIds,
    /// GPUs with their current health, as the agent offers them.
    pub(super) node: Node,
}

impl NodeGpus {
    /// Returns the GPUs of devices. Unknown IDs are left out.
    pub(super) fn of_ids(&self, resource: Resource, ids: &BTreeSet<String>) -> BTreeSet<GpuIndex> {
        ids.iter().filter_map(|id| self.ids.read(resource, id)).map(|(gpu, _)| gpu).collect()
    }

    pub(super) fn is_healthy(&self, gpu: GpuIndex) -> bool {
        self.node.gpu(gpu).is_some_and(|gpu| gpu.health.is_healthy())
    }

    /// Returns the indexes of the unhealthy GPUs.
    pub(super) fn unhealthy(&self) -> Vec<u8> {
        let gpus = self.node.gpus().iter();
        gpus.filter(|gpu| !gpu.health.is_healthy()).map(|gpu| gpu.index.0).collect()
    }

    /// Returns the content of the node annotation `tessera.dev/inventory`.
    pub(super) fn inventory(&self) -> Inventory {
        Inventory {
            gpus: self.node.gpus().to_vec(),
            topology: self.node.topology().clone(),
            memory_unit: self.ids.unit(),
        }
    }
}

/// Discovered GPUs, their health, and the error of the last discovery.
#[derive(Debug)]
pub(super) struct GpuInventory {
    node: NodeName,
    requested_unit: MemoryUnit,
    gpus: Option<NodeGpus>,
    discovery_error: Option<ShellError>,
    health: GpuHealth,
    ignore_pending_reset: bool,
}

impl GpuInventory {
    pub(super) fn new(settings: &AgentSettings) -> Self {
        Self {
            node: settings.node.clone(),
            requested_unit: settings.memory_unit,
            gpus: None,
            discovery_error: None,
            health: GpuHealth::new(settings.quiet_time, settings.ignored_xids.clone()),
            ignore_pending_reset: settings.ignore_pending_reset,
        }
    }

    /// Returns the GPUs, or `None` before the first successful discovery.
    pub(super) fn gpus(&self) -> Option<&NodeGpus> {
        self.gpus.as_ref()
    }

    /// Returns the error of the last discovery, if it failed.
    pub(super) fn discovery_error(&self) -> Option<&ShellError> {
        self.discovery_error.as_ref()
    }

    /// Takes over the result of a discovery. Returns true if the offered GPUs changed.
    pub(super) fn on_discovery(
        &mut self,
        found: Result<DiscoveredGpus, ShellError>,
        actions: &mut Vec<Action>,
    ) -> bool {
        let before = self.discovery_error.clone();
        let found = match found {
            Ok(found) => {
                self.discovery_error = None;
                let mut found = self.with_names_of_lost_gpus(found);
                for gpu in found.gpus.iter_mut().filter(|gpu| gpu.health == Health::AwaitingReset) {
                    if self.ignore_pending_reset {
                        gpu.health = Health::Healthy;
                    }
                }
                self.restore_found_gpus(&found, before.is_some());
                self.warn_of_withdrawn_gpus(&found, actions);
                found
            }
            Err(reason) => {
                if before.as_ref() == Some(&reason) {
                    return false;
                }
                let consequence = if self.gpus.is_some() {
                    "the GPUs are withdrawn until they are found again"
                } else {
                    "no GPUs to offer yet"
                };
                actions.push(Action::Warn(Warning::new(consequence).error(&reason)));
                self.discovery_error = Some(reason);
                // GPUs that were there stay in the inventory, as unhealthy ones.
                let Some(gpus) = &self.gpus else { return false };
                gpus.found.clone()
            }
        };
        if self.discovery_error.is_some() == before.is_some()
            && self.gpus.as_ref().is_some_and(|gpus| gpus.found == found)
        {
            return false;
        }
        self.set(found, actions);
        true
    }

    /// Records an incident. Returns true if a GPU went out of use or came back.
    pub(super) fn on_incident(
        &mut self,
        now: EventTime,
        incident: &Incident,
        actions: &mut Vec<Action>,
    ) -> bool {
        let Some(gpus) = &self.gpus else { return false };
        // An incident without a GPU concerns all GPUs.
        let all = || gpus.found.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let uuids: Vec<GpuUuid> = incident.gpu.clone().map_or_else(all, |gpu| vec![gpu]);
        let mut changed = false;
        for gpu in uuids {
            if self.health.record(now.elapsed, &gpu, incident.kind) {
                changed = true;
                actions.push(Action::Warn(self.health.warning(&gpu, incident.kind)));
            }
        }
        if changed {
            self.apply_health(actions);
        }
        changed
    }

    /// Puts GPUs back into use whose quiet time is over. Returns true if there were any.
    pub(super) fn restore_quiet(&mut self, now: EventTime, actions: &mut Vec<Action>) -> bool {
        let restored = self.health.restore_quiet(now.elapsed);
        if restored {
            self.apply_health(actions);
        }
        restored
    }

    /// Sends the devices of all `resources` to the kubelet, the withdrawn ones as unhealthy.
    pub(super) fn publish_devices(
        &self,
        resources: impl Iterator<Item = Resource>,
        withdrawn: &Withdrawn,
        actions: &mut Vec<Action>,
    ) {
        let Some(gpus) = &self.gpus else { return };
        for resource in resources {
            let device = |(id, index, number)| {
                let gpu = gpus.node.gpu(index)?;
                let healthy = gpu.health.is_healthy() && !withdrawn.contains(resource, index, number);
                Some(PluginDevice { id, healthy, numa_node: gpu.numa.map(i64::from) })
            };
            let devices = gpus.ids.all(resource).filter_map(device).collect();
            actions.push(Action::PublishDevices(resource, devices));
        }
    }

    /// Gives a GPU that no longer answers the UUID it had, and marks it unhealthy.
    fn with_names_of_lost_gpus(&self, mut found: DiscoveredGpus) -> DiscoveredGpus {
        for gpu in &mut found.gpus {
            let known = self.gpus.as_ref().and_then(|gpus| gpus.found.gpus.get(gpu.index.position()));
            if gpu.uuid.0.starts_with("lost-")
                && let Some(known) = known
            {
                *gpu = Gpu { health: Health::Unhealthy, ..known.clone() };
            }
        }
        found
    }

    /// Puts GPUs back into use that the driver had lost and has found again.
    ///
    /// A fatal error is over then, because the GPU has been reset or replaced.
    fn restore_found_gpus(&mut self, found: &DiscoveredGpus, were_all_lost: bool) {
        let Some(gpus) = &self.gpus else { return };
        let was_lost = |gpu: &Gpu| {
            let known = gpus.found.gpus.iter().find(|known| known.uuid == gpu.uuid);
            were_all_lost || known.is_some_and(|known| !known.health.is_healthy())
        };
        for gpu in found.gpus.iter().filter(|gpu| gpu.health.is_healthy() && was_lost(gpu)) {
            self.health.restore(&gpu.uuid);
        }
    }

    /// Warns of GPUs that the driver has and that cannot be granted, once for each.
    fn warn_of_withdrawn_gpus(&self, found: &DiscoveredGpus, actions: &mut Vec<Action>) {
        for gpu in &found.gpus {
            let message = match gpu.health {
                Health::InMigMode => {
                    "a GPU is in MIG mode and is not offered; its instances are not offered either. Disable MIG mode \
                     with nvidia-smi -mig 0 to use the GPU"
                }
                Health::AwaitingReset => {
                    "a GPU is not offered until it is reset, because memory of it was retired; use nvidia-smi -r"
                }
                Health::Healthy | Health::Unhealthy => continue,
            };
            let known = self.gpus.as_ref().and_then(|gpus| gpus.found.gpus.get(gpu.index.position()));
            if known.is_none_or(|known| (&known.uuid, known.health) != (&gpu.uuid, gpu.health)) {
                actions.push(Action::Warn(Warning::new(message).gpu(&gpu.uuid)));
            }
        }
    }

    /// Applies the recorded health to the discovered GPUs.
    fn apply_health(&mut self, actions: &mut Vec<Action>) {
        if let Some(gpus) = self.gpus.take() {
            self.set(gpus.found, actions);
        }
    }

    fn set(&mut self, found: DiscoveredGpus, actions: &mut Vec<Action>) {
        let requested = self.requested_unit;
        let unit = DeviceIds::unit_that_fits(&found.gpus, requested);
        if unit != requested && self.gpus.as_ref().is_none_or(|gpus| gpus.ids.unit() != unit) {
            let message = "the memory unit makes more devices than a kubelet accepts; aliyun.com/gpu-mem counts in a \
                           larger unit on this node";
            let detail = format!("{unit} instead of {requested}");
            actions.push(Action::Warn(Warning::new(message).detail(detail)));
        }
        let mut gpus = found.gpus.clone();
        for gpu in &mut gpus {
            if self.discovery_error.is_some() || self.health.is_out_of_use(&gpu.uuid) {
                gpu.health = Health::Unhealthy;
            }
        }
        // The scheduler accounts for CPU and main memory; the agent does not limit them.
        let (cpu, memory) = (MilliCpu(u64::MAX), MiB(u64::MAX));
        match Node::new(self.node.clone(), gpus, found.topology.clone(), cpu, memory) {
            Ok(node) => {
                let ids = DeviceIds::new(&found.gpus, unit);
                self.gpus = Some(NodeGpus { found, ids, node });
            }
            Err(error) => {
                let message = "the discovered GPUs contradict their topology and are not offered";
                actions.push(Action::Warn(Warning::new(message).error(&error)));
            }
        }
    }
}
