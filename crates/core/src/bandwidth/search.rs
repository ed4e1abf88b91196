//! The search for a good set on a host with too many GPUs to examine every set.

use std::cmp::Reverse;
use std::sync::OnceLock;

use super::BandwidthModel;
use super::rates::Bandwidth;
use super::rings::RingModel;
use crate::gpu_set::GpuSet;
use crate::units::GpuIndex;

/// A host whose sets are computed on demand.
#[derive(Debug)]
pub(crate) struct LargeHost {
    model: RingModel,
    count: usize,
    /// The bandwidth of each pair in tenths of a GB/s, row-major.
    ties: Vec<i64>,
    /// The best bandwidth by size, computed on first use.
    best: Vec<OnceLock<Bandwidth>>,
}

/// The set that is searched for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The idle GPUs.
    pub(crate) free: GpuSet,
    /// The idle GPUs that suit the request.
    pub(crate) candidates: GpuSet,
    /// The candidates that must be chosen.
    pub(crate) required: GpuSet,
    /// The number of GPUs to choose.
    pub(crate) size: usize,
}

/// The goal of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// The highest bandwidth, then the best remaining GPUs.
    Bandwidth,
    /// The best remaining GPUs.
    Rest,
}

/// Upper bound for the sets compared while GPUs are exchanged. It bounds the time of a decision.
const MAX_EXCHANGES: u32 = 100;

/// The rank of a set, the most important part first: bandwidth, compactness, few NUMA nodes, and
/// among equals the lowest indexes, which are greatest when the bits are reversed.
type Rank = (Bandwidth, i64, Reverse<(usize, usize)>, u64);

/// A set under construction, with the sums needed to rate one more GPU.
#[derive(Clone, Debug)]
struct Draft {
    set: GpuSet,
    /// The bandwidth of each GPU to the set.
    to_set: Vec<i64>,
}

struct Search<'a> {
    model: &'a BandwidthModel,
    large: &'a LargeHost,
    wanted: Wanted,
    aim: Aim,
    /// The bandwidth of each GPU to all idle GPUs.
    to_free: Vec<i64>,
}

// === impl LargeHost ===

impl LargeHost {
    pub(super) fn of(gpus: GpuSet, model: RingModel) -> Self {
        let count = gpus.len();
        let mut ties = vec![0; count * count];
        for (a, b) in gpus.pairs() {
            let (a, b) = (a.position(), b.position());
            let tie = i64::from(model.pair(a, b).tenths());
            ties[a * count + b] = tie;
            ties[b * count + a] = tie;
        }
        Self { model, count, ties, best: vec![OnceLock::new(); count + 1] }
    }

    pub(super) fn bandwidth(&self, gpus: GpuSet) -> Bandwidth {
        self.model.bandwidth(gpus.mask())
    }

    /// Returns the best bandwidth of a size that the search finds on the idle host.
    pub(super) fn best(&self, machine: &BandwidthModel, size: usize) -> Bandwidth {
        let search = || {
            let gpus = machine.gpus;
            let anywhere = Wanted { free: gpus, candidates: gpus, required: GpuSet::EMPTY, size };
            self.search(machine, anywhere, Aim::Bandwidth).map_or(Bandwidth::NONE, |set| self.bandwidth(set))
        };
        self.best.get(size).map_or(Bandwidth::NONE, |best| *best.get_or_init(search))
    }

    /// Grows a set from every candidate, always by the GPU with the best gain, and exchanges GPUs
    /// of the best one while that helps. `None` where there are not enough candidates.
    pub(crate) fn search(&self, machine: &BandwidthModel, wanted: Wanted, aim: Aim) -> Option<GpuSet> {
        let lowest = wanted.candidates.lowest_with(wanted.required, wanted.size)?;
        if wanted.size == wanted.candidates.len() || wanted.size == wanted.required.len() {
            return Some(lowest);
        }
        let to_free = (0..self.count).map(|position| self.ties_between(position, wanted.free)).collect();
        let search = Search { model: machine, large: self, wanted, aim, to_free };
        let starts = wanted.candidates.iter().map(|gpu| wanted.required.with(gpu));
        let mut grown: Vec<Draft> = starts.filter_map(|start| search.grow(start)).collect();
        // Neighbours grow into the same set, and ranking a set costs more than growing it.
        grown.sort_by_key(|draft| draft.set.mask());
        grown.dedup_by_key(|draft| draft.set);
        let best = grown.into_iter().max_by_key(|draft| search.rank(draft))?;
        Some(search.exchange(best))
    }

    fn tie(&self, a: usize, b: usize) -> i64 {
        self.ties[a * self.count + b]
    }

    fn ties_between(&self, position: usize, set: GpuSet) -> i64 {
        set.iter().map(|other| self.tie(position, other.position())).sum()
    }

    fn draft(&self, set: GpuSet) -> Draft {
        Draft { set, to_set: (0..self.count).map(|position| self.ties_between(position, set)).collect() }
    }
}

// === impl Search ===

impl Search<'_> {
    /// Returns the weight of bandwidth inside the set relative to bandwidth that the choice cuts.
    fn weight_of_kept(&self) -> i64 {
        match self.aim {
            Aim::Bandwidth => 2,
            Aim::Rest => 1,
        }
    }

    fn grow(&self, start: GpuSet) -> Option<Draft> {
        let mut draft = self.large.draft(start);
        while draft.set.len() < self.wanted.size {
            let open = self.wanted.candidates.difference(draft.set);
            // A link that moves into the set is no longer cut, so it counts on both sides.
            let gain = |gpu: &GpuIndex| {
                let position = gpu.position();
                2 * (self.weight_of_kept() + 1) * draft.to_set[position] - self.to_free[position]
            };
            let next = open.iter().max_by_key(|gpu| (gain(gpu), Reverse(*gpu)))?;
            draft.set = draft.set.with(next);
            for (position, ties) in draft.to_set.iter_mut().enumerate() {
                *ties += self.large.tie(position, next.position());
            }
        }
        Some(draft)
    }

    /// Returns the weighted bandwidth inside the set minus the bandwidth that it cuts.
    fn compactness(&self, draft: &Draft) -> i64 {
        let positions = || draft.set.iter().map(GpuIndex::position);
        let kept: i64 = positions().map(|position| draft.to_set[position]).sum();
        let all: i64 = positions().map(|position| self.to_free[position]).sum();
        self.weight_of_kept() * kept - (all - kept)
    }

    fn rank(&self, draft: &Draft) -> Rank {
        let bandwidth = match self.aim {
            Aim::Bandwidth => self.large.bandwidth(draft.set),
            Aim::Rest => Bandwidth::NONE,
        };
        let spread = self.model.numa_spread(self.wanted.free, draft.set);
        (bandwidth, self.compactness(draft), Reverse(spread), draft.set.mask().reverse_bits())
    }

    /// Replaces the set by the first better one that differs in one GPU, until none is better or
    /// the limit is reached.
    fn exchange(&self, start: Draft) -> GpuSet {
        let mut best = (self.rank(&start), start.set);
        let mut exchanges = MAX_EXCHANGES;
        'better: loop {
            let set = best.1;
            let outside = self.wanted.candidates.difference(set);
            for leaving in set.difference(self.wanted.required).iter() {
                for coming in outside.iter() {
                    if exchanges == 0 {
                        return best.1;
                    }
                    exchanges -= 1;
                    let other = set.difference(GpuSet::EMPTY.with(leaving)).with(coming);
                    let rank = self.rank(&self.large.draft(other));
                    if rank > best.0 {
                        best = (rank, other);
                        continue 'better;
                    }
                }
            }
            return best.1;
        }
    }
}
