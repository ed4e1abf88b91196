//! Another device plugin registers with the kubelet later than the agent, as NVIDIA's does for `nvidia.com/gpu`.

use std::collections::BTreeSet;

use tessera_wire::{
    foreign::{dialect::Dialect, objects::Pod},
    kubelet::device_id::Resource,
};

use super::world::{GPU_COUNT, World, pod, share};
use crate::controller::{CallId, Event, capacity::WITHDRAWAL_DELAY};

const NVIDIA: &str = "nvidia.com/gpu";
const TAKEN_OVER: &str = "another device plugin has taken over this resource";

/// Returns a world whose kubelet is connected to the agent.
fn connected() -> World {
    let mut world = World::new();
    world.event(Event::Node(Box::default()));
    for resource in Resource::ALL {
        world.event(Event::StreamOpened(resource));
    }
    world.event(Event::Tick);
    world
}

fn whole(name: &str) -> Pod {
    pod(name, name, &[("main", vec![(NVIDIA, "1".to_owned())])])
}

/// Lets the next check of the kubelet's devices happen.
fn check(world: &mut World) {
    world.wait(11);
    world.event(Event::Tick);
}

fn is_left(world: &World) -> bool {
    let dialects = &world.agent.settings.dialects;
    assert!(dialects.contains(&Dialect::Gputopology) && dialects.contains(&Dialect::Vcuda));
    let is_left = !dialects.contains(&Dialect::Nvidia);
    assert_eq!(
        world.warnings.iter().filter(|warning| warning.starts_with(TAKEN_OVER)).count(),
        usize::from(is_left)
    );
    is_left
}

/// The kubelet gives devices to a pod by another plugin, so the agent gets no call.
fn admit_by_another_plugin(world: &mut World, pod: &Pod, gpu: &str) {
    world.bind(pod.clone(), &[("main", &[3])]);
    let held = [(NVIDIA.to_owned(), [gpu.to_owned()].into())].into();
    let containers = vec![("main".to_owned(), true, held)];
    world.kubelet.insert(pod.metadata.uid.clone(), (pod.clone(), containers));
    world.set_status(&pod.metadata.uid, "Running", true);
}

fn uuid(world: &World, gpu: usize) -> String {
    world.agent.inventory.gpus().unwrap().node.gpus()[gpu].uuid.to_string()
}

#[test]
fn a_later_plugin_is_noticed_by_its_devices() {
    let mut world = connected();
    world.run(pod("share", "share", &[("main", share(30, 20))]), &[("main", &[0])]).unwrap();
    world.wait(WITHDRAWAL_DELAY.as_secs() + 1);
    world.event(Event::Tick);
    let all: BTreeSet<String> = (0..usize::from(GPU_COUNT)).map(|gpu| uuid(&world, gpu)).collect();
    // A kubelet that has not taken in the last list offers more for a moment.
    for offered in [&all, &all.iter().skip(1).cloned().collect()] {
        world.offered_by_kubelet.insert(Resource::NvidiaGpu, offered.clone());
        check(&mut world);
        assert!(!is_left(&world));
    }
    world.offered_by_kubelet.insert(Resource::NvidiaGpu, all);
    check(&mut world);
    assert!(!is_left(&world));
    check(&mut world);
    assert!(is_left(&world));
    assert_eq!(world.withheld, [NVIDIA], "the other plugin does not know that a GPU is in use");

    // The devices of the other plugin stay as that plugin has sent them.
    world.unhealthy.remove(&Resource::NvidiaGpu);
    world.run(pod("more", "more", &[("main", share(30, 20))]), &[("main", &[1])]).unwrap();
    world.wait(WITHDRAWAL_DELAY.as_secs() + 1);
    world.event(Event::Tick);
    assert!(world.unhealthy.contains_key(&Resource::AliyunGpu));
    assert!(!world.unhealthy.contains_key(&Resource::NvidiaGpu));

    for uid in ["share", "more"] {
        world.remove(uid);
    }
    check(&mut world);
    assert_eq!(world.withheld, Vec::<String>::new(), "the other plugin may give away all GPUs again");
}

#[test]
fn a_later_plugin_is_noticed_by_a_pod_that_it_serves() {
    let mut world = connected();
    check(&mut world);
    let used = uuid(&world, 1);
    admit_by_another_plugin(&mut world, &whole("theirs"), &used);
    check(&mut world);
    assert!(is_left(&world));
    assert_eq!(world.withheld, Vec::<String>::new(), "all pods with GPUs are the other plugin's");
    // The GPU that the other plugin has given away is in use.
    world.run(pod("share", "share", &[("main", share(30, 20))]), &[("main", &[1])]).unwrap();
    assert!(!world.gpus_of("share", "main").contains(&1), "{:?}", world.gpus_of("share", "main"));
    assert_eq!(world.withheld, [NVIDIA]);
}

#[test]
fn pods_of_an_earlier_agent_are_no_sign_of_another_plugin() {
    let mut world = connected();
    world.run(whole("first"), &[("main", &[0])]).unwrap();
    world.set_status("first", "Pending", false);
    world.restart_agent();
    world.set_status("first", "Running", true);
    check(&mut world);
    check(&mut world);
    assert!(!is_left(&world));
}

#[test]
fn a_resource_is_served_again_when_the_kubelet_calls() {
    let mut world = connected();
    check(&mut world);
    let used = uuid(&world, 1);
    admit_by_another_plugin(&mut world, &whole("theirs"), &used);
    check(&mut world);
    assert!(is_left(&world));
    world.unhealthy.clear();
    world.event(Event::PreStart(CallId(1_000_000), Resource::NvidiaGpu, [used].into()));
    assert!(world.agent.settings.dialects.contains(&Dialect::Nvidia));
    assert!(world.unhealthy.contains_key(&Resource::NvidiaGpu), "the devices are offered again");
    assert!(world.warnings.last().unwrap().starts_with("the kubelet calls this agent again"));
}
