//! The best division of GPUs into groups of one size.

use std::cmp::Reverse;

use super::guess::guess;
use super::pairs::{Pairs, bits};
use crate::gpu_set::GpuSet;
use crate::topology::Topology;

/// The search for the best division.
pub(super) struct Division {
    pairs: Pairs,
    required: u32,
    size: usize,
    /// The results by mask of the GPUs still to be divided.
    known: Vec<Known>,
    steps_left: u32,
}

/// The result for a set of GPUs to be divided.
#[derive(Clone, Copy, Debug)]
enum Known {
    Nothing,
    /// No division reaches this number of points.
    Below(u32),
    /// The highest number of points, and the group of the lowest GPU in that division.
    Best {
        total: u32,
        group: u32,
    },
}

/// The search for the group of the lowest GPU that is still to be divided.
struct Head {
    rest: u32,
    /// The number of points that a division must reach.
    needed: u32,
    best: Option<(u32, u32)>,
    /// For each GPU an upper bound of its points, with its best partners. Each pair counts at both
    /// ends.
    most: [u32; Pairs::MAX_GPUS],
    most_of_all: u32,
    /// The number of GPUs in the last, smaller group, and the least cost of that.
    leftover: usize,
    leftover_cost: u32,
}

/// A group under construction.
#[derive(Clone, Copy)]
struct Draft {
    gpus: u32,
    count: usize,
    points: u32,
    /// The GPUs that may still join: those after the last member.
    open: u32,
}

impl Division {
    /// Upper bound for the GPUs that are divided; larger hosts use a greedy search.
    pub(super) const MAX_GPUS: usize = Pairs::MAX_GPUS;

    /// Upper bound for the GPUs for which the search is exhaustive.
    const MAX_EXACT_GPUS: usize = 12;

    /// Step limit for more GPUs, which takes well under a millisecond. A good division then counts
    /// as the best one. Real hosts are regular, and their searches end before the limit.
    const MAX_STEPS: u32 = 10_000;

    pub(super) fn new(topology: &Topology, free: GpuSet, required: GpuSet, size: usize) -> Self {
        let pairs = Pairs::of(topology, free);
        Self {
            required: pairs.mask(required),
            size,
            known: vec![Known::Nothing; 1 << free.len()],
            steps_left: if free.len() <= Self::MAX_EXACT_GPUS { u32::MAX } else { Self::MAX_STEPS },
            pairs,
        }
    }

    /// Returns the best full group of the best division; among equal divisions the first by
    /// indexes.
    pub(super) fn best_group(mut self) -> Option<GpuSet> {
        let guess = guess(&self.pairs, self.required, self.size);
        let guessed = guess.iter().map(|group| self.pairs.inside(*group)).sum();
        self.divide(self.pairs.all(), guessed);
        let groups = if self.steps_left > 0 { self.groups() } else { guess };
        let is_full = |group: &u32| group.count_ones() as usize == self.size;
        let eligible =
            groups.into_iter().filter(|group| is_full(group) && group & self.required == self.required);
        let best = eligible.min_by_key(|group| Reverse(self.pairs.inside(*group)))?;
        Some(self.pairs.gpus(best))
    }

    /// Returns the groups of the best division, once it is known.
    fn groups(&self) -> Vec<u32> {
        let mut rest = self.pairs.all();
        let mut groups = Vec::new();
        while let Known::Best { group, .. } = self.known[rest as usize] {
            groups.push(group);
            rest &= !group;
        }
        groups
    }

    /// Returns the highest number of points for dividing `rest`, if it reaches `needed`.
    fn divide(&mut self, rest: u32, needed: u32) -> Option<u32> {
        if rest == 0 {
            return (needed == 0).then_some(0);
        }
        match self.known[rest as usize] {
            Known::Best { total, .. } => return (total >= needed).then_some(total),
            Known::Below(limit) if needed >= limit => return None,
            Known::Nothing | Known::Below(_) => {}
        }
        self.spend(rest.count_ones() as usize);
        let mut head = Head::new(self, rest, needed);
        if needed > head.bound() {
            self.known[rest as usize] = Known::Below(head.bound() + 1);
            return None;
        }
        let lowest = rest & rest.wrapping_neg();
        self.extend(&mut head, Draft { gpus: lowest, count: 1, points: 0, open: rest & !lowest });
        // A search that reached the step limit proves nothing.
        if self.steps_left > 0 {
            self.known[rest as usize] = match head.best {
                Some((total, group)) => Known::Best { total, group },
                None => Known::Below(needed),
            };
        }
        head.best.map(|(total, _)| total)
    }

    /// Tries every group that starts with the draft, in the order of indexes. Among groups with the
    /// same start the smaller one comes last.
    fn extend(&mut self, head: &mut Head, draft: Draft) {
        if draft.count == self.size {
            self.close(head, draft);
            return;
        }
        for gpu in bits(draft.open) {
            if self.steps_left == 0 {
                return;
            }
            let longer = Draft {
                gpus: draft.gpus | 1 << gpu,
                count: draft.count + 1,
                points: draft.points + self.pairs.with(draft.gpus, gpu),
                open: draft.open & !((2 << gpu) - 1),
            };
            self.spend(longer.count);
            if head.bound_with(self, longer) >= head.needed {
                self.extend(head, longer);
            }
        }
        if draft.count == head.leftover {
            self.close(head, draft);
        }
    }

    fn spend(&mut self, gpus: usize) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 16 GPUs")]
        let steps = gpus as u32;
        self.steps_left = self.steps_left.saturating_sub(steps);
    }

    fn close(&mut self, head: &mut Head, draft: Draft) {
        let required = draft.gpus & self.required;
        let splits_required = required != 0 && required != self.required;
        let wastes_required = required != 0 && draft.count < self.size;
        if splits_required || wastes_required {
            return;
        }
        let needed = head.needed.saturating_sub(draft.points);
        if let Some(others) = self.divide(head.rest & !draft.gpus, needed) {
            let total = draft.points + others;
            head.best = Some((total, draft.gpus));
            // Only a better division replaces the first one.
            head.needed = total + 1;
        }
    }
}

impl Head {
    fn new(division: &Division, rest: u32, needed: u32) -> Self {
        let Division { pairs, size, .. } = division;
        let leftover = rest.count_ones() as usize % size;
        let mut most = [0; Pairs::MAX_GPUS];
        let mut costs = [u32::MAX; Pairs::MAX_GPUS];
        for gpu in bits(rest) {
            most[gpu] = pairs.with_best(rest, gpu, size - 1);
            costs[gpu] = most[gpu] - pairs.with_best(rest, gpu, leftover.saturating_sub(1));
        }
        costs.sort_unstable();
        let leftover_cost = costs[..leftover].iter().sum();
        Self { rest, needed, best: None, most_of_all: most.iter().sum(), most, leftover, leftover_cost }
    }

    /// Returns an upper bound for the points of any division.
    fn bound(&self) -> u32 {
        (self.most_of_all - self.leftover_cost) / 2
    }

    /// Returns an upper bound for the points of divisions with a group that starts with the draft.
    fn bound_with(&self, division: &Division, draft: Draft) -> u32 {
        let missing = division.size - draft.count;
        let member = |gpu| self.most[gpu] - division.pairs.with_best(draft.open, gpu, missing);
        let lost_by_members: u32 = bits(draft.gpus).map(member).sum();
        // A draft that is not larger than the smaller group may still become that group.
        let leftover_cost = if draft.count > self.leftover { self.leftover_cost } else { 0 };
        let twice = (self.most_of_all + 2 * draft.points).saturating_sub(lost_by_members + leftover_cost);
        twice / 2
    }
}
