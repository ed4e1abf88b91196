//! The ledger stays consistent through any history.

use std::collections::{BTreeMap, HashMap};

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::grant::{Hold, PodGrant};
use tessera_core::ledger::{Conflict, Ledger, LedgerChange, NodeGrant};
use tessera_core::node::Node;
use tessera_core::request::ContainerRole;
use tessera_core::units::{GpuIndex, MiB, NodeName, Percent, PodUid};

use crate::arbitrary;

#[derive(Clone, Debug)]
enum Event {
    Node(Node),
    NodeGone(NodeName),
    Book(PodGrant),
    Observe(PodGrant),
    Release(PodUid),
    Doubt(PodUid),
    ReleaseDoubt(PodUid),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => arbitrary::node().prop_map(Event::Node),
        1 => arbitrary::node_name().prop_map(Event::NodeGone),
        4 => arbitrary::pod_grant().prop_map(Event::Book),
        2 => arbitrary::pod_grant().prop_map(Event::Observe),
        2 => arbitrary::pod_uid().prop_map(Event::Release),
        1 => arbitrary::pod_uid().prop_map(Event::Doubt),
        1 => arbitrary::pod_uid().prop_map(Event::ReleaseDoubt),
    ]
}

/// The expected nodes and pods, kept by the test itself.
#[derive(Default)]
struct World {
    nodes: HashMap<NodeName, Node>,
    pods: HashMap<PodUid, PodGrant>,
    in_doubt: BTreeMap<PodUid, PodGrant>,
}

impl World {
    fn apply(&mut self, ledger: &mut Ledger, event: Event) {
        match event {
            Event::Node(node) => {
                ledger.set_node(node.clone());
                self.nodes.insert(node.name.clone(), node);
            }
            Event::NodeGone(name) => {
                ledger.remove_node(&name);
                self.nodes.remove(&name);
            }
            Event::Book(grant) => {
                if ledger.book(grant.clone()).is_ok() {
                    self.pods.insert(grant.pod.clone(), grant);
                }
            }
            Event::Observe(grant) => {
                ledger.observe(grant.clone());
                self.pods.insert(grant.pod.clone(), grant);
            }
            Event::Release(pod) => {
                let known = self.pods.remove(&pod).is_some();
                assert_eq!(ledger.release(&pod) == LedgerChange::Changed, known);
            }
            Event::Doubt(pod) => {
                let moved = self.pods.remove(&pod).map(|grant| self.in_doubt.insert(pod.clone(), grant));
                assert_eq!(ledger.put_in_doubt(&pod) == LedgerChange::Changed, moved.is_some());
            }
            Event::ReleaseDoubt(pod) => {
                let known = self.in_doubt.remove(&pod).is_some();
                assert_eq!(ledger.release_in_doubt(&pod) == LedgerChange::Changed, known);
            }
        }
    }

    /// Returns a ledger made from the current pods and nodes alone.
    fn rebuilt(&self, pods_first: bool) -> Ledger {
        let mut ledger = Ledger::default();
        for (pod, grant) in &self.in_doubt {
            ledger.observe(grant.clone());
            ledger.put_in_doubt(pod);
        }
        if pods_first {
            self.pods
                .values()
                .for_each(|grant| assert_eq!(ledger.observe(grant.clone()), LedgerChange::Changed));
        }
        self.nodes.values().for_each(|node| assert_eq!(ledger.set_node(node.clone()), LedgerChange::Changed));
        self.pods.values().for_each(|grant| {
            ledger.observe(grant.clone());
        });
        ledger
    }
}

/// Returns what a pod takes of a GPU in each of its phases: one per init container, one for the
/// rest.
fn phases(grant: &PodGrant, gpu: GpuIndex) -> Vec<Vec<Hold>> {
    let holds = |position: usize| {
        grant.containers[position].holds.iter().filter(move |(held, _)| *held == gpu).map(|(_, hold)| *hold)
    };
    let role = |position: usize| grant.containers[position].role;
    let count = grant.containers.len();
    let inits = (0..count).filter(|at| role(*at) == ContainerRole::Init);
    let mut phases: Vec<Vec<Hold>> = inits
        .map(|at| {
            (0..at)
                .filter(|before| role(*before) == ContainerRole::Sidecar)
                .chain([at])
                .flat_map(holds)
                .collect()
        })
        .collect();
    phases.push((0..count).filter(|at| role(*at) != ContainerRole::Init).flat_map(holds).collect());
    phases
}

