//! Programs that do work of their own between launches: a share is a percentage of the GPU's time, so a program that
//! needs less than its share does not feel the limit.

use tessera_throttle::Nanos;

use crate::programs::{HOST_PROGRAMS, ONE, Program};
use crate::world::World;

const RUN: Nanos = Nanos::from_secs(10);

/// Time in which costs are measured, before the run counts.
const WARM_UP: Nanos = Nanos::from_secs(2);

/// Allowed deviation from what a program should reach, in percent of its speed without a limit.
const POINTS: f64 = 2.0;

/// Least speed of a program that does not feel its limit, in percent.
const UNLIMITED: f64 = 99.0;

/// What a program does without a limit.
struct Bare {
    kernels: f64,
    /// Part of the GPU's time that it needs, in percent.
    need: f64,
}

fn bare(program: Program) -> Bare {
    let mut world = World::with(program, 100);
    world.run(WARM_UP);
    let busy = world.gpu.work(0).busy;
    let kernels = world.kernels_in(0, RUN) as f64;
    Bare { kernels, need: (world.gpu.work(0).busy - busy).0 as f64 * 100.0 / RUN.0 as f64 }
}

/// Returns the speed of a program alone in a world, in percent of its speed without a limit.
fn speed(mut world: World, bare: &Bare) -> f64 {
    world.start_arbiter();
    world.run(WARM_UP);
    world.kernels_in(0, RUN) as f64 * 100.0 / bare.kernels
}

#[test]
fn a_program_reaches_what_its_share_and_its_need_allow() {
    let mut failed = Vec::new();
    for &program in HOST_PROGRAMS {
        let bare = bare(program);
        println!("{} needs {:.1} % of the GPU", program.name, bare.need);
        for percent in [10, 25, 50, 75, 90] {
            let wanted = (f64::from(percent) * 100.0 / bare.need).min(100.0);
            let got = speed(World::with(program, percent), &bare);
            println!("    at {percent} %: {got:.2}, wanted {wanted:.2}");
            if (got - wanted).abs() > POINTS {
                failed.push(format!("{} at {percent} %: {got:.2}, wanted {wanted:.2}", program.name));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_program_alone_with_a_soft_share_does_not_feel_it() {
    for &program in HOST_PROGRAMS {
        let bare = bare(program);
        let mut world = World::new();
        let container = world.add_soft_container(50);
        world.add_process(container, program);
        let got = speed(world, &bare);
        assert!(got >= UNLIMITED, "{}: {got:.2} %", program.name);
    }
}

/// Shares whose sum leaves some time, because a program with gaps needs more time than the GPU is busy for it.
#[test]
fn unlike_programs_get_their_shares_beside_each_other() {
    let [matrices, training, ..] = HOST_PROGRAMS else { unreachable!() };
    for (shares, programs) in
        [([30, 60], [ONE, *training]), ([30, 60], [*matrices, ONE]), ([60, 30], [ONE, *training])]
    {
        let mut world = World::new();
        for (percent, program) in shares.into_iter().zip(programs) {
            let container = world.add_container(percent);
            world.add_process(container, program);
        }
        world.start_arbiter();
        world.run(WARM_UP);
        let before = [0, 1].map(|container| world.gpu.work(container).busy);
        world.run(RUN);
        for (container, percent) in shares.into_iter().enumerate() {
            let busy = world.gpu.work(container).busy - before[container];
            let busy = busy.0 as f64 * 100.0 / RUN.0 as f64;
            println!("{} {percent} %: {busy:.2} %", programs[container].name);
            assert!(
                (busy - f64::from(percent)).abs() <= POINTS,
                "{} {percent} %: {busy:.2} %",
                programs[container].name
            );
        }
    }
}
