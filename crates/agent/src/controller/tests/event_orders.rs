//! Annotations, limits and kubelet agree after any order of events.

use proptest::prelude::*;
use tessera_wire::{foreign::dialect::Dialect, kubelet::device_id::Resource};

use super::world::{World, pod, share};
use crate::controller::Event;

#[derive(Clone, Debug)]
enum Step {
    /// Creates a pod of a kind and size, with an optional granted GPU.
    Create(u8, u8, Option<u8>),
    /// Admits the pending pod of this number, in any order.
    Admit(usize),
    Start(usize),
    /// Ends a pod. The flag says whether the watch reports it.
    End(usize, bool),
    Remove(usize),
    RestartAgent,
    RestartKubelet,
    Api(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..6u8, 1..8u8, proptest::option::of(0..4u8)).prop_map(|(kind, size, gpu)| Step::Create(kind, size, gpu)),
        6 => (0..8usize).prop_map(Step::Admit),
        6 => (0..8usize).prop_map(Step::Start),
        2 => (0..8usize, any::<bool>()).prop_map(|(number, is_reported)| Step::End(number, is_reported)),
        2 => (0..8usize).prop_map(Step::Remove),
        1 => Just(Step::RestartAgent),
        1 => Just(Step::RestartKubelet),
        1 => any::<bool>().prop_map(Step::Api),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn no_gpu_is_overbooked_and_all_records_agree(
        steps in prop::collection::vec(step(), 1..40),
        seed in 0..1000u64,
        has_parts in any::<bool>(),
    ) {
        let mut world = World::new();
        if has_parts {
            world.settings.dialects = Dialect::ALL.to_vec();
            world.restart_agent();
        }
        world.seed(seed);
        let mut count = 0;
        for step in steps {
            let numbered = |world: &World, phase: &str, held: bool, number: usize| {
                let all = world.pods.values().filter(|pod| pod.status.phase == phase);
                let mut all = all.filter(|pod| world.kubelet.contains_key(&pod.metadata.uid) == held);
                all.nth(number).cloned()
            };
            match step {
                Step::Create(kind, size, gpu) => {
                    count += 1;
                    let parts = |gpus: u8| {
                        let amounts = [gpus, size, size * 8].map(u64::from);
                        let names = ["nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores"];
                        let scaled = [amounts[0], amounts[1] * 1500, amounts[2]].map(|amount| amount.to_string());
                        names.into_iter().zip(scaled).collect::<Vec<_>>()
                    };
                    let count_of_parts = size % 3 + 1;
                    let limits = match kind {
                        4 | 5 if has_parts => parts(count_of_parts),
                        0 => share(u32::from(size) * 10, u64::from(size)),
                        1 => vec![("aliyun.com/gpu-mem", size.to_string())],
                        2 => vec![("aliyun.com/gpu", (size % 3 + 1).to_string())],
                        _ => vec![("nvidia.com/gpu", "1".to_owned())],
                    };
                    let whole = kind == 2;
                    let name = format!("p{count}");
                    let is_split = kind >= 4 && has_parts;
                    let mut containers = vec![("main", limits)];
                    if kind == 5 && is_split {
                        containers.extend([("init-load", parts(count_of_parts)), ("side-car", parts(1))]);
                    }
                    let pod = pod(&name, &name, &containers);
                    let granted = if is_split { count_of_parts } else { 1 };
                    let gpus = gpu.filter(|_| !whole);
                    let gpus = gpus.map(|gpu| (0..granted).map(|more| (gpu + more) % 4).collect::<Vec<u8>>());
                    let grants = gpus.as_ref().map(|gpus| {
                        [("main", gpus.as_slice()), ("init-load", gpus.as_slice()), ("side-car", &gpus[..1])]
                    });
                    world.bind(pod, grants.as_ref().map_or(&[][..], |grants| &grants[..]));
                }
                Step::Admit(number) if world.api_is_up => {
                    if let Some(pod) = numbered(&world, "Pending", false, number) {
                        let _outcome = world.admit(&pod);
                    }
                }
                Step::Start(number) if world.api_is_up => {
                    if let Some(pod) = numbered(&world, "Pending", true, number) {
                        world.start(&pod.metadata.uid).unwrap();
                    }
                }
                Step::End(number, is_reported) => {
                    if let Some(pod) = numbered(&world, "Running", true, number) {
                        world.kubelet.remove(&pod.metadata.uid);
                        if is_reported {
                            world.set_status(&pod.metadata.uid, "Succeeded", true);
                        } else if let Some(pod) = world.pods.get_mut(&pod.metadata.uid) {
                            pod.status.phase = "Succeeded".into();
                        }
                    }
                }
                Step::Remove(number) => {
                    if let Some(pod) = numbered(&world, "Running", true, number) {
                        world.remove(&pod.metadata.uid);
                    }
                }
                Step::RestartAgent => world.restart_agent(),
                Step::RestartKubelet => world.event(Event::StreamOpened(Resource::GpuMemory)),
                Step::Api(up) => {
                    world.api_is_up = up;
                    if up {
                        world.event(Event::Pods(world.pods.values().cloned().collect()));
                    }
                }
                Step::Admit(_) | Step::Start(_) => {}
            }
            // After every step no GPU carries more than it has.
            for gpu in 0..4u8 {
                let view = world.agent.view();
                prop_assert!(!view.overbooked.contains(&gpu) || has_conflicting_grants(&world), "GPU {gpu}");
            }
        }
        world.api_is_up = true;
        world.restart_agent();
        if !has_conflicting_grants(&world) {
            world.check();
        }
    }
}

/// Returns whether pods wait for admission whose random grants may exceed a GPU.
///
/// The real scheduler never grants too much. The agent must not turn such grants into allocations.
fn has_conflicting_grants(world: &World) -> bool {
    world
        .pods
        .values()
        .any(|pod| pod.status.phase == "Pending" && !world.kubelet.contains_key(&pod.metadata.uid))
}
