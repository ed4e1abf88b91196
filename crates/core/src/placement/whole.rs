//! The choice of whole GPUs by gpu-manager's rules over the topology tree, and by `spread`.

use std::cmp::Reverse;

use crate::gpu_set::GpuSet;
use crate::tree::{Group, GroupLevel, TopologyTree};
use crate::units::GpuIndex;

/// Chooses the GPUs with the lowest indexes in [`link_group`].
pub(super) fn link(tree: &Group, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    let group = link_group(tree, free, required, count);
    free.intersection(group.gpus).lowest_with(required, count)
}

/// Returns the tightest group with enough free GPUs; among equals the fullest, then the one with
/// the lowest index.
pub(super) fn link_group(tree: &Group, free: GpuSet, required: GpuSet, count: usize) -> &Group {
    let enough = |group: &&Group| available(group, free, required) >= count;
    let tightest = tree.groups().into_iter().filter(|group| group.level != GroupLevel::Root).filter(enough);
    let order = |group: &&Group| (group.level, available(group, free, required), group.gpus.lowest());
    tightest.min_by_key(order).unwrap_or(tree)
}

/// Chooses the GPUs with the lowest indexes in [`fragment_group`].
pub(super) fn fragment(tree: &Group, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    let group = fragment_group(tree, free, required, count);
    free.intersection(group.gpus).lowest_with(required, count)
}

/// Descends from the root into the child with the fewest free GPUs that still suffice, and returns
/// the last group.
pub(super) fn fragment_group(tree: &Group, free: GpuSet, required: GpuSet, count: usize) -> &Group {
    let mut group = tree;
    loop {
        let children = group.children.iter().filter_map(|child| match child {
            TopologyTree::Group(child) => Some(child),
            TopologyTree::Leaf(_) => None,
        });
        let enough = children.filter(|child| available(child, free, required) >= count);
        match enough.min_by_key(|child| (available(child, free, required), child.gpus.lowest())) {
            Some(child) => group = child,
            None => return group,
        }
    }
}

/// Chooses one GPU after the other. At every level it takes the branch with the fewest chosen GPUs,
/// then the most free ones.
pub(super) fn spread(tree: &Group, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    free.lowest_with(required, count)?;
    let mut chosen = required;
    while chosen.len() < count {
        chosen = chosen.with(most_remote(tree, free, chosen)?);
    }
    Some(chosen)
}

fn most_remote(group: &Group, free: GpuSet, chosen: GpuSet) -> Option<GpuIndex> {
    let left = |child: &TopologyTree| child.gpus().intersection(free).difference(chosen).len();
    let order = |child: &&TopologyTree| (child.gpus().intersection(chosen).len(), Reverse(left(child)));
    match group.children.iter().filter(|child| left(child) > 0).min_by_key(order)? {
        TopologyTree::Leaf(gpu) => Some(*gpu),
        TopologyTree::Group(child) => most_remote(child, free, chosen),
    }
}

/// Counts the free GPUs of a group; 0 where the group lacks a required GPU.
fn available(group: &Group, free: GpuSet, required: GpuSet) -> usize {
    if group.gpus.is_superset(required) { free.intersection(group.gpus).len() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Link, PcieLevel, Topology};

    /// Returns two sockets of four GPUs each, in pairs behind a switch.
    fn two_sockets() -> Group {
        TopologyTree::of(&Topology::from_pairs(8, |a, b| {
            Link::pcie(match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
                (true, _) => PcieLevel::SingleSwitch,
                (false, true) => PcieLevel::HostBridge,
                (false, false) => PcieLevel::System,
            })
        }))
    }

    fn set(indexes: &[u8]) -> GpuSet {
        indexes.iter().copied().map(GpuIndex).collect()
    }

    type Rule = fn(&Group, GpuSet, GpuSet, usize) -> Option<GpuSet>;

    fn check(rule: Rule, free: &[u8], required: &[u8], count: usize, expected: &[u8]) {
        let chosen = rule(&two_sockets(), set(free), set(required), count);
        assert_eq!(chosen, Some(set(expected)), "{count} of {free:?} with {required:?}");
    }

    const ALL: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    #[test]
    fn link_takes_the_tightest_group_then_the_fullest() {
        check(link, &ALL, &[], 2, &[0, 1]);
        check(link, &[0, 2, 4, 5], &[], 2, &[4, 5]);
        check(link, &[1, 2, 3, 4, 5, 6, 7], &[], 3, &[1, 2, 3]);
        check(link, &[0, 4, 6], &[], 2, &[4, 6]);
        check(link, &[0, 4], &[], 2, &[0, 4]);
        check(link, &ALL, &[5], 2, &[4, 5]);
        assert_eq!(link(&two_sockets(), set(&[0, 4]), GpuSet::EMPTY, 3), None);
    }

    #[test]
    fn fragment_fills_the_subtree_with_the_fewest_free_gpus() {
        check(fragment, &ALL, &[], 1, &[0]);
        check(fragment, &[0, 1, 2, 3, 5, 6, 7], &[], 1, &[5]);
        check(fragment, &[0, 1, 2, 6, 7], &[], 1, &[6]);
        check(fragment, &[0, 1, 2, 3, 4, 6, 7], &[], 1, &[4]);
    }

    #[test]
    fn spread_keeps_the_gpus_apart() {
        check(spread, &ALL, &[], 2, &[0, 4]);
        check(spread, &ALL, &[], 4, &[0, 2, 4, 6]);
        check(spread, &[0, 1, 6], &[], 2, &[0, 6]);
        check(spread, &ALL, &[7], 2, &[0, 7]);
    }
}
