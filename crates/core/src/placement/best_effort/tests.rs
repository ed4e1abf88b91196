use proptest::prelude::*;

use super::*;
use crate::fixtures::{dgx1_v100, pcie_pairs};

fn set(indexes: &[u8]) -> GpuSet {
    indexes.iter().copied().map(GpuIndex).collect()
}

#[test]
fn known_answers_for_a_dgx1() {
    const ALL: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
    let both_layers = dgx1_v100().completed_by(&pcie_pairs()).unwrap();
    // The NUMA nodes alone lead to the same choices, except where only the switch tells pairs apart.
    for (topology, by_switch) in [(both_layers, [4, 5]), (dgx1_v100(), [0, 2])] {
        let check = |free: &[u8], required: &[u8], count, expected: &[u8]| {
            let chosen = choose(&topology, set(free), set(required), count);
            assert_eq!(chosen, Some(set(expected)), "{count} of {free:?} with {required:?}");
        };
        check(&[0, 2, 4, 5], &[], 2, &by_switch);
        check(&[0, 4, 5, 6], &[], 2, &[5, 6]);
        check(&[0, 1, 3], &[], 2, &[0, 3]);
        check(&[0, 1, 4], &[], 2, &[0, 4]);
        check(&ALL, &[4], 2, &[4, 7]);
        check(&ALL, &[4], 4, &[4, 5, 6, 7]);
        check(&ALL, &[], 1, &[0]);
        check(&ALL, &[6], 1, &[6]);
        check(&ALL, &[], 8, &ALL);
    }
}

/// The machine in the documents of gputopology, whose matrix has no NUMA column.
#[test]
fn known_answers_for_the_documented_machine() {
    const SINGLE: [(u8, u8); 8] = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)];
    const DOUBLE: [(u8, u8); 8] = [(0, 3), (0, 6), (1, 2), (1, 7), (2, 3), (4, 5), (4, 7), (5, 6)];
    let documented = Topology::from_pairs(8, |a, b| match (a.0, b.0) {
        pair if SINGLE.contains(&pair) => Link::nvlink(1),
        pair if DOUBLE.contains(&pair) => Link::nvlink(2),
        _ => Link::pcie(PcieLevel::System),
    });
    for (count, expected) in [
        (2, &[0, 3][..]),
        (3, &[0, 2, 3]),
        (4, &[0, 1, 2, 3]),
        (5, &[0, 1, 2, 3, 6]),
        (6, &[0, 1, 2, 3, 4, 7]),
    ] {
        let chosen = choose(&documented, documented.gpus(), GpuSet::EMPTY, count);
        assert_eq!(chosen, Some(set(expected)), "{count} GPUs");
    }
}

#[test]
fn only_numa_nodes_tell_a_pcie_level_under_nvlinks() {
    let check = |a, b, expected| {
        assert_eq!(level_by_numa(&dgx1_v100(), GpuIndex(a), GpuIndex(b)), expected, "{a} and {b}");
    };
    check(0, 1, Some(PcieLevel::Node));
    check(1, 2, Some(PcieLevel::Node));
    check(0, 4, Some(PcieLevel::System));
    let without_numa = Topology::from_pairs(4, |_, _| Link::nvlink(1));
    assert_eq!(level_by_numa(&without_numa, GpuIndex(0), GpuIndex(1)), None);
    // Without NVLinks the matrix shows every PCIe level.
    check(0, 5, None);
    // A known level takes precedence over the assumption.
    let known = Topology::from_pairs(2, |_, _| Link { pcie: Some(PcieLevel::Node), nvlinks: 1 });
    assert_eq!(points(&known, GpuIndex(0), GpuIndex(1)), 120);
}

/// Tries every division by the definition: the reference for the search.
fn exhaustive(topology: &Topology, free: GpuSet, required: GpuSet, count: usize) -> Option<GpuSet> {
    fn walk(
        topology: &Topology,
        rest: GpuSet,
        required: GpuSet,
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
        let keeps_required = |group: &GpuSet| {
            let required_here = group.intersection(required);
            required_here.is_empty() || (required_here == required && group.len() == count)
        };
        options.retain(keeps_required);
        for group in options {
            groups.push(group);
            walk(topology, rest.difference(group), required, count, groups, best);
            groups.pop();
        }
    }
    let mut best = (0, Vec::new());
    walk(topology, free, required, count, &mut Vec::new(), &mut best);
    let full = best.1.into_iter().filter(|group| group.len() == count && group.is_superset(required));
    full.max_by_key(|group| (set_score(topology, *group), u8::MAX - group.lowest().map_or(0, |gpu| gpu.0)))
}

fn topology(count: usize, links: &[(u8, Option<PcieLevel>)]) -> Topology {
    Topology::from_pairs(count, |a, b| {
        let (nvlinks, pcie) = links[a.position() * count + b.position()];
        Link { pcie, nvlinks }
    })
}

/// Links of a machine of up to `count` GPUs.
fn links(count: usize) -> impl Strategy<Value = Vec<(u8, Option<PcieLevel>)>> {
    let pcie = proptest::option::of(prop::sample::select(PcieLevel::ALL.to_vec()));
    prop::collection::vec((0u8..3, pcie), count * count)
}

proptest! {
    #[test]
    fn agrees_with_walking_through_every_division(
        links in links(8),
        free in 0u64..256,
        required in 0u64..256,
        count in 2usize..6,
    ) {
        let topology = topology(8, &links);
        let free = GpuSet::from_mask(free);
        let required = GpuSet::from_mask(required).intersection(free).lowest_n(count / 2);
        let chosen = choose(&topology, free, required, count);
        if free.len() < count {
            prop_assert_eq!(chosen, None);
        } else {
            prop_assert_eq!(chosen, exhaustive(&topology, free, required, count));
        }
    }

    #[test]
    fn never_fewer_than_asked_on_large_machines(
        links in links(24),
        free in 0u64..1 << 24,
        most_free in 13usize..=24,
        count in 1usize..20,
    ) {
        let topology = topology(24, &links);
        let free = GpuSet::from_mask(free).lowest_n(most_free);
        let chosen = choose(&topology, free, GpuSet::EMPTY, count);
        prop_assert_eq!(chosen.map(GpuSet::len), (free.len() >= count).then_some(count));
        prop_assert!(chosen.is_none_or(|set| free.is_superset(set)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn is_exact_up_to_twelve_gpus(links in links(12), count in 3usize..6) {
        let topology = topology(12, &links);
        let chosen = choose(&topology, topology.gpus(), GpuSet::EMPTY, count);
        prop_assert_eq!(chosen, exhaustive(&topology, topology.gpus(), GpuSet::EMPTY, count));
    }
}
