//! Plans of defragmentation under random clusters.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::defragment::{Fixed, Goal, HeldPod, Plan, Requests, Scene, Wanted, plan};
use tessera_core::disruption::{DisruptionBudget, EvictedPod, LabelSelector, violations};
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::node::Node;
use tessera_core::placement::{Policy, place};
use tessera_core::request::{PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid};

const GPUS: u8 = 4;
const MEMORY: MiB = MiB(10_000);

/// One pod of a random cluster.
#[derive(Clone, Debug)]
struct Spec {
    node: u8,
    request: Request,
    app: u8,
    priority: i32,
    cost_s: u64,
    is_marked: bool,
}

/// The cluster that follows from the pods that fit.
struct World {
    ledger: Ledger,
    pods: BTreeMap<PodUid, HeldPod>,
    requests: Table,
}

#[derive(Debug)]
struct Table(BTreeMap<PodUid, PodRequest>);

impl Requests for Table {
    fn request_on(&self, pod: &PodUid, _node: &NodeName) -> Option<PodRequest> {
        self.0.get(pod).cloned()
    }
}

fn node(number: u8) -> NodeName {
    NodeName(format!("node-{number}"))
}

fn app(number: u8) -> BTreeMap<String, String> {
    BTreeMap::from([("app".to_owned(), number.to_string())])
}

fn world(nodes: u8, specs: &[Spec]) -> World {
    let mut ledger = Ledger::default();
    for number in 0..nodes {
        let gpu =
            |index| Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MEMORY);
        let gpus = (0..GPUS).map(gpu).collect();
        let topology = Topology::unknown(usize::from(GPUS));
        ledger.set_node(Node::new(node(number), gpus, topology, MilliCpu(64_000), MiB(64_000)).unwrap());
    }
    let (mut pods, mut requests) = (BTreeMap::new(), BTreeMap::new());
    for (number, spec) in specs.iter().enumerate() {
        let uid = PodUid(format!("pod-{number:02}"));
        let request = PodRequest::of_mains([spec.request]);
        let state = ledger.node(&node(spec.node % nodes)).unwrap();
        // Spread over GPUs, so that the cluster is fragmented.
        let Ok(placement) = place(state, &request, &Policy::Spread, GpuSet::EMPTY) else { continue };
        let containers = placement.grants(state.node(), &request);
        let node = state.node().name.clone();
        let grant = PodGrant { pod: uid.clone(), node, cpu: MilliCpu::ZERO, memory: MiB::ZERO, containers };
        ledger.book(grant).unwrap();
        let held = HeldPod {
            namespace: "team".to_owned(),
            name: uid.0.clone(),
            labels: app(spec.app),
            priority: spec.priority,
            cost: Duration::from_secs(spec.cost_s),
            fixed: spec.is_marked.then_some(Fixed::Marked("tessera.dev/do-not-evict")),
        };
        requests.insert(uid.clone(), request);
        pods.insert(uid, held);
    }
    World { ledger, pods, requests: Table(requests) }
}

fn spec() -> impl Strategy<Value = Spec> {
    let request = prop_oneof![
        (1..=2u8).prop_map(Request::Whole),
        (10..90u32, 100..6000u64).prop_map(|(percent, memory)| Request::share(Percent(percent), MiB(memory))),
    ];
    (0..8u8, request, 0..3u8, 0..3i32, 0..500u64, prop::bool::weighted(0.15)).prop_map(
        |(node, request, app, priority, cost_s, is_marked)| Spec {
            node,
            request,
            app,
            priority,
            cost_s,
            is_marked,
        },
    )
}

fn budgets(allowed: &[i64]) -> Vec<DisruptionBudget> {
    let budget = |(number, allowed): (u8, &i64)| DisruptionBudget {
        namespace: "team".to_owned(),
        selector: LabelSelector { labels: app(number), expressions: Vec::new() },
        disruptions_allowed: *allowed,
        ..DisruptionBudget::default()
    };
    (0u8..).zip(allowed).map(budget).collect()
}

