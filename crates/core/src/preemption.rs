//! Whom to evict, so that a pod fits on a node.

use std::collections::BTreeSet;

use crate::grant::PodGrant;
use crate::node::NodeState;
use crate::placement::{Policy, filter};
use crate::quota::Taken;
use crate::request::PodRequest;
use crate::units::PodUid;

/// A pod that holds something of the node.
#[derive(Clone, Copy, Debug)]
pub struct Holder<'a> {
    /// What it holds.
    pub grant: &'a PodGrant,
    /// How much it matters.
    pub priority: i32,
    /// What the newcomer's quota gets back when it goes.
    pub repays: Taken,
}

/// Who wants in.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer<'a> {
    /// What it asks for.
    pub request: &'a PodRequest,
    /// How much it matters: only pods that matter less may go.
    pub priority: i32,
    /// How its cards are chosen.
    pub policy: &'a Policy,
    /// What its quota must get back before it may come. Then only those who repay something may go: nobody else makes room
    /// for a namespace that has had its share.
    pub owes: Taken,
}

/// Sets up to this size are all tried before a short cut is taken.
const TRIED_SIZE: usize = 3;

/// Sets tried at most; a node has a few dozen pods, of which three make ten thousands of sets.
const TRIED_SETS: usize = 20_000;

/// The pods to evict so that the newcomer fits: those `proposed` where they suffice, for others count on them too; else
/// those whose most important one matters least, and the fewest of those. None
/// where nobody need go; `None` where nothing helps.
#[must_use]
pub fn victims(
    node: &NodeState,
    holders: &[Holder<'_>],
    newcomer: Newcomer<'_>,
    proposed: &BTreeSet<PodUid>,
) -> Option<Vec<PodUid>> {
    let bench = Bench { node, holders, newcomer };
    let is_in_debt = newcomer.owes != Taken::default();
    let may_go = |holder: &Holder<'_>| {
        holder.priority < newcomer.priority && (!is_in_debt || holder.repays != Taken::default())
    };
    let harms_nobody = || holders.iter().filter(|holder| proposed.contains(&holder.grant.pod)).all(may_go);
    if !proposed.is_empty()
        && (!is_in_debt || harms_nobody())
        && bench.fits_without(|holder| proposed.contains(&holder.grant.pod))
    {
        return Some(proposed.iter().cloned().collect());
    }
    if bench.fits_without(|_| false) {
        return Some(Vec::new());
    }
    let mut movable: Vec<Holder<'_>> = holders.iter().filter(|holder| may_go(holder)).copied().collect();
    movable.sort_by(|a, b| (a.priority, &a.grant.pod).cmp(&(b.priority, &b.grant.pod)));
    let levels: BTreeSet<i32> = movable.iter().map(|holder| holder.priority).collect();
    let enough = |level: &&i32| bench.fits_without(|holder| holder.priority <= **level && may_go(holder));
    let level = *levels.iter().find(enough)?;
    movable.retain(|holder| holder.priority <= level);
    let chosen = bench.smallest(&movable).unwrap_or_else(|| bench.spare(&movable));
    Some(chosen.into_iter().cloned().collect())
}

struct Bench<'a> {
    node: &'a NodeState,
    holders: &'a [Holder<'a>],
    newcomer: Newcomer<'a>,
}

impl<'a> Bench<'a> {
    fn fits_without(&self, gone: impl Fn(&Holder<'_>) -> bool) -> bool {
        let mut left = NodeState::empty(self.node.shared_node());
        let mut repaid = Taken::default();
        for holder in self.holders {
            if gone(holder) {
                repaid = repaid.plus(holder.repays);
            } else {
                left.add(holder.grant);
            }
        }
        repaid.covers(self.newcomer.owes)
            && filter(&left, self.newcomer.request, self.newcomer.policy).is_ok()
    }

    /// The first of the smallest sets that suffice, where it is small.
    fn smallest(&self, movable: &[Holder<'a>]) -> Option<Vec<&'a PodUid>> {
        let mut tried = 0;
        for size in 1..=TRIED_SIZE.min(movable.len()) {
            let mut picked: Vec<usize> = (0..size).collect();
            loop {
                tried += 1;
                if tried > TRIED_SETS {
                    return None;
                }
                let set: Vec<&PodUid> = picked.iter().map(|index| &movable[*index].grant.pod).collect();
                if self.fits_without(|holder| set.contains(&&holder.grant.pod)) {
                    return Some(set);
                }
                if !next_combination(&mut picked, movable.len()) {
                    break;
                }
            }
        }
        None
    }

    /// All, but for those that can stay, the most important first.
    fn spare(&self, movable: &[Holder<'a>]) -> Vec<&'a PodUid> {
        let mut gone: Vec<&PodUid> = movable.iter().map(|holder| &holder.grant.pod).collect();
        for position in (0..gone.len()).rev() {
            let spared = gone.remove(position);
            if !self.fits_without(|holder| gone.contains(&&holder.grant.pod)) {
                gone.insert(position, spared);
            }
        }
        gone
    }
}

/// Steps through the sets of positions below `count` in lexicographic order.
fn next_combination(picked: &mut [usize], count: usize) -> bool {
    let size = picked.len();
    let Some(place) = (0..size).rev().find(|place| picked[*place] < count - size + place) else {
        return false;
    };
    picked[place] += 1;
    for later in place + 1..size {
        picked[later] = picked[later - 1] + 1;
    }
    true
}

#[cfg(test)]
mod tests;
