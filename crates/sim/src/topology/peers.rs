//! Published policies that the core does not implement.

use std::cmp::Reverse;

use tessera_core::bandwidth::{Bandwidth, BandwidthModel};
use tessera_core::gpu_set::GpuSet;
use tessera_core::request::LinkSensitivity;
use tessera_core::topology::{PcieLevel, Topology};
use tessera_core::units::GpuIndex;

use super::twister::Twister;

/// Returns a random set; all sets are equally likely.
pub(super) fn random(free: GpuSet, size: usize, draws: &mut Twister) -> GpuSet {
    let mut left: Vec<GpuIndex> = free.iter().collect();
    let mut chosen = GpuSet::EMPTY;
    while chosen.len() < size && !left.is_empty() {
        let position = draws.below(u32::try_from(left.len()).unwrap_or(u32::MAX));
        chosen = chosen.with(left.swap_remove(position as usize));
    }
    chosen
}

/// Policy Greedy of MAPA: returns the set with the highest bandwidth.
pub(super) fn greedy(machine: &BandwidthModel, free: GpuSet, size: usize) -> Option<GpuSet> {
    first_best(free, size, |set| machine.bandwidth(set))
}

/// Policy Preserve of MAPA. Link-sensitive jobs choose greedily. The others keep as many NVLinks as
/// possible among the remaining GPUs.
pub(super) fn preserve(
    topology: &Topology,
    free: GpuSet,
    size: usize,
    traffic: LinkSensitivity,
) -> Option<GpuSet> {
    let machine = topology.bandwidth_model();
    match traffic {
        LinkSensitivity::Sensitive => greedy(machine, free, size),
        LinkSensitivity::Insensitive => {
            let nvlinks = |set: GpuSet| -> u32 {
                set.pairs().map(|(a, b)| u32::from(topology.link(a, b).nvlinks)).sum()
            };
            let key = |set| -> (u32, Bandwidth) { (nvlinks(free.difference(set)), machine.bandwidth(set)) };
            first_best(free, size, key)
        }
    }
}

/// Returns the set with the highest key. Among equal keys the first set wins.
fn first_best<K: Ord>(free: GpuSet, size: usize, key: impl Fn(GpuSet) -> K) -> Option<GpuSet> {
    let mut best: Option<(K, GpuSet)> = None;
    for set in free.subsets(size) {
        let key = key(set);
        if best.as_ref().is_none_or(|(highest, _)| key > *highest) {
            best = Some((key, set));
        }
    }
    best.map(|(_, set)| set)
}

/// The tree of access costs of Gaia: takes the nearest group with enough free GPUs, the fullest of
/// those, and fills it child by child.
///
/// All pairs of a group are near, unlike in the tree of the core. Therefore a mesh, in which GPUs
/// reach each other over a third one, still falls into groups.
pub(super) fn tree(topology: &Topology, free: GpuSet, size: usize) -> Option<GpuSet> {
    let levels = levels(topology);
    let fitting = |groups: &Vec<GpuSet>| tightest(groups.iter().copied(), free, size);
    let (level, group) =
        levels.iter().enumerate().find_map(|(level, groups)| Some((level, fitting(groups)?)))?;
    Some(fill(&levels[..level], group, free, size))
}

/// Returns how near two GPUs are: any NVLink, or the PCIe level.
fn nearness(topology: &Topology, a: GpuIndex, b: GpuIndex) -> (bool, PcieLevel) {
    let link = topology.link(a, b);
    if link.nvlinks > 0 {
        (true, PcieLevel::SameBoard)
    } else {
        (false, link.pcie.unwrap_or(PcieLevel::System))
    }
}

/// Returns the groups of each level, from single GPUs to the whole host.
fn levels(topology: &Topology) -> Vec<Vec<GpuSet>> {
    let mut steps: Vec<_> = topology.gpus().pairs().map(|(a, b)| nearness(topology, a, b)).collect();
    steps.sort_unstable();
    steps.dedup();
    let mut groups: Vec<GpuSet> = topology.gpus().iter().map(|gpu| GpuSet::EMPTY.with(gpu)).collect();
    let mut levels = vec![groups.clone()];
    for step in steps.into_iter().rev() {
        let near = |a: GpuSet, b: GpuSet| {
            a.iter().all(|one| b.iter().all(|other| nearness(topology, one, other) >= step))
        };
        while let Some((first, second)) = joinable(&groups, near) {
            let joined = groups.remove(second);
            groups[first] = groups[first].union(joined);
        }
        levels.push(groups.clone());
    }
    levels.push(vec![topology.gpus()]);
    levels
}

