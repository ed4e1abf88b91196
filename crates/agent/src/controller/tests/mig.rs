//! GPUs in MIG mode and their instances.

use tessera_core::{
    gpu::Health,
    units::{GpuIndex, MiB},
};
use tessera_node::gpus::{DiscoveredGpus, GpuInstance, Incident, IncidentKind};
use tessera_wire::kubelet::device_id::Resource;

use super::{
    fixtures,
    world::{GPU_COUNT, World, found, pod, share},
};
use crate::controller::{Event, InstanceOffer, MigStrategy};

/// Puts a GPU into MIG mode, with an instance of each of these profiles.
fn with_instances(mut found: DiscoveredGpus, gpu: u8, profiles: &[&str]) -> DiscoveredGpus {
    let index = GpuIndex(gpu);
    found.gpus[index.position()].health = Health::InMigMode;
    let instance = |(number, profile): (u32, &&str)| GpuInstance {
        gpu: index,
        gpu_uuid: fixtures::uuid(gpu).as_str().into(),
        uuid: format!("MIG-{gpu}-{number}").as_str().into(),
        profile: (*profile).to_owned(),
        memory: MiB(4864),
        gpu_instance: 7 + number,
        compute_instance: 0,
        device_nodes: Vec::new(),
    };
    found.instances.extend((0..).zip(profiles).map(instance));
    found
}

fn world(strategy: MigStrategy) -> World {
    let mut world = World::new();
    world.settings.mig_strategy = strategy;
    world.restart_agent();
    world
}

/// Returns the resources of instances with the IDs of their healthy devices.
fn healthy(offers: &[InstanceOffer]) -> Vec<(&str, Vec<&str>)> {
    let mut healthy = Vec::new();
    for InstanceOffer { resource, devices, .. } in offers {
        let ids = devices.iter().filter(|device| device.healthy).map(|device| device.id.as_str());
        healthy.push((resource.as_str(), ids.collect()));
    }
    healthy
}

fn warned(world: &World, text: &str) -> bool {
    world.warnings.iter().any(|warning| warning.contains(text))
}

#[test]
fn mixed_offers_a_resource_for_each_profile_beside_the_other_gpus() {
    let mut world = world(MigStrategy::Mixed);
    let two = with_instances(found(), 1, &["1g.5gb", "2g.10gb", "1g.5gb+me"]);
    let two = with_instances(two, 2, &["1g.5gb"]);
    world.event(Event::Gpus(Ok(two.clone())));
    let all = [
        ("nvidia.com/mig-1g.5gb", vec!["MIG-1-0", "MIG-2-0"]),
        ("nvidia.com/mig-1g.5gb.me", vec!["MIG-1-2"]),
        ("nvidia.com/mig-2g.10gb", vec!["MIG-1-1"]),
    ];
    assert_eq!(healthy(&world.offers), all);
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 2, "the GPUs themselves are not offered");
    assert_eq!(world.warnings, Vec::<String>::new());

    // An error of the GPU concerns all its instances, until the driver finds the GPU again.
    let gpu = Some(fixtures::uuid(1).as_str().into());
    world.event(Event::Incident(Incident { gpu, kind: IncidentKind::Xid(79) }));
    let without = [
        ("nvidia.com/mig-1g.5gb", vec!["MIG-2-0"]),
        ("nvidia.com/mig-1g.5gb.me", vec![]),
        ("nvidia.com/mig-2g.10gb", vec![]),
    ];
    assert_eq!(healthy(&world.offers), without);
    let mut lost = two.clone();
    lost.gpus[1].health = Health::Unhealthy;
    lost.instances.retain(|instance| instance.gpu != GpuIndex(1));
    world.event(Event::Gpus(Ok(lost)));
    world.event(Event::Gpus(Ok(two)));
    assert_eq!(healthy(&world.offers), all);

    // Retired memory concerns all instances too, unless the agent ignores it.
    let mut awaiting = with_instances(with_instances(found(), 1, &["1g.5gb"]), 2, &["1g.5gb"]);
    awaiting.gpus[1].health = Health::AwaitingReset;
    world.event(Event::Gpus(Ok(awaiting.clone())));
    assert_eq!(healthy(&world.offers), [("nvidia.com/mig-1g.5gb", vec!["MIG-2-0"])]);
    assert!(warned(&world, "is not offered until it is reset"), "{:?}", world.warnings);
    world.settings.ignore_pending_reset = true;
    world.restart_agent();
    world.event(Event::Gpus(Ok(awaiting)));
    assert_eq!(healthy(&world.offers), [("nvidia.com/mig-1g.5gb", vec!["MIG-1-0", "MIG-2-0"])]);
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 2, "the GPUs themselves are not offered");

    world.event(Event::Gpus(Ok(with_instances(found(), 1, &[]))));
    assert_eq!(healthy(&world.offers), []);
    assert!(warned(&world, "has no instance to offer"), "{:?}", world.warnings);
    world.event(Event::Gpus(Ok(found())));
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 0);
}

