use super::*;
use crate::fixtures::{bridged_pairs, dgx1_v100, node, pcie_pairs, switched};
use crate::grant::{ContainerGrant, Hold, PodGrant};
use crate::request::ContainerRole;
use crate::topology::{Link, PcieLevel, Topology};
use crate::units::{GpuIndex, MiB, MilliCpu, Percent};

fn set(indexes: &[u8]) -> GpuSet {
    indexes.iter().copied().map(GpuIndex).collect()
}

fn hold(node: &mut NodeState, gpus: &[u8], hold: Hold) {
    let container = ContainerGrant {
        container: "main".into(),
        role: ContainerRole::Main,
        holds: gpus.iter().map(|gpu| (GpuIndex(*gpu), hold)).collect(),
    };
    node.add(&PodGrant {
        pod: "p".into(),
        node: "n".into(),
        cpu: MilliCpu::ZERO,
        memory: MiB::ZERO,
        containers: vec![container],
    });
}

/// Chooses `count` of the `free` GPUs; a pod of its own holds each other GPU.
fn choice(
    topology: &Topology,
    free: &[u8],
    required: &[u8],
    count: usize,
    link_sensitivity: LinkSensitivity,
) -> Option<GpuSet> {
    let mut node = node(topology, &[]);
    for gpu in topology.gpus().difference(set(free)).iter() {
        hold(&mut node, &[gpu.0], Hold::Whole);
    }
    let situation = Situation {
        wanted: Wanted { free: set(free), candidates: set(free), required: set(required), size: count },
        held: released_together(&node),
        link_sensitivity,
    };
    choose_in(topology.bandwidth_model(), &situation)
}

fn check(topology: &Topology, free: &[u8], required: &[u8], count: usize, expected: &[u8]) {
    let chosen = choice(topology, free, required, count, LinkSensitivity::Sensitive);
    assert_eq!(chosen, Some(set(expected)), "{count} of {free:?} with {required:?}");
}

const ALL: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

#[test]
fn the_fastest_set_of_a_dgx1() {
    check(&dgx1_v100(), &ALL, &[], 2, &[0, 3]);
    check(&dgx1_v100(), &ALL, &[], 3, &[0, 2, 3]);
    check(&dgx1_v100(), &ALL, &[], 4, &[0, 1, 2, 3]);
    check(&dgx1_v100(), &ALL, &[], 8, &ALL);
    check(&dgx1_v100(), &[0, 1, 3], &[], 2, &[0, 3]);
    check(&dgx1_v100(), &[0, 1, 4], &[], 2, &[0, 4]);
    check(&dgx1_v100(), &[0, 2, 4, 5], &[], 2, &[0, 4]);
    check(&dgx1_v100(), &ALL, &[4], 4, &[4, 5, 6, 7]);
    check(&dgx1_v100(), &ALL, &[1, 6], 2, &[1, 6]);
}

#[test]
fn a_single_gpu_is_the_one_that_later_sets_need_least() {
    check(&bridged_pairs(), &[0, 1, 2], &[], 1, &[2]);
    check(&bridged_pairs(), &[1, 2, 3, 4, 5, 6, 7], &[], 1, &[1]);
    check(&bridged_pairs(), &ALL, &[6], 1, &[6]);
    check(&pcie_pairs(), &[0, 1, 2, 3, 5], &[], 1, &[5]);
    // Three GPUs behind one bridge, the fourth across the sockets.
    let lopsided = Topology::from_pairs(4, |a, _| {
        Link::pcie(if a.0 == 0 { PcieLevel::System } else { PcieLevel::HostBridge })
    });
    check(&lopsided, &[0, 1, 2, 3], &[], 1, &[0]);
}

#[test]
fn an_insensitive_job_leaves_the_good_links() {
    let chosen = |free, count| choice(&dgx1_v100(), free, &[], count, LinkSensitivity::Insensitive);
    // {0,3} has two NVLinks, {0,1} one: of three GPUs the pair left over matters, not the pair
    // taken.
    assert_eq!(chosen(&[0, 1, 3], 1), Some(set(&[1])));
    assert_eq!(chosen(&[0, 1, 2, 3, 5], 1), Some(set(&[5])));
    let chosen = choice(&bridged_pairs(), &[0, 1, 2, 4], &[], 2, LinkSensitivity::Insensitive);
    assert_eq!(chosen, Some(set(&[2, 4])));
}

#[test]
fn behind_a_switch_numa_nodes_are_kept_together() {
    let free = [1, 2, 4, 5, 6, 7];
    check(&switched(8, 18), &free, &[], 1, &[1]);
    check(&switched(8, 18), &free, &[], 2, &[1, 2]);
    check(&switched(8, 18), &free, &[], 3, &[4, 5, 6]);
    check(&switched(8, 18), &free, &[], 4, &[4, 5, 6, 7]);
    check(&switched(8, 18), &free, &[], 5, &[1, 4, 5, 6, 7]);
    check(&switched(8, 18), &free, &[2], 2, &[1, 2]);
    check(&switched(8, 18), &free, &[5], 2, &[4, 5]);
    check(&switched(8, 18), &free, &[1, 5], 2, &[1, 5]);
    check(&Topology::unknown(8), &free, &[], 3, &[1, 2, 4]);
}

#[test]
fn returns_none_for_too_few_gpus() {
    let chosen = |required, count| choice(&dgx1_v100(), &[0, 1], required, count, LinkSensitivity::Sensitive);
    assert_eq!(chosen(&[], 3), None);
    assert_eq!(chosen(&[0, 1], 1), None);
    assert_eq!(chosen(&[7], 2), None);
}

#[test]
fn groups_the_gpus_that_become_free_together() {
    let mut node = node(&pcie_pairs(), &[5]);
    hold(&mut node, &[0, 1], Hold::Whole);
    hold(&mut node, &[4, 5], Hold::Whole);
    let part = Hold::Share { compute_percent: Percent(10), memory: MiB(1) };
    for gpus in [[2, 3], [3, 6]] {
        hold(&mut node, &gpus, part);
    }
    let mut sets = released_together(&node);
    sets.sort_by_key(|set| set.mask());
    assert_eq!(sets, [set(&[0, 1]), set(&[2]), set(&[3]), set(&[4]), set(&[6])]);
}

#[test]
fn gpus_of_running_jobs_decide_between_scattered_gpus() {
    // One GPU behind each of two switches is free. The one whose neighbour becomes free alone is
    // better for a pair.
    let topology = pcie_pairs();
    let chosen = |held: [&[u8]; 2]| {
        let free = set(&[1, 3]);
        let wanted = Wanted { free, candidates: free, required: GpuSet::EMPTY, size: 1 };
        let held = held.map(set).to_vec();
        choose_in(
            topology.bandwidth_model(),
            &Situation { wanted, held, link_sensitivity: LinkSensitivity::Sensitive },
        )
    };
    assert_eq!(chosen([&[0], &[2, 4, 5, 6, 7]]), Some(set(&[3])));
    assert_eq!(chosen([&[2], &[0, 4, 5, 6, 7]]), Some(set(&[1])));
}
