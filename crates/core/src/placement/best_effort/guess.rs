//! A good division found quickly, from which the search for the best one starts.

use std::cmp::Reverse;

use super::pairs::{Pairs, bits};

/// Divides all GPUs: one group after the other from those left, then GPUs exchanged between groups
/// while that brings points. The `required` GPUs, at most `size`, stay in one full group. By lowest
/// GPU; the last one may be smaller.
pub(super) fn guess(pairs: &Pairs, required: u32, size: usize) -> Vec<u32> {
    let mut rest = pairs.all();
    let mut groups = Vec::new();
    if required != 0 {
        groups.push(grow(pairs, required, rest, size));
        rest &= !groups[0];
    }
    while rest.count_ones() as usize >= size {
        let grown = bits(rest).map(|start| grow(pairs, 1 << start, rest, size));
        let Some(best) = grown.min_by_key(|group| Reverse(pairs.inside(*group))) else { break };
        groups.push(best);
        rest &= !best;
    }
    if rest != 0 {
        groups.push(rest);
    }
    while exchange(pairs, required, &mut groups) {}
    groups.sort_by_key(|group| group.trailing_zeros());
    groups
}

/// A full group from its first GPUs, always adding the one that brings most.
fn grow(pairs: &Pairs, start: u32, rest: u32, size: usize) -> u32 {
    let mut group = start;
    while (group.count_ones() as usize) < size {
        let best = bits(rest & !group).min_by_key(|gpu| Reverse(pairs.with(group, *gpu)));
        let Some(next) = best else { break };
        group |= 1 << next;
    }
    group
}

/// Makes the first exchange of two GPUs that brings points, if any does.
fn exchange(pairs: &Pairs, required: u32, groups: &mut [u32]) -> bool {
    for second in 1..groups.len() {
        for first in 0..second {
            let (a, b) = (groups[first], groups[second]);
            for one in bits(a & !required) {
                for other in bits(b & !required) {
                    let (stay, come) = (a & !(1 << one), b & !(1 << other));
                    let before = pairs.with(stay, one) + pairs.with(come, other);
                    if pairs.with(stay, other) + pairs.with(come, one) > before {
                        groups[first] = stay | 1 << other;
                        groups[second] = come | 1 << one;
                        return true;
                    }
                }
            }
        }
    }
    false
}