/// A pod that asks for an instance before the kubelet knows the devices is rejected for good.
#[test]
fn an_agent_is_ready_when_the_kubelet_knows_its_instances_too() {
    let mut world = world(MigStrategy::Mixed);
    world.event(Event::Gpus(Ok(with_instances(found(), 1, &["1g.5gb", "2g.10gb"]))));
    world.event(Event::PodResourcesListed(Ok(Vec::new())));
    let resources: Vec<_> = world.settings.resources().collect();
    for resource in resources {
        world.event(Event::StreamOpened(resource));
    }
    for resource in ["nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"] {
        let reason = world.agent.readiness().unwrap_err().to_string();
        assert_eq!(reason, format!("the kubelet has not asked for the devices of {resource} yet"));
        world.event(Event::InstanceStreamOpened(resource.to_owned()));
    }
    assert_eq!(world.agent.readiness(), Ok(()));
}

#[test]
fn single_offers_equal_instances_as_gpus() {
    let mut world = world(MigStrategy::Single);
    let profiles = ["1g.5gb", "1g.5gb"];
    let all = (0..GPU_COUNT).fold(found(), |found, gpu| with_instances(found, gpu, &profiles));
    world.event(Event::Gpus(Ok(all.clone())));
    let gpus = world.agent.view().inventory.unwrap().gpus;
    assert_eq!(gpus.len(), usize::from(GPU_COUNT) * 2);
    assert_eq!(
        (gpus[3].uuid.to_string(), gpus[3].model.to_string()),
        ("MIG-1-1".into(), "T4 MIG 1g.5gb".into())
    );
    assert_eq!((gpus[3].memory, gpus[3].health, gpus[3].minor), (MiB(4864), Health::Healthy, 1));
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 0);
    assert_eq!(world.unhealthy[&Resource::VcudaCore].len(), 800, "shares of instances are not offered");

    let whole = vec![("nvidia.com/gpu", "1".to_owned())];
    let given = world.run(pod("p", "p", &[("main", whole)]), &[("main", &[3])]).unwrap();
    assert_eq!(given["main"].envs["NVIDIA_VISIBLE_DEVICES"], "MIG-1-1");
    assert!(world.run(pod("s", "s", &[("main", share(30, 4))]), &[]).is_err());

    let gpu = Some(fixtures::uuid(1).as_str().into());
    world.event(Event::Incident(Incident { gpu, kind: IncidentKind::Xid(79) }));
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 2, "both instances of the GPU");

    // Instances of a GPU that awaits a reset are in the place of their GPU like the others.
    let mut awaiting = all.clone();
    awaiting.gpus[2].health = Health::AwaitingReset;
    world.restart_agent();
    world.event(Event::Gpus(Ok(awaiting)));
    assert_eq!(world.agent.view().inventory.unwrap().gpus[4].health, Health::AwaitingReset);
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 2, "both instances of the GPU");

    // Instances that differ are offered neither as GPUs nor otherwise.
    world.event(Event::Gpus(Ok(with_instances(all, 0, &["2g.10gb"]))));
    assert!(warned(&world, "profiles 1g.5gb and 2g.10gb; create one profile"), "{:?}", world.warnings);
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), usize::from(GPU_COUNT));
    world.event(Event::Gpus(Ok(with_instances(found(), 0, &profiles))));
    assert!(warned(&world, "is not in MIG mode; enable it with nvidia-smi -mig 1"), "{:?}", world.warnings);
}

#[test]
fn none_withdraws_the_gpu_and_names_the_remedy() {
    let mut world = world(MigStrategy::None);
    world.event(Event::Gpus(Ok(with_instances(found(), 1, &["1g.5gb"]))));
    assert_eq!(world.offers, []);
    assert_eq!(world.unhealthy[&Resource::NvidiaGpu].len(), 1);
    assert!(
        warned(&world, "offer its instances with --mig-strategy mixed or single"),
        "{:?}",
        world.warnings
    );
}
