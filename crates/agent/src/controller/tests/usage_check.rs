//! What containers really use against what they were given.

use std::collections::BTreeSet;

use tessera_core::units::PodUid;

use super::world::{World, found, pod, share};
use crate::controller::{AccountSample, Escape, Event, GpuProcess, UsageSample};

const MIB: u64 = 1 << 20;

/// A process on a GPU: the GPU, its number, the container's pod, MiB.
fn process(gpu: usize, pid: u32, pod: &str, mib: u64) -> GpuProcess {
    GpuProcess {
        gpu: found().gpus[gpu].uuid.clone(),
        pid,
        started: 1,
        own_pid: Some(pid - 100),
        container: (PodUid(pod.into()), "main".into()),
        bytes: Some(mib * MIB),
    }
}

/// Books: the container's pod, its processes, MiB.
fn account(pod: &str, processes: &[u32], mib: u64) -> AccountSample {
    AccountSample {
        container: (PodUid(pod.into()), "main".into()),
        processes: processes.iter().copied().collect(),
        ended: BTreeSet::new(),
        held: vec![Some(mib * MIB)],
    }
}

fn measure(world: &mut World, processes: &[GpuProcess], accounts: &[AccountSample]) {
    world.wait(1);
    let sampled_gpus = found().gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let measured =
        UsageSample { at: 7, sampled_gpus, processes: processes.to_vec(), accounts: accounts.to_vec() };
    world.happens(Event::UsageSampled(Box::new(measured)));
}

/// Two containers with 5120 MiB each of GPU 2.
fn world() -> World {
    let mut world = World::new();
    for name in ["u", "v"] {
        world.run(pod(name, name, &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    }
    world
}

fn unledgered(world: &World) -> Vec<(&str, u64)> {
    world.unledgered.iter().map(|((pod, _), bytes)| (pod.as_str(), bytes / MIB)).collect()
}

#[test]
fn what_the_books_lack_is_told_to_the_library_and_only_to_that_one() {
    let mut world = world();
    let books = [account("u", &[7], 1000), account("v", &[8], 500)];
    let card = [process(2, 107, "u", 1110), process(2, 108, "v", 480)];
    measure(&mut world, &card, &books);
    assert_eq!(unledgered(&world), [("u", 110), ("v", 0)]);
    measure(&mut world, &card[1..], &[account("u", &[], 0), books[1].clone()]);
    assert_eq!(unledgered(&world), [("u", 0), ("v", 0)]);
    assert!(world.events.is_empty());
}

#[test]
fn where_the_driver_does_not_tell_nothing_is_changed() {
    let mut world = world();
    measure(&mut world, &[process(2, 107, "u", 1110)], &[account("u", &[7], 1000)]);
    let silent = GpuProcess { bytes: None, ..process(2, 107, "u", 0) };
    measure(&mut world, &[silent], &[account("u", &[7], 1000)]);
    assert_eq!(unledgered(&world), [("u", 110)]);
    // The GPU could not be asked at all.
    let accounts = vec![account("u", &[7], 1000)];
    world.happens(Event::UsageSampled(Box::new(UsageSample { accounts, ..UsageSample::default() })));
    assert_eq!(unledgered(&world), [("u", 110)]);
}

#[test]
fn the_memory_of_a_process_that_has_just_ended_is_not_held_against_the_others() {
    let mut world = world();
    let card = [process(2, 107, "u", 1110), process(2, 109, "u", 3000)];
    let books = AccountSample { ended: [9].into(), ..account("u", &[7], 1000) };
    measure(&mut world, &card, &[books]);
    assert_eq!(unledgered(&world), [("u", 110)]);
}

#[test]
fn looks_while_memory_is_being_taken_do_not_make_less_of_what_the_books_lack() {
    let mut world = world();
    let card = [process(2, 107, "u", 1110)];
    measure(&mut world, &card, &[account("u", &[7], 1000)]);
    // The books moved while the driver was asked: nothing is known.
    let moved = AccountSample { held: vec![None], ..account("u", &[7], 0) };
    measure(&mut world, &card, &[moved]);
    assert_eq!(unledgered(&world), [("u", 110)]);
    // 64 MiB are booked and not taken yet.
    for _ in 0..2 {
        measure(&mut world, &card, &[account("u", &[7], 1064)]);
        assert_eq!(unledgered(&world), [("u", 110)]);
    }
    measure(&mut world, &card, &[account("u", &[7], 1064)]);
    assert_eq!(unledgered(&world), [("u", 46)], "it really is less");
}

#[test]
fn a_process_without_the_library_is_told_of_once_and_counted() {
    let mut world = world();
    let (card, books) = ([process(2, 107, "u", 300), process(2, 109, "u", 10)], [account("u", &[9], 10)]);
    for _ in 0..5 {
        measure(&mut world, &card, &books);
        assert!(world.events.is_empty(), "it may have come between two looks");
    }
    for _ in 0..5 {
        measure(&mut world, &card, &books);
    }
    assert_eq!(world.events.len(), 1);
    let (reason, message) = &world.events[0];
    assert_eq!(*reason, "GpuShareEscaped");
    assert!(message.starts_with("process 107 of container main uses GPU GPU-00000002"), "{message}");
    let escapes = world.agent.view().escapes;
    assert_eq!(escapes, [(PodUid("u".into()), "main".into(), Escape::WithoutLibrary, 1)]);
    assert!(world.killed.is_empty());
    world.remove("u");
    measure(&mut world, &[], &[]);
    assert!(world.agent.view().escapes.is_empty());
}

#[test]
fn memory_over_the_limit_and_gpus_of_others_are_told_of_and_ended_where_asked() {
    let mut world = world();
    world.settings.isolation.kill_escaped = true;
    world.restart_agent();
    let card = [process(2, 107, "u", 5120 + 300), process(2, 108, "v", 5120 + 200), process(3, 118, "v", 10)];
    let books = [account("u", &[7], 5000), account("v", &[8, 18], 5000)];
    for _ in 0..6 {
        measure(&mut world, &card, &books);
    }
    let said: Vec<&str> = world.events.iter().map(|(_, message)| message.as_str()).collect();
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].ends_with(
        "has 5420 MiB of GPU GPU-00000002-0000-4000-8000-000000000000, and was given 5120 MiB; it is killed"
    ));
    assert!(said[1].contains("uses GPU GPU-00000003-0000-4000-8000-000000000000, which it was not given"));
    assert_eq!(world.killed, [107, 118]);
}

#[test]
fn whole_gpus_and_those_let_off_are_not_looked_at() {
    let mut world = World::new();
    world.settings.isolation.allow_opt_out = true;
    world.restart_agent();
    world
        .run(pod("whole", "whole", &[("main", vec![("nvidia.com/gpu", "1".to_owned())])]), &[("main", &[0])])
        .unwrap();
    let mut free = pod("free", "free", &[("main", share(30, 20))]);
    free.metadata.annotations.insert("tessera.dev/isolation".into(), "off".into());
    world.run(free, &[]).unwrap();
    let gpu = usize::from(*world.cards("free", "main").first().unwrap());
    for _ in 0..8 {
        measure(
            &mut world,
            &[process(0, 107, "whole", 16_000), process(gpu, 108, "free", 9000)],
            &[account("free", &[], 0)],
        );
    }
    assert!(world.events.is_empty(), "{:?}", world.events);
}
