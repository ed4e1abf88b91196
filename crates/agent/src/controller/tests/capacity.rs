//! Devices that are withdrawn because other dialects hold their GPUs, or because the GPUs are cordoned.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use proptest::prelude::*;
use tessera_core::{
    grant::{ContainerGrant, Hold, PodGrant},
    node::{Node, NodeState},
    request::ContainerRole,
    units::{GpuIndex, MiB, MilliCpu, Percent, PodUid},
};
use tessera_wire::{
    foreign::{
        dialect::{Dialect, MemoryUnit, vcuda},
        objects,
    },
    kubelet::device_id::{DeviceIds, Resource},
};

use super::{
    fixtures,
    world::{GPU_COUNT, MEMORY_MIB, World, pod, share},
};
use crate::controller::{
    Event,
    capacity::{WITHDRAWAL_DELAY, withdrawn_devices},
};

/// A container on one GPU: its dialect, its GPU and what it holds there.
type Held = (Dialect, GpuIndex, Hold);

fn grant((_, gpu, hold): Held) -> PodGrant {
    PodGrant {
        pod: PodUid("p".into()),
        node: fixtures::NODE.into(),
        cpu: MilliCpu::ZERO,
        memory: MiB::ZERO,
        containers: vec![ContainerGrant {
            container: "main".into(),
            role: ContainerRole::Main,
            holds: vec![(gpu, hold)],
        }],
    }
}

fn state(node: &Node, held: impl Iterator<Item = Held>) -> NodeState {
    let mut state = NodeState::empty(Arc::new(node.clone()));
    held.for_each(|held| state.add(&grant(held)));
    state
}

/// Returns how many devices of a resource a container holds.
fn units(resource: Resource, (dialect, _, hold): Held, per_gpu: u64) -> u64 {
    if dialect != resource.dialect() {
        return 0;
    }
    match (resource, hold) {
        (Resource::NvidiaGpu | Resource::AliyunGpu, _) => 1,
        (_, Hold::Whole) => per_gpu,
        (Resource::GpuMemory, Hold::Share { memory, .. }) => memory.0 / 1024,
        (Resource::VcudaCore, Hold::Share { compute_percent, .. }) => u64::from(compute_percent.0),
        (Resource::VcudaMemory, Hold::Share { memory, .. }) => memory.0 / 256,
    }
}

/// Returns how many devices of a GPU the largest new container of a resource could get.
fn obtainable(resource: Resource, state: &NodeState, gpu: GpuIndex) -> u64 {
    let fits = |compute_percent: u64, memory: u64| {
        let compute_percent = Percent(u32::try_from(compute_percent).unwrap());
        state.fits(gpu, Hold::Share { compute_percent, memory: MiB(memory) })
    };
    let largest =
        |all: u64, fits: &dyn Fn(u64) -> bool| (1..=all).rev().find(|units| fits(*units)).unwrap_or(0);
    match resource {
        Resource::NvidiaGpu | Resource::AliyunGpu => u64::from(state.fits(gpu, Hold::Whole)),
        Resource::GpuMemory => largest(MEMORY_MIB / 1024, &|units| fits(0, units * 1024)),
        Resource::VcudaCore => largest(100, &|units| fits(units, 256)),
        Resource::VcudaMemory => largest(MEMORY_MIB / 256, &|units| fits(1, units * 256)),
    }
}

fn any_held() -> impl Strategy<Value = Held> {
    let unsplit = Dialect::ALL.into_iter().filter(|dialect| *dialect != Dialect::Hami);
    (prop::sample::select(unsplit.collect::<Vec<_>>()), 0..GPU_COUNT, 1..=100u32, 1..=16u64).prop_map(
        |(dialect, gpu, percent, gib)| {
            let hold = match dialect {
                Dialect::Nvidia | Dialect::Gputopology => Hold::Whole,
                Dialect::Gpushare => Hold::Share { compute_percent: Percent::ZERO, memory: MiB(gib * 1024) },
                Dialect::Vcuda if percent == 100 => Hold::Whole,
                Dialect::Vcuda => Hold::Share { compute_percent: Percent(percent), memory: MiB(gib * 768) },
                Dialect::Hami => {
                    Hold::Share { compute_percent: Percent(percent / 3), memory: MiB(gib * 500) }
                }
            };
            (dialect, GpuIndex(gpu), hold)
        },
    )
}