fn check_plan(world: &World, budgets: &[DisruptionBudget], goal: &Goal, plan: &Plan) {
    let moved: Vec<&HeldPod> = plan.moves.iter().map(|moved| &world.pods[&moved.to.pod]).collect();
    let evicted = moved.iter().map(|pod| EvictedPod {
        namespace: &pod.namespace,
        name: &pod.name,
        labels: &pod.labels,
    });
    assert_eq!(violations(budgets, evicted), 0, "{plan:?}");
    assert!(moved.iter().all(|pod| pod.fixed.is_none()), "{plan:?}");
    for step in &plan.moves {
        let wanted = goal.wanted.iter().find(|wanted| wanted.pod == step.wanted).unwrap();
        assert!(world.pods[&step.to.pod].priority <= wanted.max_priority, "{plan:?}");
        assert_eq!(Some(&step.from), world.ledger.grant(&step.to.pod).map(|grant| &grant.node));
    }
    let mut after = world.ledger.clone();
    plan.moves.iter().for_each(|step| {
        after.release(&step.to.pod);
    });
    for grant in plan.moves.iter().map(|step| &step.to).chain(&plan.places) {
        after.book(grant.clone()).unwrap();
        let request = &world.requests.0[&grant.pod];
        let asked: usize = request.containers.iter().filter_map(|c| c.request).map(Request::gpu_count).sum();
        assert_eq!(grant.footprint().count(), asked);
    }
    assert!(after.overbooked().is_empty());
    assert_eq!(plan.places.len() + plan.unmet.len(), goal.wanted.len());
}

proptest! {
    /// A plan keeps budgets, priorities and marks. After the moves every pod has a place and the ledger is valid.
    #[test]
    fn plans_are_valid(
        nodes in 2..6u8,
        specs in vec(spec(), 0..24),
        sizes in vec(1..=GPUS, 1..4),
        allowed in vec(0..4i64, 0..3),
        max_priority in 0..3i32,
        max_moves in 0..8usize,
        different in any::<bool>(),
        all_or_nothing in any::<bool>(),
    ) {
        let mut world = world(nodes, &specs);
        let mut wanted = Vec::new();
        for (number, size) in sizes.iter().enumerate() {
            let pod = PodUid(format!("wanted-{number}"));
            world.requests.0.insert(pod.clone(), PodRequest::of_mains([Request::Whole(*size)]));
            wanted.push(Wanted { pod, max_priority });
        }
        let goal = Goal { wanted, on_different_nodes: different, all_or_nothing };
        let budgets = budgets(&allowed);
        let scene = Scene {
            ledger: &world.ledger,
            pods: &world.pods,
            budgets: &budgets,
            requests: &world.requests,
            policy: &Policy::Binpack,
            max_moves,
        };
        let found = plan(scene, &goal);
        check_plan(&world, &budgets, &goal, &found);
        prop_assert!(found.moves.len() <= max_moves);
        prop_assert!(!all_or_nothing || found.unmet.is_empty() || found.moves.is_empty());
        if different {
            let mut nodes: Vec<&NodeName> = found.places.iter().map(|place| &place.node).collect();
            nodes.sort();
            nodes.dedup();
            prop_assert_eq!(nodes.len(), found.places.len());
        }
        prop_assert_eq!(plan(scene, &goal), found, "equal input gives an equal plan");
    }

    /// With pods of one whole GPU each, the fewest evictions are known: the cheapest node needs one for each
    /// GPU that it lacks, and the pods go to free GPUs elsewhere.
    #[test]
    fn evicts_no_more_pods_than_the_cheapest_node_needs(
        nodes in 2..6u8,
        holders in vec((0..6u8, prop::bool::weighted(0.2)), 0..20),
        size in 1..=GPUS,
    ) {
        let specs: Vec<Spec> = holders
            .iter()
            .map(|(node, is_marked)| Spec {
                node: *node,
                request: Request::Whole(1),
                app: 0,
                priority: 0,
                cost_s: 0,
                is_marked: *is_marked,
            })
            .collect();
        let mut world = world(nodes, &specs);
        let free: Vec<usize> = (0..nodes).map(|n| world.ledger.node(&node(n)).unwrap().idle().len()).collect();
        let marked = |number: u8| {
            let name = node(number);
            world.ledger.grants_on(&name).filter(|grant| world.pods[&grant.pod].fixed.is_some()).count()
        };
        let size_of = usize::from(size);
        let expected = (0..nodes)
            .filter(|number| marked(*number) + size_of <= usize::from(GPUS))
            .map(|number| (size_of.saturating_sub(free[usize::from(number)]), number))
            .filter(|(lacking, number)| {
                let elsewhere: usize = free.iter().sum::<usize>() - free[usize::from(*number)];
                *lacking <= elsewhere
            })
            .map(|(lacking, _)| lacking)
            .min();
        let pod = PodUid::from("wanted");
        world.requests.0.insert(pod.clone(), PodRequest::of_mains([Request::Whole(size)]));
        let goal = Goal { wanted: vec![Wanted { pod, max_priority: 0 }], ..Goal::default() };
        let scene = Scene {
            ledger: &world.ledger,
            pods: &world.pods,
            budgets: &[],
            requests: &world.requests,
            policy: &Policy::Binpack,
            max_moves: 100,
        };
        let found = plan(scene, &goal);
        check_plan(&world, &[], &goal, &found);
        let needed = found.unmet.is_empty().then_some(found.moves.len());
        prop_assert_eq!(needed, expected, "{:?}", found);
    }
}

