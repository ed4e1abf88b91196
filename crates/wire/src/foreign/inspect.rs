//! The `inspect` JSON of gputopology and gpushare. The scheduler serves it, and the kubectl plugins
//! read it.

use serde::{Deserialize, Serialize};
use tessera_core::gpu::Gpu;
use tessera_core::grant::PodGrant;
use tessera_core::node::NodeState;
use tessera_core::topology::{Link, PcieLevel};
use tessera_core::units::GpuIndex;

use crate::foreign::dialect::MemoryUnit;
use crate::foreign::link;

/// gputopology's response.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyView {
    /// Nodes of the cluster.
    #[serde(default)]
    pub nodes: Vec<TopologyNode>,
    /// Error message, or empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// The cluster's policy.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub policy: String,
}

/// One node in gputopology's response.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyNode {
    /// Name of the node.
    pub name: String,
    /// Number of GPUs.
    #[serde(rename = "totalGPU")]
    pub total: usize,
    /// Number of GPUs that pods hold.
    #[serde(rename = "usedGPU")]
    pub used: usize,
    /// Matrix of links, in gputopology's numbers. GPUs in use have no links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topology: Vec<Vec<u8>>,
    /// The instance type.
    #[serde(rename = "type", default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
}

/// gpushare's response.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareView {
    /// Nodes of the cluster.
    #[serde(default)]
    pub nodes: Vec<ShareNode>,
    /// Error message, or empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// One node in gpushare's response. Its `GPU` keys count units of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareNode {
    /// Name of the node.
    pub name: String,
    /// Memory units of all GPUs.
    #[serde(rename = "totalGPU")]
    pub total: u64,
    /// Memory units that pods hold.
    #[serde(rename = "usedGPU")]
    pub used: u64,
    /// Size of one unit. gpushare itself does not report it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unit: String,
    /// GPUs of the node.
    #[serde(default)]
    pub devs: Vec<ShareGpu>,
}

/// One GPU in gpushare's response.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareGpu {
    /// Index of the GPU.
    pub id: u8,
    /// Memory units of the GPU.
    #[serde(rename = "totalGPU")]
    pub total: u64,
    /// Memory units that pods hold.
    #[serde(rename = "usedGPU")]
    pub used: u64,
    /// Pods that hold memory of the GPU.
    #[serde(default)]
    pub pods: Vec<SharePod>,
}

/// One pod on a GPU in gpushare's response.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharePod {
    /// Name of the pod.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Memory units the pod holds on this GPU.
    #[serde(rename = "usedGPU")]
    pub used: u64,
}

impl TopologyNode {
    /// Creates the entry of a node, with its links if `detail` is set.
    #[must_use]
    pub fn new(state: &NodeState, detail: bool) -> Self {
        let node = state.node();
        let in_use = |gpu: GpuIndex| !state.used(gpu).is_none();
        let gpus = || node.gpus().iter().map(|gpu| gpu.index);
        let number = |a: GpuIndex, b: GpuIndex| {
            if a == b || in_use(a) || in_use(b) { 0 } else { link_number(node.topology().link(a, b)) }
        };
        // gputopology omits the matrix if no link is known, for example with a single GPU.
        let is_known = node.topology().gpus().pairs().any(|(a, b)| !node.topology().link(a, b).is_unknown());
        let matrix = || gpus().map(|a| gpus().map(|b| number(a, b)).collect()).collect();
        Self {
            name: node.name.to_string(),
            total: node.gpus().len(),
            used: gpus().filter(|gpu| in_use(*gpu)).count(),
            topology: if detail && is_known { matrix() } else { Vec::new() },
            kind: node.instance_type.clone().filter(|_| detail).unwrap_or_default(),
        }
    }
}

