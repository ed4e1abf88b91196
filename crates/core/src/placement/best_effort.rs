//! Policy `best-effort`: the set a best division of all free cards would give.
//!
//! Pairs score 100 per NVLink plus points for their PCIe level. The free cards are divided into groups of the
//! asked size so that the total is highest, and the best group of that division is granted: a pair that
//! suits this job is not taken where it would tear two good pairs apart.

use crate::gpu_set::GpuSet;
use crate::topology::{Link, PcieLevel, Topology};
use crate::units::GpuIndex;

/// Up to here the best division is searched exactly; larger machines get the best set by itself.
const MOST_DIVIDED: usize = 16;

/// Points of a pair.
#[must_use]
pub fn pair_score(link: Link) -> u32 {
    let pcie = match link.pcie {
        None => 0,
        Some(PcieLevel::System) => 10,
        Some(PcieLevel::Node) => 20,
        Some(PcieLevel::HostBridge) => 30,
        Some(PcieLevel::MultiSwitch) => 40,
        Some(PcieLevel::SingleSwitch) => 50,
        Some(PcieLevel::SameBoard) => 60,
    };
    100 * u32::from(link.nvlinks) + pcie
}

/// Points of all pairs of a set.
#[must_use]
pub fn set_score(topology: &Topology, gpus: GpuSet) -> u32 {
    gpus.pairs().map(|(a, b)| pair_score(topology.link(a, b))).sum()
}

/// The `count` cards of `free`, `required` among them; `None` where there are not that many.
pub(super) fn choose(topology: &Topology, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    let lowest = free.lowest_with(required, count)?;
    let mut pairs = free.pairs().map(|(a, b)| pair_score(topology.link(a, b)));
    let first = pairs.next();
    let all_alike = pairs.all(|pair| Some(pair) == first);
    if count <= 1 || free.len() == count || all_alike {
        return Some(lowest);
    }
    if free.len() <= MOST_DIVIDED {
        Division::new(topology, free, required, count).best_group()
    } else {
        grow(topology, free, required, count)
    }
}

/// The search for the best division, card by position among the free ones.
struct Division {
    free: Vec<GpuIndex>,
    /// Symmetric, by position.
    scores: Vec<[u32; MOST_DIVIDED]>,
    required: u32,
    size: usize,
    /// Cards that no full group can hold; they stand together in one smaller group.
    leftover: usize,
    /// By mask of the cards still to be divided: the best total, and the group that holds the lowest card then.
    best: Vec<Option<(u32, u32)>>,
}

impl Division {
    fn new(topology: &Topology, free: GpuSet, required: GpuSet, size: usize) -> Self {
        let free: Vec<GpuIndex> = free.iter().collect();
        let row = |a: &GpuIndex| {
            let mut scores = [0; MOST_DIVIDED];
            for (score, b) in scores.iter_mut().zip(&free) {
                *score = pair_score(topology.link(*a, *b));
            }
            scores
        };
        let bits = free.iter().enumerate().filter(|(_, gpu)| required.contains(**gpu));
        Self {
            scores: free.iter().map(row).collect(),
            required: bits.fold(0, |mask, (position, _)| mask | 1 << position),
            size,
            leftover: free.len() % size,
            best: vec![None; 1 << free.len()],
            free,
        }
    }

    fn best_group(mut self) -> Option<GpuSet> {
        let all = (1u32 << self.free.len()) - 1;
        self.divide(all)?;
        let mut rest = all;
        let mut chosen: Option<(u32, u32)> = None;
        while rest != 0 {
            let (total, group) = self.best[rest as usize]?;
            let after = rest & !group;
            let own = total - self.best[after as usize].map_or(0, |(total, _)| total);
            let full = group.count_ones() as usize == self.size;
            let eligible = full && group & self.required == self.required;
            if eligible && chosen.is_none_or(|(best, _)| own > best) {
                chosen = Some((own, group));
            }
            rest = after;
        }
        let (_, group) = chosen?;
        let members = self.free.iter().enumerate().filter(|(position, _)| group & (1 << position) != 0);
        Some(members.map(|(_, gpu)| *gpu).collect())
    }