/// Returns the first two groups that may be joined.
fn joinable(groups: &[GpuSet], near: impl Fn(GpuSet, GpuSet) -> bool) -> Option<(usize, usize)> {
    let pairs =
        (0..groups.len()).flat_map(|first| (first + 1..groups.len()).map(move |second| (first, second)));
    pairs.into_iter().find(|(first, second)| near(groups[*first], groups[*second]))
}

/// Returns the fullest group with at least `size` free GPUs.
fn tightest(groups: impl Iterator<Item = GpuSet>, free: GpuSet, size: usize) -> Option<GpuSet> {
    let available = |group: &GpuSet| group.intersection(free).len();
    let enough = groups.filter(|group| available(group) >= size);
    enough.min_by_key(|group| (available(group), group.lowest()))
}

/// Takes GPUs from the child with enough free ones, otherwise from the largest children until
/// `size` is reached.
fn fill(below: &[Vec<GpuSet>], group: GpuSet, free: GpuSet, size: usize) -> GpuSet {
    let open = group.intersection(free);
    let Some((children, below)) = below.split_last() else {
        return open.lowest_n(size);
    };
    let mut children: Vec<GpuSet> =
        children.iter().copied().filter(|child| group.is_superset(*child)).collect();
    if let Some(child) = tightest(children.iter().copied(), free, size) {
        return fill(below, child, free, size);
    }
    children.sort_by_key(|child| (Reverse(child.intersection(free).len()), child.lowest()));
    children.into_iter().fold(GpuSet::EMPTY, |chosen, child| {
        let share = child.intersection(free).len().min(size - chosen.len());
        chosen.union(fill(below, child, free, share))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_core::topology::Link;

    fn set(indexes: &[u8]) -> GpuSet {
        indexes.iter().copied().map(GpuIndex).collect()
    }

    /// Returns a ring of four GPUs with single NVLinks, one of them doubled.
    fn square() -> Topology {
        Topology::from_pairs(4, |a, b| match (a.0, b.0) {
            (2, 3) => Link::nvlink(2),
            (0, 1) | (1, 2) | (0, 3) => Link::nvlink(1),
            _ => Link::pcie(PcieLevel::System),
        })
    }

    #[test]
    fn greedy_takes_the_fastest_set() {
        let square = square();
        assert_eq!(greedy(square.bandwidth_model(), set(&[0, 1, 2, 3]), 2), Some(set(&[2, 3])));
        assert_eq!(greedy(square.bandwidth_model(), set(&[0, 1, 2]), 2), Some(set(&[0, 1])));
        assert_eq!(greedy(square.bandwidth_model(), set(&[0]), 2), None);
    }

    #[test]
    fn preserve_keeps_nvlinks_free_for_sensitive_jobs() {
        let all = set(&[0, 1, 2, 3]);
        assert_eq!(preserve(&square(), all, 2, LinkSensitivity::Sensitive), Some(set(&[2, 3])));
        assert_eq!(preserve(&square(), all, 2, LinkSensitivity::Insensitive), Some(set(&[0, 1])));
        assert_eq!(preserve(&square(), all, 1, LinkSensitivity::Insensitive), Some(set(&[0])));
    }

    #[test]
    fn the_tree_chooses_groups_of_near_gpus() {
        // The levels are single GPUs, pairs and the whole host. Both pairs are equally near.
        assert_eq!(tree(&square(), set(&[0, 1, 2, 3]), 2), Some(set(&[0, 1])));
        assert_eq!(tree(&square(), set(&[1, 2, 3]), 2), Some(set(&[2, 3])));
        assert_eq!(tree(&square(), set(&[1, 2, 3]), 3), Some(set(&[1, 2, 3])));
        assert_eq!(tree(&square(), set(&[0, 1, 3]), 1), Some(set(&[0])));
        assert_eq!(tree(&square(), set(&[0, 1]), 3), None);
    }

    #[test]
    fn random_draws_from_the_free_gpus() {
        let free = set(&[1, 4, 6]);
        let mut draws = Twister::new(7);
        for size in 0..=3 {
            let chosen = random(free, size, &mut draws);
            assert_eq!(chosen.len(), size);
            assert!(free.is_superset(chosen));
        }
    }
}
