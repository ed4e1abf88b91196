//! Random nodes, pods and grants, small enough to collide often.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use tessera_core::gpu::{Gpu, GpuUuid, Health, Model};
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::node::Node;
use tessera_core::request::{
    ContainerRequest, ContainerRole, LinkSensitivity, MemoryRequest, PodRequest, Request, Share,
};
use tessera_core::selection::{GpuSelection, NumaBinding, ScoringWeights};
use tessera_core::topology::{Link, PcieLevel, Topology};
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid};

pub(crate) const MOST_GPUS: usize = 8;

pub(crate) fn node_name() -> impl Strategy<Value = NodeName> {
    (0..3u8).prop_map(|number| NodeName(format!("node-{number}")))
}

pub(crate) fn pod_uid() -> impl Strategy<Value = PodUid> {
    (0..12u8).prop_map(|number| PodUid(format!("pod-{number}")))
}

pub(crate) fn node() -> impl Strategy<Value = Node> {
    let links = vec(link(), MOST_GPUS * MOST_GPUS);
    (node_name(), vec(gpu(), 0..=MOST_GPUS), links, option::weighted(0.3, 1..4u16)).prop_map(
        |(name, mut gpus, links, slots_per_gpu)| {
            for (index, gpu) in (0u8..).zip(&mut gpus) {
                gpu.index = GpuIndex(index);
                gpu.uuid = GpuUuid::from(format!("GPU-{index}").as_str());
            }
            let topology =
                Topology::from_pairs(gpus.len(), |a, b| links[a.position() * MOST_GPUS + b.position()]);
            let mut node = Node::new(name, gpus, topology, MilliCpu(64_000), MiB(262_144)).unwrap();
            node.slots_per_gpu = slots_per_gpu;
            node
        },
    )
}

fn gpu() -> impl Strategy<Value = Gpu> {
    let memory = prop::sample::select(vec![MiB(8192), MiB(16_384)]);
    let health =
        prop::sample::select(vec![Health::Healthy, Health::Healthy, Health::Healthy, Health::Unhealthy]);
    (memory, health, model(), option::weighted(0.8, 0..2u16)).prop_map(|(memory, health, model, numa)| Gpu {
        index: GpuIndex(0),
        uuid: GpuUuid::from("GPU-x"),
        minor: 0,
        model,
        memory,
        numa,
        health,
    })
}

fn model() -> impl Strategy<Value = Model> {
    prop::sample::select(vec!["T4", "A10"]).prop_map(Model::from)
}

pub(crate) fn link() -> impl Strategy<Value = Link> {
    (option::of(prop::sample::select(PcieLevel::ALL.to_vec())), 0..3u8)
        .prop_map(|(pcie, nvlinks)| Link { pcie, nvlinks })
}

fn role() -> impl Strategy<Value = ContainerRole> {
    prop::sample::select(vec![
        ContainerRole::Init,
        ContainerRole::Sidecar,
        ContainerRole::Main,
        ContainerRole::Main,
    ])
}

fn memory_request() -> impl Strategy<Value = MemoryRequest> {
    prop_oneof![
        (1..9000u64).prop_map(|memory| MemoryRequest::Amount(MiB(memory))),
        (1..=100u32).prop_map(|part| MemoryRequest::PartOfGpu(Percent(part))),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let memory = || prop::sample::select(vec![MiB(1), MiB(4096), MiB(9000), MiB(16_384)]);
    prop_oneof![
        (1..4u8).prop_map(Request::Whole),
        (1..100u32, memory())
            .prop_map(|(compute_percent, memory)| Request::share(Percent(compute_percent), memory)),
        memory().prop_map(Request::memory),
        (2..5u8, 0..60u32, memory_request()).prop_map(|(count, compute_percent, memory)| {
            Request::Share(Share { count, compute_percent: Percent(compute_percent), memory })
        }),
    ]
}

pub(crate) fn pod_request() -> impl Strategy<Value = PodRequest> {
    let containers = vec((role(), option::weighted(0.8, request())), 1..4);
    (containers, vec(model(), 0..2), any::<bool>(), 0..40_000u64).prop_map(
        |(containers, models, sensitive, cpu)| PodRequest {
            containers: containers
                .into_iter()
                .enumerate()
                .map(|(position, (role, request))| ContainerRequest {
                    name: format!("c{position}"),
                    role,
                    request,
                })
                .collect(),
            cpu: MilliCpu(cpu),
            memory: MiB(cpu),
            models,
            link_sensitivity: if sensitive {
                LinkSensitivity::Sensitive
            } else {
                LinkSensitivity::Insensitive
            },
            selection: Default::default(),
        },
    )
}

/// Generates annotations of all kinds. Most pods have none.
pub(crate) fn selection() -> impl Strategy<Value = GpuSelection> {
    let models = || vec(prop::sample::select(vec!["t4", "a1", "h100"]).prop_map(str::to_owned), 0..2);
    let uuids = || prop::collection::btree_set((0..9u8).prop_map(|index| format!("GPU-{index}")), 0..5);
    let numa = prop::sample::select(vec![NumaBinding::Any, NumaBinding::Preferred, NumaBinding::Required]);
    let weights = option::of((0..3u32, 0..3u32, any::<u32>()))
        .prop_map(|weights| weights.map(|(slot, core, memory)| ScoringWeights { slot, core, memory }));
    (models(), models(), uuids(), uuids(), any::<bool>(), any::<bool>(), numa, weights).prop_map(
        |(use_models, avoid_models, use_uuids, avoid_uuids, idle_only, needs_slot, numa, weights)| {
            GpuSelection {
                use_models,
                avoid_models,
                use_uuids,
                avoid_uuids,
                idle_only,
                needs_slot,
                numa,
                weights,
            }
        },
    )
}

pub(crate) fn pod_grant() -> impl Strategy<Value = PodGrant> {
    let hold = prop_oneof![
        Just(Hold::Whole),
        (0..100u32, 1..9000u64).prop_map(|(compute_percent, memory)| Hold::Share {
            compute_percent: Percent(compute_percent),
            memory: MiB(memory)
        }),
        // A hostile annotation could name such a GPU.
        Just(Hold::Share { compute_percent: Percent(u32::MAX), memory: MiB(u64::MAX) }),
    ];
    let holds = prop::collection::btree_map(0..10u8, hold, 0..3);
    let containers = vec((role(), holds), 0..4);
    (pod_uid(), node_name(), containers).prop_map(|(pod, node, containers)| PodGrant {
        pod,
        node,
        cpu: MilliCpu(500),
        memory: MiB(100),
        containers: containers
            .into_iter()
            .enumerate()
            .map(|(position, (role, holds))| ContainerGrant {
                container: format!("c{position}"),
                role,
                holds: holds.into_iter().map(|(gpu, hold)| (GpuIndex(gpu), hold)).collect(),
            })
            .collect(),
    })
}
