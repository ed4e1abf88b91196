//! The tree of a node's GPUs in the format of gpu-manager.

use std::fmt::Write as _;

use tessera_core::gpu_set::GpuSet;
use tessera_core::node::{GpuRoom, NodeState};
use tessera_core::tree::{Group, GroupLevel, TopologyTree};
use tessera_core::units::{GpuIndex, MiB};

/// Measured use of one GPU, which the ledger does not contain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuActivity {
    /// IDs of the processes on the GPU.
    pub pids: Vec<u32>,
    /// Memory used by these processes.
    pub used: MiB,
}

/// Prints the tree of a node's GPUs with the free capacity of each. `activity` is indexed by GPU
/// and may be shorter than the list of GPUs if it is unknown.
#[must_use]
pub fn print(node: &NodeState, activity: &[GpuActivity]) -> String {
    let printer = Printer { node, activity };
    let root = node.node().topology().tree();
    let mut text = format!("ROOT:{}\n", printer.available(root.gpus));
    printer.children(&mut text, root, 0);
    text
}

struct Printer<'a> {
    node: &'a NodeState,
    activity: &'a [GpuActivity],
}

impl Printer<'_> {
    fn children(&self, text: &mut String, group: &Group, depth: usize) {
        let mut children: Vec<&TopologyTree> = group.children.iter().collect();
        children.sort_by_key(|child| match child {
            TopologyTree::Leaf(gpu) => (None, 1, Some(*gpu)),
            TopologyTree::Group(group) => {
                (Some(group.level), self.available(group.gpus), group.gpus.lowest())
            }
        });
        for child in children {
            text.push_str(&"|   ".repeat(depth));
            text.push_str("|---");
            match child {
                TopologyTree::Leaf(gpu) => self.leaf(text, *gpu),
                TopologyTree::Group(group) => {
                    let name = level_name(group.level);
                    let available = self.available(group.gpus);
                    let usage = self.usage(group.gpus);
                    // Writing to a String cannot fail.
                    let _ = writeln!(
                        text,
                        "{name} (aval: {available}, {usage}, allocatableCores: 0, allocatableMemory: 0)"
                    );
                    self.children(text, group, depth + 1);
                }
            }
        }
    }

    fn leaf(&self, text: &mut String, gpu: GpuIndex) {
        // No pod can be placed on an unhealthy GPU, so none of its capacity is allocatable.
        let is_healthy = self.node.node().gpu(gpu).is_some_and(|gpu| gpu.health.is_healthy());
        let room = if is_healthy { self.node.room(gpu) } else { GpuRoom::default() };
        let _ = writeln!(
            text,
            "GPU{gpu} ({}, allocatableCores: {}, allocatableMemory: {})",
            self.usage(GpuSet::EMPTY.with(gpu)),
            room.compute_percent.0,
            bytes(room.memory),
        );
    }

    /// Formats the processes and memory of `gpus` together.
    fn usage(&self, gpus: GpuSet) -> String {
        let active = || gpus.iter().filter_map(|gpu| self.activity.get(gpu.position()));
        let pids: Vec<String> = active().flat_map(|gpu| &gpu.pids).map(u32::to_string).collect();
        let used: MiB = active().map(|gpu| gpu.used).sum();
        let total: MiB = gpus.iter().filter_map(|gpu| self.node.node().gpu(gpu)).map(|gpu| gpu.memory).sum();
        format!("pids: [{}], usedMemory: {}, totalMemory: {}", pids.join(" "), bytes(used), bytes(total))
    }

    fn available(&self, gpus: GpuSet) -> usize {
        self.node.idle().intersection(gpus).len()
    }
}

fn bytes(memory: MiB) -> u128 {
    u128::from(memory.0) << 20
}

