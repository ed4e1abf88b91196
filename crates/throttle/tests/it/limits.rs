//! Limits change, arbiters come and go, processes are stopped: debts and pauses.

use tessera_throttle::Nanos;
use tessera_throttle::back_pressure::QUEUE_LIMIT;

use crate::programs::{ONE, Program};
use crate::world::World;

const RUN: Nanos = Nanos::from_secs(10);

/// Allowed deviation, in percentage points of the GPU.
const POINTS: f64 = 1.0;

/// Percentage points that a busy container may lose beside one whose pauses cause many switches.
const MAX_LOSS: f64 = 2.0;

/// Asserts that a container uses its share of the GPU over the next ten seconds.
fn assert_share(world: &mut World, container: usize, percent: u32) {
    let busy = world.busy_percent(container, RUN);
    println!("{percent} %: {busy:.2} %");
    assert!((busy - f64::from(percent)).abs() <= POINTS, "{busy:.2} % for {percent} %");
}

#[test]
fn a_share_changes_while_a_program_runs() {
    for has_arbiter in [false, true] {
        let mut world = World::with(ONE, 20);
        if has_arbiter {
            world.start_arbiter();
        }
        for percent in [20, 60, 100, 30, 10, 90] {
            world.set_percent(0, percent);
            assert_share(&mut world, 0, percent);
        }
    }
}

#[test]
fn an_arbiter_comes_and_goes_while_a_program_runs() {
    let mut world = World::with(ONE, 50);
    for _ in 0..3 {
        assert_share(&mut world, 0, 50);
        world.start_arbiter();
        assert_share(&mut world, 0, 50);
        world.stop_arbiter();
    }
}

#[test]
fn time_without_a_limit_is_neither_owed_nor_charged() {
    let mut world = World::with(ONE, 50);
    world.run(RUN);
    world.set_percent(0, 100);
    // The monitor thread notices the change.
    world.run(Nanos::from_millis(1));
    let before = world.charged(0);
    world.run(RUN);
    assert_eq!(world.charged(0), before, "nothing is charged without a limit");
    world.set_percent(0, 50);
    let busy_before = world.gpu.work(0).busy;
    let percent = world.busy_percent(0, Nanos::from_secs(1));
    assert!(percent >= 49.0, "{percent:.2} % in the first second under the limit");
    let (busy, charged) = (world.gpu.work(0).busy - busy_before, world.charged(0) - before);
    assert!(charged <= busy + busy / 50, "{charged:?} charged for {busy:?}");
}

#[test]
fn tenants_of_an_arbiter_get_their_shares_beside_each_other() {
    for (one, two) in [(30, 60), (50, 50), (10, 80), (25, 25)] {
        let mut world = World::new();
        for percent in [one, two] {
            let container = world.add_container(percent);
            world.add_process(container, ONE);
        }
        world.start_arbiter();
        world.run(Nanos::from_secs(1));
        let before = [0, 1].map(|container| world.gpu.work(container).busy);
        world.run(RUN);
        for (container, percent) in [(0, one), (1, two)] {
            let busy = world.gpu.work(container).busy - before[container];
            let busy = busy.0 as f64 * 100.0 / RUN.0 as f64;
            println!("{one}/{two}: {busy:.2} % for {percent} %");
            assert!((busy - f64::from(percent)).abs() <= POINTS, "{one}/{two}: {busy:.2} % for {percent} %");
        }
    }
}

/// Runs two programs in containers with these shares. Returns the percentage of the time in which the kernels
/// of each ran.
fn beside_each_other(shares: [u32; 2], is_soft: bool, programs: [Program; 2]) -> [f64; 2] {
    let mut world = World::new();
    for (percent, program) in shares.into_iter().zip(programs) {
        let container =
            if is_soft { world.add_soft_container(percent) } else { world.add_container(percent) };
        world.add_process(container, program);
    }
    world.start_arbiter();
    world.run(Nanos::from_secs(1));
    let before = [0, 1].map(|container| world.gpu.work(container).busy);
    world.run(RUN);
    let busy = |container: usize| world.gpu.work(container).busy - before[container];
    [0, 1].map(|container| busy(container).0 as f64 * 100.0 / RUN.0 as f64)
}

