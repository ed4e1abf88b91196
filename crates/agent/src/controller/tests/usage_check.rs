//! Comparison of what containers use with what they were granted.

use std::{collections::BTreeSet, time::Duration};

use tessera_core::units::PodUid;

use super::world::{World, found, pod, share};
use crate::controller::{
    AccountSample, ContainerTime, Escape, Event, GpuProcess, LibraryMapping, OnEscape, ProcessState,
    TimeTotals, UsageSample,
};

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
        state: ProcessState::Alive,
        library: LibraryMapping::Mapped,
    }
}

/// Returns a process of a pod on GPU 2 that has not mapped the library.
fn bare(pid: u32, pod: &str) -> GpuProcess {
    GpuProcess { library: LibraryMapping::NotMapped, ..process(2, pid, pod, 300) }
}

/// Returns the GPU time of a pod on GPU 2 after `seconds`, of which the container computed a part in
/// percent.
fn time(pod: &str, seconds: u64, percent: u64) -> ContainerTime {
    ContainerTime {
        container: (PodUid(pod.into()), "main".into()),
        gpu: found().gpus[2].uuid.clone(),
        totals: TimeTotals {
            measured: Duration::from_secs(seconds),
            busy: Duration::from_millis(seconds * percent * 10),
            ..TimeTotals::default()
        },
    }
}

/// Returns the memory account of a pod, with its registered processes and charged memory.
fn account(pod: &str, processes: &[u32], mib: u64) -> AccountSample {
    AccountSample {
        container: (PodUid(pod.into()), "main".into()),
        processes: processes.iter().copied().collect(),
        ended: BTreeSet::new(),
        held: vec![Some(mib * MIB)],
        context_only: BTreeSet::new(),
    }
}

fn sample(world: &mut World, processes: &[GpuProcess], accounts: &[AccountSample]) {
    sample_times(world, processes, &[], accounts);
}

fn sample_times(
    world: &mut World,
    processes: &[GpuProcess],
    times: &[ContainerTime],
    accounts: &[AccountSample],
) {
    world.wait(1);
    let sampled_gpus = found().gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let sample = UsageSample {
        at: 7,
        sampled_gpus,
        processes: processes.to_vec(),
        times: times.to_vec(),
        accounts: accounts.to_vec(),
    };
    world.event(Event::UsageSampled(Box::new(sample)));
}

/// Returns a world with two containers that hold 30 % and 5120 MiB each of GPU 2.
fn world() -> World {
    world_that(OnEscape::Report)
}