/// Returns whether some combination of phases of all pods on a GPU exceeds the GPU.
fn exceeds(grants: &[&PodGrant], gpu: GpuIndex, memory: MiB) -> bool {
    let holders =
        grants.iter().filter(|grant| phases(grant, gpu).iter().any(|phase| !phase.is_empty())).count();
    let mut compute_percent = 0u64;
    let mut bytes = 0u128;
    for grant in grants {
        let mut peak = (0u64, 0u128);
        for phase in phases(grant, gpu) {
            let whole = phase.contains(&Hold::Whole);
            if whole && (phase.len() > 1 || holders > 1) {
                return true;
            }
            let parts = phase.iter().filter_map(|hold| match hold {
                Hold::Whole => None,
                Hold::Share { compute_percent, memory } => {
                    Some((u64::from(compute_percent.0), u128::from(memory.0)))
                }
            });
            let sum = parts.fold((0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
            peak = (peak.0.max(sum.0), peak.1.max(sum.1));
        }
        compute_percent += peak.0;
        bytes += peak.1;
    }
    compute_percent > 100 || bytes > u128::from(memory.0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_history_equals_the_book_of_what_is_there(events in vec(event(), 0..40)) {
        let mut ledger = Ledger::default();
        let mut world = World::default();
        events.into_iter().for_each(|event| world.apply(&mut ledger, event));
        for pods_first in [false, true] {
            let rebuilt = world.rebuilt(pods_first);
            prop_assert_eq!(rebuilt.nodes().count(), ledger.nodes().count());
            for name in world.nodes.keys() {
                prop_assert_eq!(rebuilt.node(name), ledger.node(name));
            }
        }
        for (pod, grant) in &world.pods {
            prop_assert_eq!(ledger.grant(pod), Some(grant));
        }
        for (pod, grant) in &world.in_doubt {
            prop_assert_eq!(ledger.in_doubt(pod), Some(grant));
        }
        for name in world.nodes.keys() {
            let mut there: Vec<_> = world.pods.values().filter(|grant| grant.node == *name).collect();
            there.sort_by_key(|grant| &grant.pod);
            prop_assert_eq!(ledger.grants_on(name).collect::<Vec<_>>(), there.clone());
            let in_doubt = world.in_doubt.values().filter(|grant| grant.node == *name).map(NodeGrant::InDoubt);
            let counted: Vec<_> = there.into_iter().map(NodeGrant::Held).chain(in_doubt).collect();
            prop_assert_eq!(ledger.counted_on(name).collect::<Vec<_>>(), counted);
        }
    }

    #[test]
    fn what_is_booked_never_exceeds_a_gpu(
        nodes in vec(arbitrary::node(), 1..3),
        grants in vec(arbitrary::pod_grant(), 0..40),
    ) {
        let mut ledger = Ledger::default();
        nodes.iter().for_each(|node| { ledger.set_node(node.clone()); });
        for grant in grants {
            let before = ledger.clone();
            match ledger.book(grant.clone()) {
                Ok(_) => prop_assert_eq!(ledger.book(grant), Ok(LedgerChange::Unchanged)),
                Err(conflict) => {
                    prop_assert!(before.nodes().all(|state| ledger.node(&state.node().name) == Some(state)));
                    prop_assert_eq!(ledger.grant(&grant.pod), before.grant(&grant.pod));
                    if let Conflict::Insufficient { node, gpu } = conflict {
                        let beside: Vec<&PodGrant> = ledger.grants_on(&node).chain([&grant]).collect();
                        let memory = ledger.node(&node).unwrap().node().gpu(gpu).unwrap().memory;
                        prop_assert!(exceeds(&beside, gpu, memory), "refused without need");
                    }
                }
            }
            prop_assert!(ledger.overbooked().is_empty());
        }
        for state in ledger.nodes() {
            let grants: Vec<&PodGrant> = ledger.grants_on(&state.node().name).collect();
            for gpu in state.node().gpus() {
                prop_assert!(!exceeds(&grants, gpu.index, gpu.memory));
            }
        }
    }
}

#[test]
fn an_observed_pod_is_booked_even_where_there_is_no_room() {
    let node = two_gpus();
    let mut ledger = Ledger::default();
    ledger.set_node(node.clone());
    let grant = |pod: &str, compute_percent| PodGrant {
        pod: PodUid::from(pod),
        node: node.name.clone(),
        cpu: Default::default(),
        memory: Default::default(),
        containers: vec![tessera_core::grant::ContainerGrant {
            container: "main".into(),
            role: ContainerRole::Main,
            holds: vec![(
                GpuIndex(0),
                Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(1) },
            )],
        }],
    };
    ledger.book(grant("a", 60)).unwrap();
    let refused = ledger.book(grant("b", 60)).unwrap_err();
    assert_eq!(refused.to_string(), "GPU 0 of node n has not enough left");
    ledger.observe(grant("b", 60));
    assert_eq!(ledger.overbooked().into_values().collect::<Vec<_>>(), [[GpuIndex(0)]]);
    assert_eq!(ledger.node(&node.name).unwrap().room(GpuIndex(0)).compute_percent, Percent(0));
    ledger.release(&PodUid::from("a"));
    assert!(ledger.overbooked().is_empty());
    assert_eq!(ledger.node(&node.name).unwrap().room(GpuIndex(0)).compute_percent, Percent(40));
    let moved = ledger.book(grant("b", 30)).unwrap_err();
    assert_eq!(moved.to_string(), "pod b already holds another grant on node n; release it first");
}

fn two_gpus() -> Node {
    use tessera_core::gpu::Gpu;
    use tessera_core::topology::Topology;
    let gpu = |index| Gpu::new(GpuIndex(index), "GPU-x".into(), "T4".into(), MiB(16_384));
    Node::new("n".into(), vec![gpu(0), gpu(1)], Topology::unknown(2), Default::default(), Default::default())
        .unwrap()
}
