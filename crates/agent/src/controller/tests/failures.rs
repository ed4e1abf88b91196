//! Failures around the agent, and how it reacts.

use std::time::Duration;

use tessera_core::{
    gpu::{Gpu, Health},
    units::{MiB, PodUid},
};
use tessera_node::{
    device_plugin::PreferenceRequest,
    gpus::{Incident, IncidentKind},
};
use tessera_wire::kubelet::device_id::Resource;

use super::world::{GPU_COUNT, World, found, pod, share};
use crate::controller::{Action, CallAnswer, CallId, Event, EventTime, ShellError, UsageSample, WriteError};

fn at(seconds: u64) -> EventTime {
    EventTime { elapsed: Duration::from_secs(seconds), unix_nanos: 17 }
}

/// Returns the number of healthy devices and of all devices that were published for whole GPUs.
fn published(actions: &[Action]) -> Vec<(usize, usize)> {
    let lists = actions.iter().filter_map(|action| match action {
        Action::PublishDevices(Resource::NvidiaGpu, devices) => Some(devices),
        _ => None,
    });
    lists.map(|devices| (devices.iter().filter(|device| device.healthy).count(), devices.len())).collect()
}

fn warnings(actions: &[Action]) -> Vec<String> {
    let warned = actions.iter().filter_map(|action| match action {
        Action::Warn(warning) => Some(warning.to_string()),
        _ => None,
    });
    warned.collect()
}

#[test]
fn an_agent_without_changes_only_lists_now_and_then() {
    let mut world = World::new();
    world.event(Event::Node(Box::default()));
    for index in 0..GPU_COUNT {
        let name = format!("p{index}");
        world.run(pod(&name, &name, &[("main", share(30, 20))]), &[("main", &[index])]).unwrap();
    }
    world.check();
    for resource in Resource::ALL {
        world.event(Event::StreamOpened(resource));
    }
    let revision = world.agent.revision();
    let mut handle = |event| world.agent.handle(at(100), event);
    let whole = [Resource::NvidiaGpu, Resource::AliyunGpu].into();
    let due = [Action::ListPodResources, Action::ReadOfferedDevices(whole)];
    assert_eq!(handle(Event::Tick), due, "the routine comparisons are due");
    let listed = world.listed();
    let mut handle = |event| world.agent.handle(at(101), event);
    assert_eq!(handle(Event::PodResourcesListed(Ok(listed))), []);
    assert_eq!(handle(Event::Gpus(Ok(found()))), []);
    assert_eq!(handle(Event::UsageSampled(Box::<UsageSample>::default())), []);
    assert_eq!(handle(Event::Tick), []);
    assert_eq!(world.agent.revision(), revision, "nothing has changed");
}

#[test]
fn without_a_driver_all_gpus_are_withdrawn_until_it_is_back() {
    let mut world = World::new();
    let all = usize::from(GPU_COUNT);
    let lost = || Event::Gpus(Err(ShellError::GpuDiscovery("no NVIDIA driver answers".into())));
    let actions = world.agent.handle(at(10), lost());
    assert_eq!(
        published(&actions),
        [(0, all)],
        "the GPUs are withdrawn and not forgotten, because containers run on them"
    );
    assert_eq!(
        warnings(&actions),
        ["the GPUs are withdrawn until they are found again error=no NVIDIA driver answers"]
    );
    assert_eq!(world.agent.handle(at(20), lost()), [], "the same error is logged once");
    let back = world.agent.handle(at(30), Event::Gpus(Ok(found())));
    assert_eq!(published(&back), [(all, all)]);
    assert_eq!(
        world.agent.readiness().unwrap_err().to_string(),
        "the kubelet has not asked for the devices of nvidia.com/gpu yet"
    );
}

#[test]
fn a_gpu_that_was_lost_and_found_again_is_offered_again() {
    let mut world = World::new();
    let all = usize::from(GPU_COUNT);
    let gpu = found().gpus[1].clone();
    let fell_off = Incident { gpu: Some(gpu.uuid.clone()), kind: IncidentKind::Xid(79) };
    let actions = world.agent.handle(at(10), Event::Incident(fell_off));
    assert_eq!(published(&actions), [(all - 1, all)]);
    assert_eq!(
        world.agent.handle(at(20), Event::Gpus(Ok(found()))),
        [],
        "the driver never lost the GPU, so it was not repaired"
    );
    let mut without = found();
    without.gpus[1] = Gpu { uuid: "lost-1".into(), health: Health::Unhealthy, memory: MiB::ZERO, ..gpu };
    let lost = world.agent.handle(at(30), Event::Gpus(Ok(without)));
    assert_eq!(published(&lost), [(all - 1, all)], "the lost GPU keeps its name");
    let back = world.agent.handle(at(40), Event::Gpus(Ok(found())));
    assert_eq!(published(&back), [(all, all)]);
}