proptest! {
    /// Allocatable minus requests is what new pods of a dialect can get, and devices in use stay.
    #[test]
    fn what_stays_is_what_is_given_and_what_can_still_be_had(
        wanted in prop::collection::vec(any_held(), 0..24),
        first_numbers in prop::collection::vec(0..500u64, 24),
    ) {
        let node = fixtures::described_node(&fixtures::host(GPU_COUNT, "T4", MEMORY_MIB));
        let ids = DeviceIds::new(node.gpus(), MemoryUnit::GiB);
        let mut held: Vec<Held> = Vec::new();
        for one in wanted {
            if state(&node, held.iter().copied()).fits(one.1, one.2) {
                held.push(one);
            }
        }
        let full = state(&node, held.iter().copied());
        for resource in Resource::ALL {
            // Each container has devices with any free numbers of its GPU.
            let mut given: HashSet<(GpuIndex, u64)> = HashSet::new();
            for (one, first) in held.iter().zip(&first_numbers) {
                let per_gpu = ids.per_gpu(resource, one.1);
                let numbers = (0..per_gpu).map(|number| (one.1, (first + number) % per_gpu));
                let free: Vec<_> = numbers.filter(|device| !given.contains(device)).collect();
                let count = usize::try_from(units(resource, *one, per_gpu)).unwrap();
                given.extend(free.into_iter().take(count));
            }
            let others = state(&node, held.iter().copied().filter(|one| one.0 != resource.dialect()));
            let withdrawn = withdrawn_devices(resource, &ids, &others, &given);
            prop_assert!(withdrawn.is_disjoint(&given.iter().copied().collect()));
            for gpu in (0..GPU_COUNT).map(GpuIndex) {
                let on = |devices: &mut dyn Iterator<Item = &(GpuIndex, u64)>| {
                    devices.filter(|(on, _)| *on == gpu).count() as u64
                };
                let healthy = ids.per_gpu(resource, gpu) - on(&mut withdrawn.iter());
                let left = healthy - on(&mut given.iter());
                let obtainable = obtainable(resource, &full, gpu);
                prop_assert!(left >= obtainable, "{resource}: {left} instead of {obtainable}");
                // Shares of the same dialect may use up compute or memory alone. kube-scheduler counts both.
                let room = full.room(gpu);
                let is_own_limit = resource.dialect() == Dialect::Vcuda
                    && (room.memory < vcuda::BLOCK || room.compute_percent == Percent::ZERO);
                prop_assert!(left == obtainable || is_own_limit, "{resource}: {left}, not {obtainable}");
            }
        }
    }
}

/// Returns how many devices of each resource the kubelet does not offer.
fn unhealthy(world: &World) -> [usize; 5] {
    Resource::ALL.map(|resource| world.unhealthy.get(&resource).map_or(0, BTreeSet::len))
}

fn memory(gib: u64) -> Vec<(&'static str, String)> {
    vec![("aliyun.com/gpu-mem", gib.to_string())]
}

fn whole(count: u64) -> Vec<(&'static str, String)> {
    vec![("nvidia.com/gpu", count.to_string())]
}

/// Lets the delay of withdrawals pass.
fn settle(world: &mut World) {
    world.event(Event::Tick);
    world.wait(WITHDRAWAL_DELAY.as_secs());
    world.event(Event::Tick);
}

#[test]
fn a_pod_withdraws_its_part_from_the_other_dialects_until_it_ends() {
    let mut world = World::new();
    world.run(pod("m", "m", &[("main", memory(7))]), &[("main", &[1])]).unwrap();
    world.event(Event::Tick);
    assert_eq!(unhealthy(&world), [0; 5], "short pods cause no list of devices");
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 1, 0, 0, 28]);
    assert!(world.unhealthy[&Resource::NvidiaGpu].contains(&fixtures::uuid(1)));
    world.set_status("m", "Succeeded", true);
    assert_eq!(unhealthy(&world), [0; 5], "the devices come back at once");
    world.remove("m");

    world.run(pod("n", "n", &[("main", whole(2))]), &[("main", &[0, 1])]).unwrap();
    world.run(pod("v", "v", &[("main", share(40, 64))]), &[("main", &[2])]).unwrap();
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 3, 48, 200, 128], "two whole GPUs, and all memory of a third");
    world.restart_agent();
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 3, 48, 200, 128], "a new agent computes the same");
}

#[test]
fn devices_are_withdrawn_only_after_the_whole_delay() {
    let mut world = World::new();
    world.run(pod("m", "m", &[("main", memory(7))]), &[("main", &[1])]).unwrap();
    world.event(Event::Tick);
    world.wait(WITHDRAWAL_DELAY.as_secs() - 1);
    world.run(pod("n", "n", &[("main", whole(1))]), &[("main", &[0])]).unwrap();
    world.event(Event::Tick);
    world.wait(1);
    world.event(Event::Tick);
    assert_eq!(unhealthy(&world), [1, 1, 0, 0, 28], "the second pod has held its GPU for a second");
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 2, 16, 100, 92]);
}

