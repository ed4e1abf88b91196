//! Plans of evictions under random clusters.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::defragment::{Fixed, HeldPod};
use tessera_core::disruption::{DisruptionBudget, EvictedPod, LabelSelector, violations};
use tessera_core::eviction::{EvictionNode, EvictionPlan, EvictionScene, EvictionUnit, plan};
use tessera_core::gang::{self, GangClass, GangNode, TopologyWish};
use tessera_core::gpu::Gpu;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Ledger;
use tessera_core::node::{Node, NodeState};
use tessera_core::placement::{Policy, place};
use tessera_core::quota::GpuAmount;
use tessera_core::request::{PodRequest, Request};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid};

const GPUS: u8 = 4;
const RACKS: [&str; 2] = ["rack-1", "rack-2"];

/// One pod of a random cluster.
#[derive(Clone, Debug)]
struct Spec {
    node: u8,
    request: Request,
    /// Pods with the same number above zero are a gang.
    gang: u8,
    app: u8,
    priority: i32,
    is_marked: bool,
}

fn spec() -> impl Strategy<Value = Spec> {
    let request = prop_oneof![
        2 => (1..=GPUS).prop_map(Request::Whole),
        1 => (10..90u32).prop_map(|percent| Request::share(Percent(percent), MiB(100))),
    ];
    (0..8u8, request, prop_oneof![3 => Just(0u8), 1 => 1..3u8], 0..3u8, 0..4i32, prop::bool::weighted(0.1))
        .prop_map(|(node, request, gang, app, priority, is_marked)| Spec {
            node,
            request,
            gang,
            app,
            priority,
            is_marked,
        })
}

/// The cluster that follows from the pods that fit.
struct World {
    ledger: Ledger,
    pods: BTreeMap<PodUid, HeldPod>,
    /// The units that a waiting gang of this priority may evict, and the states of the nodes without them.
    units: Vec<EvictionUnit>,
    bases: Vec<NodeState>,
}

fn app(number: u8) -> BTreeMap<String, String> {
    BTreeMap::from([("app".to_owned(), number.to_string())])
}

fn world(nodes: u8, specs: &[Spec], priority: i32) -> World {
    let mut ledger = Ledger::default();
    for number in 0..nodes {
        let gpu = |index| {
            Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MiB(10_000))
        };
        let name = NodeName(format!("node-{number}"));
        let topology = Topology::unknown(usize::from(GPUS));
        let node =
            Node::new(name, (0..GPUS).map(gpu).collect(), topology, MilliCpu(64_000), MiB(64_000)).unwrap();
        ledger.set_node(node);
    }
    let (mut pods, mut gangs) = (BTreeMap::new(), BTreeMap::<String, (Vec<PodUid>, i32)>::new());
    for (number, spec) in specs.iter().enumerate() {
        let uid = PodUid(format!("pod-{number:02}"));
        let request = PodRequest::of_mains([spec.request]);
        let state = ledger.node(&NodeName(format!("node-{}", spec.node % nodes))).unwrap();
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
            cost: Duration::ZERO,
            fixed: spec.is_marked.then_some(Fixed::Marked("tessera.dev/do-not-evict")),
        };
        pods.insert(uid.clone(), held);
        let name = if spec.gang == 0 { uid.0.clone() } else { format!("gang-{}", spec.gang) };
        let (members, highest) = gangs.entry(name).or_insert((Vec::new(), spec.priority));
        members.push(uid);
        *highest = spec.priority.max(*highest);
    }
    let mut units: Vec<EvictionUnit> = gangs
        .into_values()
        .filter(|(_, highest)| *highest < priority)
        .map(|(pods, highest)| EvictionUnit { pods, level: highest.into(), released: GpuAmount::default() })
        .collect();
    units.sort_by_key(|unit| unit.level);
    let gone: BTreeSet<&PodUid> = units.iter().flat_map(|unit| &unit.pods).collect();
    let mut bases: Vec<NodeState> = ledger.nodes().map(|state| without(&ledger, state, &gone)).collect();
    bases.sort_by(|a, b| a.node().name.cmp(&b.node().name));
    World { ledger, pods, units, bases }
}

fn without(ledger: &Ledger, state: &NodeState, gone: &BTreeSet<&PodUid>) -> NodeState {
    let mut left = NodeState::empty(state.shared_node());
    ledger
        .grants_on(&state.node().name)
        .filter(|grant| !gone.contains(&grant.pod))
        .for_each(|grant| left.add(grant));
    left
}

impl World {
    fn unit_of(&self, pod: &PodUid) -> Option<usize> {
        self.units.iter().position(|unit| unit.pods.contains(pod))
    }

