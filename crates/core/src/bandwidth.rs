//! The predicted bandwidth of a set of GPUs: the bus bandwidth of an all-reduce over the set, from
//! its links.
//!
//! The prediction follows NCCL, which sends data around rings through all GPUs of a set:
//!
//! - two GPUs have what joins them;
//! - GPUs behind NVLink switches have their links into the switch, whichever they are;
//! - other sets have twice an NVLink's rate for every ring over NVLinks, as many as share no link;
//! - a set without such a ring is as fast as the slowest hop of its best ring over PCIe.

mod hamilton;
mod mask;
mod outlook;
mod packing;
mod rates;
mod rings;
mod search;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::gpu_set::GpuSet;
use crate::topology::Topology;
use rings::RingModel;

pub(crate) use outlook::Outlook;
pub use rates::Bandwidth;
pub(crate) use search::{Aim, LargeHost, Wanted};

/// The predicted bandwidths of one topology. Nodes with equal links share one model.
pub struct BandwidthModel {
    gpus: GpuSet,
    /// The GPUs of each NUMA node; GPUs of unknown NUMA nodes form one set.
    numa_nodes: Vec<GpuSet>,
    sets: Sets,
}

/// What is precomputed about the sets of a host.
pub(crate) enum Sets {
    /// All pairs have equal links (NVLink switches, guests that see no switch, one or two GPUs), so
    /// sets differ by their size only. The value holds the bandwidth by size.
    Alike(Vec<Bandwidth>),
    /// The outlook of every set, and the best bandwidth by size.
    Known(Box<Outlook>, Vec<Bandwidth>),
    /// The host has too many sets, so each bandwidth is computed on demand.
    Searched(Box<LargeHost>),
}

// === impl BandwidthModel ===

impl BandwidthModel {
    pub(crate) fn of(topology: &Topology) -> Self {
        let gpus = topology.gpus();
        let model = RingModel::of(topology);
        let sizes = 0..=gpus.len();
        let sets = if is_alike(topology) {
            Sets::Alike(sizes.map(|size| model.bandwidth(GpuSet::first(size).mask())).collect())
        } else if gpus.len() <= Outlook::MAX_GPUS {
            let bandwidth = model.bandwidths();
            let mut best = vec![Bandwidth::NONE; gpus.len() + 1];
            for (set, bandwidth) in bandwidth.iter().enumerate() {
                let of_size = &mut best[set.count_ones() as usize];
                *of_size = (*of_size).max(*bandwidth);
            }
            Sets::Known(Box::new(Outlook::of(gpus.len(), bandwidth, &best)), best)
        } else {
            Sets::Searched(Box::new(LargeHost::of(gpus, model)))
        };
        Self { gpus, numa_nodes: numa_nodes(topology), sets }
    }

    /// Returns the bus bandwidth of an all-reduce over a set; none for fewer than two GPUs.
    ///
    /// On hosts with more than eight GPUs the search for rings is limited, and the result may be
    /// too low.
    #[must_use]
    pub fn bandwidth(&self, gpus: GpuSet) -> Bandwidth {
        let gpus = gpus.intersection(self.gpus);
        match &self.sets {
            Sets::Alike(by_size) => by_size[gpus.len()],
            Sets::Known(outlook, _) => outlook.bandwidth(gpus),
            Sets::Searched(large) => large.bandwidth(gpus),
        }
    }

    /// Returns the best bandwidth of any `size` GPUs; none where the host has fewer.
    #[must_use]
    pub fn best(&self, size: usize) -> Bandwidth {
        match &self.sets {
            Sets::Alike(by_size) | Sets::Known(_, by_size) => {
                by_size.get(size).copied().unwrap_or(Bandwidth::NONE)
            }
            Sets::Searched(large) => large.best(self, size),
        }
    }

    /// Returns the bandwidth of a set relative to the best of its size: 1 for the best.
    #[must_use]
    pub fn share(&self, gpus: GpuSet) -> f64 {
        self.bandwidth(gpus).share_of(self.best(gpus.len()))
    }

    /// Returns the relative bandwidth of the best set of `size` GPUs within `gpus`.
    ///
    /// Hosts without precomputed sets return 1, because a search would cost more than the result is
    /// worth.
    pub(crate) fn best_share_within(&self, gpus: GpuSet, size: usize) -> f64 {
        match &self.sets {
            Sets::Known(outlook, _) => outlook.best_share_within(gpus.intersection(self.gpus), size),
            Sets::Alike(_) | Sets::Searched(_) => 1.0,
        }
    }

    /// Returns what is precomputed about the sets.
    pub(crate) fn sets(&self) -> &Sets {
        &self.sets
    }

    /// Returns the GPUs of each NUMA node.
    pub(crate) fn numa_nodes(&self) -> &[GpuSet] {
        &self.numa_nodes
    }

    /// Returns how many NUMA nodes a set spans and how many other `free` GPUs these have. Less of
    /// both is better.
    pub(crate) fn numa_spread(&self, free: GpuSet, gpus: GpuSet) -> (usize, usize) {
        let touched = self.numa_nodes.iter().filter(|node| !node.intersection(gpus).is_empty());
        touched.fold((0, 0), |(span, beside), node| {
            (span + 1, beside + node.intersection(free).difference(gpus).len())
        })
    }
}

fn is_alike(topology: &Topology) -> bool {
    // The PCIe level under an NVLink does not matter for rings.
    let seen = |(a, b)| {
        let link = topology.link(a, b);
        (link.nvlinks, link.pcie.filter(|_| link.nvlinks == 0))
    };
    let mut pairs = topology.gpus().pairs().map(seen);
    let first = pairs.next();
    pairs.all(|pair| Some(pair) == first)
}

fn numa_nodes(topology: &Topology) -> Vec<GpuSet> {
    let mut nodes: Vec<(Option<u16>, GpuSet)> = Vec::new();
    for gpu in topology.gpus().iter() {
        let numa = topology.numa(gpu);
        match nodes.iter_mut().find(|(node, _)| *node == numa) {
            Some((_, gpus)) => *gpus = gpus.with(gpu),
            None => nodes.push((numa, GpuSet::EMPTY.with(gpu))),
        }
    }
    nodes.into_iter().map(|(_, gpus)| gpus).collect()
}

/// The tables of thousands of sets are left out.
impl fmt::Debug for BandwidthModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BandwidthModel").field("gpus", &self.gpus).finish_non_exhaustive()
    }
}