/// A GPU in MIG mode has no compute of its own, and one with retired memory needs a reset.
#[test]
fn gpus_in_mig_mode_or_awaiting_a_reset_are_withdrawn_with_the_reason() {
    for (health, reason) in
        [(Health::InMigMode, "in MIG mode"), (Health::AwaitingReset, "awaiting a reset for retired memory")]
    {
        let mut world = World::new();
        let all = usize::from(GPU_COUNT);
        let mut withdrawn = found();
        withdrawn.gpus[2].health = health;
        let warnings =
            |actions: &[Action]| actions.iter().filter(|action| matches!(action, Action::Warn(_))).count();
        let actions = world.agent.handle(at(10), Event::Gpus(Ok(withdrawn.clone())));
        assert_eq!((published(&actions), warnings(&actions)), (vec![(all - 1, all)], 1), "{reason}");
        let again = world.agent.handle(at(20), Event::Gpus(Ok(withdrawn)));
        assert_eq!(warnings(&again), 0, "one warning is enough");
        let inventory = world.agent.view().inventory.unwrap();
        assert_eq!(inventory.gpus[2].health, health, "schedulers read the reason");
        let back = world.agent.handle(at(30), Event::Gpus(Ok(found())));
        assert_eq!((published(&back), warnings(&back)), (vec![(all, all)], 0));
    }
}

#[test]
fn annotations_that_are_removed_are_written_again() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.check();
    let expected = world.pods["u"].metadata.annotations.clone();
    for _ in 0..2 {
        let pod = world.pods.get_mut("u").unwrap();
        pod.metadata.annotations.clear();
        let pod = pod.clone();
        world.event(Event::PodApplied(Box::new(pod)));
        assert_eq!(
            world.pods["u"].metadata.annotations.keys().collect::<Vec<_>>(),
            expected.keys().collect::<Vec<_>>()
        );
        world.check();
    }
}

#[test]
fn a_refused_patch_is_logged_once_and_retried_with_backoff() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.check();
    let mut bare = world.pods["u"].clone();
    bare.metadata.annotations.clear();
    let patches = |actions: &[Action]| {
        actions.iter().filter(|action| matches!(action, Action::PatchPod { .. })).count()
    };
    let first = world.agent.handle(at(100), Event::PodApplied(Box::new(bare)));
    assert_eq!(patches(&first), 1);
    let refused = || Event::PodPatched(PodUid::from("u"), Err(WriteError::Later("forbidden".into())));
    let actions = world.agent.handle(at(100), refused());
    assert_eq!(
        warnings(&actions),
        ["cannot annotate a pod with its GPUs, will try again pod=team/p error=forbidden"]
    );
    assert_eq!(patches(&actions), 0, "not before the retry delay");
    let mut tried = 0;
    for second in 101..200 {
        let again = patches(&world.agent.handle(at(second), Event::Tick));
        tried += again;
        if again > 0 {
            let actions = world.agent.handle(at(second), refused());
            assert!(warnings(&actions).is_empty());
        }
    }
    assert!((4..10).contains(&tried), "{tried} retries with growing delays");
}

#[test]
fn a_full_disk_refuses_the_start_and_the_next_attempt_works() {
    let mut world = World::new();
    let bound = world.bind(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]);
    world.admit(&bound).unwrap();
    let ids = world.kubelet["u"].1[0].2["tencent.com/vcuda-core"].clone();
    let call = CallId(900);
    world.agent.handle(at(5), Event::PreStart(call, Resource::VcudaCore, ids));
    let listed = world.listed();
    let begun = world.agent.handle(at(5), Event::PodResourcesListed(Ok(listed)));
    assert!(begun.iter().any(|action| matches!(action, Action::CreateGrants(..))), "{begun:?}");
    let full = Err(ShellError::GrantFile("No space left on device (os error 28)".to_owned()));
    let answered = world.agent.handle(at(5), Event::GrantsCreated(call, full));
    let refused = answered.iter().find_map(|action| match action {
        Action::Answer(_, CallAnswer::Started(Err(reason))) => Some(reason.to_string()),
        _ => None,
    });
    let expected = "cannot write the limits of the container: No space left on device (os error 28)";
    assert_eq!(refused.as_deref(), Some(expected));
    assert!(
        !world.pods["u"].metadata.annotations.values().any(|value| value == "true"),
        "the container has not started"
    );
    world.start("u").unwrap();
    world.check();
}