/// Of two pods that could go, the one that loses less GPU time goes.
#[test]
fn prefers_the_pod_that_loses_the_least_gpu_time() {
    let pod = |node, cost_s| Spec {
        node,
        request: Request::Whole(1),
        app: 0,
        priority: 0,
        cost_s,
        is_marked: false,
    };
    let mut world = world(2, &[pod(0, 3600), pod(1, 30)]);
    world.requests.0.insert("wanted".into(), PodRequest::of_mains([Request::Whole(GPUS)]));
    let goal = Goal { wanted: vec![Wanted { pod: "wanted".into(), max_priority: 0 }], ..Goal::default() };
    let scene = Scene {
        ledger: &world.ledger,
        pods: &world.pods,
        budgets: &[],
        requests: &world.requests,
        policy: &Policy::Binpack,
        max_moves: 10,
    };
    let found = plan(scene, &goal);
    assert_eq!(found.moves.iter().map(|step| step.to.pod.0.as_str()).collect::<Vec<_>>(), ["pod-01"]);
    assert_eq!(found.moves[0].cost, Duration::from_secs(30));
    let none = plan(Scene { max_moves: 0, ..scene }, &goal);
    assert_eq!(none.unmet, ["wanted".into()]);
}

/// A share moves to another GPU of its own node where that empties a GPU.
#[test]
fn moves_shares_within_a_node() {
    let share = |percent| Spec {
        node: 0,
        request: Request::share(Percent(percent), MiB(1000)),
        app: 0,
        priority: 0,
        cost_s: 0,
        is_marked: false,
    };
    let mut world = world(1, &[share(40), share(40), share(40), share(40)]);
    assert!(world.ledger.node(&node(0)).unwrap().idle().is_empty(), "one share on each GPU");
    world.requests.0.insert("wanted".into(), PodRequest::of_mains([Request::Whole(2)]));
    let goal = Goal { wanted: vec![Wanted { pod: "wanted".into(), max_priority: 0 }], ..Goal::default() };
    let scene = Scene {
        ledger: &world.ledger,
        pods: &world.pods,
        budgets: &[],
        requests: &world.requests,
        policy: &Policy::Binpack,
        max_moves: 10,
    };
    let found = plan(scene, &goal);
    check_plan(&world, &[], &goal, &found);
    assert_eq!(found.moves.len(), 2, "{found:?}");
    assert_eq!(found.places[0].containers[0].holds.len(), 2, "{found:?}");
}