/// Bursts of 1 ms, each followed by a pause.
fn bursts(kernel_us: u64, pause: Nanos) -> Program {
    Program { kernel: Nanos::from_micros(kernel_us), sync_every: 1_000 / kernel_us, pause, ..ONE }
}

/// The program would use a quarter of the time alone. The other container must not get all time that switches
/// cost.
#[test]
fn a_container_with_short_bursts_gets_its_share_beside_a_busy_one() {
    for kernel_us in [1_000, 500, 200, 100, 50, 20] {
        for is_soft in [false, true] {
            let program = bursts(kernel_us, Nanos::from_millis(3));
            let [pausing, busy] = beside_each_other([10, 85], is_soft, [program, ONE]);
            println!("kernels of {kernel_us} us, soft: {is_soft}: {pausing:.2} and {busy:.2} %");
            assert!(pausing >= 10.0 - POINTS && busy >= 85.0 - POINTS, "{pausing:.2} and {busy:.2} %");
        }
    }
}

/// The share of 30 % is more than the program can use, because after each pause it waits for the work that
/// the other one has queued.
#[test]
fn a_container_with_short_bursts_waits_only_for_queued_work() {
    let mut sum = 0.0;
    let pauses = [20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40].map(|tenths| Nanos::from_micros(tenths * 100));
    for pause in pauses {
        let [pausing, busy] = beside_each_other([30, 60], true, [bursts(100, pause), ONE]);
        println!("{pause:?}: {pausing:.2} and {busy:.2} %");
        let cycle = Nanos::from_millis(1) + pause + QUEUE_LIMIT;
        assert!(
            pausing >= 1e8 / cycle.0 as f64 - 0.1 && busy >= 60.0,
            "{pause:?}: {pausing:.2}, {busy:.2} %"
        );
        sum += pausing;
    }
    assert!(sum / pauses.len() as f64 > 16.6, "{:.2} % on average", sum / pauses.len() as f64);
}

#[test]
fn two_containers_use_the_pauses_of_each_other() {
    let millis = Nanos::from_millis;
    let program = Program { kernel: Nanos::from_micros(500), sync_every: 10, pause: millis(5), ..ONE };
    let mut world = World::with(program, 100);
    let alone = world.busy_percent(0, RUN);
    for is_soft in [false, true] {
        for busy in beside_each_other([50, 50], is_soft, [program, program]) {
            println!("{busy:.2} %, alone {alone:.2} %");
            assert!(busy >= alone.min(50.0) - MAX_LOSS, "{busy:.2} %, alone {alone:.2} %");
        }
    }
}

/// A program with pauses returns its windows and arrives again, so it cuts the windows of the other one. The
/// time that it keeps from others is its own, so the other container gets its share.
#[test]
fn a_busy_container_gets_its_share_beside_one_that_pauses() {
    let micros = Nanos::from_micros;
    let pausing = [(10, 10, 5_000), (100, 10, 3_000), (300, 10, 500), (300, 10, 2_000), (1_000, 50, 5_000)];
    for (kernel, sync_every, pause) in pausing {
        let program = Program { kernel: micros(kernel), sync_every, pause: micros(pause), ..ONE };
        for (own, other) in [(10, 85), (30, 60)] {
            for is_soft in [false, true] {
                let [rest, got] = beside_each_other([own, other], is_soft, [program, ONE]);
                let name = format!("{own}/{other}, soft: {is_soft}, {program:?}: {rest:.2} and {got:.2} %");
                assert!(got >= f64::from(other) - MAX_LOSS, "{name}");
                // Bursts of 50 ms fill whole windows.
                assert!(sync_every < 50 || rest >= f64::from(own) - POINTS, "{name}");
            }
        }
    }
}

