//! HAMi's dialect: devices of `nvidia.com/gpu` that stand for a part of a GPU.

use std::collections::BTreeSet;

use tessera_wire::{
    foreign::{dialect::Dialect, objects::Pod},
    kubelet::device_id::Resource,
};

use super::world::{GPU_COUNT, World, found, pod};
use crate::controller::{Event, capacity::WITHDRAWAL_DELAY};

const SLOTS: usize = 10;

fn world() -> World {
    let mut world = World::new();
    world.settings.dialects = Dialect::ALL.to_vec();
    world.restart_agent();
    world
}

fn parts(gpus: u64, memory: u64, cores: u64) -> Vec<(&'static str, String)> {
    vec![
        ("nvidia.com/gpu", gpus.to_string()),
        ("nvidia.com/gpumem", memory.to_string()),
        ("nvidia.com/gpucores", cores.to_string()),
    ]
}

fn whole(gpus: u64) -> Vec<(&'static str, String)> {
    vec![("nvidia.com/gpu", gpus.to_string())]
}

/// Returns memory in MiB and compute in percent of each GPU of a container.
fn limits(world: &World, uid: &str) -> Vec<(u64, u32)> {
    let limits = &world.limits[&(uid.to_owned(), "main".to_owned())];
    limits.gpus.iter().map(|gpu| (gpu.memory.0 >> 20, gpu.compute_percent)).collect()
}

#[test]
fn a_container_is_held_to_its_part_of_each_of_several_gpus() {
    let mut world = world();
    world.run(pod("a", "a", &[("main", parts(2, 3000, 30))]), &[("main", &[1, 3])]).unwrap();
    assert_eq!(world.gpus_of("a", "main"), BTreeSet::from([1, 3]));
    assert_eq!(limits(&world, "a"), [(3000, 30), (3000, 30)]);
    let half = vec![("nvidia.com/gpu", "1".to_owned()), ("nvidia.com/gpumem-percentage", "50".to_owned())];
    world.run(pod("b", "b", &[("main", half)]), &[("main", &[3])]).unwrap();
    assert_eq!(limits(&world, "b"), [(8192, 0)]);
    world.check();
    world.restart_agent();
    world.check();
    assert_eq!(limits(&world, "a"), [(3000, 30), (3000, 30)]);
}

#[test]
fn parts_and_whole_gpus_share_a_resource_and_never_a_gpu() {
    let mut world = world();
    world.run(pod("whole", "whole", &[("main", whole(2))]), &[("main", &[0, 1])]).unwrap();
    world.run(pod("part", "part", &[("main", parts(2, 9000, 60))]), &[]).unwrap();
    assert_eq!(world.gpus_of("part", "main"), BTreeSet::from([2, 3]));
    let more = world.run(pod("more", "more", &[("main", parts(2, 9000, 10))]), &[]);
    assert!(more.unwrap_err().to_string().contains("fewer than 2 GPUs with 10% and 9000 MiB left"));
    world.check();
}

#[test]
fn a_whole_gpu_withdraws_the_other_devices_of_the_gpu() {
    let mut world = world();
    world.run(pod("whole", "whole", &[("main", whole(1))]), &[("main", &[2])]).unwrap();
    world.run(pod("part", "part", &[("main", parts(1, 9000, 60))]), &[("main", &[0])]).unwrap();
    world.event(Event::Tick);
    world.wait(WITHDRAWAL_DELAY.as_secs());
    world.event(Event::Tick);
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), SLOTS - 1);
    assert_eq!(world.unhealthy[&Resource::AliyunGpu].len(), 2);
    world.check();
}

#[test]
fn a_refusal_names_the_granted_gpu_whose_devices_the_kubelet_does_not_offer_yet() {
    let mut world = world();
    for (name, gpu) in [("a", 0), ("b", 1), ("c", 3)] {
        world.run(pod(name, name, &[("main", parts(1, 9000, 60))]), &[("main", &[gpu])]).unwrap();
    }
    let other = vec![("aliyun.com/gpu", "1".to_owned())];
    world.run(pod("other", "other", &[("main", other)]), &[("main", &[2])]).unwrap();
    world.event(Event::Tick);
    world.wait(WITHDRAWAL_DELAY.as_secs());
    world.event(Event::Tick);
    let withdrawn = world.unhealthy.clone();
    assert_eq!(withdrawn[&Resource::NvidiaGpu].len(), SLOTS);
    world.remove("other");
    let next = world.bind(pod("next", "next", &[("main", whole(1))]), &[("main", &[2])]);
    // The kubelet has not received the new list of devices.
    world.unhealthy = withdrawn;
    let refused = world.admit(&next).unwrap_err().to_string();
    assert!(
        refused.contains("must use GPU 2, where the kubelet has fewer than 1 free nvidia.com/gpu"),
        "{refused}"
    );
}

