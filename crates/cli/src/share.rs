//! The data of gpushare's tables: memory of each GPU in the node's unit.

use tessera_core::grant::PodGrant;
use tessera_core::units::{GpuIndex, MiB};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::inspect::ShareView;

use crate::survey::Survey;

/// All nodes that share GPU memory, sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareTable {
    pub(crate) nodes: Vec<NodeRow>,
}

/// One row of the table. Amounts are in MiB, because nodes may use different units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeRow {
    pub(crate) name: String,
    pub(crate) address: Option<String>,
    pub(crate) unit: MemoryUnit,
    pub(crate) gpus: Vec<GpuCell>,
    /// Memory of a node with an unknown number of GPUs.
    pub(crate) unlisted: MiB,
    /// Pods sorted by their lowest GPU and by name. Pods whose GPU is unknown come last.
    pub(crate) pods: Vec<PodRow>,
    /// Node status in kubectl's form, for the wide table.
    pub(crate) status: String,
    pub(crate) models: String,
}

/// One GPU of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuCell {
    pub(crate) used: MiB,
    pub(crate) total: MiB,
    pub(crate) faulty: bool,
}

/// One pod on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodRow {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Held memory, by GPU index.
    pub(crate) held: Vec<MiB>,
    /// Memory of a pod whose GPU is unknown, or has no column.
    pub(crate) pending: MiB,
}

impl ShareTable {
    pub(crate) fn of(survey: &Survey) -> Self {
        let nodes = survey.sharing().map(|(facts, state)| {
            let name = &state.node().name;
            let gpus = state.node().gpus();
            let mut cells: Vec<GpuCell> = gpus
                .iter()
                .map(|gpu| GpuCell { used: MiB::ZERO, total: gpu.memory, faulty: gpu.health.is_faulty() })
                .collect();
            let held = |grant: &PodGrant| {
                let mut held = vec![MiB::ZERO; gpus.len()];
                for (GpuIndex(index), usage) in grant.footprint() {
                    if let (Some(amount), Some(gpu)) =
                        (held.get_mut(usize::from(index)), gpus.get(usize::from(index)))
                    {
                        *amount += if usage.whole { gpu.memory } else { usage.memory };
                    }
                }
                held
            };
            let beyond = |grant: &PodGrant| {
                let without_column = |(GpuIndex(index), _): &(GpuIndex, _)| usize::from(*index) >= gpus.len();
                grant.footprint().filter(without_column).map(|(_, usage)| usage.memory).sum()
            };
            let mut pods: Vec<PodRow> = survey
                .holders(name)
                .into_iter()
                .map(|(pod, grant)| PodRow {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                    held: held(grant),
                    pending: beyond(grant),
                })
                .collect();
            pods.sort_by_key(|pod| pod.held.iter().position(|held| *held > MiB::ZERO));
            for pod in &pods {
                cells.iter_mut().zip(&pod.held).for_each(|(cell, held)| cell.used += *held);
            }
            pods.extend(survey.unknown_gpus(name).into_iter().map(|pod| PodRow {
                namespace: pod.facts.namespace.clone(),
                name: pod.facts.name.clone(),
                held: vec![MiB::ZERO; gpus.len()],
                pending: pod.memory,
            }));
            NodeRow {
                name: name.to_string(),
                address: facts.address.clone(),
                unit: facts.unit,
                unlisted: if cells.is_empty() { facts.shared_memory } else { MiB::ZERO },
                gpus: cells,
                pods,
                status: facts.status(),
                models: crate::show::models(state.node()),
            }
        });
        Self { nodes: nodes.collect() }
    }

    /// Creates the table from an extender's response, which contains no addresses. Only Tessera's
    /// scheduler reports units.
    pub(crate) fn of_view(view: &ShareView, unit: MemoryUnit) -> Self {
        let mut nodes: Vec<NodeRow> = view
            .nodes
            .iter()
            .map(|node| {
                let unit = node.unit.parse().unwrap_or(unit);
                let mib = |units: u64| MiB(units.saturating_mul(unit.mib()));
                let mut pods: Vec<PodRow> = Vec::new();
                for (position, gpu) in node.devs.iter().enumerate() {
                    for held in &gpu.pods {
                        let is_it =
                            |pod: &&mut PodRow| pod.namespace == held.namespace && pod.name == held.name;
                        if let Some(known) = pods.iter_mut().find(is_it) {
                            known.held[position] = mib(held.used);
                            continue;
                        }
                        let mut by_gpu = vec![MiB::ZERO; node.devs.len()];
                        by_gpu[position] = mib(held.used);
                        let (namespace, name) = (held.namespace.clone(), held.name.clone());
                        pods.push(PodRow { namespace, name, held: by_gpu, pending: MiB::ZERO });
                    }
                }
                let cell = |gpu: &tessera_wire::foreign::inspect::ShareGpu| GpuCell {
                    used: mib(gpu.used),
                    total: mib(gpu.total),
                    faulty: false,
                };
                NodeRow {
                    name: node.name.clone(),
                    unit,
                    gpus: node.devs.iter().map(cell).collect(),
                    pods,
                    status: "Unknown".to_owned(),
                    ..NodeRow::default()
                }
            })
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Self { nodes }
    }

    /// Returns the unit of the table: the nodes' common unit, or MiB if they differ.
    pub(crate) fn unit(&self) -> MemoryUnit {
        let first = self.nodes.first().map(|node| node.unit).unwrap_or_default();
        if self.nodes.iter().all(|node| node.unit == first) { first } else { MemoryUnit::MiB }
    }
}

impl NodeRow {
    pub(crate) fn pending(&self) -> MiB {
        self.pods.iter().map(|pod| pod.pending).sum()
    }
}
