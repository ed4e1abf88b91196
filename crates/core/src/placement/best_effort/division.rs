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
    /// By mask of the GPUs still to be divided.
    known: Vec<Known>,
    steps_left: u32,
}

/// What is known of dividing some GPUs.
#[derive(Clone, Copy, Debug)]
enum Known {
    Nothing,
    /// No division has so many points.
    Below(u32),
    /// The most points, and the group that holds the lowest GPU then.
    Best {
        total: u32,
        group: u32,
    },
}

/// The search for the group that holds the lowest of the GPUs still to be divided.
struct Head {
    rest: u32,
    /// What a division must reach to be of interest.
    needed: u32,
    best: Option<(u32, u32)>,
    /// By GPU: no group gives it more points, these being with its best partners. Counted at both ends of a pair.
    most: [u32; Pairs::MAX_GPUS],
    most_of_all: u32,
    /// How many GPUs will stand in a smaller group, and what that costs them at least.
    leftover: usize,
    leftover_cost: u32,
}

/// A group under way.
#[derive(Clone, Copy)]
struct Draft {
    gpus: u32,
    count: usize,
    points: u32,
    /// The GPUs that may still join: those after its last one.
    open: u32,
}

impl Division {
    /// More GPUs are not divided.
    pub(super) const MAX_GPUS: usize = Pairs::MAX_GPUS;

    /// Up to here every search is carried to its end.
    const MOST_EXACT: usize = 12;

    /// Beyond, it ends after looking so many times at what a GPU could still get, well within a millisecond, and a
    /// good division counts for the best one. Real machines are regular, and their searches end by themselves.
    const STEPS: u32 = 10_000;

    pub(super) fn new(topology: &Topology, free: GpuSet, required: GpuSet, size: usize) -> Self {
        let pairs = Pairs::of(topology, free);
        Self {
            required: pairs.mask(required),
            size,
            known: vec![Known::Nothing; 1 << free.len()],
            steps_left: if free.len() <= Self::MOST_EXACT { u32::MAX } else { Self::STEPS },
            pairs,
        }
    }

    /// The best full group of the best division, of several such divisions the first: groups compare by their indexes.
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

    /// The groups of the best division, once it is known.
    fn groups(&self) -> Vec<u32> {
        let mut rest = self.pairs.all();
        let mut groups = Vec::new();
        while let Known::Best { group, .. } = self.known[rest as usize] {
            groups.push(group);
            rest &= !group;
        }
        groups
    }

    /// The most points of dividing `rest`, where these are as many as `needed`.
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
        // A search cut short knows nothing for certain.
        if self.steps_left > 0 {
            self.known[rest as usize] = match head.best {
                Some((total, group)) => Known::Best { total, group },
                None => Known::Below(needed),
            };
        }
        head.best.map(|(total, _)| total)
    }

    /// Tries every group that starts like the draft, in the order of their indexes, the smaller group last among those
    /// that start alike.
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
            // Only a better one replaces the first.
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

    /// No division has more points.
    fn bound(&self) -> u32 {
        (self.most_of_all - self.leftover_cost) / 2
    }

    /// No division that contains a group which starts like the draft has more points.
    fn bound_with(&self, division: &Division, draft: Draft) -> u32 {
        let missing = division.size - draft.count;
        let member = |gpu| self.most[gpu] - division.pairs.with_best(draft.open, gpu, missing);
        let lost_by_members: u32 = bits(draft.gpus).map(member).sum();
        // Until it is larger than the smaller group, it may become that one.
        let leftover_cost = if draft.count > self.leftover { self.leftover_cost } else { 0 };
        let twice = (self.most_of_all + 2 * draft.points).saturating_sub(lost_by_members + leftover_cost);
        twice / 2
    }
}
