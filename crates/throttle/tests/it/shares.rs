//! Every kind of work gets its share.

use tessera_throttle::Nanos;
use tessera_throttle::back_pressure::QUEUE_LIMIT;

use crate::programs::{PROGRAMS, Program};
use crate::world::World;

const SHARES: [u32; 5] = [10, 25, 50, 75, 90];

/// Time over which a share must be delivered.
const RUN: Nanos = Nanos::from_secs(10);

/// Time in which costs are measured, before the run counts.
const WARM_UP: Nanos = Nanos::from_secs(1);

/// Allowed deviation, in percentage points of the GPU.
const POINTS: f64 = 1.0;

/// Asserts that a container is charged for the time in which its kernels ran, but for a hundredth.
fn assert_charged(busy: Nanos, charged: Nanos, name: &str) {
    // The last poll may be this long ago.
    let unseen = QUEUE_LIMIT * 2;
    assert!(charged + busy / 100 + unseen >= busy, "{name}: {charged:?} charged for {busy:?}");
    assert!(charged <= busy + busy / 100 + unseen, "{name}: {charged:?} charged for {busy:?}");
}

/// Returns the kernels that a program completes in a run, as a percentage of those without a limit.
fn share_of(program: Program, percent: u32, has_arbiter: bool) -> f64 {
    let run = |percent| {
        let mut world = World::with(program, percent);
        if has_arbiter && percent < 100 {
            world.start_arbiter();
        }
        world.run(WARM_UP);
        let (busy, charged) = (world.gpu.work(0).busy, world.charged(0));
        let kernels = world.kernels_in(0, RUN);
        if percent < 100 {
            assert_charged(world.gpu.work(0).busy - busy, world.charged(0) - charged, program.name);
        }
        assert_eq!(world.threads_asleep_at_an_open_gate(0), 0, "{}", program.name);
        kernels as f64
    };
    100.0 * run(percent) / run(100)
}

fn assert_shares(has_arbiter: bool) {
    let mut failed = Vec::new();
    for &program in PROGRAMS {
        for percent in SHARES {
            let share = share_of(program, percent, has_arbiter);
            println!("{:>30} at {percent} %: {share:.2} %", program.name);
            if (share - f64::from(percent)).abs() > POINTS {
                failed.push(format!("{} at {percent} %: {share:.2} %", program.name));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn every_kind_of_work_gets_its_share_without_an_arbiter() {
    assert_shares(false);
}

#[test]
fn every_kind_of_work_gets_its_share_in_the_windows_of_an_arbiter() {
    assert_shares(true);
}
