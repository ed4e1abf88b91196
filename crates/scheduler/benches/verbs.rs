//! Measures filter and prioritize on clusters of several sizes, because kube-scheduler waits for
//! both with every pod.
//!
//! `cargo bench -p tessera-scheduler --bench verbs`
//!
//! The benchmark alternates between the sizes, so that other load on the machine slows all of them
//! alike.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark speaks, and may fail")]
#![allow(unsafe_code, reason = "counting allocations takes an allocator")]

mod cluster;

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tessera_core::forecast::Forecast;
use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindOutcome, BindStep, State, StateEvent, Timestamp, WatchEvent};
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_wire::foreign::extender::{BindingArgs, BorrowedName, ExtenderArgs};

use self::cluster::{asked_about, cluster, reserve, wait_in_gangs, with_parts};

/// The clusters: the number of nodes, and whether gangs wait and node annotations reserve GPUs there.
const SITES: [(usize, bool); 4] = [(500, false), (5_000, false), (5_000, true), (10_000, false)];

/// Gangs that wait and nodes with a reservation, on clusters that have any.
const WAITING_GANGS: usize = 200;
const RESERVATIONS: usize = 50;

/// Number of calls of each kind on each cluster. Each cluster runs `IN_A_ROW` of them at a time.
const CALLS: usize = 600;
const IN_A_ROW: usize = 20;

/// Nodes that kube-scheduler offers of a cluster of 10,000 nodes.
const SAMPLE: usize = 500;

/// Added to the numbers of pods with a part of each of several GPUs, because numbers identify pods.
const PARTS_FROM: usize = 100_000_000;

/// Number of pods between two forecasts.
const FORECAST_AFTER: usize = 100;

/// The system allocator with a counter of allocations.
struct Counted;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator, which fulfils the contract of
// `GlobalAlloc`.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller guarantees a valid layout, which is forwarded unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees that `pointer` came from `alloc` with this layout, and
        // `alloc` uses the system allocator.
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

/// Returns the CPU time of this thread, which other processes do not affect.
fn cpu_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap()
}

/// A cluster with the scheduler's caches and the node names that kube-scheduler sends.
struct Site {
    nodes: usize,
    state: State,
    cache: VerdictCache,
    names: Vec<String>,
    /// Number of pods created so far.
    made: usize,
}

/// The input of one call.
struct Call<'a> {
    args: ExtenderArgs<&'a str>,
    body: Vec<u8>,
    /// The same call with a sample of the nodes.
    sample_body: Vec<u8>,
    bind: BindingArgs,
    /// A call for a pod with a part of each of several GPUs.
    parts: ExtenderArgs<&'a str>,
    bind_parts: BindingArgs,
}

/// CPU times and number of allocations of the calls.
#[derive(Default)]
struct Measured {
    took: Vec<Duration>,
    allocations: u64,
}