#[test]
fn many_containers_share_a_gpu_up_to_its_memory() {
    let mut world = world();
    let count = 16_384 / 2000 * usize::from(GPU_COUNT);
    for number in 0..count {
        let name = format!("p{number}");
        world.run(pod(&name, &name, &[("main", parts(1, 2000, 12))]), &[]).unwrap();
    }
    let last = world.run(pod("last", "last", &[("main", parts(1, 2000, 12))]), &[]);
    assert!(last.unwrap_err().to_string().contains("no GPU with 12% and 2000 MiB left"));
    world.check();
}

fn annotated(name: &str, asked: Vec<(&'static str, String)>, annotations: &[(&str, &str)]) -> Pod {
    let mut pod = pod(name, name, &[("main", asked)]);
    let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    pod.metadata.annotations.extend(annotations);
    pod
}

/// A pod with a `nodeName` bypasses the scheduler, not its annotations.
#[test]
fn pods_without_a_grant_get_only_gpus_that_their_annotations_allow() {
    let mut world = world();
    let uuid = |gpu: usize| found().gpus[gpu].uuid.0.to_string();
    let two = [uuid(2), uuid(3)].join(",");
    for (name, asked, annotations, gpus) in [
        ("use", parts(1, 100, 1), ("nvidia.com/use-gpuuuid", two.as_str()), vec![2]),
        ("avoid", parts(2, 100, 1), ("tessera.dev/avoid-gpu-uuids", two.as_str()), vec![0, 1]),
        ("mutex", parts(1, 100, 1), ("hami.io/gpu-scheduler-policy", "mutex,spread"), vec![3]),
    ] {
        world.run(annotated(name, asked, &[annotations]), &[]).unwrap();
        assert_eq!(world.gpus_of(name, "main"), gpus.into_iter().collect(), "{name}");
    }
    let memory = vec![("aliyun.com/gpu-mem", "1".to_owned())];
    for (name, asked, annotation, expected) in [
        (
            "none",
            parts(1, 100, 1),
            ("nvidia.com/nouse-gputype", "T4"),
            "fewer than 1 GPU that the annotations",
        ),
        ("taken", parts(1, 100, 1), ("hami.io/gpu-scheduler-policy", "mutex"), "fewer than 1 idle GPU"),
        ("bad", parts(1, 100, 1), ("nvidia.com/numa-bind", "yes"), "nvidia.com/numa-bind: found \"yes\""),
        ("other", memory, ("hami.io/gpu-scheduler-policy", "fast"), "found \"fast\"; write binpack"),
    ] {
        let refused = world.run(annotated(name, asked, &[annotation]), &[]).unwrap_err().to_string();
        assert!(refused.contains(expected), "{name}: {refused}");
    }
    let reported: Vec<&str> = world.events.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(reported, ["AnnotationNotUnderstood"; 2], "{:?}", world.events);
    world.check();
}

/// The scheduler does not count the devices of each GPU, so it may grant a GPU of which all devices are in use.
#[test]
fn a_gpu_without_devices_is_replaced_by_one_that_the_annotations_allow() {
    let mut world = world();
    for number in 0..SLOTS {
        let name = format!("p{number}");
        world.run(pod(&name, &name, &[("main", parts(1, 100, 1))]), &[("main", &[0])]).unwrap();
    }
    world.run(pod("next", "next", &[("main", parts(1, 100, 1))]), &[("main", &[0])]).unwrap();
    assert!(!world.gpus_of("next", "main").contains(&0));
    let first = found().gpus[0].uuid.0.to_string();
    let bound = annotated("bound", parts(1, 100, 1), &[("nvidia.com/use-gpuuuid", &first)]);
    let refused = world.run(bound, &[("main", &[0])]).unwrap_err().to_string();
    assert!(refused.contains("must use GPU 0, where the kubelet has fewer than 1 free"), "{refused}");
    world.check();
}

/// Two containers of a pod, one init container and a sidecar, each with a part of several GPUs.
#[test]
fn all_containers_of_a_pod_keep_their_parts_of_several_gpus() {
    for seed in 0..8 {
        let mut world = world();
        world.seed(seed);
        let containers = [
            ("init-load", parts(2, 4000, 20)),
            ("side-car", parts(2, 1000, 10)),
            ("first", parts(3, 2000, 20)),
            ("second", parts(2, 3000, 30)),
        ];
        let grants: &[(&str, &[u8])] =
            &[("init-load", &[1, 2]), ("side-car", &[1, 2]), ("first", &[0, 1, 2]), ("second", &[2, 3])];
        world.run(pod("p", "p", &containers), grants).unwrap();
        for restarts in 0..2 {
            let of = |container| world.gpus_of("p", container).len();
            assert_eq!(["side-car", "first", "second"].map(of), [2, 3, 2], "{restarts}");
            world.check();
            world.restart_agent();
        }
        assert_eq!(world.limits.len(), 4);
        let first = &world.limits[&("p".to_owned(), "first".to_owned())];
        assert_eq!(first.gpus.iter().map(|gpu| gpu.memory.0 >> 20).collect::<Vec<_>>(), [2000; 3]);
    }
}
