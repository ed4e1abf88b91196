//! Fills a group of nodes with the members of a gang, with as few nodes and domains as possible.

use std::cmp::Ordering;
use std::collections::HashMap;

use super::capacity::{add, capacity};
use super::{GangPlace, Planner};
use crate::gpu_set::GpuSet;
use crate::node::NodeState;
use crate::placement::{place, score};

/// Nodes of equal room that are compared by the policy's score.
const MAX_COMPARED_NODES: usize = 64;

/// Copies of the nodes that the plan uses so far, with the members placed on them.
#[derive(Default)]
struct Scratch {
    states: HashMap<usize, NodeState>,
    places: Vec<GangPlace>,
}

impl Planner<'_> {
    /// Places all members in a group of nodes, or returns `None`.
    pub(super) fn fill(&self, group: &[usize]) -> Option<Vec<GangPlace>> {
        let mut scratch = Scratch::default();
        for class in &self.order {
            let mut need = self.classes[*class].count;
            // Nodes in use come first, so that small members do not take further nodes.
            let mut used: Vec<usize> = scratch.states.keys().copied().collect();
            used.sort_unstable();
            for node in used {
                need -= self.place_on(node, *class, need, &mut scratch);
            }
            need -= self.fill_nodes(group, *class, need, &mut scratch);
            if need > 0 {
                return None;
            }
        }
        Some(scratch.places)
    }

    /// Places up to `need` members on the nodes of a group and returns how many were placed.
    ///
    /// The node with the most room comes first, and the last node is the tightest one that takes the
    /// rest, so the plan uses the fewest nodes. Among nodes with equal room those come first that
    /// share the narrowest domain with nodes in use, then those whose domain fits the rest best.
    fn fill_nodes(&self, group: &[usize], class: usize, need: usize, scratch: &mut Scratch) -> usize {
        let mut rooms: Vec<(usize, usize)> =
            group.iter().map(|node| (self.room(*node, class, need, scratch), *node)).collect();
        rooms.retain(|(room, _)| *room > 0);
        let mut domains = DomainRooms::new(self, &rooms);
        let is_used = |node: &usize| self.nodes[*node].has_member || scratch.states.contains_key(node);
        group.iter().filter(|node| is_used(node)).for_each(|node| domains.mark_used(self, *node));
        let mut placed = 0;
        while placed < need && !rooms.is_empty() {
            let left = need - placed;
            let room = rooms[tightest(rooms.iter().map(|(room, _)| *room), left)].0;
            let equals = rooms.iter().enumerate().filter(|(_, (other, _))| *other == room);
            let mut nearest: Vec<(Nearness, usize)> = Vec::new();
            for (position, (_, node)) in equals {
                let nearness = domains.nearness(self, *node, left);
                match nearest.first().map(|(best, _)| nearness.cmp(best)) {
                    Some(Ordering::Greater) => {}
                    Some(Ordering::Equal) => nearest.push((nearness, position)),
                    Some(Ordering::Less) | None => nearest = vec![(nearness, position)],
                }
            }
            let best = nearest
                .into_iter()
                .take(MAX_COMPARED_NODES)
                .map(|(_, position)| (position, self.merit(rooms[position].1, class, scratch)))
                .reduce(|best, next| if next.1 > best.1 { next } else { best });
            let Some((position, _)) = best else { break };
            let (room, node) = rooms.remove(position);
            domains.take(self, node, room);
            placed += self.place_on(node, class, left, scratch);
        }
        placed
    }

    /// Returns how well a node suits one more member.
    fn merit(&self, node: usize, class: usize, scratch: &Scratch) -> f64 {
        let Some(request) = self.nodes[node].requests[class] else { return f64::NEG_INFINITY };
        let state = scratch.states.get(&node).unwrap_or(self.nodes[node].state);
        score(state, request, self.classes[class].policy).unwrap_or(f64::NEG_INFINITY)
    }

    /// Returns how many of `most` members fit on a node beside those that the plan has there.
    fn room(&self, node: usize, class: usize, most: usize, scratch: &Scratch) -> usize {
        match (scratch.states.get(&node), self.nodes[node].requests[class]) {
            (Some(state), Some(request)) => capacity(state, request, most),
            _ => self.capacities[node][class].min(most),
        }
    }

    /// Places up to `most` members on one node and returns how many fit.
    fn place_on(&self, node: usize, class: usize, most: usize, scratch: &mut Scratch) -> usize {
        let (Some(request), policy) = (self.nodes[node].requests[class], self.classes[class].policy) else {
            return 0;
        };
        let mut state = scratch.states.get(&node).unwrap_or(self.nodes[node].state).clone();
        let mut count = 0;
        while count < most
            && let Ok(placement) = place(&state, request, policy, GpuSet::EMPTY)
        {
            let containers = placement.grants(state.node(), request);
            add(&mut state, request, &placement);
            scratch.places.push(GangPlace { class, node, containers });
            count += 1;
        }
        if count > 0 {
            scratch.states.insert(node, state);
        }
        count
    }
}