type Measure = fn(&mut State, &VerdictCache, &Call<'_>);

/// The measured operations by name.
const MEASURES: [(&str, Measure); 8] = [
    ("filter + prioritize", |state, cache, call| both(state, cache, &call.args)),
    ("filter of a pod outside gangs, beside reservations", |state, cache, call| {
        if black_box(state.reserved_node(&call.args)).is_none() && state.filter(&call.args, cache).fit == 0 {
            black_box(state.waits_for_reservation(&call.args));
        }
    }),
    ("the same, from and to JSON", |state, cache, call| {
        let args: ExtenderArgs<BorrowedName<'_>> = serde_json::from_slice(&call.body).unwrap();
        black_box(serde_json::to_vec(&state.filter(&args, cache)).unwrap());
        let args: ExtenderArgs<BorrowedName<'_>> = serde_json::from_slice(&call.body).unwrap();
        black_box(serde_json::to_vec(&state.prioritize(&args, cache)).unwrap());
    }),
    ("filter of a sample of at most 500 nodes, from and to JSON", |state, cache, call| {
        let args: ExtenderArgs<BorrowedName<'_>> = serde_json::from_slice(&call.sample_body).unwrap();
        black_box(serde_json::to_vec(&state.filter(&args, cache)).unwrap());
    }),
    ("a kind of pod never seen before", |state, _, call| both(state, &VerdictCache::default(), &call.args)),
    ("bind: choose, book, take back", |state, _, call| bind_and_take_back(state, &call.bind)),
    ("filter + prioritize of a part of each of 4 GPUs", |state, cache, call| both(state, cache, &call.parts)),
    ("bind of a part of each of 4 GPUs", |state, _, call| bind_and_take_back(state, &call.bind_parts)),
];

fn bind_and_take_back(state: &mut State, bind: &BindingArgs) {
    if matches!(state.begin_bind(bind, Timestamp::default()), Ok(BindStep::Send(_))) {
        state.end_bind(&PodUid(bind.pod_uid.clone()), BindOutcome::Refused, Timestamp::default());
    }
}

/// Returns the arguments of a call: a pod, and the names of all nodes.
fn args(names: &[String], pod: serde_json::Value) -> ExtenderArgs<&str> {
    let pod = serde_json::from_value(pod).unwrap();
    ExtenderArgs { pod, nodes: None, node_names: Some(names.iter().map(String::as_str).collect()) }
}

/// Returns the names that kube-scheduler offers of a large cluster: each call continues where the last one ended, and
/// the order within a sample depends on how its 16 workers interleave.
fn sample(names: &[String], number: usize) -> Vec<&str> {
    let size = SAMPLE.min(names.len());
    let workers_order = |index: usize| (index * 37 + number * 11) % size;
    let name = |index| names[(number * size + workers_order(index)) % names.len()].as_str();
    (0..size).map(name).collect()
}

fn both(state: &State, cache: &VerdictCache, args: &ExtenderArgs<&str>) {
    let fitting = state.filter(args, cache).fitting;
    let fitting = ExtenderArgs { pod: args.pod.clone(), nodes: None, node_names: Some(fitting) };
    drop(black_box(state.prioritize(&fitting, cache)));
}

fn main() {
    let mut sites = SITES.map(Site::new);
    let mut measured: [[Measured; SITES.len()]; MEASURES.len()] = Default::default();
    for _ in 0..CALLS / IN_A_ROW {
        for (measured, (_, call)) in measured.iter_mut().zip(MEASURES) {
            for (measured, site) in measured.iter_mut().zip(&mut sites) {
                (0..IN_A_ROW).for_each(|_| site.measure(measured, call));
            }
        }
    }
    for (mut measured, (name, _)) in measured.into_iter().zip(MEASURES) {
        println!("{name}");
        let mut before: Option<(usize, Duration)> = None;
        for (measured, (nodes, is_busy)) in measured.iter_mut().zip(SITES) {
            measured.took.sort();
            let at = |percent: usize| measured.took[measured.took.len() * percent / 100];
            let growth = before.map(|(fewer, took)| {
                let grown = at(50).as_secs_f64() / took.as_secs_f64();
                let with = if is_busy { ", with gangs and reservations" } else { "" };
                format!("p50 x {grown:.2} for nodes x {:.1}{with}", nodes as f64 / fewer as f64)
            });
            println!(
                "  {nodes:>6} nodes  p50 {:>9.1?}  p99 {:>9.1?}  {:>4} allocations  {}",
                at(50),
                at(99),
                measured.allocations / measured.took.len() as u64,
                growth.unwrap_or_default()
            );
            // The next cluster is compared with the last one without gangs.
            if !is_busy {
                before = Some((nodes, at(50)));
            }
        }
    }
}

impl Site {
    fn new((nodes, is_busy): (usize, bool)) -> Self {
        let before = resident_mib();
        let mut state = cluster(nodes);
        if is_busy {
            reserve(&mut state, RESERVATIONS);
            wait_in_gangs(&mut state, WAITING_GANGS, nodes);
        }
        let names: Vec<String> = (0..nodes).map(|number| format!("node-{number:05}")).collect();
        let site = Self { nodes, state, cache: VerdictCache::default(), names, made: 1_000_000 };
        let asked = (0..6).map(asked_about).chain([with_parts(0)]);
        let fit = asked.map(|pod| site.state.filter(&args(&site.names, pod), &site.cache).fit);
        let fit: Vec<usize> = fit.collect();
        println!(
            "  {} MiB resident; the shapes of pods asked about fit on {fit:?} nodes",
            resident_mib() - before
        );
        site
    }

    fn measure(&mut self, measured: &mut Measured, measure: Measure) {
        self.made += 1;
        let pods = [asked_about(self.made), with_parts(PARTS_FROM + self.made)];
        for pod in &pods {
            self.state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(pod.clone()).unwrap())));
        }
        let [args, parts] = pods.clone().map(|pod| args(&self.names, pod));
        let body = serde_json::to_vec(&args).unwrap();
        let offered = ExtenderArgs {
            pod: args.pod.clone(),
            nodes: None,
            node_names: Some(sample(&self.names, self.made)),
        };
        let sample_body = serde_json::to_vec(&offered).unwrap();
        let node = self.names[self.made * 7 % self.nodes].clone();
        let [bind, bind_parts] = pods.clone().map(|pod| {
            let pod_uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
            BindingArgs { pod_name: String::new(), pod_namespace: String::new(), pod_uid, node: node.clone() }
        });
        let call = Call { args, body, sample_body, bind, parts, bind_parts };
        let allocated = ALLOCATIONS.load(Ordering::Relaxed);
        let begun = cpu_time();
        measure(&mut self.state, &self.cache, &call);
        measured.took.push(cpu_time() - begun);
        measured.allocations += ALLOCATIONS.load(Ordering::Relaxed) - allocated;
        let Call { bind, .. } = call;
        self.go_on(pods, &bind);
    }

    /// Changes a node before the next pods, as in a real cluster: binds a pod and removes it. Makes a new forecast at
    /// times.
    fn go_on(&mut self, pods: [serde_json::Value; 2], bind: &BindingArgs) {
        let _ = black_box(self.state.begin_bind(bind, Timestamp::default()));
        for pod in pods {
            self.state.handle(StateEvent::Pod(WatchEvent::Gone(serde_json::from_value(pod).unwrap())));
        }
        if self.made.is_multiple_of(FORECAST_AFTER)
            && let Some(remains) = self.state.free_capacity_if_due()
        {
            let forecast = Arc::new(Forecast::new(&self.state.begin_forecast(&remains), &remains));
            let mut shapes = self.cache.shapes_for(&forecast);
            shapes.iter_mut().for_each(|shape| shape.refresh(&self.state, 0..self.nodes));
            self.state.adopt_forecast(forecast);
            self.cache.insert(shapes);
        }
    }
}
