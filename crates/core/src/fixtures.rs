//! Hosts for tests: the links of real models, written as small tables.

use crate::gpu::{Gpu, Health};
use crate::node::{Node, NodeState};
use crate::topology::{Link, PcieLevel, Topology};
use crate::units::{GpuIndex, MiB, MilliCpu};

const SYS: Link = Link { pcie: Some(PcieLevel::System), nvlinks: 0 };

/// The NVLinks of a DGX-1 with V100, in a file that the benchmarks include too.
const DGX1_V100: [[u8; 8]; 8] = include!("fixtures/dgx1-v100.in");

/// Returns a DGX-1 with V100 as `nvidia-smi topo -m` shows it, without the PCIe levels under the
/// NVLinks.
pub(crate) fn dgx1_v100() -> Topology {
    let link = |a: GpuIndex, b: GpuIndex| match DGX1_V100[a.position()][b.position()] {
        0 => SYS,
        nvlinks => Link::nvlink(nvlinks),
    };
    on_two_sockets(&Topology::from_pairs(8, link))
}

/// Returns eight GPUs on two sockets, in pairs behind a switch: also the PCIe layer of a DGX-1.
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

/// Returns eight A100 on PCIe with two sockets; twelve NVLinks join neighbours.
pub(crate) fn bridged_pairs() -> Topology {
    let topology = Topology::from_pairs(8, |a, b| match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
        (true, _) => Link::nvlink(12),
        (false, true) => Link::pcie(PcieLevel::Node),
        (false, false) => SYS,
    });
    on_two_sockets(&topology)
}

/// Returns GPUs that reach each other over `nvlinks` through switches, as on a DGX H100 with 18;
/// two sockets.
pub(crate) fn switched(count: usize, nvlinks: u8) -> Topology {
    on_two_sockets(&Topology::from_pairs(count, |_, _| Link::nvlink(nvlinks)))
}

fn on_two_sockets(topology: &Topology) -> Topology {
    let count = topology.count();
    let numa: Vec<Option<u16>> = (0..count).map(|gpu| Some(u16::from(gpu * 2 >= count))).collect();
    topology.with_numa(&numa)
}

/// Returns an unused node with these links, on which some GPUs are unhealthy.
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

/// Returns a node with GPUs of these memories and without known links.
pub(crate) fn node_of_memories(memories: &[u64]) -> Node {
    let gpu = |(index, memory): (u8, &u64)| {
        Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MiB(*memory))
    };
    let gpus: Vec<Gpu> = (0u8..).zip(memories).map(gpu).collect();
    let topology = Topology::unknown(gpus.len());
    Node::new("node".into(), gpus, topology, MilliCpu(1000), MiB(1000)).unwrap()
}