/// How near a node is to those in use; the least value is the nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Nearness {
    /// The narrowest level of a domain that the node shares with nodes in use.
    level: usize,
    /// The room that the node's narrowest domain leaves after the rest, or lacks for it.
    fit: (bool, usize),
}

/// The room of each topology domain, and the domains in use.
struct DomainRooms {
    /// By level and number of the domain.
    rooms: Vec<HashMap<usize, usize>>,
    used: Vec<Vec<usize>>,
}

impl DomainRooms {
    fn new(planner: &Planner<'_>, rooms: &[(usize, usize)]) -> Self {
        let levels = planner.levels();
        let mut domains = Self { rooms: vec![HashMap::new(); levels], used: vec![Vec::new(); levels] };
        for (room, node) in rooms {
            for (level, domain) in planner.domain_numbers[*node].iter().enumerate() {
                if let Some(domain) = domain {
                    *domains.rooms[level].entry(*domain).or_default() += room;
                }
            }
        }
        domains
    }

    fn mark_used(&mut self, planner: &Planner<'_>, node: usize) {
        for (level, domain) in planner.domain_numbers[node].iter().enumerate() {
            if let Some(domain) = domain
                && !self.used[level].contains(domain)
            {
                self.used[level].push(*domain);
            }
        }
    }

    /// Counts the room of a node as used.
    fn take(&mut self, planner: &Planner<'_>, node: usize, room: usize) {
        self.mark_used(planner, node);
        for (level, domain) in planner.domain_numbers[node].iter().enumerate() {
            if let Some(left) = domain.and_then(|domain| self.rooms[level].get_mut(&domain)) {
                *left -= room;
            }
        }
    }

    fn nearness(&self, planner: &Planner<'_>, node: usize, need: usize) -> Nearness {
        let numbers = &planner.domain_numbers[node];
        let is_shared =
            |level: &usize| numbers[*level].is_some_and(|domain| self.used[*level].contains(&domain));
        let level = (0..numbers.len()).find(is_shared).unwrap_or(numbers.len());
        let narrowest = numbers.iter().enumerate().find_map(|(level, domain)| Some((level, (*domain)?)));
        let room =
            narrowest.map_or(0, |(level, domain)| self.rooms[level].get(&domain).copied().unwrap_or(0));
        let fit = if room >= need { (false, room - need) } else { (true, need - room) };
        Nearness { level, fit }
    }
}

/// Returns the position of the smallest room that takes all of `need`, or else of the largest one.
/// The first of equal rooms wins.
fn tightest(rooms: impl Iterator<Item = usize>, need: usize) -> usize {
    let mut best: Option<(usize, usize)> = None;
    for (position, room) in rooms.enumerate() {
        let is_better = match best {
            None => true,
            Some((_, best)) if best >= need => room >= need && room < best,
            Some((_, best)) => room > best,
        };
        if is_better {
            best = Some((position, room));
        }
    }
    best.map_or(0, |(position, _)| position)
}