#[test]
fn processes_of_a_container_share_its_time() {
    for has_arbiter in [false, true] {
        let mut world = World::new();
        let container = world.add_container(40);
        let program = Program { sync_every: 10, ..ONE };
        let processes = [world.add_process(container, program), world.add_process(container, program)];
        if has_arbiter {
            world.start_arbiter();
        }
        world.run(Nanos::from_secs(1));
        assert_share(&mut world, container, 40);
        let launches = processes.map(|process| world.launches(process)[0]);
        assert!(launches.iter().all(|&own| own * 4 > launches.iter().sum()), "{launches:?}");
    }
}

#[test]
fn a_stopped_process_is_not_charged() {
    for has_arbiter in [false, true] {
        let mut world = World::with(Program { threads: 3, overlaps: true, ..ONE }, 50);
        if has_arbiter {
            world.start_arbiter();
        }
        for round in 0..20 {
            world.run(Nanos::from_millis(100 + round * 7));
            let (before, queued) = (world.charged(0), world.gpu.queued());
            world.stop_process(0, Nanos::from_secs(1));
            world.run(Nanos::from_millis(1_001));
            let charged = world.charged(0) - before;
            // The time since the last poll, what was queued then, and a millisecond after the stop.
            let most = QUEUE_LIMIT + queued + Nanos::from_millis(1);
            assert!(charged <= most, "{charged:?} of {most:?} in round {round}");
        }
    }
}

/// A stopped process cannot report that its work has ended, so it loses its window while the work seems to run.
#[test]
fn a_container_that_was_stopped_gets_its_share_at_once() {
    for percent in [10, 40] {
        let mut world = World::new();
        let stopped = world.add_soft_container(percent);
        let process = world.add_process(stopped, ONE);
        let other = world.add_soft_container(90 - percent);
        world.add_process(other, ONE);
        world.start_arbiter();
        world.run(Nanos::from_secs(1));
        world.stop_process(process, Nanos::from_secs(3));
        // The agent asks the kernel every second.
        world.run(Nanos::from_millis(900));
        world.report_stopped(stopped, true);
        world.run(Nanos::from_millis(2_100));
        let busy = world.busy_percent(stopped, Nanos::from_millis(500));
        let share = f64::from(percent) * 100.0 / 90.0;
        assert!((busy - share).abs() <= 4.0, "{busy:.2} % of {share:.2} % in the first half second");
        world.report_stopped(stopped, false);
        let busy = world.busy_percent(stopped, RUN);
        assert!((busy - share).abs() <= POINTS, "{busy:.2} % of {share:.2} % afterwards");
    }
}

/// The monitor thread sees the end of work some time after it. A request of 0.1 ms is not charged for that
/// delay, nor for the pause of 3 ms after it.
#[test]
fn pauses_are_not_charged() {
    let pause = Nanos::from_millis(3);
    let program = Program { kernel: Nanos::from_micros(10), sync_every: 10, pause, ..ONE };
    for has_arbiter in [false, true] {
        let mut world = World::with(program, 90);
        if has_arbiter {
            world.start_arbiter();
        }
        world.run(Nanos::from_secs(1));
        let (busy, charged) = (world.gpu.work(0).busy, world.charged(0));
        let launches = world.launches(0)[0];
        world.run(RUN);
        let requests = (world.launches(0)[0] - launches) / 10;
        let (busy, charged) = (world.gpu.work(0).busy - busy, world.charged(0) - charged);
        println!("{charged:?} charged for {busy:?} of kernels in {requests} requests");
        // The end of the last request may not have been seen.
        let least = busy - Nanos::from_millis(1);
        assert!(charged >= least && charged <= busy + busy / 100, "{charged:?} charged for {busy:?}");
    }
}

#[test]
fn an_idle_process_does_not_want_the_gpu() {
    let program = Program { sync_every: 10, pause: Nanos::from_millis(200), ..ONE };
    let mut world = World::with(program, 50);
    world.start_arbiter();
    let mut wanted = 0;
    for _ in 0..1_000 {
        world.run(Nanos::from_millis(1));
        wanted += u32::from(world.demand(0).wants);
    }
    // Five requests of 2 ms in a second, with a short pause after each.
    assert!((5..=30).contains(&wanted), "wanted for {wanted} ms of a second");
}
