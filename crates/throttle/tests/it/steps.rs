//! Programs that compute in steps: each launches kernels, waits for all of them, and does some work of the host before
//! the next step. Two of them beside each other have hard shares that leave little time.

use tessera_throttle::Nanos;

use crate::programs::{ONE, Program};
use crate::world::World;

const RUN: Nanos = Nanos::from_secs(10);

/// Time in which costs are measured, before the run counts.
const WARM_UP: Nanos = Nanos::from_secs(2);

/// The shares of both containers.
const SHARES: [u32; 2] = [60, 30];

/// Allowed deviation, in percentage points of the GPU.
const POINTS: f64 = 0.5;

/// How the kernels of a program are launched.
#[derive(Clone, Copy, Debug)]
enum Kernels {
    /// The program is far ahead of the GPU.
    Short,
    /// The program is hardly faster than the GPU.
    SlowlyLaunched,
    Long,
}

/// Returns a program with steps of this length, of which it uses the GPU for all but `host_percent`.
fn in_steps(step: Nanos, host_percent: u64, kernels: Kernels) -> Program {
    let (kernel, kinds, launch_time) = match kernels {
        Kernels::Short => (50, 4, 25),
        Kernels::SlowlyLaunched => (50, 4, 110),
        Kernels::Long => (2_000, 1, 10),
    };
    let pause = step / 100 * host_percent;
    let mean = Nanos::from_micros(kernel * (kinds + 1) / 2);
    Program {
        kernel: Nanos::from_micros(kernel),
        kinds,
        sync_every: (step - pause).0 / mean.0,
        launch_time: Nanos::from_micros(launch_time),
        pause,
        ..ONE
    }
}

/// Runs two programs in the containers of a world. Returns the percentage of the time in which the kernels of each ran.
fn busy_percents(mut world: World, programs: [Program; 2]) -> [f64; 2] {
    for (container, program) in programs.into_iter().enumerate() {
        world.add_process(container, program);
    }
    world.start_arbiter();
    world.run(WARM_UP);
    let before = [0, 1].map(|container| world.gpu.work(container).busy);
    world.run(RUN);
    let busy = |container: usize| world.gpu.work(container).busy - before[container];
    [0, 1].map(|container| busy(container).0 as f64 * 100.0 / RUN.0 as f64)
}

/// Returns by how many percentage points a container misses its share, the worst of both.
fn worst_deviation(programs: [Program; 2], max_delay: Nanos) -> f64 {
    let mut world = World::new().with_delay(max_delay);
    for percent in SHARES {
        world.add_container(percent);
    }
    let busy = busy_percents(world, programs);
    (busy[0] - f64::from(SHARES[0])).abs().max((busy[1] - f64::from(SHARES[1])).abs())
}

/// Programs that are busy for 94 % of the time alone need windows for 96 % of the time to get 60 % and 30 %. No time
/// in which nothing ran for a container, or in which work of the other one ran, may count as its own.
#[test]
fn programs_that_wait_after_each_step_get_their_shares_beside_each_other() {
    let mut failed = Vec::new();
    let steps = [(55, 55), (55, 18), (55, 8), (18, 18), (30, 8), (8, 8), (200, 4)];
    for (one, two) in steps.map(|(one, two)| (Nanos::from_millis(one), Nanos::from_millis(two))) {
        for kernels in [Kernels::Short, Kernels::SlowlyLaunched, Kernels::Long] {
            for (host_percent, delay_us) in [(2, 60), (6, 60), (2, 300), (6, 300)] {
                let programs = [one, two].map(|step| in_steps(step, host_percent, kernels));
                let deviation = worst_deviation(programs, Nanos::from_micros(delay_us));
                let case = format!(
                    "{} and {} ms, {kernels:?}, {host_percent} % of the host, delays of {delay_us} us: {deviation:.2}",
                    one.0 / 1_000_000,
                    two.0 / 1_000_000
                );
                println!("{case}");
                if deviation > POINTS {
                    failed.push(case);
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// A program that pauses after each step leaves the pauses to the other one, but keeps what it was owed before. The
/// program with the pauses would use 94 % of the time alone.
#[test]
fn a_program_keeps_its_soft_share_over_its_pauses() {
    let pausing = in_steps(Nanos::from_millis(55), 6, Kernels::Short);
    for (own, other) in [(80, 10), (60, 30)] {
        for neighbour in [ONE, pausing] {
            let mut world = World::new();
            for percent in [own, other] {
                world.add_soft_container(percent);
            }
            let [busy, rest] = busy_percents(world, [pausing, neighbour]);
            println!("{own} and {other}: {busy:.2} and {rest:.2} %");
            assert!(
                busy >= f64::from(own) && rest >= f64::from(other),
                "{own}: {busy:.2}, {other}: {rest:.2} %"
            );
        }
    }
}
