//! Policy `best-effort`: the best group of the best division of all free GPUs.
//!
//! Pairs score 100 per NVLink plus points for their PCIe level. The free GPUs are divided into
//! groups of the requested size so that the total is highest, and the best group of that division
//! is granted. A pair that suits this job is therefore not taken where that would split two good
//! pairs.

mod division;
mod guess;
mod pairs;

use std::cmp::Reverse;

use crate::gpu_set::GpuSet;
use crate::topology::{Link, PcieLevel, Topology};
use crate::units::GpuIndex;
use division::Division;

/// Returns the points of a link.
fn pair_score(link: Link) -> u32 {
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

/// Returns the points of all pairs of a set.
#[must_use]
pub fn set_score(topology: &Topology, gpus: GpuSet) -> u32 {
    gpus.pairs().map(|(a, b)| points(topology, a, b)).sum()
}

/// Returns the points of two GPUs.
fn points(topology: &Topology, a: GpuIndex, b: GpuIndex) -> u32 {
    let link = topology.link(a, b);
    let pcie = link.pcie.or_else(|| level_by_numa(topology, a, b));
    pair_score(Link { pcie, ..link })
}

/// Returns what the NUMA nodes of two GPUs tell about a PCIe level that the matrix hides below NVLinks.
///
/// `nvidia-smi topo -m` hides the level, and `topo -mp` and NVML show it. Nothing else about it is
/// assumed: boards wire their switches differently, and a wrong level would decide between pairs with
/// equal NVLinks.
fn level_by_numa(topology: &Topology, a: GpuIndex, b: GpuIndex) -> Option<PcieLevel> {
    let (numa_a, numa_b) = (topology.numa(a)?, topology.numa(b)?);
    let level = if numa_a == numa_b { PcieLevel::Node } else { PcieLevel::System };
    (topology.link(a, b).nvlinks > 0).then_some(level)
}

/// Chooses `count` of the `free` GPUs, including `required`; `None` where there are too few.
pub(super) fn choose(topology: &Topology, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    let lowest = free.lowest_with(required, count)?;
    let mut pairs = free.pairs().map(|(a, b)| points(topology, a, b));
    let first = pairs.next();
    let all_alike = pairs.all(|pair| Some(pair) == first);
    if count <= 1 || free.len() == count || all_alike {
        return Some(lowest);
    }
    if free.len() <= Division::MAX_GPUS {
        Division::new(topology, free, required, count).best_group()
    } else {
        grow(topology, free, required, count)
    }
}

/// Chooses a set on a large host: grows one set from every start by the GPU that adds most, and
/// returns the best set.
fn grow(topology: &Topology, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    let starts: Vec<GpuSet> = if required.is_empty() {
        free.iter().map(|gpu| GpuSet::EMPTY.with(gpu)).collect()
    } else {
        vec![required]
    };
    let mut best: Option<(u32, GpuSet)> = None;
    for mut set in starts {
        let mut score = set_score(topology, set);
        // The points of each GPU with the set so far.
        let with_set = |gpu| set.iter().map(|member| points(topology, member, gpu)).sum();
        let mut gains: Vec<(GpuIndex, u32)> = free.iter().map(|gpu| (gpu, with_set(gpu))).collect();
        while set.len() < count {
            gains.retain(|(gpu, _)| !set.contains(*gpu));
            let (next, gain) = *gains.iter().min_by_key(|(_, gain)| Reverse(*gain))?;
            set = set.with(next);
            score += gain;
            gains.iter_mut().for_each(|(gpu, gain)| *gain += points(topology, next, *gpu));
        }
        if best.is_none_or(|(highest, _)| score > highest) {
            best = Some((score, set));
        }
    }
    best.map(|(_, set)| set)
}

#[cfg(test)]
mod tests;