    /// The best total of dividing `rest`; `None` where the required cards cannot stand in one full group.
    fn divide(&mut self, rest: u32) -> Option<u32> {
        if rest == 0 {
            return Some(0);
        }
        if let Some((total, _)) = self.best[rest as usize] {
            return Some(total);
        }
        let head = rest.trailing_zeros() as usize;
        self.extend(rest, 1 << head, 0, head, 1);
        self.best[rest as usize].map(|(total, _)| total)
    }

    /// Tries every group that starts with the `taken` cards of `group`, in the order of their indexes with the
    /// smaller group last among equals: the first of several best divisions wins.
    fn extend(&mut self, rest: u32, group: u32, score: u32, last: usize, taken: usize) {
        if taken == self.size {
            self.close(rest, group, score);
            return;
        }
        let later = (last + 1..self.free.len()).filter(|position| rest & (1 << position) != 0);
        for position in later {
            let with: u32 = self.sum_with(group, position);
            self.extend(rest, group | 1 << position, score + with, position, taken + 1);
        }
        let leftover_is_due = rest.count_ones() as usize % self.size == self.leftover;
        if taken == self.leftover && leftover_is_due {
            self.close(rest, group, score);
        }
    }

    fn sum_with(&self, group: u32, position: usize) -> u32 {
        let row = &self.scores[position];
        let mut sum = 0;
        let mut members = group;
        while members != 0 {
            sum += row[members.trailing_zeros() as usize];
            members &= members - 1;
        }
        sum
    }

    fn close(&mut self, rest: u32, group: u32, score: u32) {
        let required = group & self.required;
        let splits_required = required != 0 && required != self.required;
        let wastes_required = required != 0 && (group.count_ones() as usize) < self.size;
        if splits_required || wastes_required {
            return;
        }
        let Some(others) = self.divide(rest & !group) else {
            return;
        };
        let best = &mut self.best[rest as usize];
        if best.is_none_or(|(total, _)| score + others > total) {
            *best = Some((score + others, group));
        }
    }
}

