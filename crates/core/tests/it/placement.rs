//! Invariants of every policy: exact counts, no overbooked GPU, rejections only with a reason,
//! determinism.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use tessera_core::forecast::Forecast;
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::ledger::{Ledger, LedgerChange};
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Policy, explain, filter, place, score};
use tessera_core::request::{ContainerRole, MemoryRequest, PodRequest, Request, Share};
use tessera_core::selection::NumaBinding;
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};
use tessera_core::workload::Workload;

use crate::arbitrary;

/// Generates any policy; `tessera` gets some forecast.
fn policy() -> impl Strategy<Value = Policy> {
    let named = prop::sample::select(Policy::NAMES.to_vec()).prop_map(|name| name.parse().unwrap());
    let expecting =
        (vec(arbitrary::pod_request(), 0..10), vec(arbitrary::node(), 0..4)).prop_map(|(pods, nodes)| {
            let nodes: Vec<NodeState> = nodes.into_iter().map(|node| NodeState::empty(node.into())).collect();
            let forecast = Forecast::new(&Workload::of(&pods), &nodes.iter().collect());
            Policy::Tessera(forecast.into())
        });
    let plain = prop_oneof![2 => named, 1 => expecting].boxed();
    let pair = (option::of(plain.clone()), option::of(plain.clone()), plain.clone());
    prop_oneof![3 => plain, 1 => pair.prop_map(|(gpus, nodes, other)| other.with(gpus, nodes))]
}

