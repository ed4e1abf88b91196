use proptest::prelude::*;

use super::*;
use crate::fixtures::{bridged_pairs, dgx1_v100, pcie_pairs, switched};
use crate::topology::{Link, PcieLevel};
use crate::units::GpuIndex;

fn set(indexes: &[u8]) -> GpuSet {
    indexes.iter().copied().map(GpuIndex).collect()
}

fn check(topology: &Topology, indexes: &[u8], expected: f64) {
    let bandwidth = topology.bandwidth_model().bandwidth(set(indexes)).gb_per_second();
    assert!((bandwidth - expected).abs() < 1e-9, "{indexes:?}: {bandwidth}, expected {expected}");
}

/// Returns the best, mean and worst bandwidth of all sets of a size.
fn spread(topology: &Topology, size: usize) -> [String; 3] {
    let rates: Vec<f64> = topology
        .gpus()
        .subsets(size)
        .map(|gpus| topology.bandwidth_model().bandwidth(gpus).gb_per_second())
        .collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let best = rates.iter().copied().fold(0.0, f64::max);
    let worst = rates.iter().copied().fold(f64::MAX, f64::min);
    [best, mean, worst].map(|rate| format!("{rate:.1}"))
}

#[test]
fn what_is_known_of_a_dgx1_with_v100() {
    let dgx1 = dgx1_v100();
    assert_eq!(spread(&dgx1, 2), ["40.0", "19.7", "6.0"]);
    assert_eq!(spread(&dgx1, 3), ["40.0", "10.9", "6.0"]);
    assert_eq!(spread(&dgx1, 4), ["80.0", "11.0", "6.0"]);
    assert_eq!(spread(&dgx1, 5), ["40.0", "20.6", "6.0"]);
    assert_eq!(spread(&dgx1, 6), ["80.0", "45.7", "40.0"]);
    assert_eq!(spread(&dgx1, 8), ["120.0", "120.0", "120.0"]);
    assert_eq!(dgx1.bandwidth_model().best(4).to_string(), "80.0 GB/s");
    assert!((dgx1.bandwidth_model().share(set(&[0, 1])) - 0.5).abs() < 1e-9);
}

#[test]
fn the_pcie_level_under_nvlinks_changes_nothing() {
    let both = dgx1_v100().completed_by(&pcie_pairs()).unwrap();
    for gpus in (0..256).map(GpuSet::from_mask) {
        assert_eq!(both.bandwidth_model().bandwidth(gpus), dgx1_v100().bandwidth_model().bandwidth(gpus));
    }
}

#[test]
fn over_pcie_the_slowest_hop_of_the_best_ring_counts() {
    check(&pcie_pairs(), &[0, 1], 12.0);
    check(&pcie_pairs(), &[0, 1, 2, 3], 10.0);
    check(&pcie_pairs(), &[0, 1, 4], 6.0);
}

#[test]
fn a_third_gpu_falls_off_the_bridge() {
    check(&bridged_pairs(), &[2, 3], 240.0);
    check(&bridged_pairs(), &[2, 3, 0], 9.0);
    check(&bridged_pairs(), &[2, 3, 4, 5], 6.0);
}

#[test]
fn behind_a_switch_all_sets_of_a_size_are_alike() {
    check(&switched(8, 18), &[1, 6], 370.8);
    check(&switched(8, 18), &[0, 1, 2, 3, 5], 370.8);
    check(&switched(16, 6), &[0, 15, 7], 120.0);
    // Four GPUs with four links between any two are wired, and three rings use them up twice over.
    check(&switched(4, 4), &[0, 1, 2, 3], 240.0);
    check(&switched(4, 4), &[0, 1], 80.0);
}

#[test]
fn few_gpus_and_unknown_links() {
    check(&Topology::unknown(0), &[], 0.0);
    check(&Topology::unknown(1), &[0], 0.0);
    check(&Topology::unknown(8), &[0, 1, 2], 6.0);
    check(&Topology::unknown(3), &[0, 9], 0.0);
    let half_known =
        Topology::from_pairs(
            3,
            |a, _| {
                if a.0 == 0 { Link::pcie(PcieLevel::SingleSwitch) } else { Link::default() }
            },
        );
    check(&half_known, &[0, 1], 12.0);
    check(&half_known, &[0, 1, 2], 6.0);
    assert_eq!(half_known.bandwidth_model().best(7), Bandwidth::NONE);
}

