//! The ring model: the bandwidth of an all-reduce over a set of GPUs.

use super::hamilton::{has_ring, ringed_sets};
use super::mask::{bits, index};
use super::packing::Wiring;
use super::rates::{Bandwidth, Rates};
use crate::gpu_set::GpuSet;
use crate::topology::{Link, MAX_NVLINKS_PER_GPU, PcieLevel, Topology};

/// The links of a host as the ring model uses them.
#[derive(Debug)]
pub(super) struct RingModel {
    count: usize,
    rates: Rates,
    /// The number of NVLinks of each pair, row-major and symmetric.
    nvlinks: Vec<u8>,
    /// The kinds of hops, nearest first; the last kind joins every pair.
    hops: Vec<Hops>,
    /// The GPUs whose NVLinks all lead into switches.
    switched: u64,
}

/// The hops that a ring may take, up to some distance.
#[derive(Debug)]
struct Hops {
    slowest: Hop,
    /// For each GPU the GPUs in reach of one hop of this kind or a nearer one.
    neighbours: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
enum Hop {
    NvLink,
    Pcie(Bandwidth),
}

/// Step limit of the ring search on a host of up to eight GPUs; more than any real wiring needs.
const MAX_STEPS_SMALL: u32 = 100_000;
/// Step limit on larger hosts, which have up to 65,535 sets. The result is then a lower bound.
const MAX_STEPS_LARGE: u32 = 400;
const MAX_SMALL_GPUS: usize = 8;

// === impl RingModel ===

impl RingModel {
    pub(super) fn of(topology: &Topology) -> Self {
        let count = topology.count();
        let gpus = || topology.gpus().iter();
        let nvlinks: Vec<u8> =
            gpus().flat_map(|a| gpus().map(move |b| topology.link(a, b).nvlinks)).collect();
        let (mut switched, mut per_gpu) = (0, 0);
        for (gpu, row) in nvlinks.chunks(count.max(1)).enumerate() {
            let sum = row.iter().map(|links| u32::from(*links)).sum();
            let most_to_one = row.iter().copied().max().unwrap_or(0);
            let is_switched = sum > MAX_NVLINKS_PER_GPU;
            switched |= u64::from(is_switched) << gpu;
            // Behind a switch each pair shows all links of a GPU.
            per_gpu = per_gpu.max(if is_switched { u32::from(most_to_one) } else { sum });
        }
        let rates = Rates::guess(per_gpu, nvlinks.iter().any(|links| *links > 1));
        Self { count, rates, nvlinks, hops: Hops::of(topology, rates), switched }
    }

    /// Returns the bus bandwidth of an all-reduce over a set.
    pub(super) fn bandwidth(&self, set: u64) -> Bandwidth {
        let steps = self.steps();
        self.rate(set, |hops| has_ring(&self.hops[hops].neighbours, set, steps))
    }

    /// Returns the bandwidth of every set on a host of at most 16 GPUs, by mask.
    pub(super) fn bandwidths(&self) -> Vec<Bandwidth> {
        let ringed: Vec<Vec<bool>> = self.hops.iter().map(|hops| ringed_sets(&hops.neighbours)).collect();
        (0..1 << self.count).map(|set| self.rate(set, |hops| ringed[hops][index(set)])).collect()
    }

    /// Returns the bandwidth between two GPUs.
    pub(super) fn pair(&self, a: usize, b: usize) -> Bandwidth {
        match self.hops.iter().find(|hops| hops.neighbours[a] & (1 << b) != 0).map(|hops| hops.slowest) {
            Some(Hop::NvLink) => self.rates.nvlinks(self.nvlinks(a, b).into()),
            Some(Hop::Pcie(rate)) => rate,
            None => Bandwidth::NONE,
        }
    }

    /// Returns the bandwidth of a set; `has_ring` returns whether a ring of the hops at a position
    /// runs through all of it.
    fn rate(&self, set: u64, has_ring: impl Fn(usize) -> bool) -> Bandwidth {
        let mut members = bits(set);
        let (first, second, third) = (members.next(), members.next(), members.next());
        let (Some(a), Some(b)) = (first, second) else {
            return Bandwidth::NONE;
        };
        if third.is_none() {
            return self.pair(a, b);
        }
        if let Some(rate) = self.switch(set) {
            return rate;
        }
        let ringed = self.hops.iter().enumerate().find(|(position, _)| has_ring(*position));
        // The last kind of hop joins every pair, so a ring exists even if the limited search found
        // none.
        match ringed.map(|(_, hops)| hops).or_else(|| self.hops.last()).map(|hops| hops.slowest) {
            Some(Hop::NvLink) => self.rates.nvlinks(2 * self.nvlink_rings(set)),
            Some(Hop::Pcie(rate)) => rate,
            None => Bandwidth::NONE,
        }
    }

    /// Returns the bandwidth through NVLink switches, where all GPUs of the set connect to them.
    fn switch(&self, set: u64) -> Option<Bandwidth> {
        if set & !self.switched != 0 {
            return None;
        }
        let pairs = GpuSet::from_mask(set).pairs();
        let narrowest = pairs.map(|(a, b)| self.nvlinks(a.position(), b.position())).min()?;
        (narrowest > 0).then(|| self.rates.nvlinks(narrowest.into()))
    }

    /// Returns the number of rings that share the NVLinks of a set that has one; each ring runs
    /// both ways.
    fn nvlink_rings(&self, set: u64) -> u32 {
        let members: Vec<usize> = bits(set).collect();
        let wiring = Wiring::of(members.len(), |a, b| self.nvlinks(members[a], members[b]));
        wiring.most_rings(self.steps()).max(1)
    }

    fn nvlinks(&self, a: usize, b: usize) -> u8 {
        self.nvlinks[a * self.count + b]
    }

    fn steps(&self) -> u32 {
        if self.count <= MAX_SMALL_GPUS { MAX_STEPS_SMALL } else { MAX_STEPS_LARGE }
    }
}

// === impl Hops ===

impl Hops {
    fn of(topology: &Topology, rates: Rates) -> Vec<Self> {
        let reach = |joins: &dyn Fn(Link) -> bool| -> Vec<u64> {
            let gpus = || topology.gpus().iter();
            let row = |a| gpus().filter(|b| *b != a && joins(topology.link(a, *b))).collect::<GpuSet>();
            gpus().map(|a| row(a).mask()).collect()
        };
        let nvlink = Self { slowest: Hop::NvLink, neighbours: reach(&|link| link.nvlinks > 0) };
        let mut all = vec![nvlink];
        for level in PcieLevel::ALL.into_iter().rev() {
            // A pair without a known link counts as the farthest level.
            let is_near = |link: Link| link.pcie.unwrap_or(PcieLevel::System) >= level;
            let neighbours = reach(&|link| link.nvlinks > 0 || is_near(link));
            // A level without pairs of its own is never the slowest hop of a ring.
            if all.last().is_some_and(|nearer| nearer.neighbours != neighbours) {
                all.push(Self { slowest: Hop::Pcie(rates.pcie(level)), neighbours });
            }
        }
        all
    }
}
