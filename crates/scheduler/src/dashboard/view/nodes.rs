//! Nodes as GPUs of tiles.

use serde::Serialize;

use super::super::known::{self, GpuNode, Known};
use super::card::{Cards, Tile, tiles};
use super::cluster::bucket;
use super::{Filter, Page, contains};
use crate::state::{Look, State};

/// One node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCard {
    /// Its name.
    pub name: String,
    /// The instance type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// The vocabularies it serves.
    pub dialects: Vec<&'static str>,
    /// Its GPUs together.
    pub cards: Cards,
    /// Its GPUs.
    pub gpus: Vec<Tile>,
    /// Why it cannot be read. There are no GPUs then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The nodes a filter lets through, by name. Nodes without GPUs are left out.
#[must_use]
pub fn nodes(look: &impl Look, filter: &Filter) -> Page<NodeCard> {
    let mut shown = Vec::new();
    look.each_node(|state, name| {
        let passes = match known::node(state, name) {
            Some(Known::Gpus(node)) => passes(state, node, filter),
            Some(Known::Unreadable(_)) => passes_unread(&name.0, filter),
            Some(Known::NoGpus) | None => false,
        };
        if passes {
            shown.push(name.clone());
        }
    });
    let (total, range) = (shown.len(), filter.range(shown.len()));
    let items = look.look(|state| {
        let page = shown.drain(range.clone());
        page.filter_map(|name| Some(card(state, &name.0, known::node(state, &name)?))).collect()
    });
    Page { total, offset: range.start, items }
}

pub(super) fn card(state: &State, name: &str, known: Known<'_>) -> NodeCard {
    let empty = NodeCard {
        name: name.to_owned(),
        instance_type: None,
        dialects: Vec::new(),
        cards: Cards::default(),
        gpus: Vec::new(),
        problem: None,
    };
    match known {
        Known::Gpus(node) => NodeCard {
            instance_type: node.spec.node.instance_type.clone(),
            dialects: known::words(node.spec.dialects),
            cards: Cards::of(node.state),
            gpus: tiles(state, node),
            ..empty
        },
        Known::Unreadable(problem) => NodeCard { problem: Some(problem.to_owned()), ..empty },
        Known::NoGpus => empty,
    }
}

/// A node nobody can read has a name and trouble, and nothing else to be found by.
fn passes_unread(name: &str, filter: &Filter) -> bool {
    let others = [&filter.namespace, &filter.model, &filter.dialect];
    others.iter().all(|part| part.is_empty())
        && filter.fullness.is_none()
        && (filter.state.is_empty() || filter.state == "trouble")
        && filter.mentions(name)
}

fn passes(state: &State, node: GpuNode<'_>, filter: &Filter) -> bool {
    let GpuNode { spec, state: node_state, .. } = node;
    let of_model = |card: &&tessera_core::gpu::Gpu| filter.model.is_empty() || *card.model.0 == *filter.model;
    let cards = || spec.node.gpus().iter().filter(of_model);
    if cards().next().is_none() || filter.fullness.is_some_and(|grade| bucket(node_state, cards()) != grade) {
        return false;
    }
    if !filter.dialect.is_empty() && !known::words(spec.dialects).contains(&filter.dialect.as_str()) {
        return false;
    }
    if filter.state == "trouble" {
        let sums = Cards::of(node_state);
        if sums.unhealthy + sums.overbooked == 0 {
            return false;
        }
    }
    let name = &spec.node.name;
    let pods = || known::holders(state, name).filter_map(|holder| holder.pod);
    if !filter.namespace.is_empty() && !pods().any(|pod| pod.namespace == filter.namespace) {
        return false;
    }
    let kind = spec.node.instance_type.as_deref().unwrap_or_default();
    filter.mentions(&name.0)
        || contains(kind, &filter.q)
        || cards().any(|card| contains(&card.model.0, &filter.q) || contains(&card.uuid.0, &filter.q))
        || pods().any(|pod| contains(&pod.name, &filter.q))
}
