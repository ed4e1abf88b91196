//! The GPUs of the node, as they were found and as they are offered.

use std::collections::BTreeSet;

use tessera_core::{
    gpu::{Gpu, Health},
    node::Node,
    units::{GpuIndex, MiB, MilliCpu},
};
use tessera_node::{device_plugin::PluginDevice, gpus::DiscoveredGpus};
use tessera_wire::{
    kubelet::device_id::{DeviceIds, Resource},
    tessera::inventory::Inventory,
};

use super::{Action, Agent, Dirty};

/// The GPUs of the node and the names of their devices.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeGpus {
    pub(super) found: DiscoveredGpus,
    pub(super) ids: DeviceIds,
    pub(super) node: Node,
}

impl NodeGpus {
    /// The GPUs of these devices.
    pub(super) fn of_ids(&self, resource: Resource, ids: &BTreeSet<String>) -> BTreeSet<GpuIndex> {
        ids.iter().filter_map(|id| self.ids.read(resource, id)).map(|(gpu, _)| gpu).collect()
    }
}

impl Agent {
    pub(super) fn on_gpus(
        &mut self,
        found: Result<DiscoveredGpus, String>,
        actions: &mut Vec<Action>,
    ) -> Dirty {
        let before = self.missing.clone();
        let found = match found {
            Ok(found) => {
                self.missing = None;
                let found = self.with_lost_names(found);
                self.trust_those_found_again(&found, before.is_some());
                found
            }
            Err(reason) => {
                if before.as_ref() == Some(&reason) {
                    return Dirty::Nothing;
                }
                let consequence = if self.cards.is_some() {
                    "the GPUs are withdrawn until they are found again"
                } else {
                    "no GPUs to offer yet"
                };
                actions.push(Action::Warn(format!("{consequence}: {reason}")));
                self.missing = Some(reason);
                // Those that were there are, as far as anybody can tell, broken.
                let Some(cards) = &self.cards else { return Dirty::Nothing };
                cards.found.clone()
            }
        };
        if self.missing.is_some() == before.is_some()
            && self.cards.as_ref().is_some_and(|cards| cards.found == found)
        {
            return Dirty::Nothing;
        }
        self.set_gpus(found, actions);
        self.publish_devices(actions);
        Dirty::All
    }

    /// A GPU that does not answer keeps the name it had, as a broken one.
    fn with_lost_names(&self, mut found: DiscoveredGpus) -> DiscoveredGpus {
        for gpu in &mut found.gpus {
            let known = self.cards.as_ref().and_then(|cards| cards.found.gpus.get(gpu.index.position()));
            if gpu.uuid.0.starts_with("lost-")
                && let Some(known) = known
            {
                *gpu = Gpu { health: Health::Unhealthy, ..known.clone() };
            }
        }
        found
    }

    /// What was fatal to a GPU is over once the driver, which had lost it, has it again: somebody has reset it.
    fn trust_those_found_again(&mut self, found: &DiscoveredGpus, were_all_lost: bool) {
        let Some(cards) = &self.cards else { return };
        let was_lost = |gpu: &Gpu| {
            let known = cards.found.gpus.iter().find(|known| known.uuid == gpu.uuid);
            were_all_lost || known.is_some_and(|known| known.health == Health::Unhealthy)
        };
        for gpu in found.gpus.iter().filter(|gpu| gpu.health == Health::Healthy && was_lost(gpu)) {
            self.health.found_again(&gpu.uuid);
        }
    }

    fn set_gpus(&mut self, found: DiscoveredGpus, actions: &mut Vec<Action>) {
        let asked = self.settings.memory_unit;
        let unit = DeviceIds::unit_that_fits(&found.gpus, asked);
        if unit != asked && self.cards.as_ref().is_none_or(|cards| cards.ids.unit() != unit) {
            actions.push(Action::Warn(format!(
                "units of {asked} would be more than a kubelet takes: aliyun.com/gpu-mem counts in {unit} on this node"
            )));
        }
        let mut gpus = found.gpus.clone();
        for gpu in &mut gpus {
            if self.missing.is_some() || self.health.is_bad(&gpu.uuid) {
                gpu.health = Health::Unhealthy;
            }
        }
        let name = self.settings.node.clone();
        // CPU and main memory are the scheduler's affair.
        match Node::new(name, gpus, found.topology.clone(), MilliCpu(u64::MAX), MiB(u64::MAX)) {
            Ok(node) => {
                let ids = DeviceIds::new(&found.gpus, unit);
                self.cards = Some(NodeGpus { found, ids, node });
                self.read_pods();
                self.pods_or_gpus_changed();
            }
            Err(error) => actions.push(Action::Warn(error.to_string())),
        }
    }

    /// Health has changed: the same GPUs, seen anew.
    pub(super) fn refresh_gpus(&mut self, actions: &mut Vec<Action>) {
        if let Some(cards) = self.cards.take() {
            self.set_gpus(cards.found, actions);
        }
        self.publish_devices(actions);
    }

    fn publish_devices(&self, actions: &mut Vec<Action>) {
        let Some(cards) = &self.cards else { return };
        for resource in self.resources() {
            let device = |(id, gpu)| {
                let card = cards.node.gpu(gpu)?;
                let healthy = card.health == Health::Healthy;
                Some(PluginDevice { id, healthy, numa_node: card.numa.map(i64::from) })
            };
            actions
                .push(Action::PublishDevices(resource, cards.ids.all(resource).filter_map(device).collect()));
        }
    }

    /// What the agent would publish of its GPUs.
    pub(super) fn inventory(&self) -> Option<Inventory> {
        let cards = self.cards.as_ref()?;
        Some(Inventory {
            gpus: cards.node.gpus().to_vec(),
            topology: cards.node.topology().clone(),
            memory_unit: cards.ids.unit(),
        })
    }
}
