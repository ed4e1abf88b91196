//! The search for the units to evict.
//!
//! For each level, the lowest first, the nodes are emptied of the units up to that level, those with the fewest pods to
//! evict first, until the waiting pods fit. Then as many units as possible are spared.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{EvictionPlan, EvictionScene, EvictionUnit};
use crate::defragment::HeldPod;
use crate::disruption::allow;
use crate::gang::capacity::capacity;
use crate::gang::{GangClass, GangNode, GangPlan, TopologyWish, plan};
use crate::node::NodeState;
use crate::quota::GpuAmount;

/// Upper bound for the nodes that are summed up or planned with. Each costs some microseconds, and a search on 5,000
/// nodes takes about ten times their number.
const MAX_NODE_TRIALS: usize = 500_000;

pub(super) struct Search<'a> {
    scene: EvictionScene<'a>,
    classes: &'a [GangClass<'a>],
    wish: &'a TopologyWish,
    /// For each unit whether it may be evicted at all.
    is_movable: Vec<bool>,
    trials: Cell<usize>,
}

/// The units that are evicted, by position.
type Gone = BTreeSet<usize>;

impl<'a> Search<'a> {
    pub(super) fn new(
        scene: EvictionScene<'a>,
        classes: &'a [GangClass<'a>],
        wish: &'a TopologyWish,
    ) -> Self {
        let may_go = |unit: &EvictionUnit| {
            unit.pods.iter().all(|pod| scene.pods.get(pod).is_some_and(|pod| pod.fixed.is_none()))
        };
        let is_movable = scene.units.iter().map(may_go).collect();
        Self { scene, classes, wish, is_movable, trials: Cell::new(0) }
    }

    pub(super) fn run(&self) -> Option<EvictionPlan> {
        let all: Vec<usize> = (0..self.scene.nodes.len()).collect();
        if let Some(placed) = self.place(&all, &Gone::new()) {
            return Some(EvictionPlan { units: Vec::new(), placed });
        }
        let movable = self.scene.units.iter().zip(&self.is_movable).filter(|(_, is_movable)| **is_movable);
        let levels: BTreeSet<i64> = movable.map(|(unit, _)| unit.level).collect();
        let levels: Vec<i64> = levels.into_iter().collect();
        let fits_without_budgets = |level: i64| self.place(&all, &self.up_to(level)).is_some();
        let first = levels.partition_point(|level| !fits_without_budgets(*level));
        levels[first..].iter().find_map(|level| self.at_level(*level))
    }

    /// Returns the movable units of these levels.
    fn up_to(&self, level: i64) -> Gone {
        let units = self.scene.units.iter().enumerate();
        units
            .filter(|(number, unit)| unit.level <= level && self.is_movable[*number])
            .map(|(number, _)| number)
            .collect()
    }

    /// Returns the best plan that evicts only units of these levels.
    fn at_level(&self, level: i64) -> Option<EvictionPlan> {
        let candidates = self.up_to(level);
        let order = self.by_price(&candidates);
        let plans = self.groups(order).into_iter().filter_map(|group| self.in_group(&group, &candidates));
        plans.min_by_key(|plan| {
            let pods: usize = plan.units.iter().map(|unit| self.scene.units[*unit].pods.len()).sum();
            (plan.units.iter().map(|unit| self.scene.units[*unit].level).max(), pods, plan.units.clone())
        })
    }

    /// Returns the nodes that can take a waiting pod without the candidates: first those with pods of the gang, then
    /// those with the fewest pods to evict.
    fn by_price(&self, candidates: &Gone) -> Vec<usize> {
        let values = self.values_of_members();
        let mut order: Vec<usize> = (0..self.scene.nodes.len()).collect();
        order.retain(|node| {
            let met = &self.scene.nodes[*node].node;
            let is_near = values.as_ref().is_none_or(|values| values.contains(&met.wished));
            is_near && (met.has_member || self.capacities(*node, candidates).iter().any(|room| *room > 0))
        });
        let price = |node: &usize| {
            let units: BTreeSet<usize> =
                self.on_node(*node).filter(|unit| candidates.contains(unit)).collect();
            let pods: usize = units.iter().map(|unit| self.scene.units[*unit].pods.len()).sum();
            (pods, units.last().copied())
        };
        order.sort_by_cached_key(|node| {
            let met = &self.scene.nodes[*node].node;
            (!met.has_member, price(node), met.state.node().name.clone())
        });
        order
    }

    /// Returns the values of the required label where the gang has pods already, or `None` if any value will do.
    fn values_of_members(&self) -> Option<Vec<Option<&'a str>>> {
        let members = self.scene.nodes.iter().filter(|node| node.node.has_member);
        let values: Vec<Option<&str>> = members.map(|node| node.node.wished).collect();
        let is_required = matches!(self.wish, TopologyWish::Required(_));
        (is_required && !values.is_empty()).then_some(values)
    }

    /// Returns the groups of nodes that are tried one after the other, so that the budgets are used for one of them
    /// alone: single nodes for a single pod, and the values of a label that the gang requires.
    fn groups(&self, order: Vec<usize>) -> Vec<Vec<usize>> {
        if self.classes.iter().map(|class| class.count).sum::<usize>() == 1 {
            return order.into_iter().map(|node| vec![node]).collect();
        }
        let TopologyWish::Required(_) = self.wish else { return vec![order] };
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for node in order {
            if let Some(value) = self.scene.nodes[node].node.wished {
                groups.entry(value).or_default().push(node);
            }
        }
        groups.into_values().collect()
    }

    /// Empties node after node of a group until the waiting pods fit, then spares units.
    fn in_group(&self, group: &[usize], candidates: &Gone) -> Option<EvictionPlan> {
        let mut gone = Gone::new();
        let (mut opened, mut count) = (0, 1);
        loop {
            let end = count.min(group.len());
            group[opened..end].iter().for_each(|node| self.open(*node, candidates, &mut gone));
            opened = end;
            if self.place(&group[..end], &gone).is_some() {
                return self.spare(&group[..end], gone);
            }
            if end == group.len() {
                return None;
            }
            count *= 2;
        }
    }

    /// Evicts the candidates of a node as far as the limits allow it, except for those whose eviction makes no room.
    fn open(&self, node: usize, candidates: &Gone, gone: &mut Gone) {
        let mut added: Vec<usize> = Vec::new();
        let on_node: BTreeSet<usize> = self.on_node(node).filter(|unit| candidates.contains(unit)).collect();
        for unit in on_node {
            if gone.insert(unit) {
                if self.is_allowed(gone) {
                    added.push(unit);
                } else {
                    gone.remove(&unit);
                }
            }
        }
        let room = self.capacities(node, gone);
        for unit in added.into_iter().rev() {
            gone.remove(&unit);
            if self.capacities(node, gone) != room {
                gone.insert(unit);
            }
        }
    }

    /// Spares as many units as possible, the last ones first. Whole blocks are spared at once where that suffices.
    fn spare(&self, group: &[usize], mut gone: Gone) -> Option<EvictionPlan> {
        let units: Vec<usize> = gone.iter().copied().collect();
        let mut blocks: Vec<Range<usize>> = std::iter::once(0..units.len()).collect();
        while let Some(block) = blocks.pop() {
            for place in block.clone() {
                gone.remove(&units[place]);
            }
            if !block.is_empty() && self.place(group, &gone).is_some() {
                continue;
            }
            gone.extend(block.clone().map(|place| units[place]));
            if block.len() > 1 {
                let middle = block.start + block.len() / 2;
                blocks.extend([block.start..middle, middle..block.end]);
            }
        }
        let placed = self.place(group, &gone)?;
        Some(EvictionPlan { units: gone.into_iter().collect(), placed })
    }

    /// Returns whether the budgets and the guarantees allow these evictions together.
    fn is_allowed(&self, gone: &Gone) -> bool {
        self.keeps_guarantees(gone) && self.keeps_budgets(gone)
    }

    fn keeps_guarantees(&self, gone: &Gone) -> bool {
        let mut lost: BTreeMap<&str, GpuAmount> = BTreeMap::new();
        for unit in gone.iter().map(|unit| &self.scene.units[*unit]) {
            let namespace =
                unit.pods.first().and_then(|pod| self.scene.pods.get(pod)).map(|pod| &pod.namespace);
            if let Some(namespace) = namespace {
                let sum = lost.entry(namespace).or_default();
                *sum = sum.plus(unit.released);
            }
        }
        lost.into_iter().all(|(namespace, lost)| {
            self.scene.guarantees.get(namespace).is_none_or(|guaranteed| guaranteed.may_lose(lost))
        })
    }

    fn keeps_budgets(&self, gone: &Gone) -> bool {
        let pods = gone.iter().flat_map(|unit| &self.scene.units[*unit].pods);
        let pods = pods.filter_map(|pod| self.scene.pods.get(pod));
        allow(self.scene.budgets, pods.map(HeldPod::evicted))
    }

    /// Returns the units with pods on a node.
    fn on_node(&self, node: usize) -> impl Iterator<Item = usize> {
        self.scene.nodes[node].held.iter().map(|(unit, _)| *unit)
    }

    /// Returns the node as it is without these units.
    fn state(&self, node: usize, gone: &Gone) -> NodeState {
        self.trials.set(self.trials.get() + 1);
        let node = &self.scene.nodes[node];
        let mut state = node.node.state.clone();
        let left = node.held.iter().filter(|(unit, _)| !gone.contains(unit));
        left.for_each(|(_, grant)| state.add(grant));
        state
    }

    /// Returns how many pods of each class fit on a node alone without these units.
    fn capacities(&self, node: usize, gone: &Gone) -> Vec<usize> {
        let state = self.state(node, gone);
        let classes = self.classes.iter().zip(&self.scene.nodes[node].node.requests);
        classes
            .map(|(class, request)| request.map_or(0, |request| capacity(&state, request, class.count)))
            .collect()
    }

    /// Places the waiting pods on these nodes without these units. The search gives up after too many trials.
    fn place(&self, group: &[usize], gone: &Gone) -> Option<GangPlan> {
        if self.trials.get() > MAX_NODE_TRIALS {
            return None;
        }
        let states: Vec<NodeState> = group.iter().map(|node| self.state(*node, gone)).collect();
        let nodes = group.iter().zip(&states);
        let nodes: Vec<GangNode<'_>> =
            nodes.map(|(node, state)| GangNode { state, ..self.scene.nodes[*node].node.clone() }).collect();
        let mut placed = plan(self.classes, &nodes, self.wish)?;
        placed.places.iter_mut().for_each(|place| place.node = group[place.node]);
        Some(placed)
    }
}
