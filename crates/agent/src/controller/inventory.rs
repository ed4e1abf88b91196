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

use super::{
    Action, AgentSettings, EventTime, MigStrategy, ShellError, Warning,
    capacity::Withdrawn,
    health::GpuHealth,
    mig::{self, NotAlike, is_instance},
};

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

    /// Returns the content of the node annotation `tessera.dev/inventory` for a node that serves shares.
    pub(super) fn inventory(&self) -> Inventory {
        Inventory {
            gpus: self.node.gpus().to_vec(),
            topology: self.node.topology().clone(),
            memory_unit: self.ids.unit(),
            nvidia_slots: self.ids.slots(),
            whole_gpus_only: false,
            withheld: Vec::new(),
        }
    }
}

/// Discovered GPUs, their health, and the error of the last discovery.
#[derive(Debug)]
pub(super) struct GpuInventory {
    node: NodeName,
    requested_unit: MemoryUnit,
    nvidia_slots: Option<u16>,
    gpus: Option<NodeGpus>,
    discovery_error: Option<ShellError>,
    health: GpuHealth,
    ignore_pending_reset: bool,
    mig_strategy: MigStrategy,
    /// Why instances could not take the place of the GPUs at the last discovery.
    not_alike: Option<NotAlike>,
}

impl GpuInventory {
    pub(super) fn new(settings: &AgentSettings) -> Self {
        Self {
            node: settings.node.clone(),
            requested_unit: settings.memory_unit,
            nvidia_slots: settings.slots(),
            gpus: None,
            discovery_error: None,
            health: GpuHealth::new(settings.quiet_time, settings.ignored_xids.clone()),
            ignore_pending_reset: settings.ignore_pending_reset,
            mig_strategy: settings.mig_strategy,
            not_alike: None,
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
                let found = self.without_ignored_resets(found);
                let found = self.with_instances(found, actions);
                let found = self.with_names_of_lost_gpus(found);
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
        let of = |gpu: GpuUuid| -> Vec<GpuUuid> {
            if gpus.found.gpus.iter().any(|known| known.uuid == gpu) {
                return vec![gpu];
            }
            // The instances of this GPU are in its place.
            let instances = gpus.found.instances.iter().filter(|instance| instance.gpu_uuid == gpu);
            instances.map(|instance| instance.uuid.clone()).collect()
        };
        let uuids: Vec<GpuUuid> = incident.gpu.clone().map_or_else(all, of);
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
                // The library cannot hold a container to a share of an instance.
                let can_serve = gpus.ids.is_whole(resource) || !is_instance(gpu);
                let healthy =
                    gpu.health.is_healthy() && can_serve && !withdrawn.contains(resource, index, number);
                Some(PluginDevice { id, healthy, numa_node: gpu.numa.map(i64::from) })
            };
            let devices = gpus.ids.all(resource).filter_map(device).collect();
            actions.push(Action::PublishDevices(resource, devices));
        }
    }

    /// Returns the IDs of the devices of a resource that are offered as healthy.
    pub(super) fn healthy_devices(&self, resource: Resource, withdrawn: &Withdrawn) -> BTreeSet<String> {
        let mut actions = Vec::new();
        self.publish_devices(std::iter::once(resource), withdrawn, &mut actions);
        let devices = actions.into_iter().filter_map(|action| match action {
            Action::PublishDevices(_, devices) => Some(devices),
            _ => None,
        });
        devices.flatten().filter(|device| device.healthy).map(|device| device.id).collect()
    }

    /// Sends the devices of MIG instances to the kubelet, if they are resources of their own.
    pub(super) fn publish_instances(&self, actions: &mut Vec<Action>) {
        let Some(gpus) = self.gpus.as_ref().filter(|_| self.mig_strategy == MigStrategy::Mixed) else {
            return;
        };
        let is_usable = |gpu: &GpuUuid| self.discovery_error.is_none() && !self.health.is_out_of_use(gpu);
        actions.push(Action::PublishInstances(mig::offers(&gpus.found, is_usable)));
    }

    /// Returns the names of the resources of MIG instances, if they are resources of their own.
    pub(super) fn instance_resources(&self) -> BTreeSet<String> {
        let gpus = self.gpus.as_ref().filter(|_| self.mig_strategy == MigStrategy::Mixed);
        gpus.map(|gpus| mig::resources(&gpus.found)).unwrap_or_default()
    }

    /// Offers GPUs that await a reset as if they did not, if the agent is configured so.
    fn without_ignored_resets(&self, mut found: DiscoveredGpus) -> DiscoveredGpus {
        if self.ignore_pending_reset {
            for gpu in found.gpus.iter_mut().filter(|gpu| gpu.health == Health::AwaitingReset) {
                let has_instances = found.instances.iter().any(|instance| instance.gpu_uuid == gpu.uuid);
                gpu.health = if has_instances { Health::InMigMode } else { Health::Healthy };
            }
        }
        found
    }

    /// Puts instances into the place of their GPUs, if they are to be offered so. Logs why it is not possible.
    fn with_instances(&mut self, found: DiscoveredGpus, actions: &mut Vec<Action>) -> DiscoveredGpus {
        // A GPU that awaits a reset is in MIG mode too if it has instances.
        let is_in_use =
            found.gpus.iter().any(|gpu| gpu.health == Health::InMigMode) || !found.instances.is_empty();
        if self.mig_strategy != MigStrategy::Single || !is_in_use {
            self.not_alike = None;
            return found;
        }
        match mig::instances_as_gpus(&found) {
            Ok(found) => {
                self.not_alike = None;
                found
            }
            Err(reason) => {
                if self.not_alike.as_ref() != Some(&reason) {
                    let message = "MIG instances are not offered as GPUs";
                    actions.push(Action::Warn(Warning::new(message).error(&reason)));
                }
                self.not_alike = Some(reason);
                found
            }
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
            were_all_lost
                || known.is_some_and(|known| !known.health.is_healthy() && known.health != gpu.health)
        };
        let answers = |gpu: &&Gpu| gpu.health.is_healthy() || gpu.health == Health::InMigMode;
        for gpu in found.gpus.iter().filter(answers).filter(|gpu| was_lost(gpu)) {
            self.health.restore(&gpu.uuid);
        }
    }

    /// Warns of GPUs that the driver has and that cannot be granted, once for each.
    fn warn_of_withdrawn_gpus(&self, found: &DiscoveredGpus, actions: &mut Vec<Action>) {
        for gpu in &found.gpus {
            let Some(message) = self.withdrawal(found, gpu) else { continue };
            let known = self.gpus.as_ref().map(|gpus| &gpus.found);
            let before = known.and_then(|known| Some((known, known.gpus.get(gpu.index.position())?)));
            let is_known = before.is_some_and(|(known, before)| {
                before.uuid == gpu.uuid && self.withdrawal(known, before) == Some(message)
            });
            if !is_known {
                actions.push(Action::Warn(Warning::new(message).gpu(&gpu.uuid)));
            }
        }
    }

    /// Returns why a GPU that answers cannot be granted, with the remedy.
    fn withdrawal(&self, found: &DiscoveredGpus, gpu: &Gpu) -> Option<&'static str> {
        let has_instances = || found.instances.iter().any(|instance| instance.gpu_uuid == gpu.uuid);
        match (gpu.health, self.mig_strategy) {
            (Health::Healthy | Health::Unhealthy | Health::Cordoned, _) | (Health::InMigMode, MigStrategy::Single) => None,
            (Health::InMigMode, MigStrategy::None) => Some(
                "a GPU is in MIG mode and is not offered; offer its instances with --mig-strategy mixed or single, or \
                 disable MIG mode with nvidia-smi -mig 0",
            ),
            (Health::InMigMode, MigStrategy::Mixed) => (!has_instances()).then_some(
                "a GPU is in MIG mode and has no instance to offer; create some with nvidia-smi mig -cgi PROFILE -C",
            ),
            (Health::AwaitingReset, _) => {
                Some("a GPU is not offered until it is reset, because memory of it was retired; use nvidia-smi -r")
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
                let ids = DeviceIds::new(&found.gpus, unit).with_slots(self.nvidia_slots);
                self.gpus = Some(NodeGpus { found, ids, node });
            }
            Err(error) => {
                let message = "the discovered GPUs contradict their topology and are not offered";
                actions.push(Action::Warn(Warning::new(message).error(&error)));
            }
        }
    }
}
