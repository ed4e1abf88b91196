//! Chooses the GPUs of one host, as the scheduler does when it binds a pod.
//!
//! `cargo bench -p tessera-core --bench placement`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark speaks, and may fail")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_core::bandwidth::Bandwidth;
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::Ledger;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Policy, place};
use tessera_core::request::{ContainerRole, PodRequest, Request};
use tessera_core::topology::{Link, PcieLevel, Topology};
use tessera_core::units::{GpuIndex, MiB, MilliCpu};

const DGX1: [[u8; 8]; 8] = include!("../src/fixtures/dgx1-v100.in");

const SYS: Link = Link { pcie: Some(PcieLevel::System), nvlinks: 0 };

fn machines() -> Vec<(&'static str, Topology)> {
    let mesh = |a: GpuIndex, b: GpuIndex| match DGX1[a.position()][b.position()] {
        0 => SYS,
        nvlinks => Link::nvlink(nvlinks),
    };
    // Pairs behind a switch, four GPUs behind a bridge, half of the GPUs on each socket.
    let pcie = |count: u8| {
        move |a: GpuIndex, b: GpuIndex| {
            let together = |group: u8| a.0 / group == b.0 / group;
            Link::pcie(match (together(2), together(4), together(count / 2)) {
                (true, ..) => PcieLevel::SingleSwitch,
                (_, true, _) => PcieLevel::HostBridge,
                (.., true) => PcieLevel::Node,
                _ => PcieLevel::System,
            })
        }
    };
    // Rows and columns of a 4x4 torus, two links each.
    let torus = |a: GpuIndex, b: GpuIndex| {
        let (row, column) = ((a.0 / 4).abs_diff(b.0 / 4), (a.0 % 4).abs_diff(b.0 % 4));
        let near = matches!((row, column), (0, 1 | 3) | (1 | 3, 0));
        if near { Link::nvlink(2) } else { SYS }
    };
    vec![
        ("8 GPUs, DGX-1 mesh", Topology::from_pairs(8, mesh)),
        ("8 GPUs, PCIe", Topology::from_pairs(8, pcie(8))),
        ("8 GPUs, switched", Topology::from_pairs(8, |_, _| Link::nvlink(18))),
        ("16 GPUs, torus", Topology::from_pairs(16, torus)),
        ("16 GPUs, PCIe", Topology::from_pairs(16, pcie(16))),
        ("16 GPUs, switched", Topology::from_pairs(16, |_, _| Link::nvlink(6))),
    ]
}

/// Returns the host with every GPU free, or with a pod on each fourth GPU.
fn node(topology: &Topology, busy: bool) -> NodeState {
    let gpu = |index: GpuIndex| Gpu::new(index, "GPU-x".into(), "GPU".into(), MiB(16_384));
    let gpus = topology.gpus().iter().map(gpu).collect();
    let node = Node::new("n".into(), gpus, topology.clone(), MilliCpu::ZERO, MiB::ZERO).unwrap();
    let name = node.name.clone();
    let mut ledger = Ledger::default();
    ledger.set_node(node);
    for gpu in topology.gpus().iter().filter(|gpu| busy && gpu.0 % 4 == 1) {
        let main = ContainerGrant {
            container: "main".into(),
            role: ContainerRole::Main,
            holds: vec![(gpu, Hold::Whole)],
        };
        let pod = format!("held-{gpu}").as_str().into();
        let (cpu, memory) = (MilliCpu::ZERO, MiB::ZERO);
        ledger.book(PodGrant { pod, node: name.clone(), cpu, memory, containers: vec![main] }).unwrap();
    }
    ledger.node(&name).unwrap().clone()
}

/// Measures one call: the median of several rounds.
fn measure(mut call: impl FnMut()) -> Duration {
    let calls = 50;
    let mut rounds: Vec<Duration> = (0..21)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| call());
            start.elapsed() / calls
        })
        .collect();
    rounds.sort();
    rounds[rounds.len() / 2]
}

fn main() {
    let policies = [Policy::Simple, Policy::BestEffort, Policy::Tessera(Arc::default())];
    println!("Choosing GPUs: median of one decision, and how many times what `simple` takes\n");
    print!("{:20} {:>5} {:>4}", "machine", "state", "ask");
    policies.iter().for_each(|policy| print!(" {:>21}", policy.name()));
    println!("   best-effort / tessera");
    for (name, topology) in machines() {
        for busy in [false, true] {
            let node = node(&topology, busy);
            for count in [1, 2, 4, topology.count() / 2 + 1] {
                let pod = PodRequest::of_mains([Request::Whole(u8::try_from(count).unwrap())]);
                let took = policies.each_ref().map(|policy| {
                    measure(|| drop(black_box(place(black_box(&node), &pod, policy, GpuSet::EMPTY))))
                });
                print!("{name:20} {:>5} {count:>4}", if busy { "busy" } else { "empty" });
                let times =
                    |duration: Duration, other: Duration| duration.as_secs_f64() / other.as_secs_f64();
                for duration in took {
                    print!(" {:>12.2?} {:>6.1} x", duration, times(duration, took[0]));
                }
                println!(" {:>13.1} x", times(took[1], took[2]));
            }
        }
    }
    println!("\nPreparing a kind of machine, once, and one decision with it (two GPUs, empty)\n");
    for (name, topology) in machines() {
        let prepared = measure_once(|| {
            let fresh = topology.with_numa(&[]);
            black_box(fresh.bandwidth_model().best(2)) > Bandwidth::NONE
        });
        let (node, pod) = (node(&topology, false), PodRequest::of_mains([Request::Whole(2)]));
        let decision = measure(|| drop(black_box(place(&node, &pod, &policies[2], GpuSet::EMPTY))));
        let ratio = prepared.as_secs_f64() / decision.as_secs_f64();
        println!("{name:20} {prepared:>12.2?} {decision:>12.2?} {ratio:>12.0} decisions");
    }
}

/// Measures the fastest of three runs.
fn measure_once(call: impl Fn() -> bool) -> Duration {
    let round = |_| {
        let start = Instant::now();
        assert!(call());
        start.elapsed()
    };
    (0..3).map(round).min().unwrap()
}
