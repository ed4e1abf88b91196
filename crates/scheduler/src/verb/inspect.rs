//! What the original extenders showed of their nodes, in their own JSON.

use serde::Serialize;
use tessera_core::grant::Hold;
use tessera_core::node::NodeState;
use tessera_core::topology::{Link, PcieLevel};
use tessera_core::units::{GpuIndex, NodeName};
use tessera_wire::dialect::Dialect;
use tessera_wire::node_spec::{NodeSpec, Serves};

use crate::state::State;

/// gputopology's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TopologyView {
    /// Its nodes.
    pub nodes: Vec<TopologyNode>,
    /// What went wrong.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// The cluster's policy.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub policy: String,
}

/// One node of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TopologyNode {
    /// Its name.
    pub name: String,
    /// How many cards.
    #[serde(rename = "totalGPU")]
    pub total: usize,
    /// How many of them somebody holds.
    #[serde(rename = "usedGPU")]
    pub used: usize,
    /// What joins them, in the numbers of the original; cards in use have no links.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub topology: Vec<Vec<u8>>,
    /// The instance type.
    #[serde(rename = "type", skip_serializing_if = "String::is_empty")]
    pub kind: String,
}

/// gpushare's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ShareView {
    /// Its nodes.
    pub nodes: Vec<ShareNode>,
    /// What went wrong.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// One node of it. What is called GPU are units of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ShareNode {
    /// Its name.
    pub name: String,
    /// Units of all cards.
    #[serde(rename = "totalGPU")]
    pub total: u64,
    /// Units held.
    #[serde(rename = "usedGPU")]
    pub used: u64,
    /// Its cards.
    pub devs: Vec<ShareCard>,
}

/// One card.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ShareCard {
    /// Its index.
    pub id: u8,
    /// Its units.
    #[serde(rename = "totalGPU")]
    pub total: u64,
    /// Units held.
    #[serde(rename = "usedGPU")]
    pub used: u64,
    /// By whom.
    pub pods: Vec<SharePod>,
}

/// One pod on a card.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SharePod {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Units it holds there.
    #[serde(rename = "usedGPU")]
    pub used: u64,
}

impl State {
    /// gputopology's view of all nodes with cards, or of one.
    #[must_use]
    pub fn inspect_topology(&self, node: Option<&str>, detail: bool) -> TopologyView {
        let shown = self.shown(node);
        TopologyView {
            error: not_found(node, shown.is_empty()),
            nodes: shown.into_iter().map(|(spec, state)| topology_node(spec, state, detail)).collect(),
            policy: if detail { self.policy(None).to_string() } else { String::new() },
        }
    }

    /// gpushare's view of all nodes that share memory, or of one.
    #[must_use]
    pub fn inspect_share(&self, node: Option<&str>) -> ShareView {
        let shares = Serves::default().with(Dialect::Gpushare);
        let shown: Vec<_> =
            self.shown(node).into_iter().filter(|(spec, _)| spec.serves.covers(shares)).collect();
        ShareView {
            error: not_found(node, shown.is_empty()),
            nodes: shown.into_iter().map(|(spec, state)| self.share_node(spec, state)).collect(),
        }
    }

    fn shown(&self, node: Option<&str>) -> Vec<(&NodeSpec, &NodeState)> {
        let all = self.nodes().into_iter().filter(|(name, _)| node.is_none_or(|wanted| name.0 == wanted));
        let readable = |(name, _)| {
            let (record, state) = self.node(name)?;
            Some((record.spec.as_ref().ok()?, state?))
        };
        all.filter_map(readable).filter(|(spec, _)| !spec.node.gpus().is_empty()).collect()
    }

    fn share_node(&self, spec: &NodeSpec, state: &NodeState) -> ShareNode {
        let unit = spec.unit.mib();
        let card = |gpu: &tessera_core::gpu::Gpu| {
            let pods = self.pods_on_card(&spec.node.name, gpu.index, gpu.memory.0, unit);
            let used = state.used(gpu.index);
            let held = if used.whole { gpu.memory.0 } else { used.memory.0 };
            ShareCard { id: gpu.index.0, total: gpu.memory.0 / unit, used: held / unit, pods }
        };
        let devs: Vec<ShareCard> = spec.node.gpus().iter().map(card).collect();
        ShareNode {
            name: spec.node.name.to_string(),
            total: devs.iter().map(|card| card.total).sum(),
            used: devs.iter().map(|card| card.used).sum(),
            devs,
        }
    }

    fn pods_on_card(&self, node: &NodeName, card: GpuIndex, memory: u64, unit: u64) -> Vec<SharePod> {
        let mut pods = Vec::new();
        for grant in self.ledger().grants_on(node) {
            let holds = grant.containers.iter().flat_map(|container| &container.cards);
            let held = holds.filter(|(gpu, _)| *gpu == card).map(|(_, hold)| match hold {
                Hold::Whole => memory,
                Hold::Part { memory, .. } => memory.0,
            });
            let held: u64 = held.sum();
            if let Some(pod) = self.pod(&grant.pod).filter(|_| held > 0) {
                let (name, namespace) = (pod.name.clone(), pod.namespace.clone());
                pods.push(SharePod { name, namespace, used: held / unit });
            }
        }
        pods.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        pods
    }
}

fn not_found(node: Option<&str>, nothing: bool) -> String {
    match node {
        Some(node) if nothing => format!("node {node} is not known or has no GPU of this kind"),
        _ => String::new(),
    }
}

fn topology_node(spec: &NodeSpec, state: &NodeState, detail: bool) -> TopologyNode {
    let node = &spec.node;
    let in_use = |gpu: GpuIndex| !state.used(gpu).is_none();
    let gpus = || node.gpus().iter().map(|gpu| gpu.index);
    let number = |a: GpuIndex, b: GpuIndex| {
        if a == b || in_use(a) || in_use(b) { 0 } else { link_number(node.topology().link(a, b)) }
    };
    let matrix = || gpus().map(|a| gpus().map(|b| number(a, b)).collect()).collect();
    TopologyNode {
        name: node.name.to_string(),
        total: node.gpus().len(),
        used: gpus().filter(|gpu| in_use(*gpu)).count(),
        topology: if detail { matrix() } else { Vec::new() },
        kind: node.instance_type.clone().filter(|_| detail).unwrap_or_default(),
    }
}

/// The original's number of a link, which counts PCIe levels from the nearest.
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
