//! The test bench of generated workloads: known answers of simple policies on small clusters.

use tessera_sim::cluster::WorkloadKnowledge;
use tessera_sim::cluster::bench::{BenchWorkload, Measure, Measures, Scenario, replay};

use super::cluster::small;

fn scenario(workload: &str, nodes: usize, seed: u64) -> Scenario {
    BenchWorkload::named(workload).unwrap().scenario(nodes, seed).unwrap()
}

fn measures(workload: &str, nodes: usize, policy: &str, seed: u64) -> Measures {
    replay(&scenario(workload, nodes, seed), policy.parse().unwrap(), WorkloadKnowledge::Learned)
}

fn check(workload: &str, policy: &str, expected: &[(Measure, f64)]) {
    let found = measures(workload, 10, policy, 42);
    for (measure, value) in expected {
        assert_eq!(found.get(*measure), Some(*value), "{workload}, {policy}: {measure:?}");
    }
}

#[test]
fn binpack_opens_as_few_gpus_as_alike_shares_need() {
    // The pods request 20 of 80 GPUs. The last pod that would exceed them is left out.
    for (percent, pods) in [(10, 200), (20, 100), (25, 80), (30, 66), (34, 58), (40, 50), (50, 40), (60, 33)]
    {
        let opened = f64::from(u32::div_ceil(pods, 100 / percent));
        for policy in ["binpack", "packing", "best-fit"] {
            let expected = [
                (Measure::Opened, opened),
                (Measure::OpenedPeak, opened),
                (Measure::OneGpuFits, 80.0 - opened),
                (Measure::EightGpuFits, 10.0 - (opened / 8.0).ceil()),
                (Measure::WholeGranted, 0.0),
                (Measure::Granted, 100.0),
                (Measure::NotPlaced, 0.0),
            ];
            check(&format!("alike-{percent}"), policy, &expected);
            check(&format!("restart-alike-{percent}"), policy, &expected);
            check(&format!("memory-{percent}"), policy, &expected);
        }
    }
}

#[test]
fn tessera_opens_no_more_gpus_than_binpack_for_alike_shares() {
    let families = ["alike", "memory", "restart-alike", "turnover", "restart-turnover", "bare"];
    for family in families {
        for percent in [10, 20, 25, 30, 34, 40, 45, 50, 60] {
            let workload = format!("{family}-{percent}");
            let opened = |policy| measures(&workload, 10, policy, 42).get(Measure::Opened).unwrap();
            let (ours, theirs) = (opened("tessera"), opened("binpack"));
            assert!(ours <= theirs * 1.01, "{workload}: {ours} GPUs, binpack {theirs}");
        }
    }
}

/// A scheduler that has seen no pod yet, or was restarted, opens no more GPUs than a rule that needs no knowledge.
#[test]
fn a_fresh_start_is_never_worse_than_best_fit() {
    let shapes = ["alike-25", "alike-30", "alike-45", "two-20-50", "two-25-60", "two-30-70"];
    for (family, shape) in
        ["burst", "restart"].into_iter().flat_map(|family| shapes.map(|shape| (family, shape)))
    {
        let workload = format!("{family}-{shape}");
        for seed in 42..45 {
            let opened = |policy| measures(&workload, 100, policy, seed).get(Measure::Opened).unwrap();
            let (ours, theirs) = (opened("tessera"), opened("best-fit"));
            assert!(ours <= theirs, "{workload}, seed {seed}: {ours} GPUs, best-fit {theirs}");
        }
    }
    for workload in ["burst-mixed", "restart-mixed"] {
        for seed in 42..45 {
            let allocated = |policy| measures(workload, 100, policy, seed).get(Measure::Allocated).unwrap();
            let (ours, theirs) = (allocated("tessera"), allocated("best-fit"));
            assert!(ours >= theirs, "{workload}, seed {seed}: {ours} %, best-fit {theirs} %");
        }
    }
}

#[test]
fn tessera_leaves_large_pods_the_nodes_that_quarters_need_not() {
    for workload in ["quarters-then-8", "restart-quarters-then-8"] {
        let granted = measures(workload, 10, "tessera", 42).get(Measure::WholeGranted);
        assert_eq!(granted, Some(48.0), "{workload}");
    }
}

#[test]
fn tessera_leaves_large_gpus_to_shares_that_need_them_without_having_seen_one() {
    for seed in 7..10 {
        let granted = |policy| measures("kinds-small-first", 12, policy, seed).get(Measure::Granted).unwrap();
        let (ours, theirs) = (granted("tessera"), granted("fgd"));
        assert!(ours >= theirs, "seed {seed}: {ours} %, fgd {theirs} %");
    }
}

#[test]
fn spread_opens_a_gpu_for_each_share() {
    check("alike-50", "spread", &[(Measure::Opened, 40.0), (Measure::EightGpuFits, 0.0)]);
    check("quarters-then-8", "spread", &[(Measure::WholeGranted, 0.0), (Measure::NotPlaced, 6.0)]);
}

#[test]
fn whole_gpu_pods_get_what_packed_shares_leave() {
    let packed = [(Measure::WholeGranted, 48.0), (Measure::Allocated, 100.0), (Measure::NotPlaced, 0.0)];
    check("quarters-then-8", "binpack", &packed);
}

#[test]
fn a_trace_gives_the_allocation_of_the_trace_experiment() {
    for target in [WorkloadKnowledge::Learned, WorkloadKnowledge::Trace] {
        let experiment = small(target);
        for policy in ["random", "binpack", "packing", "best-fit", "fgd", "tessera"] {
            let policy = || policy.parse().unwrap();
            let direct = tessera_sim::cluster::run(&experiment, policy(), 7);
            let replayed = replay(&Scenario::of_trace(&experiment, 7), policy(), target);
            let allocated = replayed.get(Measure::Allocated).unwrap();
            assert!((direct.allocated_percent - allocated).abs() < 1e-9);
            let refused: u32 = direct.refused.iter().sum();
            assert!(replayed.get(Measure::NotPlaced).unwrap() >= f64::from(refused));
        }
    }
}

#[test]
fn a_seed_repeats_and_seeds_differ() {
    let run = |seed| measures("churn-80", 4, "random", seed);
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn waiting_is_measured_only_where_pods_end() {
    assert_eq!(measures("mixed", 4, "binpack", 1).get(Measure::WaitMean), None);
    let idle = measures("churn-alike-1", 20, "binpack", 1);
    assert_eq!((idle.get(Measure::WaitMean), idle.get(Measure::WaitP95)), (Some(0.0), Some(0.0)));
    let busy = measures("churn-95", 4, "random", 1);
    assert!(busy.get(Measure::WaitMean) > Some(0.0));
}

#[test]
fn every_name_is_a_workload_of_that_name() {
    for workload in BenchWorkload::all() {
        assert_eq!(BenchWorkload::named(&workload.name).unwrap().name, workload.name);
    }
    assert_eq!(BenchWorkload::named("two-33-67").unwrap().name, "two-33-67");
    for wrong in
        ["", "alike", "alike-", "alike-0", "alike-100", "alike-025", "two-30", "restart-restart-mixed"]
    {
        assert!(BenchWorkload::named(wrong).is_none(), "{wrong}");
    }
}
