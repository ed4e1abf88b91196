//! What goes wrong around an agent, and what it makes of it.

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

use super::world::{CARDS, World, found, pod, share};
use crate::controller::{Action, CallAnswer, CallId, Event, EventTime, UsageSample, WriteError};

fn at(seconds: u64) -> EventTime {
    EventTime { elapsed: Duration::from_secs(seconds), unix_nanos: 17 }
}

/// Healthy devices and all devices of whole GPUs that are told.
fn told(actions: &[Action]) -> Vec<(usize, usize)> {
    let published = actions.iter().filter_map(|action| match action {
        Action::PublishDevices(Resource::NvidiaGpu, devices) => Some(devices),
        _ => None,
    });
    published.map(|devices| (devices.iter().filter(|device| device.healthy).count(), devices.len())).collect()
}

fn warnings(actions: &[Action]) -> Vec<&str> {
    let warned = actions.iter().filter_map(|action| match action {
        Action::Warn(what) => Some(what.as_str()),
        _ => None,
    });
    warned.collect()
}

#[test]
fn an_agent_to_which_nothing_happens_does_nothing() {
    let mut world = World::new();
    world.happens(Event::Node(Box::default()));
    for card in 0..CARDS {
        let name = format!("p{card}");
        world.run(pod(&name, &name, &[("main", share(30, 20))]), &[("main", &[card])]).unwrap();
    }
    world.check();
    for resource in Resource::ALL {
        world.happens(Event::StreamOpened(resource));
    }
    let revision = world.agent.revision();
    let mut happens = |event| world.agent.handle(at(100), event);
    assert_eq!(
        happens(Event::Tick),
        [Action::ListPodResources],
        "the kubelet's books are compared now and then"
    );
    let books = world.listed();
    let mut happens = |event| world.agent.handle(at(101), event);
    assert_eq!(happens(Event::PodResourcesListed(Ok(books))), []);
    assert_eq!(happens(Event::Gpus(Ok(found()))), []);
    assert_eq!(happens(Event::UsageSampled(Box::<UsageSample>::default())), []);
    assert_eq!(happens(Event::Tick), []);
    assert_eq!(world.agent.revision(), revision, "and nobody has to look again");
}

#[test]
fn a_driver_that_is_lost_takes_all_gpus_with_it_until_it_is_back() {
    let mut world = World::new();
    let all = usize::from(CARDS);
    let lost = || Event::Gpus(Err("no NVIDIA driver answers".into()));
    let actions = world.agent.handle(at(10), lost());
    assert_eq!(told(&actions), [(0, all)], "withdrawn, not forgotten: containers run on them");
    assert_eq!(
        warnings(&actions),
        ["the GPUs are withdrawn until they are found again: no NVIDIA driver answers"]
    );
    assert_eq!(world.agent.handle(at(20), lost()), [], "said once");
    let back = world.agent.handle(at(30), Event::Gpus(Ok(found())));
    assert_eq!(told(&back), [(all, all)]);
    assert_eq!(
        world.agent.readiness().unwrap_err(),
        "the kubelet has not asked for the devices of nvidia.com/gpu yet"
    );
}

#[test]
fn a_gpu_that_was_lost_and_is_found_again_is_trusted_again() {
    let mut world = World::new();
    let all = usize::from(CARDS);
    let card = found().gpus[1].clone();
    let fell_off = Incident { gpu: Some(card.uuid.clone()), kind: IncidentKind::Xid(79) };
    let actions = world.agent.handle(at(10), Event::Incident(fell_off));
    assert_eq!(told(&actions), [(all - 1, all)]);
    assert_eq!(
        world.agent.handle(at(20), Event::Gpus(Ok(found()))),
        [],
        "it was never away: nobody has mended it"
    );
    let mut without = found();
    without.gpus[1] = Gpu { uuid: "lost-1".into(), health: Health::Unhealthy, memory: MiB::ZERO, ..card };
    let lost = world.agent.handle(at(30), Event::Gpus(Ok(without)));
    assert_eq!(told(&lost), [(all - 1, all)], "under the name it had");
    let back = world.agent.handle(at(40), Event::Gpus(Ok(found())));
    assert_eq!(told(&back), [(all, all)]);
}

#[test]
fn annotations_that_somebody_changes_back_are_corrected_again() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.check();
    let truth = world.pods["u"].metadata.annotations.clone();
    for _ in 0..2 {
        let pod = world.pods.get_mut("u").unwrap();
        pod.metadata.annotations.clear();
        let pod = pod.clone();
        world.happens(Event::PodApplied(Box::new(pod)));
        assert_eq!(
            world.pods["u"].metadata.annotations.keys().collect::<Vec<_>>(),
            truth.keys().collect::<Vec<_>>()
        );
        world.check();
    }
}

