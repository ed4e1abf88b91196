//! Machines the tests know: facts about real ones, written as small tables.

use crate::gpu::{Gpu, Health};
use crate::node::{Node, NodeState};
use crate::topology::{Link, PcieLevel, Topology};
use crate::units::{GpuIndex, MiB, MilliCpu};

const SYS: Link = Link { pcie: Some(PcieLevel::System), nvlinks: 0 };

/// In a file, as the benchmarks read it too.
const DGX1_V100: [[u8; 8]; 8] = include!("fixtures/dgx1-v100.in");

/// As `nvidia-smi topo -m` shows a DGX-1 with V100: what lies under the NVLinks is hidden.
pub(crate) fn dgx1_v100() -> Topology {
    let link = |a: GpuIndex, b: GpuIndex| match DGX1_V100[a.position()][b.position()] {
        0 => SYS,
        nvlinks => Link::nvlink(nvlinks),
    };
    on_two_sockets(&Topology::from_pairs(8, link))
}

/// Eight GPUs on two sockets, in pairs behind a switch: also the PCIe layer of a DGX-1.
pub(crate) fn pcie_pairs() -> Topology {
    let topology = Topology::from_pairs(8, |a, b| {
        Link::pcie(match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
            (true, _) => PcieLevel::SingleSwitch,
            (false, true) => PcieLevel::HostBridge,
            (false, false) => PcieLevel::System,
        })
    });
    on_two_sockets(&topology)
}

/// Eight A100 on PCIe, two sockets, neighbours bridged by twelve NVLinks.
pub(crate) fn bridged_pairs() -> Topology {
    let topology = Topology::from_pairs(8, |a, b| match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
        (true, _) => Link::nvlink(12),
        (false, true) => Link::pcie(PcieLevel::Node),
        (false, false) => SYS,
    });
    on_two_sockets(&topology)
}

/// Every GPU reaches every other over `nvlinks` through switches, as on a DGX H100 with 18; two sockets.
pub(crate) fn switched(count: usize, nvlinks: u8) -> Topology {
    on_two_sockets(&Topology::from_pairs(count, |_, _| Link::nvlink(nvlinks)))
}

fn on_two_sockets(topology: &Topology) -> Topology {
    let count = topology.count();
    let numa: Vec<Option<u16>> = (0..count).map(|gpu| Some(u16::from(gpu * 2 >= count))).collect();
    topology.with_numa(&numa)
}

/// A node of GPUs joined like this, nobody using it.
pub(crate) fn node(topology: &Topology, broken: &[u8]) -> NodeState {
    let gpu = |index: GpuIndex| Gpu {
        numa: topology.numa(index),
        health: if broken.contains(&index.0) { Health::Unhealthy } else { Health::Healthy },
        ..Gpu::new(index, "GPU-x".into(), "GPU".into(), MiB(16_384))
    };
    let gpus = topology.gpus().iter().map(gpu).collect();
    let node = Node::new("n".into(), gpus, topology.clone(), MilliCpu::ZERO, MiB::ZERO).unwrap();
    NodeState::empty(node.into())
}

/// A node with GPUs of these memories and nothing known of its links.
pub(crate) fn node_of_memories(memories: &[u64]) -> Node {
    let gpu = |(index, memory): (u8, &u64)| {
        Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MiB(*memory))
    };
    let gpus: Vec<Gpu> = (0u8..).zip(memories).map(gpu).collect();
    let topology = Topology::unknown(gpus.len());
    Node::new("node".into(), gpus, topology, MilliCpu(1000), MiB(1000)).unwrap()
}
