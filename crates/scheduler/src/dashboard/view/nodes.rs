//! The list of nodes, with one tile per GPU.

use serde::Serialize;
use tessera_core::units::NodeName;

use super::super::lookup::{self, GpuNode, NodeLookup};
use super::cluster::bucket;
use super::gpu::{GpuTile, GpuTotals, tiles};
use super::{ListQuery, Page, contains};
use crate::state::{State, StateAccess};

/// A node in the list of nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeSummary {
    /// Name of the node.
    pub name: String,
    /// Instance type of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// Names of the dialects that the node serves.
    pub dialects: Vec<&'static str>,
    /// Sums over the GPUs of the node.
    pub gpu_totals: GpuTotals,
    /// Tiles of the GPUs, by index.
    pub gpus: Vec<GpuTile>,
    /// Value of the node's condition `Ready`; absent if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// True if the node is cordoned, so that it gets no new pods.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// Reason why the node object cannot be parsed. The node then has no tiles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Returns the nodes that match the query in the wanted order, and then by name. Nodes without GPUs are left out.
#[must_use]
pub fn nodes(access: &impl StateAccess, query: &ListQuery) -> Page<NodeSummary> {
    let mut shown: Vec<(f64, NodeName)> = Vec::new();
    access.for_each_node(|state, name| {
        let rank = match lookup::node(state, name) {
            Some(NodeLookup::Gpus(node)) => passes(state, node, query).then(|| rank(&query.sort, node)),
            Some(NodeLookup::Unreadable(_)) => {
                passes_unread(&name.0, query).then(|| rank_unread(&query.sort))
            }
            Some(NodeLookup::NoGpus) | None => None,
        };
        shown.extend(rank.map(|rank| (rank, name.clone())));
    });
    // The sort is stable: equal nodes stay in the order of their names.
    shown.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let (total, range) = (shown.len(), query.range(shown.len()));
    let items = access.with_state(|state| {
        let page = shown.drain(range.clone());
        page.filter_map(|(_, name)| Some(summary(state, &name.0, lookup::node(state, &name)?))).collect()
    });
    Page { total, offset: range.start, items }
}

pub(super) fn summary(state: &State, name: &str, known: NodeLookup<'_>) -> NodeSummary {
    let empty = NodeSummary {
        name: name.to_owned(),
        instance_type: None,
        dialects: Vec::new(),
        gpu_totals: GpuTotals::default(),
        gpus: Vec::new(),
        ready: None,
        cordoned: false,
        problem: None,
    };
    match known {
        NodeLookup::Gpus(node) => NodeSummary {
            instance_type: node.spec.node.instance_type.clone(),
            dialects: lookup::dialect_names(node.spec.dialects.offered),
            gpu_totals: GpuTotals::of(node.state),
            gpus: tiles(state, node),
            ready: node.ready,
            cordoned: node.cordoned,
            ..empty
        },
        NodeLookup::Unreadable(problem) => NodeSummary { problem: Some(problem.to_owned()), ..empty },
        NodeLookup::NoGpus => empty,
    }
}

/// Returns the rank of a node in an order. The highest rank comes first.
fn rank(sort: &str, node: GpuNode<'_>) -> f64 {
    let totals = || GpuTotals::of(node.state);
    let number = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    match sort {
        "full" => totals().taken / number(totals().total.max(1)),
        // Nothing is free on a node that takes no new pods.
        "free" if !node.takes_pods() => 0.0,
        "free" => node.state.gpus_left(),
        "trouble" => {
            let totals = totals();
            number(totals.unhealthy + totals.overbooked + usize::from(node.ready == Some(false)))
        }
        _ => 0.0,
    }
}

/// Returns the rank of a node that cannot be parsed, which is one problem.
fn rank_unread(sort: &str) -> f64 {
    if sort == "trouble" { 1.0 } else { 0.0 }
}

/// Returns whether a node that cannot be parsed matches the query. Only its name and the state
/// `trouble` can match.
fn passes_unread(name: &str, query: &ListQuery) -> bool {
    let others = [&query.namespace, &query.model, &query.dialect];
    others.iter().all(|part| part.is_empty())
        && query.fullness.is_none()
        && (query.state.is_empty() || query.state == "trouble")
        && query.mentions(name)
}

fn passes(state: &State, node: GpuNode<'_>, query: &ListQuery) -> bool {
    let GpuNode { spec, state: node_state, .. } = node;
    let of_model = |gpu: &&tessera_core::gpu::Gpu| query.model.is_empty() || *gpu.model.0 == *query.model;
    let gpus = || spec.node.gpus().iter().filter(of_model);
    if gpus().next().is_none() || query.fullness.is_some_and(|grade| bucket(node_state, gpus()) != grade) {
        return false;
    }
    if !query.dialect.is_empty()
        && !lookup::dialect_names(spec.dialects.offered).contains(&query.dialect.as_str())
    {
        return false;
    }
    if query.state == "trouble" {
        let sums = GpuTotals::of(node_state);
        if sums.unhealthy + sums.overbooked == 0 && node.ready != Some(false) {
            return false;
        }
    }
    let name = &spec.node.name;
    let pods = || lookup::holders(state, name).filter_map(|holder| holder.pod);
    if !query.namespace.is_empty() && !pods().any(|pod| pod.namespace == query.namespace) {
        return false;
    }
    let kind = spec.node.instance_type.as_deref().unwrap_or_default();
    query.mentions(&name.0)
        || contains(kind, &query.q)
        || gpus().any(|gpu| contains(&gpu.model.0, &query.q) || contains(&gpu.uuid.0, &query.q))
        || pods().any(|pod| contains(&pod.name, &query.q))
}
