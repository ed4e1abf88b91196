//! Filter and prioritize on large clusters: what kube-scheduler waits for with every pod.
//!
//! `cargo bench -p tessera-scheduler --bench verbs`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark speaks, and may fail")]
#![allow(unsafe_code, reason = "counting allocations takes an allocator")]

mod cluster;

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindStep, Event, Now, Outcome, State, Watched};
use tessera_scheduler::verb::memory::Memory;
use tessera_wire::extender::{Args, BindingArgs, Name};

use self::cluster::{cluster, pod};

const CALLS: usize = 300;

/// The system's allocator, counted.
struct Counted;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on as it came to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise about the layout is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() / 1024
}

/// Median, 99th percentile, and allocations of a call; making its input and what happens after it are not counted.
fn measure<C, T>(
    name: &str,
    cluster: &mut C,
    make: impl Fn(usize) -> T,
    mut call: impl FnMut(&mut C, T),
    after: impl Fn(&mut C, usize),
) {
    let mut took = Vec::with_capacity(CALLS);
    let mut allocations = 0;
    for number in 0..CALLS {
        let input = make(number);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        let begun = Instant::now();
        call(cluster, input);
        took.push(begun.elapsed());
        allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
        after(cluster, number);
    }
    took.sort();
    let at = |percent: usize| -> Duration { took[CALLS * percent / 100] };
    println!(
        "  {name:40} p50 {:>9.1?}  p99 {:>9.1?}  {:>6} allocations",
        at(50),
        at(99),
        allocations / CALLS as u64
    );
}

fn main() {
    for nodes in [500, 5_000, 10_000] {
        let mut state = cluster(nodes);
        println!("resident {} MiB", resident_mib());
        let names: Vec<String> = (0..nodes).map(|number| format!("node-{number:05}")).collect();
        let args = |number: usize| -> Args<&str> {
            let pod = serde_json::from_value(pod(1_000_000 + number)).unwrap();
            Args { pod, nodes: None, node_names: Some(names.iter().map(String::as_str).collect()) }
        };
        let both = |state: &State, memory: &Memory, args: Args<&str>| {
            let fitting = state.filter(&args, memory).fitting;
            let fitting = Args { node_names: Some(fitting), ..args.clone() };
            drop(black_box(state.prioritize(&fitting, memory)));
        };
        let rest = |_: &mut State, _| ();
        let state = &mut state;
        measure(
            "filter, nothing remembered",
            state,
            args,
            |state, args| drop(black_box(state.filter(&args, &Memory::default()))),
            rest,
        );
        measure(
            "filter + prioritize, nothing remembered",
            state,
            args,
            |state, args| both(state, &Memory::default(), args),
            rest,
        );
        let memory = Memory::default();
        // As in a cluster: each pod is bound before the next one comes, and now and then the forecast is made anew.
        let busy = |state: &mut State, number: usize| bind_another(state, nodes, number);
        measure("filter + prioritize", state, args, |state, args| both(state, &memory, args), busy);
        let body = |number: usize| serde_json::to_vec(&args(number)).unwrap();
        measure(
            "the same, from and to JSON",
            state,
            body,
            |state, body| {
                let args: Args<Name<'_>> = serde_json::from_slice(&body).unwrap();
                black_box(serde_json::to_vec(&state.filter(&args, &memory)).unwrap());
                let args: Args<Name<'_>> = serde_json::from_slice(&body).unwrap();
                black_box(serde_json::to_vec(&state.prioritize(&args, &memory)).unwrap());
            },
            |state, number| bind_another(state, nodes, CALLS + number),
        );
        bind(state, nodes);
    }
}

/// Binds some small pod somewhere, and forecasts anew after every hundred.
fn bind_another(state: &mut State, nodes: usize, number: usize) {
    let json = pod(3_000_000 + number * 6);
    state.handle(Event::Pod(Watched::Set(serde_json::from_value(json.clone()).unwrap())));
    let args = BindingArgs {
        pod_name: String::new(),
        pod_namespace: String::new(),
        pod_uid: json["metadata"]["uid"].as_str().unwrap().to_owned(),
        node: format!("node-{:05}", number * 7 % nodes),
    };
    let _ = black_box(state.begin_bind(&args, Now::default()));
    if number % 100 == 99
        && let Some(forecast) = state.forecast()
    {
        state.adopt(forecast);
    }
}

/// Choosing and booking, and taking back.
fn bind(state: &mut State, nodes: usize) {
    let make = |number: usize| {
        let json = pod(2_000_000 + number * 6);
        let args = BindingArgs {
            pod_name: String::new(),
            pod_namespace: String::new(),
            pod_uid: json["metadata"]["uid"].as_str().unwrap().to_owned(),
            node: format!("node-{:05}", (nodes - 1).saturating_sub(number % nodes)),
        };
        (json, args)
    };
    for number in 0..CALLS {
        state.handle(Event::Pod(Watched::Set(serde_json::from_value(make(number).0).unwrap())));
    }
    let choose = |state: &mut State, (_, args): (Value, BindingArgs)| {
        let step = state.begin_bind(&args, Now::default());
        if matches!(step, Ok(BindStep::Send(_))) {
            state.end_bind(&PodUid(args.pod_uid), Outcome::Refused, Now::default());
        }
    };
    measure("bind: choose and book", state, make, choose, |_, _| ());
}
