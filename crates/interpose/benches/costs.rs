//! Measures the cost of the library per call on the simulated driver. One run alternates between
//! the program without the library and the same program with it.
//!
//! A call of the simulated driver takes about 100 ns, far less than a call of a real driver.
//! Compare the differences, not the absolute times.

#![allow(missing_docs, unused_crate_dependencies, reason = "a program")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for people")]

#[path = "../tests/it/support.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod support;

use support::Container;

/// Number of alternating rounds. The shortest time of each variant is compared, because other work
/// on the host disturbs the shortest time least.
const TURNS: usize = 12;

fn main() {
    let free = Container::with(65_536, 100);
    // With half of the GPU guaranteed and all of it allowed, the gate is in use and never closes.
    let gated = Container::with_ceiling(65_536, 50, 100);
    println!("{:>28} {:>10} {:>14} {:>12}", "ns per call, least", "bare", "no limit", "window open");
    for (kind, calls) in [("launch", 20_000), ("cold", 5_000), ("alloc", 2_000)] {
        let mut least = [f64::MAX; 3];
        for _ in 0..TURNS {
            let programs = [free.start_bare("dlsym"), free.start("dlsym"), gated.start("dlsym")];
            for (mut program, least) in programs.into_iter().zip(&mut least) {
                assert_eq!(program.ask("begin"), "0");
                let cost: f64 = program.ask(&format!("cost {kind} 8 {calls}")).parse().unwrap();
                *least = least.min(cost);
            }
        }
        let [bare, unlimited, open] = least;
        println!("{kind:>28} {bare:>10.1} {:>+14.1} {:>+12.1}", unlimited - bare, open - bare);
    }
}