fn grant(
    node: &NodeState,
    pod: &PodRequest,
    uid: usize,
    gpus: &tessera_core::placement::Placement,
) -> PodGrant {
    PodGrant {
        pod: format!("uid-{uid}").as_str().into(),
        node: node.node().name.clone(),
        cpu: pod.cpu,
        memory: pod.memory,
        containers: gpus.grants(node.node(), pod),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_stream_of_pods_is_never_double_booked(
        node in arbitrary::node(),
        pods in vec((arbitrary::pod_request(), policy()), 0..12),
    ) {
        let name = node.name.clone();
        let mut ledger = Ledger::default();
        ledger.set_node(node);
        for (uid, (pod, policy)) in pods.iter().enumerate() {
            let state = ledger.node(&name).unwrap();
            let Ok(placement) = place(state, pod, policy, GpuSet::EMPTY) else { continue };
            prop_assert_eq!(place(state, pod, policy, GpuSet::EMPTY), Ok(placement.clone()));
            for (container, gpus) in pod.containers.iter().zip(&placement.gpus) {
                // The GPUs are a set, so no two parts of a request are on one GPU.
                let asked = container.request.map_or(0, Request::gpu_count);
                prop_assert_eq!(gpus.len(), asked);
            }
            let grant = grant(state, pod, uid, &placement);
            prop_assert!(state.cpu_left() >= pod.cpu && state.memory_left() >= pod.memory);
            prop_assert_eq!(ledger.book(grant), Ok(LedgerChange::Changed));
        }
        prop_assert!(ledger.overbooked().is_empty());
    }

    /// Pods with annotations share a node with pods without. Whatever the annotations say, the chosen GPUs follow
    /// them, and no GPU holds two parts of one request or more than it has.
    #[test]
    fn annotations_are_followed_by_every_policy(
        node in arbitrary::node(),
        pods in vec((arbitrary::pod_request(), option::weighted(0.7, arbitrary::selection()), policy()), 0..10),
    ) {
        let name = node.name.clone();
        let mut ledger = Ledger::default();
        ledger.set_node(node);
        for (uid, (pod, selection, policy)) in pods.into_iter().enumerate() {
            let pod = PodRequest { selection: selection.unwrap_or_default(), ..pod };
            let state = ledger.node(&name).unwrap();
            let placement = match place(state, &pod, &policy, GpuSet::EMPTY) {
                Ok(placement) => placement,
                Err(refusal) => {
                    prop_assert!(refusal.to_string().len() <= 60, "{}", refusal);
                    let alone = place(&empty(state), &pod, &policy, GpuSet::EMPTY);
                    prop_assert!(refusal.may_resolve() || alone.is_err(), "{refusal}");
                    prop_assert_eq!(explain(state, &pod, &policy).map(|why| why.error), Some(refusal));
                    prop_assert_eq!(filter(state, &pod, &policy), Err(refusal));
                    continue;
                }
            };
            prop_assert_eq!(filter(state, &pod, &policy), Ok(()));
            let quick = score(state, &pod, &policy).unwrap();
            prop_assert!((quick - placement.score).abs() < 1e-6, "{quick} {placement:?}");
            for (container, gpus) in pod.containers.iter().zip(&placement.gpus) {
                prop_assert_eq!(gpus.len(), container.request.map_or(0, Request::gpu_count));
                let chosen = || state.node().gpus().iter().filter(|gpu| gpus.contains(gpu.index));
                prop_assert!(chosen().all(|gpu| pod.selection.accepts(gpu)), "{:?}", pod.selection);
                if pod.selection.idle_only {
                    prop_assert!(chosen().all(|gpu| state.used(gpu.index).is_none()));
                }
                if pod.selection.needs_slot {
                    let pods = |gpu| state.held().iter().filter(|held| held.contains(gpu)).count();
                    let slots = state.node().slots_per_gpu.map_or(usize::MAX, usize::from);
                    prop_assert!(chosen().all(|gpu| pods(gpu.index) < slots));
                }
                if pod.selection.numa == NumaBinding::Required && gpus.len() > 1 {
                    let first = chosen().next().and_then(|gpu| gpu.numa);
                    prop_assert!(first.is_some() && chosen().all(|gpu| gpu.numa == first));
                }
            }
            let grant = grant(state, &pod, uid, &placement);
            prop_assert_eq!(ledger.book(grant), Ok(LedgerChange::Changed));
            prop_assert!(ledger.overbooked().is_empty());
        }
    }

    #[test]
    fn rejects_exactly_where_no_gpu_suits(
        node in arbitrary::node(),
        held in vec(arbitrary::pod_grant(), 0..4),
        pod in arbitrary::pod_request(),
        policy in policy(),
    ) {
        let name = node.name.clone();
        let mut ledger = Ledger::default();
        ledger.set_node(node);
        held.into_iter().for_each(|mut grant| {
            grant.node = name.clone();
            ledger.observe(grant);
        });
        let state = ledger.node(&name).unwrap();
        // The CPU and memory are zero, so that only the GPUs decide.
        let Some(container) = pod.containers.iter().find(|container| container.request.is_some()) else {
            return Ok(());
        };
        let request = container.request.unwrap();
        let alone = PodRequest { containers: vec![container.clone()], ..pod.clone() };
        let asked = request.gpu_count();
        let fits = |gpu: GpuIndex| state.fits(gpu, state.node().hold(request, gpu));
        let gpus = state.node().gpus().iter();
        let usable = gpus.filter(|gpu| fits(gpu.index) && alone.accepts(&gpu.model)).count();
        let has_cpu = state.cpu_left() >= pod.cpu && state.memory_left() >= pod.memory;
        let placement = place(state, &alone, &policy, GpuSet::EMPTY);
        prop_assert_eq!(placement.is_ok(), usable >= asked && has_cpu, "{:?}", placement);
        prop_assert_eq!(filter(state, &alone, &policy).err(), placement.as_ref().err().copied());
        let quick = score(state, &alone, &policy);
        match (&quick, &placement) {
            (Ok(quick), Ok(placement)) => prop_assert!((quick - placement.score).abs() < 1e-6, "{quick} {placement:?}"),
            _ => prop_assert_eq!(quick.as_ref().err(), placement.as_ref().err()),
        }
        let explanation = explain(state, &alone, &policy);
        prop_assert_eq!(explanation.as_ref().map(|why| why.error), placement.as_ref().err().copied());
        if let Some(why) = explanation.filter(|why| why.container.is_some()) {
            prop_assert_eq!(why.gpus.iter().filter(|(_, refusal)| refusal.is_none()).count(), usable);
        }
        if let Err(refusal) = placement {
            prop_assert!(refusal.to_string().len() <= 60, "{}", refusal);
            // A pod that can never fit must not fit on the idle node either.
            let empty = empty(state);
            if !refusal.may_resolve() {
                prop_assert!(place(&empty, &alone, &policy, GpuSet::EMPTY).is_err());
            }
        }
    }

    #[test]
    fn required_gpus_are_among_the_chosen(
        node in arbitrary::node(),
        required in 0u64..256,
        count in 1u8..6,
        shared in any::<bool>(),
        policy in policy(),
    ) {
        let mut ledger = Ledger::default();
        let name = node.name.clone();
        ledger.set_node(node);
        let state = ledger.node(&name).unwrap();
        let required = GpuSet::from_mask(required).intersection(state.idle());
        let share = Share { count, compute_percent: Percent(10), memory: MemoryRequest::Amount(MiB(1)) };
        let request = if shared && count > 1 { Request::Share(share) } else { Request::Whole(count) };
        let pod = PodRequest::of_mains([request]);
        match place(state, &pod, &policy, required) {
            Ok(placement) => {
                prop_assert!(placement.gpus[0].is_superset(required));
                prop_assert_eq!(placement.gpus[0].len(), usize::from(count));
            }
            Err(_) => prop_assert!(state.idle().len() < usize::from(count) || required.len() > usize::from(count)),
        }
    }
}

fn empty(state: &NodeState) -> NodeState {
    let mut ledger = Ledger::default();
    ledger.set_node(state.node().clone());
    ledger.node(&state.node().name).unwrap().clone()
}

#[test]
fn a_hold_follows_from_its_request() {
    use tessera_core::units::{MiB, Percent};
    let of = |request| Hold::of(request, MiB(1001));
    assert_eq!(of(Request::Whole(3)), Hold::Whole);
    let share = |percent, memory| Hold::Share { compute_percent: Percent(percent), memory: MiB(memory) };
    assert_eq!(of(Request::memory(MiB(5))), share(0, 5));
    let half = MemoryRequest::PartOfGpu(Percent(50));
    let two = Request::Share(Share { count: 2, compute_percent: Percent(30), memory: half });
    assert_eq!(of(two), share(30, 500));
}

#[test]
fn a_small_container_does_not_take_the_only_place_of_a_large_one() {
    let gpu =
        |index| Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MiB(100));
    let node = Node::new("node".into(), vec![gpu(0), gpu(1)], Topology::unknown(2), MilliCpu(0), MiB(0));
    let mut state = NodeState::empty(node.unwrap().into());
    let share = |percent: u32| Request::share(Percent(percent), MiB(percent.into()));
    for (gpu, taken) in [(0, 5), (1, 60)] {
        let held = ContainerGrant {
            container: "c".to_owned(),
            role: ContainerRole::Main,
            holds: vec![(GpuIndex(gpu), Hold::of(share(taken), MiB(100)))],
        };
        let grant = PodGrant {
            pod: format!("uid-{gpu}").as_str().into(),
            node: "node".into(),
            cpu: MilliCpu(0),
            memory: MiB(0),
            containers: vec![held],
        };
        state.add(&grant);
    }
    let pod = PodRequest::of_mains([share(30), share(90)]);
    for name in Policy::NAMES {
        let placed = place(&state, &pod, &name.parse().unwrap(), GpuSet::EMPTY);
        let gpus: Vec<String> = placed.unwrap().gpus.iter().map(ToString::to_string).collect();
        assert_eq!(gpus, ["1", "0"], "{name}");
    }
    let too_much = PodRequest::of_mains([share(30), share(96)]);
    let blocked = explain(&state, &too_much, &Policy::Spread).unwrap();
    assert_eq!(blocked.container.as_deref(), Some("c1"), "told as the containers stand");
}