impl ShareNode {
    /// Creates the entry of a node with the pods of `grants`. `name_of` returns a pod's namespace
    /// and name.
    pub fn new<'a>(
        state: &NodeState,
        unit: MemoryUnit,
        grants: impl Iterator<Item = &'a PodGrant> + Clone,
        name_of: impl Fn(&PodGrant) -> Option<(String, String)>,
    ) -> Self {
        let share_gpu = |gpu: &Gpu| {
            let mut pods: Vec<SharePod> = grants
                .clone()
                .filter_map(|grant| {
                    let used = held(grant, gpu);
                    let (namespace, name) = name_of(grant).filter(|_| used > 0)?;
                    Some(SharePod { name, namespace, used: used / unit.mib() })
                })
                .collect();
            pods.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
            let used = state.used(gpu.index);
            let used = if used.whole { gpu.memory.0 } else { used.memory.0 };
            let total = gpu.memory.0 / unit.mib();
            ShareGpu { id: gpu.index.0, total, used: used / unit.mib(), pods }
        };
        let devs: Vec<ShareGpu> = state.node().gpus().iter().map(share_gpu).collect();
        Self {
            name: state.node().name.to_string(),
            total: devs.iter().map(|gpu| gpu.total).sum(),
            // Annotations may claim more memory than the node has.
            used: devs.iter().map(|gpu| gpu.used).fold(0, u64::saturating_add),
            unit: unit.to_string(),
            devs,
        }
    }
}

/// Returns the memory in MiB that a pod holds of a GPU.
fn held(grant: &PodGrant, gpu: &Gpu) -> u64 {
    let on_gpu = grant.footprint().filter(|(index, _)| *index == gpu.index);
    on_gpu.map(|(_, usage)| if usage.whole { gpu.memory.0 } else { usage.memory.0 }).sum()
}

/// Returns the abbreviation of gputopology's link number, such as `PHB` or `NV2`. Returns `None`
/// for 0, which means no link or a GPU in use.
#[must_use]
pub fn link_word(number: u8) -> Option<String> {
    let pcie = |level| link::abbreviation(Link::pcie(level));
    match number {
        0 => None,
        1 => pcie(PcieLevel::SameBoard),
        2 => pcie(PcieLevel::SingleSwitch),
        3 => pcie(PcieLevel::MultiSwitch),
        4 => pcie(PcieLevel::HostBridge),
        5 => pcie(PcieLevel::Node),
        6 => pcie(PcieLevel::System),
        nvlinks => link::abbreviation(Link { pcie: None, nvlinks: nvlinks - 6 }),
    }
}

/// Returns gputopology's number of a link, which counts PCIe levels from the nearest.
fn link_number(link: Link) -> u8 {
    if link.nvlinks > 0 {
        return 6 + link.nvlinks;
    }
    match link.pcie {
        None => 0,
        Some(PcieLevel::SameBoard) => 1,
        Some(PcieLevel::SingleSwitch) => 2,
        Some(PcieLevel::MultiSwitch) => 3,
        Some(PcieLevel::HostBridge) => 4,
        Some(PcieLevel::Node) => 5,
        Some(PcieLevel::System) => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_link_numbers_to_abbreviations() {
        let words: Vec<String> = (0..10).map(|number| link_word(number).unwrap_or_default()).collect();
        assert_eq!(words, ["", "PSB", "PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "NV2", "NV3"]);
        for level in [PcieLevel::SameBoard, PcieLevel::MultiSwitch, PcieLevel::System] {
            assert_eq!(link_word(link_number(Link::pcie(level))), link::abbreviation(Link::pcie(level)));
        }
    }

    #[test]
    fn parses_responses_of_gpushare_and_gputopology() {
        let read: ShareView = serde_json::from_str(
            r#"{"nodes":[{"name":"n","totalGPU":15,"usedGPU":3,"devs":[{"id":0,"totalGPU":15,"usedGPU":3,
                "pods":[{"name":"p","namespace":"d","usedGPU":3}]}]}]}"#,
        )
        .unwrap();
        assert_eq!(read.nodes[0].devs[0].pods[0].used, 3);
        let read: TopologyView =
            serde_json::from_str(r#"{"nodes":[{"name":"n","totalGPU":8,"usedGPU":0}]}"#).unwrap();
        assert_eq!((read.nodes[0].total, read.policy.as_str()), (8, ""));
    }
}