    fn nodes<'a>(&'a self, bases: &'a [NodeState], request: &'a PodRequest) -> Vec<EvictionNode<'a>> {
        let racks = RACKS.iter().cycle();
        let node = |(state, rack): (&'a NodeState, &&'static str)| {
            let node = GangNode {
                state,
                domains: vec![Some(*rack)],
                wished: Some(*rack),
                requests: vec![Some(request)],
                has_member: false,
            };
            let grants = self.ledger.grants_on(&state.node().name);
            let held = grants.filter_map(|grant| Some((self.unit_of(&grant.pod)?, grant))).collect();
            EvictionNode { node, held }
        };
        bases.iter().zip(racks).map(node).collect()
    }

    fn plan(
        &self,
        request: &PodRequest,
        count: usize,
        wish: &TopologyWish,
        budgets: &[DisruptionBudget],
    ) -> Option<EvictionPlan> {
        let nodes = self.nodes(&self.bases, request);
        let guarantees = BTreeMap::new();
        let scene = EvictionScene {
            nodes: &nodes,
            units: &self.units,
            pods: &self.pods,
            budgets,
            guarantees: &guarantees,
        };
        plan(scene, &[GangClass { count, policy: &Policy::Binpack }], wish)
    }

    /// Returns whether the waiting pods fit once these pods are gone.
    fn fits(&self, request: &PodRequest, count: usize, wish: &TopologyWish, gone: &[&EvictionUnit]) -> bool {
        let gone: BTreeSet<&PodUid> = gone.iter().flat_map(|unit| &unit.pods).collect();
        let states: Vec<NodeState> =
            self.bases.iter().map(|state| without(&self.ledger, state, &gone)).collect();
        let nodes: Vec<GangNode<'_>> =
            self.nodes(&states, request).into_iter().map(|node| node.node).collect();
        gang::plan(&[GangClass { count, policy: &Policy::Binpack }], &nodes, wish).is_some()
    }

    fn is_movable(&self, unit: &EvictionUnit) -> bool {
        unit.pods.iter().all(|pod| self.pods[pod].fixed.is_none())
    }
}

fn budgets(allowed: &[i64]) -> Vec<DisruptionBudget> {
    let budget = |(number, allowed): (u8, &i64)| DisruptionBudget {
        namespace: "team".to_owned(),
        selector: LabelSelector { labels: app(number), expressions: Vec::new() },
        disruptions_allowed: *allowed,
        disrupted_pods: BTreeSet::new(),
    };
    (0..).zip(allowed).map(budget).collect()
}

fn wish() -> impl Strategy<Value = TopologyWish> {
    prop_oneof![
        Just(TopologyWish::Any),
        Just(TopologyWish::Required("rack".to_owned())),
        Just(TopologyWish::Preferred("rack".to_owned()))
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_plan_keeps_within_its_limits_and_makes_room(
        nodes in 1..6u8,
        specs in vec(spec(), 0..24),
        (count, gpus) in (1..4usize, 1..=GPUS),
        wish in wish(),
        allowed in vec(0..4i64, 0..3),
    ) {
        let world = world(nodes, &specs, 3);
        let request = PodRequest::of_mains([Request::Whole(gpus)]);
        let budgets = budgets(&allowed);
        let Some(planned) = world.plan(&request, count, &wish, &budgets) else { return Ok(()) };
        let units: Vec<&EvictionUnit> = planned.units.iter().map(|unit| &world.units[*unit]).collect();
        let victims: Vec<&HeldPod> =
            units.iter().flat_map(|unit| &unit.pods).map(|pod| &world.pods[pod]).collect();
        prop_assert!(victims.iter().all(|pod| pod.fixed.is_none() && pod.priority < 3));
        let evicted = victims
            .iter()
            .map(|pod| EvictedPod { namespace: &pod.namespace, name: &pod.name, labels: &pod.labels });
        prop_assert_eq!(violations(&budgets, evicted), 0);
        // The places can be booked once the victims are gone.
        let mut ledger = world.ledger.clone();
        for pod in units.iter().flat_map(|unit| &unit.pods) {
            ledger.release(pod);
        }
        prop_assert_eq!(planned.placed.places.len(), count);
        for (number, place) in planned.placed.places.iter().enumerate() {
            let grant = PodGrant {
                pod: PodUid(format!("member-{number}")),
                node: world.bases[place.node].node().name.clone(),
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
                containers: place.containers.clone(),
            };
            prop_assert!(ledger.book(grant).is_ok());
        }
    }

    #[test]
    fn room_is_found_where_it_can_be_made_and_at_the_lowest_level(
        nodes in 1..6u8,
        specs in vec(spec(), 0..24),
        (count, gpus) in (1..4usize, 1..=GPUS),
        wish in wish(),
    ) {
        let world = world(nodes, &specs, 3);
        let request = PodRequest::of_mains([Request::Whole(gpus)]);
        let fits = |gone: &[&EvictionUnit]| world.fits(&request, count, &wish, gone);
        let movable: Vec<&EvictionUnit> =
            world.units.iter().filter(|unit| world.is_movable(unit)).collect();
        let planned = world.plan(&request, count, &wish, &[]);
        prop_assert_eq!(planned.is_some(), fits(&movable));
        let Some(planned) = planned else { return Ok(()) };
        let units: Vec<&EvictionUnit> = planned.units.iter().map(|unit| &world.units[*unit]).collect();
        prop_assert!(fits(&units));
        match units.iter().map(|unit| unit.level).max() {
            None => prop_assert!(fits(&[])),
            Some(level) => {
                let lower: Vec<&EvictionUnit> =
                    movable.into_iter().filter(|unit| unit.level < level).collect();
                prop_assert!(!fits(&lower), "lower levels suffice");
            }
        }
    }
}
