//! Machine models of simulated nodes.

use tessera_core::gpu::Gpu;
use tessera_core::topology::{Link, PcieLevel, Topology};
use tessera_core::units::{GpuIndex, MiB};

/// A machine model: the GPUs of a host and their links.
#[derive(Debug, Clone)]
pub struct MachineModel {
    /// Model name of the GPUs.
    pub model: String,
    /// Memory of each GPU.
    pub memory: MiB,
    /// Links between the GPUs.
    pub topology: Topology,
}

impl MachineModel {
    /// Returns a model with these links and common data-centre GPUs.
    #[must_use]
    pub fn of(topology: Topology) -> Self {
        Self { model: "NVIDIA A100-SXM4-80GB".to_owned(), memory: MiB(81_920), topology }
    }

    /// Returns the GPUs of one host of this model. Every host has its own UUIDs.
    pub(crate) fn gpus(&self, number: usize) -> Vec<Gpu> {
        let gpu = |index: GpuIndex| {
            let uuid = format!("GPU-{number:04x}{:04x}-7e55-4e7a-8000-{number:012x}", index.0);
            let mut gpu = Gpu::new(index, uuid.as_str().into(), self.model.as_str().into(), self.memory);
            gpu.numa = self.topology.numa(index);
            gpu
        };
        self.topology.gpus().iter().map(gpu).collect()
    }
}

/// Returns the default models: eight GPUs bridged in pairs over two sockets, and eight GPUs on an
/// NVLink switch.
#[must_use]
pub fn built_in_models() -> Vec<MachineModel> {
    let sockets: Vec<Option<u16>> = (0..8).map(|gpu| Some(gpu / 4)).collect();
    let level = |a: GpuIndex, b: GpuIndex| match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
        (true, _) => PcieLevel::SingleSwitch,
        (false, true) => PcieLevel::Node,
        (false, false) => PcieLevel::System,
    };
    let pairs = Topology::from_pairs(8, |a, b| Link {
        pcie: Some(level(a, b)),
        nvlinks: if a.0 / 2 == b.0 / 2 { 12 } else { 0 },
    });
    let switch = Topology::from_pairs(8, |a, b| Link { pcie: Some(level(a, b)), nvlinks: 18 });
    let bridged = MachineModel {
        model: "NVIDIA A100 80GB PCIe".to_owned(),
        memory: MiB(81_920),
        topology: pairs.with_numa(&sockets),
    };
    let switched = MachineModel {
        model: "NVIDIA H100 80GB HBM3".to_owned(),
        memory: MiB(81_559),
        topology: switch.with_numa(&sockets),
    };
    vec![bridged.clone(), bridged, switched]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_gpu_of_every_host_has_its_own_uuid() {
        let models = built_in_models();
        let uuids: BTreeSet<_> =
            (0..30).flat_map(|number| models[number % 3].gpus(number)).map(|gpu| gpu.uuid).collect();
        assert_eq!(uuids.len(), 240);
        assert_eq!(models[2].topology.nvswitch_links(), Some(18));
        assert_eq!(models[0].topology.link(GpuIndex(4), GpuIndex(5)).nvlinks, 12);
    }
}