#[test]
fn limits_that_could_not_be_written_are_written_later() {
    let mut world = World::new();
    world.settings.isolation.allow_ceiling_changes = true;
    world.restart_agent();
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.check();
    let mut pod = world.pods["u"].clone();
    pod.metadata.annotations.insert("tencent.com/vcuda-core-limit".into(), "80".into());
    let change = |actions: Vec<Action>| {
        actions.into_iter().find_map(|action| match action {
            Action::UpdateGrant(limits) => Some(limits),
            _ => None,
        })
    };
    let limits = change(world.agent.handle(at(100), Event::PodApplied(Box::new(pod)))).unwrap();
    assert_eq!(limits.gpus[0].compute_ceiling_percent, 80);
    let failed = world
        .agent
        .handle(at(100), Event::GrantUpdated(limits.clone(), Err(ShellError::GrantFile("disk full".into()))));
    assert_eq!(
        warnings(&failed),
        [
            "cannot write new limits of a container; the old ones stay, will try again pod=team/p container=main error=disk full"
        ]
    );
    assert_eq!(change(world.agent.handle(at(101), Event::Tick)), None);
    let again = (102..120).find_map(|second| change(world.agent.handle(at(second), Event::Tick)));
    assert_eq!(again, Some(limits));
}

#[test]
fn a_growing_account_file_is_reported_to_its_owner_now_and_then() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    let mut grows_at = |second, uid: &str| {
        let grew = Event::AccountFileGrew((uid.into(), "main".to_owned()), 1 << 30);
        world.agent.handle(at(second), grew)
    };
    let first = grows_at(100, "u");
    assert_eq!(
        warnings(&first),
        [
            "a container made its account file grow; the file was cut pod=team/p container=main detail=1048576 KiB"
        ]
    );
    let reason = |action: &Action| match action {
        Action::RecordPodEvent { reason, .. } => Some(*reason),
        _ => None,
    };
    assert_eq!(first.iter().find_map(reason), Some("AccountFileGrew"));
    assert_eq!(grows_at(101, "u"), []);
    assert_eq!(grows_at(101, "unknown"), []);
    assert_eq!(grows_at(701, "u").len(), 2);
}

#[test]
fn a_refusal_names_the_failed_list() {
    let mut world = World::new();
    world.bind(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]);
    let call = CallId(900);
    world.agent.handle(at(5), Event::Allocate(call, Resource::VcudaCore, ["x".to_owned()].into()));
    let silent = "the kubelet was asked to list pod resources and does not answer; is it alive?";
    world.agent.handle(at(8), Event::PodResourcesListed(Err(ShellError::PodResources(silent.into()))));
    let answered = world.agent.handle(at(10), Event::Tick);
    let refused = answered.iter().find_map(|action| match action {
        Action::Answer(_, CallAnswer::Allocated(Err(reason))) => Some(reason.to_string()),
        _ => None,
    });
    assert_eq!(refused.unwrap(), format!("cannot tell which pod asks for tencent.com/vcuda-core: {silent}"));
}

/// Makes a call that matches no pod, so that the agent reads the pods. The read stays unanswered.
fn begin_read(world: &mut World) {
    let wish = PreferenceRequest { count: 3, ..PreferenceRequest::default() };
    world.agent.handle(at(50), Event::Prefer(CallId(900), Resource::NvidiaGpu, wish));
    let listed = world.listed();
    let mut reads_at = |second| {
        world.agent.handle(at(second), Event::PodResourcesListed(Ok(listed.clone())));
        world.agent.handle(at(second), Event::Tick).contains(&Action::ReadPods)
    };
    assert!(reads_at(51));
    assert!(!reads_at(52), "one read at a time");
    world.agent.handle(at(52), Event::PodResourcesListed(Ok(listed)));
    world.wait(60);
}

#[test]
fn a_read_that_is_older_than_the_watch_removes_and_revives_no_pod() {
    let mut world = World::new();
    world.run(pod("leaves", "leaves", &[("main", share(30, 20))]), &[("main", &[1])]).unwrap();
    world.run(pod("stays", "stays", &[("main", share(30, 20))]), &[("main", &[1])]).unwrap();
    let behind = world.pods.values().cloned().collect();
    begin_read(&mut world);
    world.remove("leaves");
    world.run(pod("comes", "comes", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.event(Event::PodsRead(Ok(behind)));
    let known: Vec<String> = world.agent.view().pods.iter().map(|pod| pod.uid.0.clone()).collect();
    assert_eq!(known, ["comes", "stays"]);
    assert!(world.limits.contains_key(&("comes".to_owned(), "main".to_owned())), "its limits are kept");
    world.check();
}

#[test]
fn a_read_that_began_before_a_new_watch_is_ignored() {
    let mut world = World::new();
    begin_read(&mut world);
    let gone = pod("gone", "gone", &[("main", share(30, 20))]);
    world.event(Event::Pods(Vec::new()));
    world.event(Event::PodsRead(Ok(vec![gone])));
    assert!(world.agent.view().pods.is_empty());
}
