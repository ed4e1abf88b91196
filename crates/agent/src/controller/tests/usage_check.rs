//! Comparison of what containers use with what they were granted.

use std::collections::BTreeSet;

use tessera_core::units::PodUid;

use super::world::{World, found, pod, share};
use crate::controller::{AccountSample, Escape, Event, GpuProcess, UsageSample};

const MIB: u64 = 1 << 20;

/// Returns a process of a pod on a GPU, with its ID on the node and its memory.
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

/// Returns the memory account of a pod, with its registered processes and charged memory.
fn account(pod: &str, processes: &[u32], mib: u64) -> AccountSample {
    AccountSample {
        container: (PodUid(pod.into()), "main".into()),
        processes: processes.iter().copied().collect(),
        ended: BTreeSet::new(),
        held: vec![Some(mib * MIB)],
    }
}

fn sample(world: &mut World, processes: &[GpuProcess], accounts: &[AccountSample]) {
    world.wait(1);
    let sampled_gpus = found().gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let sample =
        UsageSample { at: 7, sampled_gpus, processes: processes.to_vec(), accounts: accounts.to_vec() };
    world.event(Event::UsageSampled(Box::new(sample)));
}

/// Returns a world with two containers that hold 5120 MiB each of GPU 2.
fn world() -> World {
    let mut world = World::new();
    for name in ["u", "v"] {
        world.run(pod(name, name, &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    }
    world
}

fn uncharged(world: &World) -> Vec<(&str, u64)> {
    world.uncharged.iter().map(|((pod, _), bytes)| (pod.as_str(), bytes / MIB)).collect()
}

#[test]
fn uncharged_memory_is_published_to_its_container_only() {
    let mut world = world();
    let accounts = [account("u", &[7], 1000), account("v", &[8], 500)];
    let processes = [process(2, 107, "u", 1110), process(2, 108, "v", 480)];
    sample(&mut world, &processes, &accounts);
    assert_eq!(uncharged(&world), [("u", 110), ("v", 0)]);
    sample(&mut world, &processes[1..], &[account("u", &[], 0), accounts[1].clone()]);
    assert_eq!(uncharged(&world), [("u", 0), ("v", 0)]);
    assert!(world.events.is_empty());
}

#[test]
fn without_a_driver_report_uncharged_memory_stays_as_it_was() {
    let mut world = world();
    sample(&mut world, &[process(2, 107, "u", 1110)], &[account("u", &[7], 1000)]);
    let silent = GpuProcess { bytes: None, ..process(2, 107, "u", 0) };
    sample(&mut world, &[silent], &[account("u", &[7], 1000)]);
    assert_eq!(uncharged(&world), [("u", 110)]);
    // The driver reported no GPU at all.
    let accounts = vec![account("u", &[7], 1000)];
    world.event(Event::UsageSampled(Box::new(UsageSample { accounts, ..UsageSample::default() })));
    assert_eq!(uncharged(&world), [("u", 110)]);
}

#[test]
fn memory_of_an_ended_process_does_not_count_as_uncharged() {
    let mut world = world();
    let processes = [process(2, 107, "u", 1110), process(2, 109, "u", 3000)];
    let account = AccountSample { ended: [9].into(), ..account("u", &[7], 1000) };
    sample(&mut world, &processes, &[account]);
    assert_eq!(uncharged(&world), [("u", 110)]);
}

#[test]
fn samples_during_an_allocation_do_not_lower_uncharged_memory() {
    let mut world = world();
    let processes = [process(2, 107, "u", 1110)];
    sample(&mut world, &processes, &[account("u", &[7], 1000)]);
    // The account changed during the sample, so it cannot be compared.
    let moved = AccountSample { held: vec![None], ..account("u", &[7], 0) };
    sample(&mut world, &processes, &[moved]);
    assert_eq!(uncharged(&world), [("u", 110)]);
    // 64 MiB are charged and not allocated yet.
    for _ in 0..2 {
        sample(&mut world, &processes, &[account("u", &[7], 1064)]);
        assert_eq!(uncharged(&world), [("u", 110)]);
    }
    sample(&mut world, &processes, &[account("u", &[7], 1064)]);
    assert_eq!(uncharged(&world), [("u", 46)], "the highest of three samples is lower now");
}

#[test]
fn a_process_without_the_library_is_reported_once_and_counted() {
    let mut world = world();
    let (processes, accounts) =
        ([process(2, 107, "u", 300), process(2, 109, "u", 10)], [account("u", &[9], 10)]);
    for _ in 0..5 {
        sample(&mut world, &processes, &accounts);
        assert!(world.events.is_empty(), "the process may have started between two samples");
    }
    for _ in 0..5 {
        sample(&mut world, &processes, &accounts);
    }
    assert_eq!(world.events.len(), 1);
    let (reason, message) = &world.events[0];
    assert_eq!(*reason, "GpuShareEscaped");
    assert!(message.starts_with("process 107 of container main uses GPU GPU-00000002"), "{message}");
    let escapes = world.agent.view().escapes;
    assert_eq!(escapes, [(PodUid("u".into()), "main".into(), Escape::WithoutLibrary, 1)]);
    assert!(world.killed.is_empty());
    world.remove("u");
    sample(&mut world, &[], &[]);
    assert!(world.agent.view().escapes.is_empty());
}

#[test]
fn memory_over_the_limit_and_foreign_gpus_are_reported_and_killed_on_request() {
    let mut world = world();
    world.settings.isolation.kill_escaped = true;
    world.restart_agent();
    let processes =
        [process(2, 107, "u", 5120 + 300), process(2, 108, "v", 5120 + 200), process(3, 118, "v", 10)];
    let accounts = [account("u", &[7], 5000), account("v", &[8, 18], 5000)];
    for _ in 0..6 {
        sample(&mut world, &processes, &accounts);
    }
    let messages: Vec<&str> = world.events.iter().map(|(_, message)| message.as_str()).collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(messages[0].ends_with(
        "uses 5420 MiB of GPU GPU-00000002-0000-4000-8000-000000000000, and was given 5120 MiB; it is killed"
    ));
    assert!(
        messages[1].contains("uses GPU GPU-00000003-0000-4000-8000-000000000000, which it was not given")
    );
    assert_eq!(world.killed, [107, 118]);
}

#[test]
fn whole_gpus_and_pods_that_opted_out_are_not_reported() {
    let mut world = World::new();
    world.settings.isolation.allow_opt_out = true;
    world.restart_agent();
    world
        .run(pod("whole", "whole", &[("main", vec![("nvidia.com/gpu", "1".to_owned())])]), &[("main", &[0])])
        .unwrap();
    let mut free = pod("free", "free", &[("main", share(30, 20))]);
    free.metadata.annotations.insert("tessera.dev/isolation".into(), "off".into());
    world.run(free, &[]).unwrap();
    let gpu = usize::from(*world.gpus_of("free", "main").first().unwrap());
    for _ in 0..8 {
        sample(
            &mut world,
            &[process(0, 107, "whole", 16_000), process(gpu, 108, "free", 9000)],
            &[account("free", &[], 0)],
        );
    }
    assert!(world.events.is_empty(), "{:?}", world.events);
}
