//! No wake-up is lost and no launch waits for ever, whatever programs, limits and arbiters do.

use proptest::prelude::*;
use tessera_throttle::Nanos;

use crate::programs::{Call, ONE, Program};
use crate::world::World;

/// A change of the rules while programs run.
#[derive(Clone, Copy, Debug)]
enum Change {
    SetPercent(usize, u32),
    StartArbiter,
    StopArbiter,
    StopProcess(usize),
}

fn programs() -> impl Strategy<Value = Program> {
    let calls = vec![Call::Queued, Call::Blocking, Call::PerThread, Call::NewStream];
    let sizes = (1..4usize, 5..20_000u64, 1..4u64, 1..5usize, 0..40u64, 0..5_000u64);
    (sizes, prop::sample::select(calls), any::<bool>()).prop_map(
        |((threads, kernel, kinds, streams, sync_every, pause), call, overlaps)| Program {
            threads,
            kernel: Nanos::from_micros(kernel),
            kinds,
            streams,
            sync_every,
            pause: Nanos::from_micros(pause),
            call,
            overlaps,
            ..ONE
        },
    )
}

fn changes() -> impl Strategy<Value = (u64, Change)> {
    let change = prop_oneof![
        (0..2usize, 10..50u32).prop_map(|(container, percent)| Change::SetPercent(container, percent)),
        (0..2usize).prop_map(|container| Change::SetPercent(container, 100)),
        Just(Change::StartArbiter),
        Just(Change::StopArbiter),
        (0..3usize).prop_map(Change::StopProcess),
    ];
    (1..700u64, change)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The simulation sleeps for ever where the library sleeps with a safety net, so a thread that gets no
    /// wake-up never launches again.
    #[test]
    fn every_thread_goes_on_launching(
        programs in prop::collection::vec(programs(), 3),
        percents in [10..50u32, 10..50u32],
        changes in prop::collection::vec(changes(), 0..6),
        delay in 0..2_000u64,
    ) {
        let mut world = World::new().with_delay(Nanos::from_micros(delay));
        let containers = percents.map(|percent| world.add_container(percent));
        // Two processes in the first container, one in the second.
        for (program, container) in programs.iter().zip([0, 0, 1]) {
            world.add_process(containers[container], *program);
        }
        for (millis, change) in changes {
            world.run(Nanos::from_millis(millis));
            match change {
                Change::SetPercent(container, percent) => world.set_percent(container, percent),
                Change::StartArbiter => world.start_arbiter(),
                Change::StopArbiter => world.stop_arbiter(),
                Change::StopProcess(process) => world.stop_process(process, Nanos::from_millis(millis)),
            }
        }
        // What was queued without a limit is a thousand kernels of each thread.
        world.run(Nanos::from_secs(2));
        let drained = world.gpu.queued();
        world.run(drained + Nanos::from_secs(2));
        // Beside programs without a limit, every kernel waits behind a full queue of theirs, and the threads of
        // a limited process take turns. So a thread may need several rounds; without a wake-up none suffices.
        let launches = |world: &World| -> Vec<u64> { (0..3).flat_map(|process| world.launches(process)).collect() };
        let before = launches(&world);
        let go_on = |world: &World| launches(world).iter().zip(&before).all(|(after, before)| after > before);
        for _ in 0..10 {
            world.run(world.gpu.queued() + Nanos::from_secs(20));
            if go_on(&world) {
                break;
            }
        }
        prop_assert!(go_on(&world), "launches of each thread: {before:?}, for ever {:?}", launches(&world));
    }
}

#[test]
fn no_launch_is_held_back_for_longer_than_a_period() {
    for percent in [5, 10, 50, 90] {
        let mut world = World::with(Program { threads: 4, sync_every: 7, ..ONE }, percent);
        world.run(Nanos::from_secs(20));
        // A window's work, what is queued at its end, and the wait for room behind that.
        let period = Nanos::from_millis(26) * 100 / u64::from(percent);
        assert!(world.longest_wait() <= period + Nanos::from_millis(10), "{:?}", world.longest_wait());
    }
}