/// Returns gpu-manager's name of a level. `nvidia-smi` calls `CPU` `NODE`. gpu-manager has no
/// NVLink level; Tessera adds `NVL`.
fn level_name(level: GroupLevel) -> &'static str {
    match level {
        GroupLevel::NvLink => "NVL",
        GroupLevel::SameBoard => "PSB",
        GroupLevel::SingleSwitch => "PIX",
        GroupLevel::MultiSwitch => "PXB",
        GroupLevel::HostBridge => "PHB",
        GroupLevel::Node => "CPU",
        GroupLevel::System => "SYS",
        GroupLevel::Root => "ROOT",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tessera_core::gpu::Gpu;
    use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
    use tessera_core::node::Node;
    use tessera_core::request::ContainerRole;
    use tessera_core::topology::{Link, PcieLevel, Topology};
    use tessera_core::units::{MilliCpu, Percent};

    use super::*;
    use crate::foreign::smi_matrix;

    /// Seven GPUs below two switches of one host bridge, with a network interface at the second switch.
    const WITH_INTERFACE: &str = "\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tmlx5_1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tPIX\tPHB\tPHB\tPHB\tPHB\tPHB\t0-15\t0
GPU1\tPIX\t X \tPIX\tPHB\tPHB\tPHB\tPHB\tPHB\t0-15\t0
GPU2\tPIX\tPIX\t X \tPHB\tPHB\tPHB\tPHB\tPHB\t0-15\t0
GPU3\tPHB\tPHB\tPHB\t X \tPIX\tPIX\tPIX\tPIX\t0-15\t0
GPU4\tPHB\tPHB\tPHB\tPIX\t X \tPIX\tPIX\tPIX\t0-15\t0
GPU5\tPHB\tPHB\tPHB\tPIX\tPIX\t X \tPIX\tPIX\t0-15\t0
GPU6\tPHB\tPHB\tPHB\tPIX\tPIX\tPIX\t X \tPIX\t0-15\t0
mlx5_1\tPHB\tPHB\tPHB\tPIX\tPIX\tPIX\tPIX\t X \t\t

Legend:

  X    = Self
";

    #[test]
    fn a_network_interface_is_no_gpu_of_the_tree() {
        let matrix = smi_matrix::parse(WITH_INTERFACE).unwrap();
        assert_eq!(matrix.cpu_affinity, vec![Some("0-15".to_owned()); 7]);
        assert_eq!(matrix.topology.numa(GpuIndex(6)), Some(0));
        let link = |a, b| matrix.topology.link(GpuIndex(a), GpuIndex(b));
        for (a, b) in GpuSet::first(7).pairs() {
            let is_near = (a.0 < 3) == (b.0 < 3);
            let level = if is_near { PcieLevel::SingleSwitch } else { PcieLevel::HostBridge };
            assert_eq!(link(a.0, b.0), Link::pcie(level), "{a} and {b}");
        }
        let gpu = |index| Gpu::new(GpuIndex(index), "GPU-x".into(), "P40".into(), MiB(8));
        let (gpus, topology) = ((0..7).map(gpu).collect(), matrix.topology);
        let node = Node::new("n".into(), gpus, topology, MilliCpu::ZERO, MiB::ZERO).unwrap();
        let text = print(&NodeState::empty(Arc::new(node)), &[]);
        let name = |line: &str| match line.split_once(" (") {
            Some((name, rest)) => {
                let rest = rest.strip_prefix("aval: ").and_then(|rest| rest.split(',').next());
                rest.map_or_else(|| name.to_owned(), |idle| format!("{name}:{idle}"))
            }
            None => line.to_owned(),
        };
        let lines: Vec<String> = text.lines().map(name).collect();
        let expected = [
            "ROOT:7",
            "|---PHB:7",
            "|   |---PIX:3",
            "|   |   |---GPU0",
            "|   |   |---GPU1",
            "|   |   |---GPU2",
            "|   |---PIX:4",
            "|   |   |---GPU3",
            "|   |   |---GPU4",
            "|   |   |---GPU5",
            "|   |   |---GPU6",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn prints_groups_by_level_and_free_gpus() {
        let gpu = |index| Gpu::new(GpuIndex(index), "GPU-x".into(), "P4".into(), MiB(8));
        let topology = Topology::from_pairs(5, |a, b| match (a.0 / 2 == b.0 / 2, b.0) {
            (true, _) => Link::pcie(PcieLevel::SingleSwitch),
            (false, 4) => Link::pcie(PcieLevel::System),
            (false, _) => Link::pcie(PcieLevel::HostBridge),
        });
        let gpus = (0..5).map(gpu).collect();
        let node = Node::new("n".into(), gpus, topology, MilliCpu::ZERO, MiB::ZERO).unwrap();
        let mut state = NodeState::empty(Arc::new(node));
        let share = Hold::Share { compute_percent: Percent(30), memory: MiB(2) };
        state.add(&PodGrant {
            pod: "p".into(),
            node: "n".into(),
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            containers: vec![ContainerGrant {
                container: "c".into(),
                role: ContainerRole::Main,
                holds: vec![(GpuIndex(2), share)],
            }],
        });
        let mut activity = vec![GpuActivity::default(); 5];
        activity[2] = GpuActivity { pids: vec![7, 9], used: MiB(1) };
        let expected = "\
ROOT:4
|---SYS (aval: 4, pids: [7 9], usedMemory: 1048576, totalMemory: 41943040, allocatableCores: 0, allocatableMemory: 0)
|   |---GPU4 (pids: [], usedMemory: 0, totalMemory: 8388608, allocatableCores: 100, allocatableMemory: 8388608)
|   |---PHB (aval: 3, pids: [7 9], usedMemory: 1048576, totalMemory: 33554432, allocatableCores: 0, allocatableMemory: 0)
|   |   |---PIX (aval: 1, pids: [7 9], usedMemory: 1048576, totalMemory: 16777216, allocatableCores: 0, allocatableMemory: 0)
|   |   |   |---GPU2 (pids: [7 9], usedMemory: 1048576, totalMemory: 8388608, allocatableCores: 70, allocatableMemory: 6291456)
|   |   |   |---GPU3 (pids: [], usedMemory: 0, totalMemory: 8388608, allocatableCores: 100, allocatableMemory: 8388608)
|   |   |---PIX (aval: 2, pids: [], usedMemory: 0, totalMemory: 16777216, allocatableCores: 0, allocatableMemory: 0)
|   |   |   |---GPU0 (pids: [], usedMemory: 0, totalMemory: 8388608, allocatableCores: 100, allocatableMemory: 8388608)
|   |   |   |---GPU1 (pids: [], usedMemory: 0, totalMemory: 8388608, allocatableCores: 100, allocatableMemory: 8388608)
";
        assert_eq!(print(&state, &activity), expected);
    }
}
