//! The views of the dashboard on a large cluster: how long each takes, and how large its JSON is.
//!
//! `cargo bench -p tessera-scheduler --bench dashboard`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark speaks, and may fail")]

mod cluster;

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;
use tessera_scheduler::dashboard::view::{Filter, cluster as sums, explanation, node, nodes, pods, quota};
use tessera_scheduler::state::{Event, State, Watched};

const CALLS: usize = 50;

/// Median and 99th percentile of making a view, while the state is locked, and of writing it, when it no longer is.
fn measure<T: Serialize>(name: &str, make: impl Fn() -> T) {
    let (mut made, mut written, mut size) = (Vec::new(), Vec::new(), 0);
    for _ in 0..CALLS {
        let begun = Instant::now();
        let view = black_box(make());
        made.push(begun.elapsed());
        let begun = Instant::now();
        size = black_box(serde_json::to_vec(&view).unwrap()).len();
        written.push(begun.elapsed());
    }
    let at = |all: &mut Vec<Duration>, percent: usize| {
        all.sort();
        all[CALLS * percent / 100]
    };
    println!(
        "  {name:34} made p50 {:>9.1?}  p99 {:>9.1?}   written p50 {:>9.1?}   {:>9} bytes",
        at(&mut made, 50),
        at(&mut made, 99),
        at(&mut written, 50),
        size
    );
}

fn main() {
    for nodes in [500, 5_000] {
        let mut state = cluster::cluster(nodes);
        let waiting = cluster::pod(9_000_000);
        state.handle(Event::Pod(Watched::Set(serde_json::from_value(waiting).unwrap())));
        views(&state);
    }
}

fn views(state: &State) {
    let only = |filter: Filter| Filter { limit: Some(60), ..filter };
    measure("cluster", || sums::cluster(state));
    measure("map", || sums::map(state));
    measure("nodes, the first 60", || nodes::nodes(state, &only(Filter::default())));
    let by_pod = only(Filter { q: "pod-000100".into(), ..Filter::default() });
    measure("nodes, by the name of a pod", || nodes::nodes(state, &by_pod));
    measure("node", || node::node(state, "node-00007"));
    measure("pods, the first 60", || pods::pods(state, &only(Filter::default())));
    let by_dialect = only(Filter { dialect: "vcuda".into(), ..Filter::default() });
    measure("pods, of one vocabulary", || pods::pods(state, &by_dialect));
    measure("quota", || quota::quota(state));
    let question = explanation::question(state, "team", "pod-9000000").unwrap();
    measure("explanation, 64 nodes at a time", || explanation::explain(|ask| ask(state), &question));
}