#[test]
fn a_write_the_api_server_refuses_is_told_once_and_tried_again() {
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
    assert_eq!(warnings(&actions), ["cannot annotate pod team/p with its GPUs, will try again: forbidden"]);
    assert_eq!(patches(&actions), 0, "not at once");
    let mut tried = 0;
    for second in 101..200 {
        let again = patches(&world.agent.handle(at(second), Event::Tick));
        tried += again;
        if again > 0 {
            let actions = world.agent.handle(at(second), refused());
            assert!(warnings(&actions).is_empty());
        }
    }
    assert!((4..10).contains(&tried), "{tried} times, with ever longer pauses");
}

#[test]
fn a_full_disk_refuses_the_start_and_the_next_try_works() {
    let mut world = World::new();
    let bound = world.bind(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]);
    world.admit(&bound).unwrap();
    let ids = world.books["u"].1[0].2["tencent.com/vcuda-core"].clone();
    let call = CallId(900);
    world.agent.handle(at(5), Event::PreStart(call, Resource::VcudaCore, ids));
    let books = world.listed();
    let begun = world.agent.handle(at(5), Event::PodResourcesListed(Ok(books)));
    assert!(begun.iter().any(|action| matches!(action, Action::CreateGrants(..))), "{begun:?}");
    let full = Err("No space left on device (os error 28)".to_owned());
    let answered = world.agent.handle(at(5), Event::GrantsCreated(call, full));
    let refused = answered.iter().find_map(|action| match action {
        Action::Answer(_, CallAnswer::Started(Err(reason))) => Some(reason.as_str()),
        _ => None,
    });
    let expected = "cannot write the limits of the container: No space left on device (os error 28)";
    assert_eq!(refused, Some(expected));
    assert!(
        !world.pods["u"].metadata.annotations.values().any(|value| value == "true"),
        "it has not started"
    );
    world.start("u").unwrap();
    world.check();
}

#[test]
fn limits_that_could_not_be_changed_are_changed_later() {
    let mut world = World::new();
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
    let failed = world.agent.handle(at(100), Event::GrantUpdated(limits.clone(), Err("disk full".into())));
    assert_eq!(warnings(&failed), ["the limits of team/p, container main, stay as they were: disk full"]);
    assert_eq!(change(world.agent.handle(at(101), Event::Tick)), None);
    let again = (102..120).find_map(|second| change(world.agent.handle(at(second), Event::Tick)));
    assert_eq!(again, Some(limits));
}

#[test]
fn a_kubelet_that_does_not_list_is_named_in_the_refusal() {
    let mut world = World::new();
    world.bind(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]);
    let call = CallId(900);
    world.agent.handle(at(5), Event::Allocate(call, Resource::VcudaCore, ["x".to_owned()].into()));
    let silent = "the kubelet was asked to list pod resources and does not answer; is it alive?";
    world.agent.handle(at(8), Event::PodResourcesListed(Err(silent.into())));
    let answered = world.agent.handle(at(10), Event::Tick);
    let refused = answered.iter().find_map(|action| match action {
        Action::Answer(_, CallAnswer::Allocated(Err(reason))) => Some(reason.clone()),
        _ => None,
    });
    assert_eq!(refused.unwrap(), format!("cannot tell which pod asks for tencent.com/vcuda-core: {silent}"));
}

/// Asks what nobody can tell whose question it is, so that the pods are read. The answer takes its time.
fn begin_reading(world: &mut World) {
    let wish = PreferenceRequest { count: 3, ..PreferenceRequest::default() };
    world.agent.handle(at(50), Event::Prefer(CallId(900), Resource::NvidiaGpu, wish));
    let books = world.listed();
    let mut reads_at = |second| {
        world.agent.handle(at(second), Event::PodResourcesListed(Ok(books.clone())));
        world.agent.handle(at(second), Event::Tick).contains(&Action::ReadPods)
    };
    assert!(reads_at(51));
    assert!(!reads_at(52), "one at a time");
    world.agent.handle(at(52), Event::PodResourcesListed(Ok(books)));
    world.wait(60);
}

#[test]
fn a_reading_that_is_behind_the_watch_takes_nobody_away_and_brings_nobody_back() {
    let mut world = World::new();
    world.run(pod("leaves", "leaves", &[("main", share(30, 20))]), &[("main", &[1])]).unwrap();
    world.run(pod("stays", "stays", &[("main", share(30, 20))]), &[("main", &[1])]).unwrap();
    let behind = world.pods.values().cloned().collect();
    begin_reading(&mut world);
    world.remove("leaves");
    world.run(pod("comes", "comes", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.happens(Event::PodsRead(Ok(behind)));
    let known: Vec<String> = world.agent.view().pods.iter().map(|pod| pod.uid.0.clone()).collect();
    assert_eq!(known, ["comes", "stays"]);
    assert!(world.limits.contains_key(&("comes".to_owned(), "main".to_owned())), "its limits hold on");
    world.check();
}

#[test]
fn a_reading_that_the_watch_has_overtaken_says_nothing() {
    let mut world = World::new();
    begin_reading(&mut world);
    let gone = pod("gone", "gone", &[("main", share(30, 20))]);
    world.happens(Event::Pods(Vec::new()));
    world.happens(Event::PodsRead(Ok(vec![gone])));
    assert!(world.agent.view().pods.is_empty());
}
