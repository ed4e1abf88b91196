//! Details of one node: its host, its GPUs and the links between them.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_core::units::NodeName;
use tessera_wire::foreign::link;
use tessera_wire::foreign::pod_spec::MIG_PREFIX;
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::reservation::NodeReservation;

use super::super::lookup::{self, GpuNode, NodeLookup};
use super::nodes::{NodeSummary, summary};
use crate::state::State;

/// Details of one node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeDetail {
    /// The fields that the list of nodes shows too.
    #[serde(flatten)]
    pub summary: NodeSummary,
    /// Identities of the GPUs, by index.
    pub identities: Vec<GpuIdentity>,
    /// Every pair of GPUs with a known link.
    pub links: Vec<LinkView>,
    /// NVLinks of each GPU, if all GPUs are connected through NVSwitches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvswitch_links: Option<u8>,
    /// CPU and main memory of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Memory that one `aliyun.com/gpu-mem` stands for on this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_unit: Option<String>,
    /// Instance type that the node publishes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// Pool of the node for quotas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// True if the node publishes the address of its agent.
    pub has_agent: bool,
    /// MIG instances by resource, such as `nvidia.com/mig-1g.10gb`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub instances: BTreeMap<String, InstancesView>,
    /// Reservations of the node's GPUs that are in effect, as in the node's annotation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reservations: Vec<NodeReservation>,
}

/// MIG instances of one profile on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstancesView {
    /// Number of instances that the node offers.
    pub offered: u64,
    /// Pods that hold instances, by namespace and name.
    pub pods: Vec<InstanceHolder>,
}

/// A pod with MIG instances.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceHolder {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Number of instances that the pod holds.
    pub count: u64,
}

/// Identity of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuIdentity {
    /// UUID of the GPU.
    pub uuid: String,
    /// The number N of the device file `/dev/nvidiaN`.
    pub minor: u32,
    /// NUMA node of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<u16>,
}

/// The link between two GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinkView {
    /// Lower index of the two GPUs.
    pub a: u8,
    /// Higher index of the two GPUs.
    pub b: u8,
    /// PCIe level, if known: `SYS`, `NODE`, `PHB`, `PXB`, `PIX` or `PSB`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie: Option<&'static str>,
    /// Number of NVLinks between the two GPUs.
    pub nvlinks: u8,
}

/// CPU and main memory of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Host {
    /// CPU that pods may use, in thousandths of a core.
    pub cpu_milli: u64,
    /// CPU that is not reserved, in thousandths of a core.
    pub cpu_left_milli: u64,
    /// Main memory that pods may use, in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// Main memory that is not reserved, in MiB.
    #[serde(rename = "memoryLeftMiB")]
    pub memory_left_mib: u64,
}

/// Returns the details of a node, or `None` if the node is unknown.
#[must_use]
pub fn node(state: &State, name: &str) -> Option<NodeDetail> {
    let (all, name) = (state, NodeName(name.to_owned()));
    let known = lookup::node(all, &name)?;
    let summary = summary(all, &name.0, known);
    let NodeLookup::Gpus(GpuNode { spec, state, pool, agent, .. }) = known else {
        return Some(NodeDetail {
            summary,
            identities: Vec::new(),
            links: Vec::new(),
            nvswitch_links: None,
            host: None,
            memory_unit: None,
            instance_type: None,
            pool: None,
            has_agent: false,
            instances: instances(all, &name),
            reservations: Vec::new(),
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
        instance_type: spec.node.instance_type.clone(),
        pool: pool.map(str::to_owned),
        has_agent: agent.is_some(),
        instances: instances(all, &name),
        reservations: all.reservations_on(&name).cloned().collect(),
    })
}

fn instances(state: &State, name: &NodeName) -> BTreeMap<String, InstancesView> {
    let offered = state.constraints(name).into_iter().flat_map(|node| &node.other_resources);
    let offered = offered.filter(|(resource, _)| resource.starts_with(MIG_PREFIX));
    let view = |offered: &u64| InstancesView { offered: *offered, pods: Vec::new() };
    let mut all: BTreeMap<String, InstancesView> =
        offered.map(|(resource, offered)| (resource.clone(), view(offered))).collect();
    for (pod, held) in state.instance_holders(name) {
        for (resource, count) in held {
            let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
            all.entry(resource).or_default().pods.push(InstanceHolder { namespace, name, count });
        }
    }
    all.values_mut().for_each(|instances| instances.pods.sort());
    all
}

/// Returns the address of the node's agent, as the node publishes it.
#[must_use]
pub fn agent(state: &State, name: &str) -> Option<AgentAddress> {
    match lookup::node(state, &NodeName(name.to_owned()))? {
        NodeLookup::Gpus(node) => node.agent.cloned(),
        NodeLookup::Unreadable(_) | NodeLookup::NoGpus => None,
    }
}
