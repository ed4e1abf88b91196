//! One node in detail: its host, its GPUs, and what joins them.

use serde::Serialize;
use tessera_core::units::NodeName;
use tessera_wire::foreign::link;

use super::super::lookup::{self, GpuNode, NodeLookup};
use super::nodes::{NodeSummary, summary};
use crate::state::State;

/// One node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeDetail {
    /// As in the list.
    #[serde(flatten)]
    pub summary: NodeSummary,
    /// Who its GPUs are, by index.
    pub identities: Vec<GpuIdentity>,
    /// Every pair that is known to be joined.
    pub links: Vec<LinkView>,
    /// Where all GPUs reach each other through switches: NVLinks of each GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvswitch_links: Option<u8>,
    /// The host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// What one `aliyun.com/gpu-mem` is here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_unit: Option<String>,
    /// The pool a quota counts it to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Whether it says where its agent answers.
    pub has_agent: bool,
}

/// Who a GPU is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuIdentity {
    /// Its UUID.
    pub uuid: String,
    /// The number in `/dev/nvidiaN`.
    pub minor: u32,
    /// The NUMA node it hangs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<u16>,
}

/// What joins two GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinkView {
    /// The lower index.
    pub a: u8,
    /// The higher one.
    pub b: u8,
    /// `SYS`, `NODE`, `PHB`, `PXB`, `PIX` or `PSB`, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie: Option<&'static str>,
    /// How many NVLinks.
    pub nvlinks: u8,
}

/// CPU and main memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// CPU that pods may use, thousandths.
    pub cpu_milli: u64,
    /// CPU not promised.
    pub cpu_left_milli: u64,
    /// Main memory that pods may use.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Main memory not promised.
    #[serde(rename = "memoryLeftMiB")]
    pub memory_left_mib: u64,
}

/// One node, if it is known.
#[must_use]
pub fn node(state: &State, name: &str) -> Option<NodeDetail> {
    let known = lookup::node(state, &NodeName(name.to_owned()))?;
    let summary = summary(state, name, known);
    let NodeLookup::Gpus(GpuNode { spec, state, place, agent }) = known else {
        return Some(NodeDetail {
            summary,
            identities: Vec::new(),
            links: Vec::new(),
            nvswitch_links: None,
            host: None,
            memory_unit: None,
            pool: None,
            has_agent: false,
        });
    };
    let topology = spec.node.topology();
    let identity = |gpu: &tessera_core::gpu::Gpu| GpuIdentity {
        uuid: gpu.uuid.to_string(),
        minor: gpu.minor,
        numa: gpu.numa.or_else(|| topology.numa(gpu.index)),
    };
    let links = topology.gpus().pairs().filter_map(|(a, b)| {
        let joined = topology.link(a, b);
        let pcie = joined.pcie.map(link::pcie_abbreviation);
        (!joined.is_unknown()).then_some(LinkView { a: a.0, b: b.0, pcie, nvlinks: joined.nvlinks })
    });
    Some(NodeDetail {
        summary,
        identities: spec.node.gpus().iter().map(identity).collect(),
        links: links.collect(),
        nvswitch_links: topology.nvswitch_links(),
        host: Some(Host {
            cpu_milli: spec.node.cpu.0,
            cpu_left_milli: state.cpu_left().0,
            memory_mib: spec.node.memory.0,
            memory_left_mib: state.memory_left().0,
        }),
        memory_unit: Some(spec.unit.to_string()),
        pool: place.pool.clone(),
        has_agent: agent.is_some(),
    })
}

/// Where the agent of a node answers, as the node says.
#[must_use]
pub fn agent(state: &State, name: &str) -> Option<String> {
    match lookup::node(state, &NodeName(name.to_owned()))? {
        NodeLookup::Gpus(node) => node.agent.map(str::to_owned),
        NodeLookup::Unreadable(_) | NodeLookup::NoGpus => None,
    }
}
