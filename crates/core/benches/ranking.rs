//! Ranks all nodes of a cluster for one pod, as the scheduler does for every waiting pod.
//!
//! `cargo bench -p tessera-core --bench ranking`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark speaks, and may fail")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_core::forecast::{Forecast, FreeCapacity};
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::scoreboard::Scoreboard;
use tessera_core::placement::{Policy, filter, place, score};
use tessera_core::request::{PodRequest, Request};
use tessera_core::topology::{Link, Topology};
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};
use tessera_core::workload::Workload;

const GPUS_PER_NODE: u8 = 8;
const MEMORY: MiB = MiB(81_920);
const PODS_PER_NODE: usize = 4;

/// The number of classes in the trace of a large cluster, rounded.
const KINDS_EXPECTED: u64 = 100;

fn share(compute_percent: u32) -> PodRequest {
    let request = Request::share(Percent(compute_percent), MiB(MEMORY.0 * u64::from(compute_percent) / 100));
    PodRequest { cpu: MilliCpu(4000), memory: MiB(16_384), ..PodRequest::of_mains([request]) }
}

fn whole(gpus: u8) -> PodRequest {
    let cpu = MilliCpu(8000 * u64::from(gpus));
    PodRequest { cpu, memory: MiB(65_536), ..PodRequest::of_mains([Request::Whole(gpus)]) }
}

/// Returns the pods of the cluster in turn.
fn pod(number: usize) -> PodRequest {
    [share(30), share(50), whole(1), share(20), whole(2), share(80)][number % 6].clone()
}

/// Returns the pods that a forecast expects, each of its own class.
fn expected(number: u64) -> PodRequest {
    let pod = pod(usize::try_from(number).unwrap());
    PodRequest { cpu: MilliCpu(pod.cpu.0 + 10 * number), ..pod }
}

fn cluster(nodes: usize) -> Vec<NodeState> {
    let topology = Topology::from_pairs(usize::from(GPUS_PER_NODE), |_, _| Link::nvlink(18));
    let mut ledger = Ledger::default();
    let mut names = Vec::new();
    for number in 0..nodes {
        let gpu = |index| {
            Gpu::new(GpuIndex(index), format!("GPU-{number}-{index}").as_str().into(), "H100".into(), MEMORY)
        };
        let gpus = (0..GPUS_PER_NODE).map(gpu).collect();
        let name = tessera_core::units::NodeName(format!("node-{number:05}"));
        let node =
            Node::new(name.clone(), gpus, topology.clone(), MilliCpu(128_000), MiB(1_048_576)).unwrap();
        ledger.set_node(node);
        for held in 0..PODS_PER_NODE {
            let pod = pod(number * 7 + held);
            let state = ledger.node(&name).unwrap();
            let placement = place(state, &pod, &Policy::Binpack, GpuSet::EMPTY).unwrap();
            let grant = PodGrant {
                pod: format!("{number}-{held}").as_str().into(),
                node: name.clone(),
                cpu: pod.cpu,
                memory: pod.memory,
                containers: placement.grants(state.node(), &pod),
            };
            ledger.book(grant).unwrap();
        }
        names.push(name);
    }
    names.iter().map(|name| ledger.node(name).unwrap().clone()).collect()
}

/// Measures the median and the 99th percentile of a call.
fn measure(mut call: impl FnMut(usize)) -> (Duration, Duration) {
    let calls = 200;
    let mut took: Vec<Duration> = (0..calls)
        .map(|number| {
            let start = Instant::now();
            call(number);
            start.elapsed()
        })
        .collect();
    took.sort();
    (took[calls / 2], took[calls * 99 / 100])
}

fn main() {
    for nodes in [500, 5_000, 10_000] {
        let states = cluster(nodes);
        let take = || states.iter().collect::<FreeCapacity>();
        let remains = take();
        let workload = Workload::of(&(0..6).map(pod).collect::<Vec<_>>());
        let tessera = Policy::Tessera(Arc::new(Forecast::new(&workload, &remains)));
        println!(
            "{nodes} nodes x {GPUS_PER_NODE} GPUs, {} pods: filter and score of every node",
            nodes * PODS_PER_NODE
        );
        let rank = |policy: &Policy, pod: &PodRequest| {
            for state in &states {
                if filter(state, pod, policy).is_ok() {
                    let _ = black_box(score(state, pod, policy));
                }
            }
        };
        let (base, _) = report("binpack", None, measure(|number| rank(&Policy::Binpack, &pod(number))));
        report("tessera", Some(base), measure(|number| rank(&tessera, &pod(number))));
        let mut board = Scoreboard::new(states.len());
        let remembered = measure(|number| {
            board.touch(number % states.len());
            let pod = pod(number);
            black_box(board.best(&pod, |node| score(&states[node], &pod, &tessera).ok()));
        });
        report("tessera, scores remembered", Some(base), remembered);
        let workload = Workload::of(&(0..KINDS_EXPECTED).map(expected).collect::<Vec<_>>());
        report("taken for a forecast", Some(base), measure(|_| drop(black_box(take()))));
        let made = measure(|_| drop(black_box(Forecast::new(&workload, &remains))));
        report("forecast made of it", Some(base), made);
    }
}

fn report(what: &str, base: Option<Duration>, took: (Duration, Duration)) -> (Duration, Duration) {
    let ratio = base.map_or(1.0, |base| took.0.as_secs_f64() / base.as_secs_f64());
    println!("  {what:28} p50 {:>10.1?}  p99 {:>10.1?}  {ratio:6.2} x binpack", took.0, took.1);
    took
}