/// Returns the same world with this treatment of escapes.
fn world_that(on_escape: OnEscape) -> World {
    let mut world = World::new();
    world.settings.isolation.on_escape = on_escape;
    world.restart_agent();
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

/// A container can write anything into its account, so its contexts say nothing about others.
#[test]
fn the_size_of_a_context_is_measured_for_its_container() {
    let contexts = |world: &World| -> Vec<u64> {
        world.limits.values().map(|limits| limits.gpus[0].context.0 / MIB).collect()
    };
    let waiting = |mib| AccountSample { context_only: [(7, 0)].into(), ..account("u", &[7], mib) };
    let mut world = world();
    sample(&mut world, &[process(2, 107, "u", 417)], &[account("u", &[7], 528)]);
    assert_eq!(contexts(&world), [0, 0], "the process may hold more than a context");
    sample(&mut world, &[process(2, 108, "u", 417)], &[waiting(528)]);
    sample(&mut world, &[process(3, 107, "u", 417)], &[waiting(528)]);
    sample(&mut world, &[GpuProcess { bytes: None, ..process(2, 107, "u", 0) }], &[waiting(528)]);
    assert_eq!(contexts(&world), [0, 0], "another process, another GPU, and no report");
    sample(&mut world, &[process(2, 107, "u", 529)], &[waiting(528)]);
    assert_eq!(contexts(&world), [0, 0], "more than the upper bound contains code too");
    sample(&mut world, &[process(2, 107, "u", 417)], &[waiting(528)]);
    assert_eq!(contexts(&world), [418, 0], "rounded up to blocks of 2 MiB");
    sample(&mut world, &[process(2, 107, "u", 100)], &[waiting(528)]);
    assert_eq!(contexts(&world), [418, 0], "once it is known it stays");
    world.restart_agent();
    world.wait(30);
    assert_eq!(contexts(&world), [418, 0], "also after a restart of the agent");
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

fn escaped(world: &mut World) -> Vec<(String, usize)> {
    world.agent.view().escaped.into_iter().map(|(pod, _, _, count)| (pod.0, count)).collect()
}

#[test]
fn a_pod_that_is_ending_is_not_shown_as_escaped() {
    let mut world = world();
    for _ in 0..5 {
        sample(&mut world, &[bare(107, "u")], &[]);
    }
    assert_eq!(escaped(&mut world), [("u".to_owned(), 1)]);
    world.terminate("u");
    sample(&mut world, &[bare(107, "u")], &[]);
    assert!(escaped(&mut world).is_empty());
}

#[test]
fn a_process_without_the_library_is_reported_once_and_counted() {
    let mut world = world();
    let processes = [bare(107, "u"), process(2, 109, "u", 10)];
    for _ in 0..2 {
        sample(&mut world, &processes, &[]);
        assert!(world.events.is_empty(), "the process may have started between two samples");
        assert!(escaped(&mut world).is_empty());
    }
    for _ in 0..5 {
        sample(&mut world, &processes, &[]);
    }
    assert_eq!(world.events.len(), 1);
    let (reason, message) = &world.events[0];
    assert_eq!(*reason, "GpuShareEscaped");
    assert!(message.starts_with("process 107 of container main uses GPU GPU-00000002"), "{message}");
    let escapes = world.agent.view().escapes;
    assert_eq!(escapes, [(PodUid("u".into()), "main".into(), Escape::WithoutLibrary, 1)]);
    assert_eq!(escaped(&mut world), [("u".to_owned(), 1)]);
    assert!(world.killed.is_empty());
    world.remove("u");
    sample(&mut world, &[], &[]);
    assert!(world.agent.view().escapes.is_empty());
    assert!(escaped(&mut world).is_empty());
}

#[test]
fn a_forged_slot_does_not_hide_a_process() {
    let mut world = world_that(OnEscape::Kill);
    for _ in 0..3 {
        sample(&mut world, &[bare(107, "u")], &[account("u", &[7], 300)]);
    }
    assert_eq!(world.events.len(), 1, "the account lists process 7 of the container, which is process 107");
    assert_eq!(world.killed, [107]);
}

#[test]
fn a_process_that_is_not_in_the_account_but_has_the_library_is_not_reported() {
    let mut world = world_that(OnEscape::Kill);
    let unreadable = GpuProcess { library: LibraryMapping::Unknown, ..process(2, 108, "u", 10) };
    for _ in 0..8 {
        sample(&mut world, &[process(2, 107, "u", 300), unreadable.clone()], &[account("u", &[], 0)]);
    }
    assert!(world.events.is_empty() && world.killed.is_empty(), "{:?}", world.events);
}

#[test]
fn pods_that_are_ending_are_not_reported() {
    let bare_and_over_memory = |state| {
        let more = GpuProcess { state, ..process(2, 108, "u", 9000) };
        [GpuProcess { state, ..bare(107, "u") }, more]
    };
    // The driver still lists processes that have ended.
    let mut world = world_that(OnEscape::Kill);
    for _ in 0..8 {
        sample(&mut world, &bare_and_over_memory(ProcessState::Ended), &[]);
    }
    // The pod has ended, so its grant is gone, and its processes are about to end.
    world.set_status("u", "Succeeded", true);
    for _ in 0..8 {
        sample(&mut world, &bare_and_over_memory(ProcessState::Alive), &[]);
    }
    // The kubelet and the API server have forgotten the pod.
    world.remove("u");
    for _ in 0..8 {
        sample(&mut world, &bare_and_over_memory(ProcessState::Alive), &[]);
    }
    // The processes of a pod are on a GPU that it does not hold in single samples, but never for long.
    for round in 0..20 {
        let gpu = if round % 3 == 2 { 2 } else { 3 };
        sample(&mut world, &[process(gpu, 118, "v", 10)], &[]);
    }
    assert!(world.events.is_empty() && world.killed.is_empty(), "{:?}", world.events);
    assert!(escaped(&mut world).is_empty());
}

#[test]
fn samples_in_quick_succession_confirm_nothing() {
    let mut world = world();
    for _ in 0..50 {
        let processes = vec![bare(107, "u")];
        let sample = UsageSample { processes, ..UsageSample::default() };
        world.event(Event::UsageSampled(Box::new(sample)));
    }
    assert!(world.events.is_empty(), "{:?}", world.events);
}

#[test]
fn memory_over_the_limit_and_foreign_gpus_are_reported_and_killed_on_request() {
    let mut world = world_that(OnEscape::Kill);
    let processes =
        [process(2, 107, "u", 5120 + 300), process(2, 108, "v", 5120 + 200), process(3, 118, "v", 10)];
    let accounts = [account("u", &[7], 5000), account("v", &[8, 18], 5000)];
    for _ in 0..3 {
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
fn time_over_the_share_is_reported_although_the_library_is_mapped() {
    let mut world = world();
    world.run(pod("w", "w", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    // The driver measures every two seconds, and the agent reads its figures every second.
    for second in 0..12 {
        let times = ["u", "v", "w"].map(|pod| time(pod, second / 2 * 2, if pod == "v" { 20 } else { 61 }));
        let simulated = GpuProcess { library: LibraryMapping::NoMemory, ..process(2, 109, "w", 300) };
        let processes = [process(2, 107, "u", 300), process(2, 108, "v", 300), simulated];
        sample_times(&mut world, &processes, &times, &[]);
    }
    let messages: Vec<&str> = world.events.iter().map(|(_, message)| message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "container main computed on GPU GPU-00000002-0000-4000-8000-000000000000 for 61 % of the last 6 s, and \
          its windows allowed 0 %"
        ]
    );
    assert_eq!(world.agent.view().escapes[0].2, Escape::OverTime);
}

#[test]
fn an_escaped_process_is_throttled_to_its_share_until_it_ends() {
    let mut world = world_that(OnEscape::Throttle);
    let processes = [bare(107, "u"), process(2, 108, "v", 9000)];
    let pauses = |world: &World| {
        let of_process = world.throttled.iter().filter(|(pid, _)| *pid == 107);
        of_process.map(|(_, cycle)| cycle.pause.as_millis()).collect::<Vec<_>>()
    };
    for _ in 0..3 {
        sample(&mut world, &processes, &[]);
    }
    assert_eq!(pauses(&world), [23], "10 ms of 33 ms are 30 %");
    assert!(world.events[0].1.ends_with("; it is held to 30 % of the time"), "{}", world.events[0].1);
    // The work that it queues keeps the GPU busy while the process is stopped.
    for (second, percent) in [(2, 90), (4, 90), (6, 90)] {
        sample_times(&mut world, &processes, &[time("u", second, percent)], &[]);
    }
    assert_eq!(pauses(&world), [23, 69, 209], "90 % are three times the share");
    sample_times(&mut world, &processes, &[time("u", 6, 90)], &[]);
    assert_eq!(pauses(&world).len(), 3, "nothing new was measured");
    assert!(world.throttled.iter().all(|(pid, _)| *pid == 107), "a pause gives no memory back");
    assert!(world.killed.is_empty());
    sample_times(&mut world, &[], &[time("u", 8, 90)], &[]);
    sample_times(&mut world, &[], &[time("u", 10, 90)], &[]);
    assert_eq!(pauses(&world).len(), 3, "the process has ended");
}

#[test]
fn processes_that_an_earlier_agent_has_stopped_are_resumed_once() {
    let mut world = world();
    let stopped = |pid, pod| GpuProcess { state: ProcessState::Stopped, ..process(2, pid, pod, 10) };
    for _ in 0..3 {
        sample(&mut world, &[stopped(107, "u"), process(2, 108, "v", 10), stopped(109, "other")], &[]);
    }
    assert_eq!(world.resumed, [107]);
    world.wait(60);
    sample(&mut world, &[stopped(110, "v")], &[]);
    assert_eq!(world.resumed, [107], "this agent did not stop it, and no earlier one did");
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
