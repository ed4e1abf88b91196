//! Measures the views of the dashboard on a large cluster: their time and the size of their JSON.
//!
//! `cargo bench -p tessera-scheduler --bench dashboard`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark speaks, and may fail")]

mod cluster;

use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;
use tessera_scheduler::dashboard::view::{ListQuery, cluster as sums, explanation, node, nodes, pods, quota};
use tessera_scheduler::state::StateAccess;
use tessera_scheduler::state::{State, StateEvent, WatchEvent};

const CALLS: usize = 50;

/// A state that records its longest read access. A bind waits at most that long for the lock.
struct Timed<'a> {
    state: &'a State,
    longest: Cell<Duration>,
}

impl StateAccess for Timed<'_> {
    fn with_state<T>(&self, at: impl FnOnce(&State) -> T) -> T {
        let begun = Instant::now();
        let seen = at(self.state);
        self.longest.set(self.longest.get().max(begun.elapsed()));
        seen
    }
}

/// Prints the medians of a view's total time, its longest read access and its serialization, and
/// its size.
fn measure<T: Serialize>(name: &str, state: &State, make: impl Fn(&Timed<'_>) -> T) {
    let (mut made, mut looked, mut written, mut size) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..CALLS {
        let timed = Timed { state, longest: Cell::default() };
        let begun = Instant::now();
        let view = black_box(make(&timed));
        made.push(begun.elapsed());
        looked.push(timed.longest.get());
        let begun = Instant::now();
        size = black_box(serde_json::to_vec(&view).unwrap()).len();
        written.push(begun.elapsed());
    }
    let median = |all: &mut Vec<Duration>| {
        all.sort();
        all[CALLS / 2]
    };
    println!(
        "  {name:28} made {:>9.1?}   longest look {:>9.1?}   written {:>9.1?}   {size:>7} bytes",
        median(&mut made),
        median(&mut looked),
        median(&mut written),
    );
}

fn main() {
    for nodes in [500, 5_000] {
        let mut state = cluster::cluster(nodes);
        let waiting = cluster::asked_about(9_000_000);
        state.handle(StateEvent::Pod(WatchEvent::Set(serde_json::from_value(waiting).unwrap())));
        views(&state);
    }
}

fn views(state: &State) {
    let only = |query: ListQuery| ListQuery { limit: Some(60), ..query };
    let by_pod = only(ListQuery { q: "pod-000100".into(), ..ListQuery::default() });
    let by_dialect = only(ListQuery { dialect: "vcuda".into(), ..ListQuery::default() });
    measure("cluster", state, |at| sums::cluster(at));
    measure("map", state, |at| sums::map(at));
    measure("nodes, the first 60", state, |at| nodes::nodes(at, &only(ListQuery::default())));
    measure("nodes, by the name of a pod", state, |at| nodes::nodes(at, &by_pod));
    measure("node", state, |at| at.with_state(|state| node::node(state, "node-00007")));
    measure("pods, the first 60", state, |at| pods::pods(at, &only(ListQuery::default())));
    measure("pods, of one vocabulary", state, |at| pods::pods(at, &by_dialect));
    measure("quota", state, |at| at.with_state(quota::quota));
    measure("explanation", state, |at| explanation::of_pod(at, "team", "pod-9000000").unwrap());
}
