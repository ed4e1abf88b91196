//! A good set on a machine with too many GPUs to look at every set.

use std::cmp::Reverse;
use std::sync::OnceLock;

use super::BandwidthModel;
use super::rates::Bandwidth;
use super::rings::RingModel;
use crate::gpu_set::GpuSet;
use crate::units::GpuIndex;

/// A machine whose sets are worked out when asked for.
#[derive(Debug)]
pub(crate) struct LargeHost {
    model: RingModel,
    count: usize,
    /// Bandwidth of each pair in tenths of a GB/s, row-major.
    ties: Vec<i64>,
    /// The best bandwidth by size, once somebody asked.
    best: Vec<OnceLock<Bandwidth>>,
}

/// Which set is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// GPUs nobody holds.
    pub(crate) free: GpuSet,
    /// Those of them to choose from.
    pub(crate) candidates: GpuSet,
    /// Candidates that must be chosen.
    pub(crate) required: GpuSet,
    /// How many.
    pub(crate) size: usize,
}

/// What makes a set good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// Its bandwidth, then what it leaves behind.
    Bandwidth,
    /// What it leaves behind.
    Rest,
}

/// How many sets may be compared while single GPUs are exchanged: what bounds a decision's time.
const EXCHANGES: u32 = 100;

/// How good a set is, the most important first: bandwidth, ties kept over ties cut, few NUMA nodes, and among equals
/// the lowest indexes, which are the greatest when the bits are read from the other end.
type Rank = (Bandwidth, i64, Reverse<(usize, usize)>, u64);

/// A set under way, with what is needed to judge one more GPU.
#[derive(Clone, Debug)]
struct Draft {
    set: GpuSet,
    /// By GPU: its ties to the set.
    to_set: Vec<i64>,
}

struct Search<'a> {
    machine: &'a BandwidthModel,
    large: &'a LargeHost,
    wanted: Wanted,
    aim: Aim,
    /// By GPU: its ties to all free GPUs.
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

    /// The best bandwidth of a size that the search finds on the empty machine.
    pub(super) fn best(&self, machine: &BandwidthModel, size: usize) -> Bandwidth {
        let search = || {
            let gpus = machine.gpus;
            let anywhere = Wanted { free: gpus, candidates: gpus, required: GpuSet::EMPTY, size };
            self.search(machine, anywhere, Aim::Bandwidth).map_or(Bandwidth::NONE, |set| self.bandwidth(set))
        };
        self.best.get(size).map_or(Bandwidth::NONE, |best| *best.get_or_init(search))
    }

    /// Grows a set from every candidate, always by the GPU that keeps most and cuts least, and exchanges GPUs of
    /// the best one while that helps. `None` where there are not enough candidates.
    pub(crate) fn search(&self, machine: &BandwidthModel, wanted: Wanted, aim: Aim) -> Option<GpuSet> {
        let lowest = wanted.candidates.lowest_with(wanted.required, wanted.size)?;
        if wanted.size == wanted.candidates.len() || wanted.size == wanted.required.len() {
            return Some(lowest);
        }
        let to_free = (0..self.count).map(|position| self.ties_between(position, wanted.free)).collect();
        let search = Search { machine, large: self, wanted, aim, to_free };
        let starts = wanted.candidates.iter().map(|gpu| wanted.required.with(gpu));
        let mut grown: Vec<Draft> = starts.filter_map(|start| search.grow(start)).collect();
        // Neighbours grow into the same set, and judging it costs more than growing it.
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
    /// A tie kept counts this often against one cut.
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
            // What was cut is kept now: a tie gained counts on both sides.
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

    /// Ties the set keeps, weighed, less those it cuts.
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
        let spread = self.machine.numa_spread(self.wanted.free, draft.set);
        (bandwidth, self.compactness(draft), Reverse(spread), draft.set.mask().reverse_bits())
    }

    /// The first better set that differs in one GPU, again and again.
    fn exchange(&self, start: Draft) -> GpuSet {
        let mut best = (self.rank(&start), start.set);
        let mut exchanges = EXCHANGES;
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
