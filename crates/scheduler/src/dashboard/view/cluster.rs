//! The cluster at a glance: sums, by model and by namespace, and one square for every node.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tessera_core::fragmentation::Fragmentation;
use tessera_core::gpu::{Gpu, GpuKind};
use tessera_core::node::NodeState;

use super::super::lookup::{self, GpuNode, NodeLookup};
use super::gpu::{GpuTotals, taken};
use crate::state::{State, StateAccess};

/// The sums.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cluster {
    /// The policy of pods that name none.
    pub policy: String,
    /// Nodes with GPUs.
    pub nodes: usize,
    /// Nodes that say of themselves what cannot be read.
    pub unreadable_nodes: usize,
    /// Pods on nodes.
    pub placed_pods: usize,
    /// Pods that wait for GPUs.
    pub waiting_pods: usize,
    /// All GPUs.
    pub gpus: GpuTotals,
    /// Of what is left, how much the pods that are expected cannot use.
    pub fragmentation: Leftover,
    /// The same by model, most GPUs first.
    pub models: Vec<ModelView>,
    /// What the namespaces hold, most first.
    pub namespaces: Vec<NamespaceView>,
}

/// What is left of the GPUs, in GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Leftover {
    /// Not taken, of healthy GPUs.
    pub left: f64,
    /// The part of it that is expected to be of no use.
    pub useless: f64,
}

/// GPUs of one product and size.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelView {
    /// The product.
    pub model: String,
    /// Memory of one GPU.
    #[serde(rename = "gpuMiB")]
    pub gpu_mib: u64,
    /// Nodes that have any.
    pub nodes: usize,
    /// The GPUs.
    pub gpus: GpuTotals,
    /// What is left of them.
    pub fragmentation: Leftover,
    /// Nodes by how full these GPUs are there: empty, up to a quarter, a half, three quarters, less than full, full.
    pub fullness: [usize; 6],
}

/// What one namespace holds, and waits for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceView {
    /// Its name.
    pub namespace: String,
    /// Its pods with GPUs.
    pub placed_pods: usize,
    /// Its pods that wait.
    pub waiting_pods: usize,
    /// Compute it holds, percent of one GPU.
    pub compute_held: u64,
    /// Memory it holds.
    #[serde(rename = "memoryHeldMiB")]
    pub memory_held_mib: u64,
}

/// One square for every node, grouped by model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MapGroup {
    /// The product of the nodes' first GPUs.
    pub model: String,
    /// Each node's name, how full it is in percent, and how many of its GPUs are in trouble.
    pub nodes: Vec<(String, u8, usize)>,
}

/// Sums everything up.
#[must_use]
pub fn cluster(access: &impl StateAccess) -> Cluster {
    let mut models: Vec<Model> = Vec::new();
    let (mut nodes, mut unreadable_nodes, mut gpus) = (0, 0, GpuTotals::default());
    access.for_each_node(|state, name| match lookup::node(state, name) {
        Some(NodeLookup::Gpus(node)) => {
            nodes += 1;
            node.spec.node.gpus().iter().for_each(|gpu| gpus.add(gpu, node.state.used(gpu.index)));
            count_models(&mut models, state, node.state);
        }
        Some(NodeLookup::Unreadable(_)) => unreadable_nodes += 1,
        Some(NodeLookup::NoGpus) | None => {}
    });
    let mut models: Vec<ModelView> = models.into_iter().map(|model| model.view).collect();
    models.sort_by(|a, b| b.gpus.total.cmp(&a.gpus.total).then_with(|| a.model.cmp(&b.model)));
    let fragmentation = models.iter().fold(Leftover::default(), |sum, model| Leftover {
        left: sum.left + model.fragmentation.left,
        useless: sum.useless + model.fragmentation.useless,
    });
    let (policy, namespaces) = access.with_state(|state| (state.policy(None).to_string(), namespaces(state)));
    Cluster {
        policy,
        nodes,
        unreadable_nodes,
        placed_pods: namespaces.iter().map(|namespace| namespace.placed_pods).sum(),
        waiting_pods: namespaces.iter().map(|namespace| namespace.waiting_pods).sum(),
        gpus,
        fragmentation,
        models,
        namespaces,
    }
}

struct Model {
    kind: GpuKind,
    measure: Fragmentation,
    view: ModelView,
}