/// For machines too large to divide: from every start, the card that adds most, and the best of those sets.
fn grow(topology: &Topology, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    let starts: Vec<GpuSet> = if required.is_empty() {
        free.iter().map(|gpu| GpuSet::EMPTY.with(gpu)).collect()
    } else {
        vec![required]
    };
    let mut best: Option<(u32, GpuSet)> = None;
    for mut set in starts {
        while set.len() < count {
            let gain = |gpu: GpuIndex| -> u32 { set.iter().map(|m| pair_score(topology.link(m, gpu))).sum() };
            let next = free.difference(set).iter().max_by_key(|gpu| (gain(*gpu), u8::MAX - gpu.0))?;
            set = set.with(next);
        }
        let score = set_score(topology, set);
        if best.is_none_or(|(highest, _)| score > highest) {
            best = Some((score, set));
        }
    }
    best.map(|(_, set)| set)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVLinks and PCIe levels of a DGX-1 with V100.
    fn dgx1() -> Topology {
        const NVLINKS: [[u8; 8]; 8] = [
            [0, 1, 1, 2, 2, 0, 0, 0],
            [1, 0, 2, 1, 0, 2, 0, 0],
            [1, 2, 0, 2, 0, 0, 1, 0],
            [2, 1, 2, 0, 0, 0, 0, 1],
            [2, 0, 0, 0, 0, 1, 1, 2],
            [0, 2, 0, 0, 1, 0, 2, 1],
            [0, 0, 1, 0, 1, 2, 0, 2],
            [0, 0, 0, 1, 2, 1, 2, 0],
        ];
        Topology::from_pairs(8, |a, b| {
            let pcie = match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
                (true, _) => PcieLevel::SingleSwitch,
                (false, true) => PcieLevel::HostBridge,
                (false, false) => PcieLevel::System,
            };
            Link { pcie: Some(pcie), nvlinks: NVLINKS[a.position()][b.position()] }
        })
    }

    fn set(indexes: &[u8]) -> GpuSet {
        indexes.iter().copied().map(GpuIndex).collect()
    }

    fn check(free: &[u8], required: &[u8], count: usize, expected: &[u8]) {
        let chosen = choose(&dgx1(), set(free), set(required), count);
        assert_eq!(chosen, Some(set(expected)), "{count} of {free:?} with {required:?}");
    }

    #[test]
    fn known_answers_for_a_dgx1() {
        const ALL: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
        check(&[0, 2, 4, 5], &[], 2, &[4, 5]);
        check(&[0, 4, 5, 6], &[], 2, &[5, 6]);
        check(&[0, 1, 3], &[], 2, &[0, 3]);
        check(&[0, 1, 4], &[], 2, &[0, 4]);
        check(&ALL, &[4], 2, &[4, 7]);
        check(&ALL, &[4], 4, &[4, 5, 6, 7]);
        check(&ALL, &[], 1, &[0]);
        check(&ALL, &[6], 1, &[6]);
        check(&ALL, &[], 8, &ALL);
    }

    /// Every division, walked through as the definition says: the yardstick of the search.
    fn exhaustive(topology: &Topology, free: GpuSet, count: usize) -> Option<GpuSet> {
        fn walk(
            topology: &Topology,
            rest: GpuSet,
            count: usize,
            groups: &mut Vec<GpuSet>,
            best: &mut (u32, Vec<GpuSet>),
        ) {
            let Some(head) = rest.lowest() else {
                let total = groups.iter().map(|group| set_score(topology, *group)).sum();
                if best.1.is_empty() || total > best.0 {
                    *best = (total, groups.clone());
                }
                return;
            };
            let head = GpuSet::EMPTY.with(head);
            let others = rest.difference(head);
            let leftover = rest.len() % count;
            let mut options: Vec<GpuSet> = others.subsets(count - 1).map(|more| head.union(more)).collect();
            if leftover > 0 {
                options.extend(others.subsets(leftover - 1).map(|more| head.union(more)));
            }
            let order = |group: &GpuSet| {
                let mut key: Vec<u8> = group.iter().map(|gpu| gpu.0).collect();
                key.resize(count, u8::MAX);
                key
            };
            options.sort_by_key(order);
            for group in options {
                groups.push(group);
                walk(topology, rest.difference(group), count, groups, best);
                groups.pop();
            }
        }
        let mut best = (0, Vec::new());
        walk(topology, free, count, &mut Vec::new(), &mut best);
        let full = best.1.into_iter().filter(|group| group.len() == count);
        full.max_by_key(|group| {
            (set_score(topology, *group), u8::MAX - group.lowest().map_or(0, |gpu| gpu.0))
        })
    }

    proptest::proptest! {
        #[test]
        fn agrees_with_walking_through_every_division(
            nvlinks in proptest::collection::vec(0u8..3, 64),
            pcie in proptest::collection::vec(0usize..6, 64),
            free in 0u64..256,
            count in 2usize..6,
        ) {
            let topology = Topology::from_pairs(8, |a, b| {
                let pair = a.position() * 8 + b.position();
                Link { pcie: Some(PcieLevel::ALL[pcie[pair]]), nvlinks: nvlinks[pair] }
            });
            let free = GpuSet::from_mask(free);
            let chosen = choose(&topology, free, GpuSet::EMPTY, count);
            if free.len() < count {
                proptest::prop_assert_eq!(chosen, None);
            } else {
                proptest::prop_assert_eq!(chosen, exhaustive(&topology, free, count));
            }
        }

        #[test]
        fn never_fewer_than_asked_on_large_machines(
            count in 1usize..20,
            free in proptest::num::u64::ANY,
            nvlinks in proptest::collection::vec(0u8..3, 24 * 24),
        ) {
            let topology = Topology::from_pairs(24, |a, b| Link::nvlink(nvlinks[a.position() * 24 + b.position()]));
            let free = GpuSet::from_mask(free).intersection(topology.gpus());
            let chosen = choose(&topology, free, GpuSet::EMPTY, count);
            proptest::prop_assert_eq!(chosen.map(GpuSet::len), (free.len() >= count).then_some(count));
            proptest::prop_assert!(chosen.is_none_or(|set| free.is_superset(set)));
        }
    }
}
