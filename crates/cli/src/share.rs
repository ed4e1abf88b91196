//! gpushare's view: memory of each GPU in the node's unit.

use tessera_core::grant::PodGrant;
use tessera_core::units::{GpuIndex, MiB};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::inspect::ShareView;

use crate::survey::Survey;

/// All nodes that share memory, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareTable {
    pub(crate) nodes: Vec<ShareNode>,
}

/// One of them. Amounts are MiB: nodes count in different units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareNode {
    pub(crate) name: String,
    pub(crate) address: Option<String>,
    pub(crate) unit: MemoryUnit,
    pub(crate) cards: Vec<ShareGpu>,
    /// By the lowest of their GPUs, then by name; those of whom nobody told the GPU last.
    pub(crate) pods: Vec<SharePod>,
    /// As kubectl words it, and the GPUs' models; for the wide table.
    pub(crate) status: String,
    pub(crate) models: String,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareGpu {
    pub(crate) used: MiB,
    pub(crate) total: MiB,
    pub(crate) unhealthy: bool,
}

/// One pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SharePod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// By GPU.
    pub(crate) held: Vec<MiB>,
    /// Of a GPU nobody told.
    pub(crate) pending: MiB,
}

impl ShareTable {
    pub(crate) fn of(survey: &Survey) -> Self {
        let nodes = survey.sharing().map(|(facts, state)| {
            let name = &state.node().name;
            let gpus = state.node().gpus();
            let mut cards: Vec<ShareGpu> = gpus
                .iter()
                .map(|gpu| ShareGpu {
                    used: MiB::ZERO,
                    total: gpu.memory,
                    unhealthy: gpu.health == tessera_core::gpu::Health::Unhealthy,
                })
                .collect();
            let held = |grant: &PodGrant| {
                let mut held = vec![MiB::ZERO; gpus.len()];
                for (GpuIndex(gpu), usage) in grant.footprint() {
                    if let (Some(amount), Some(card)) =
                        (held.get_mut(usize::from(gpu)), gpus.get(usize::from(gpu)))
                    {
                        *amount += if usage.whole { card.memory } else { usage.memory };
                    }
                }
                held
            };
            let mut pods: Vec<SharePod> = survey
                .holders(name)
                .into_iter()
                .map(|(pod, grant)| SharePod {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                    held: held(grant),
                    pending: MiB::ZERO,
                })
                .collect();
            pods.sort_by_key(|pod| pod.held.iter().position(|held| *held > MiB::ZERO));
            for pod in &pods {
                cards.iter_mut().zip(&pod.held).for_each(|(card, held)| card.used += *held);
            }
            pods.extend(survey.unsure(name).into_iter().map(|unsure| SharePod {
                namespace: unsure.pod.namespace.clone(),
                name: unsure.pod.name.clone(),
                held: vec![MiB::ZERO; gpus.len()],
                pending: unsure.memory,
            }));
            ShareNode {
                name: name.to_string(),
                address: facts.address.clone(),
                unit: facts.unit,
                cards,
                pods,
                status: facts.status(),
                models: crate::show::models(state.node()),
            }
        });
        Self { nodes: nodes.collect() }
    }

    /// From what an extender answers, which tells neither addresses nor, if it is an original, units.
    pub(crate) fn of_view(view: &ShareView, unit: MemoryUnit) -> Self {
        let mut nodes: Vec<ShareNode> = view
            .nodes
            .iter()
            .map(|node| {
                let unit = node.unit.parse().unwrap_or(unit);
                let mib = |units: u64| MiB(units.saturating_mul(unit.mib()));
                let mut pods: Vec<SharePod> = Vec::new();
                for (position, card) in node.devs.iter().enumerate() {
                    for held in &card.pods {
                        let is_it =
                            |pod: &&mut SharePod| pod.namespace == held.namespace && pod.name == held.name;
                        if let Some(known) = pods.iter_mut().find(is_it) {
                            known.held[position] = mib(held.used);
                            continue;
                        }
                        let mut by_gpu = vec![MiB::ZERO; node.devs.len()];
                        by_gpu[position] = mib(held.used);
                        let (namespace, name) = (held.namespace.clone(), held.name.clone());
                        pods.push(SharePod { namespace, name, held: by_gpu, pending: MiB::ZERO });
                    }
                }
                let card = |card: &tessera_wire::foreign::inspect::ShareGpu| ShareGpu {
                    used: mib(card.used),
                    total: mib(card.total),
                    unhealthy: false,
                };
                ShareNode {
                    name: node.name.clone(),
                    unit,
                    cards: node.devs.iter().map(card).collect(),
                    pods,
                    status: "Unknown".to_owned(),
                    ..ShareNode::default()
                }
            })
            .collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Self { nodes }
    }

    /// The unit all numbers are shown in: that of the nodes, or MiB where they differ.
    pub(crate) fn unit(&self) -> MemoryUnit {
        let first = self.nodes.first().map(|node| node.unit).unwrap_or_default();
        if self.nodes.iter().all(|node| node.unit == first) { first } else { MemoryUnit::MiB }
    }
}

impl ShareNode {
    pub(crate) fn pending(&self) -> MiB {
        self.pods.iter().map(|pod| pod.pending).sum()
    }
}