#[test]
fn large_machines_are_searched() {
    // Six switches with four GPUs each.
    let topology = Topology::from_pairs(24, |a, b| {
        Link::pcie(if a.0 / 4 == b.0 / 4 { PcieLevel::SingleSwitch } else { PcieLevel::System })
    });
    let machine = topology.bandwidth_model();
    assert_eq!(machine.best(4).to_string(), "12.0 GB/s");
    assert_eq!(machine.best(5).to_string(), "6.0 GB/s");
    assert_eq!(machine.best(24).to_string(), "6.0 GB/s");
    assert_eq!(machine.best(25), Bandwidth::NONE);
    let Sets::Searched(large) = machine.sets() else { panic!("24 GPUs are too many to know every set") };
    let search = |candidates: &[u8], required: &[u8], size| {
        let candidates = set(candidates);
        let wanted = Wanted { free: candidates, candidates, required: set(required), size };
        large.search(machine, wanted, Aim::Bandwidth)
    };
    assert_eq!(search(&[0, 1, 5, 6, 7, 9], &[], 3), Some(set(&[5, 6, 7])));
    assert_eq!(search(&[0, 1, 5, 6, 7, 9], &[1], 2), Some(set(&[0, 1])));
    assert_eq!(search(&[0, 1, 5, 6, 7, 9], &[], 2), Some(set(&[0, 1])));
    assert_eq!(search(&[0, 1, 5], &[], 4), None);
}

/// Returns every order of the GPUs after the first.
fn rings(gpus: &[GpuIndex]) -> Vec<Vec<GpuIndex>> {
    let Some((last, others)) = gpus.split_last() else { return vec![Vec::new()] };
    let shorter = rings(others);
    let with_last = |ring: &Vec<GpuIndex>| {
        (ring.len().min(1)..=ring.len())
            .map(|at| [&ring[..at], &[*last], &ring[at..]].concat())
            .collect::<Vec<_>>()
    };
    shorter.iter().flat_map(with_last).collect()
}

/// Returns the slowest hop of the best ring in tenths of a GB/s, where NVLinks count as infinitely
/// fast.
fn best_ring(topology: &Topology, gpus: GpuSet) -> u32 {
    let hop = |a, b| {
        let link = topology.link(a, b);
        let pcie = match link.pcie.unwrap_or(PcieLevel::System) {
            PcieLevel::System => 60,
            PcieLevel::Node => 90,
            PcieLevel::HostBridge => 100,
            PcieLevel::MultiSwitch => 115,
            PcieLevel::SingleSwitch | PcieLevel::SameBoard => 120,
        };
        if link.nvlinks > 0 { u32::MAX } else { pcie }
    };
    let slowest = |ring: &Vec<GpuIndex>| {
        let hops = ring.iter().zip(ring.iter().cycle().skip(1));
        hops.map(|(a, b)| hop(*a, *b)).min().unwrap_or(0)
    };
    let members: Vec<GpuIndex> = gpus.iter().collect();
    rings(&members).iter().map(slowest).max().unwrap_or(0)
}

fn link() -> impl Strategy<Value = Link> {
    let pcie = proptest::option::of(prop::sample::select(PcieLevel::ALL.to_vec()));
    (pcie, prop::sample::select(vec![0u8, 0, 0, 1, 2])).prop_map(|(pcie, nvlinks)| Link { pcie, nvlinks })
}

proptest! {
    #[test]
    fn agrees_with_trying_every_ring(count in 3usize..=6, links in prop::collection::vec(link(), 36)) {
        let topology = Topology::from_pairs(count, |a, b| links[a.position() * 6 + b.position()]);
        for size in 3..=count {
            for gpus in topology.gpus().subsets(size) {
                let (predicted, best) = (topology.bandwidth_model().bandwidth(gpus).tenths(), best_ring(&topology, gpus));
                if best == u32::MAX {
                    // How many rings, the packing's own test tells.
                    prop_assert!(predicted >= 360 && (predicted % 360 == 0 || predicted % 400 == 0), "{predicted}");
                } else {
                    prop_assert_eq!(predicted, best, "{}", gpus);
                }
            }
        }
    }

    #[test]
    fn one_set_and_all_sets_are_worked_out_alike(links in prop::collection::vec(link(), 64)) {
        let topology = Topology::from_pairs(8, |a, b| links[a.position() * 8 + b.position()]);
        let model = RingModel::of(&topology);
        let all = model.bandwidths();
        for set in 0..256u64 {
            prop_assert_eq!(model.bandwidth(set), all[mask::index(set)]);
        }
    }

    #[test]
    fn no_set_is_better_than_the_best_of_its_size(links in prop::collection::vec(link(), 64), gpus in 0u64..256) {
        let topology = Topology::from_pairs(8, |a, b| links[a.position() * 8 + b.position()]);
        let share = topology.bandwidth_model().share(GpuSet::from_mask(gpus));
        prop_assert!((0.0..=1.0).contains(&share));
    }
}