#[test]
fn a_pod_on_its_way_finds_its_devices() {
    let mut world = World::new();
    let bound = world.bind(pod("n", "n", &[("main", whole(4))]), &[("main", &[0, 1, 2, 3])]);
    settle(&mut world);
    assert_eq!(unhealthy(&world), [0, 4, 64, 400, 256], "only other dialects lose the GPUs");
    world.admit(&bound).unwrap();
    world.start("n").unwrap();
    // A pod that was waiting is admitted as soon as the last one has ended.
    world.set_status("n", "Succeeded", true);
    world.kubelet.remove("n");
    world.run(pod("m", "m", &[("main", memory(16))]), &[("main", &[3])]).unwrap();
    world.check();
}

#[test]
fn devices_of_an_ending_pod_come_back_before_its_containers_end() {
    let mut world = World::new();
    world.run(pod("m", "m", &[("main", memory(7))]), &[("main", &[1])]).unwrap();
    settle(&mut world);
    let mut ending = world.pods["m"].clone();
    ending.metadata.deletion_timestamp = Some("2026-11-15T05:00:00Z".into());
    world.event(Event::PodApplied(Box::new(ending)));
    assert_eq!(unhealthy(&world), [0; 5]);

    // A pod that is deleted at once is gone from the API server while the kubelet still lists it.
    world.run(pod("n", "n", &[("main", memory(7))]), &[("main", &[2])]).unwrap();
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 1, 0, 0, 28]);
    world.pods.remove("n");
    world.event(Event::PodDeleted(PodUid("n".into())));
    assert_eq!(unhealthy(&world), [0; 5]);
}

#[test]
fn nothing_is_withdrawn_if_the_node_is_configured_so() {
    let mut world = World::new();
    world.settings.withdraw_held = false;
    world.restart_agent();
    world.run(pod("m", "m", &[("main", memory(7))]), &[("main", &[1])]).unwrap();
    settle(&mut world);
    assert_eq!(unhealthy(&world), [0; 5]);
}

/// Reports the node with a cordon of these GPUs.
fn cordon(world: &mut World, gpus: &[u8]) {
    let uuids: Vec<String> = gpus.iter().map(|gpu| fixtures::uuid(*gpu)).collect();
    let mut node = objects::Node::default();
    if !uuids.is_empty() {
        node.metadata.annotations = [("tessera.dev/gpu-cordon".to_owned(), uuids.join(","))].into();
    }
    world.event(Event::Node(Box::new(node)));
}

#[test]
fn unused_devices_of_cordoned_gpus_are_withdrawn_until_the_cordon_ends() {
    let mut world = World::new();
    cordon(&mut world, &[1, 2]);
    world.event(Event::Tick);
    assert_eq!(unhealthy(&world), [0; 5], "short cordons cause no list of devices");
    settle(&mut world);
    assert_eq!(unhealthy(&world), [2, 2, 32, 200, 128]);
    world.restart_agent();
    cordon(&mut world, &[1, 2]);
    settle(&mut world);
    assert_eq!(unhealthy(&world), [2, 2, 32, 200, 128], "a new agent computes the same");
    cordon(&mut world, &[2]);
    assert_eq!(unhealthy(&world), [1, 1, 16, 100, 64], "the devices come back at once");
    cordon(&mut world, &[]);
    assert_eq!(unhealthy(&world), [0; 5]);
}

#[test]
fn devices_in_use_on_cordoned_gpus_stay() {
    let mut world = World::new();
    world.run(pod("n", "n", &[("main", whole(1))]), &[("main", &[0])]).unwrap();
    world.run(pod("v", "v", &[("main", share(40, 16))]), &[("main", &[1])]).unwrap();
    cordon(&mut world, &[0, 1]);
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 2, 32, 160, 112], "the pods keep 1 GPU, and 40 % and 16 blocks");
    world.check();
    world.set_status("v", "Succeeded", true);
    world.remove("v");
    // The agent reads the kubelet's list again.
    world.check();
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 2, 32, 200, 128], "what ends on a cordoned GPU is withdrawn too");
}

#[test]
fn a_pod_that_was_bound_before_the_cordon_finds_its_devices() {
    let mut world = World::new();
    let bound = world.bind(pod("v", "v", &[("main", share(40, 16))]), &[("main", &[1])]);
    cordon(&mut world, &[1]);
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 1, 16, 0, 0], "only the dialect of the pod has devices there");
    world.admit(&bound).unwrap();
    world.start("v").unwrap();
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 1, 16, 60, 48]);
    world.check();
}

#[test]
fn cordoned_gpus_are_withdrawn_also_if_held_ones_are_not() {
    let mut world = World::new();
    world.settings.withdraw_held = false;
    world.restart_agent();
    world.run(pod("m", "m", &[("main", memory(7))]), &[("main", &[1])]).unwrap();
    cordon(&mut world, &[3]);
    settle(&mut world);
    assert_eq!(unhealthy(&world), [1, 1, 16, 100, 64]);
}
