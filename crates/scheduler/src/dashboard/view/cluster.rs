//! The overview of the cluster: sums by model and namespace, and a map with one square per node.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use tessera_core::fragmentation::Fragmentation;
use tessera_core::gpu::{Gpu, GpuKind};
use tessera_core::node::NodeState;

use super::super::lookup::{self, GpuNode, NodeLookup};
use super::gpu::GpuTotals;
use crate::state::{State, StateAccess};

/// Sums over the cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterOverview {
    /// Placement policy of pods that name none.
    pub policy: String,
    /// Number of nodes with GPUs.
    pub nodes: usize,
    /// Number of nodes whose annotations cannot be parsed.
    pub unreadable_nodes: usize,
    /// Number of nodes with GPUs that are not ready.
    pub not_ready_nodes: usize,
    /// Number of other nodes with GPUs that are cordoned.
    pub cordoned_nodes: usize,
    /// Number of GPU pods on nodes.
    pub placed_pods: usize,
    /// Number of pods that wait for GPUs.
    pub waiting_pods: usize,
    /// Sums over all GPUs.
    pub gpus: GpuTotals,
    /// Free capacity, and how much of it the expected pods cannot use.
    pub fragmentation: Leftover,
    /// Sums by model, the model with most GPUs first.
    pub models: Vec<ModelView>,
    /// Sums by namespace, the largest first.
    pub namespaces: Vec<NamespaceView>,
}

/// Free GPU capacity, in GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Leftover {
    /// Free capacity of healthy GPUs on nodes that take new pods.
    pub left: f64,
    /// Part of the free capacity that the expected pods cannot use.
    pub useless: f64,
}

/// Sums over the GPUs of one model and memory size.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelView {
    /// Model of the GPUs.
    pub model: String,
    /// Memory of one GPU in MiB.
    #[serde(rename = "gpuMiB")]
    pub gpu_mib: u64,
    /// Number of nodes with such GPUs.
    pub nodes: usize,
    /// Sums over these GPUs.
    pub gpus: GpuTotals,
    /// Free capacity of these GPUs.
    pub fragmentation: Leftover,
    /// Number of nodes by fullness of these GPUs: empty, up to 25 %, 50 %, 75 %, below 100 %, full.
    pub fullness: [usize; 6],
}

/// Usage and waiting pods of one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceView {
    /// Name of the namespace.
    pub namespace: String,
    /// Number of its placed GPU pods.
    pub placed_pods: usize,
    /// Number of its waiting GPU pods.
    pub waiting_pods: usize,
    /// Compute that its pods hold, in percent of one GPU.
    pub compute_held: u64,
    /// GPU memory that its pods hold, in MiB.
    #[serde(rename = "memoryHeldMiB")]
    pub memory_held_mib: u64,
}

/// The squares of the map for one model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MapGroup {
    /// Model of the first GPU of each node.
    pub model: String,
    /// For each node: its name, its fullness in percent, and the number of its problems: unhealthy and overbooked GPUs,
    /// and the node itself if it is not ready.
    pub nodes: Vec<(String, u8, usize)>,
}

/// Returns the sums over the cluster.
#[must_use]
pub fn cluster(access: &impl StateAccess) -> ClusterOverview {
    let mut models: Vec<Model> = Vec::new();
    let (mut nodes, mut unreadable_nodes, mut gpus) = (0, 0, GpuTotals::default());
    let (mut not_ready_nodes, mut cordoned_nodes) = (0, 0);
    access.for_each_node(|state, name| match lookup::node(state, name) {
        Some(NodeLookup::Gpus(node)) => {
            nodes += 1;
            not_ready_nodes += usize::from(node.ready == Some(false));
            cordoned_nodes += usize::from(node.cordoned && node.ready != Some(false));
            node.spec.node.gpus().iter().for_each(|gpu| gpus.add(gpu, node.state.used(gpu.index)));
            count_models(&mut models, state, node);
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
    ClusterOverview {
        policy,
        nodes,
        unreadable_nodes,
        not_ready_nodes,
        cordoned_nodes,
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

fn count_models(models: &mut Vec<Model>, cluster: &State, node: GpuNode<'_>) {
    let state = node.state;
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
        if !node.takes_pods() {
            continue;
        }
        let left = gpus().map(|gpu| state.percent_left(gpu.index));
        view.fragmentation.left += f64::from(left.clone().map(u32::from).sum::<u32>()) / 100.0;
        view.fragmentation.useless += measure.of(state.cpu_left(), left);
    }
}

impl Model {
    fn new(kind: GpuKind, cluster: &State) -> Self {
        let workload = cluster.workload();
        let expected = workload.classes().map(|expected| (expected.class, expected.share));
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

/// Returns the fullness of these GPUs of a node in percent.
fn percent_taken<'a>(state: &NodeState, gpus: impl Iterator<Item = &'a Gpu>) -> u8 {
    let (mut sum, mut count) = (0.0, 0u32);
    for gpu in gpus {
        sum += state.used(gpu.index).part_of(gpu.memory);
        count += 1;
    }
    let percent = 100.0 * sum / f64::from(count.max(1));
    // Only an empty node shows 0 %, and only a full node shows 100 %.
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

/// Returns the fullness grade of these GPUs of a node, from 0 (empty) to 5 (full).
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

/// Returns the map of the cluster with one square per node.
#[must_use]
pub fn map(access: &impl StateAccess) -> Vec<MapGroup> {
    let mut groups: BTreeMap<Arc<str>, Vec<(String, u8, usize)>> = BTreeMap::new();
    access.for_each_node(|state, name| {
        let Some(NodeLookup::Gpus(node)) = lookup::node(state, name) else { return };
        let GpuNode { spec, state, .. } = node;
        let model = spec.node.gpus().first().map(|gpu| Arc::clone(&gpu.model.0)).unwrap_or_default();
        let totals = GpuTotals::of(state);
        let percent = percent_taken(state, spec.node.gpus().iter());
        let problems = totals.unhealthy + totals.overbooked + usize::from(node.ready == Some(false));
        let square = (name.to_string(), percent, problems);
        groups.entry(model).or_default().push(square);
    });
    groups.into_iter().map(|(model, nodes)| MapGroup { model: model.to_string(), nodes }).collect()
}