fn count_models(models: &mut Vec<Model>, cluster: &State, state: &NodeState) {
    for (kind, set) in state.node().kinds() {
        let place = models.iter().position(|model| model.kind == *kind).unwrap_or_else(|| {
            models.push(Model::new(kind.clone(), cluster));
            models.len() - 1
        });
        let Some(Model { measure, view, .. }) = models.get_mut(place) else { continue };
        let gpus = || set.iter().filter_map(|gpu| state.node().gpu(gpu));
        gpus().for_each(|gpu| view.gpus.add(gpu, state.used(gpu.index)));
        view.nodes += 1;
        view.fullness[bucket(state, gpus())] += 1;
        let left = gpus().map(|gpu| state.percent_left(gpu.index));
        view.fragmentation.left += f64::from(left.clone().map(u32::from).sum::<u32>()) / 100.0;
        view.fragmentation.useless += measure.of(state.cpu_left(), left);
    }
}

impl Model {
    fn new(kind: GpuKind, cluster: &State) -> Self {
        let expected = cluster.workload().classes().map(|expected| (expected.class, expected.share));
        let view = ModelView {
            model: kind.model.to_string(),
            gpu_mib: kind.memory.0,
            nodes: 0,
            gpus: GpuTotals::default(),
            fragmentation: Leftover::default(),
            fullness: [0; 6],
        };
        Self { measure: Fragmentation::new(expected, &kind), kind, view }
    }
}

/// How full these GPUs of a node are, in percent.
fn percent_taken<'a>(state: &NodeState, gpus: impl Iterator<Item = &'a Gpu>) -> u8 {
    let (mut sum, mut count) = (0.0, 0u32);
    for gpu in gpus {
        sum += taken(gpu, state.used(gpu.index));
        count += 1;
    }
    let percent = 100.0 * sum / f64::from(count.max(1));
    // Neither a trace of use nor a trace of room is rounded away.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 100")]
    let rounded = percent.round() as u8;
    if percent <= 0.0 {
        0
    } else if percent >= 100.0 {
        100
    } else {
        rounded.clamp(1, 99)
    }
}

/// Which of the six grades of fullness these GPUs of a node are in.
pub(super) fn bucket<'a>(state: &NodeState, gpus: impl Iterator<Item = &'a Gpu>) -> usize {
    match percent_taken(state, gpus) {
        0 => 0,
        1..=25 => 1,
        26..=50 => 2,
        51..=75 => 3,
        76..=99 => 4,
        _ => 5,
    }
}

fn namespaces(state: &State) -> Vec<NamespaceView> {
    let mut by_name: BTreeMap<&str, NamespaceView> = BTreeMap::new();
    for (namespace, _, taken) in state.quota().1.all() {
        let view = by_name.entry(namespace).or_default();
        view.compute_held += taken.compute_percent;
        view.memory_held_mib += taken.memory.0;
    }
    for (_, pod) in state.gpu_pods() {
        let view = by_name.entry(&pod.namespace).or_default();
        match pod.node {
            Some(_) => view.placed_pods += 1,
            None => view.waiting_pods += 1,
        }
    }
    let named = |(name, view): (&str, NamespaceView)| NamespaceView { namespace: name.to_owned(), ..view };
    let mut all: Vec<NamespaceView> = by_name.into_iter().map(named).collect();
    all.sort_by_key(|view| std::cmp::Reverse(view.compute_held));
    all
}

/// One square for every node.
#[must_use]
pub fn map(access: &impl StateAccess) -> Vec<MapGroup> {
    let mut groups: BTreeMap<Arc<str>, Vec<(String, u8, usize)>> = BTreeMap::new();
    access.for_each_node(|state, name| {
        let Some(NodeLookup::Gpus(GpuNode { spec, state, .. })) = lookup::node(state, name) else { return };
        let model = spec.node.gpus().first().map(|gpu| Arc::clone(&gpu.model.0)).unwrap_or_default();
        let totals = GpuTotals::of(state);
        let percent = percent_taken(state, spec.node.gpus().iter());
        let square = (name.to_string(), percent, totals.unhealthy + totals.overbooked);
        groups.entry(model).or_default().push(square);
    });
    groups.into_iter().map(|(model, nodes)| MapGroup { model: model.to_string(), nodes }).collect()
}
