//! Defragmentation: which pods to move so that a wanted shape fits.
//!
//! A plan names the pods to evict, another place for each of them, and the places of the wanted pods. It has
//! as few evictions as the search finds, then loses the least GPU time. It respects disruption budgets,
//! priorities and pods that must stay. Nothing is carried out here: the ledger is not changed.
//!
//! Wanted pods are placed one after the other, the largest first. For each of them every node is considered: the
//! search chooses the pods to evict there (`victims`) and looks for other places. A pod moves at most once,
//! and no pod is moved to make room for a moved pod.

mod victims;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::disruption::{DisruptionBudget, EvictedPod, allow};
use crate::gpu_set::GpuSet;
use crate::grant::PodGrant;
use crate::ledger::Ledger;
use crate::node::NodeState;
use crate::placement::{Policy, filter, place, score};
use crate::request::PodRequest;
use crate::units::{NodeName, PodUid};

/// The reason why a pod stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fixed {
    /// An annotation with this key forbids the eviction.
    Marked(&'static str),
    /// No controller would create the pod again.
    NoController,
    /// The pod belongs to its node, as pods of DaemonSets and static pods do.
    BoundToNode,
    /// The pod belongs to a gang, which would lose all its work.
    Gang,
    /// Volumes, ports of the host, affinity to other pods or claims bind the pod, and kube-scheduler alone can
    /// tell where it may go.
    KnownToKubeScheduler,
    /// No annotation names the GPUs of the pod.
    UnknownGpus,
    /// The pod is being deleted already.
    Ending,
}

/// A pod that holds GPUs.
#[derive(Clone, Debug)]
pub struct HeldPod {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub name: String,
    /// The labels of the pod, which disruption budgets select by.
    pub labels: BTreeMap<String, String>,
    /// The priority of the pod.
    pub priority: i32,
    /// The GPU time that an eviction loses.
    pub cost: Duration,
    /// The reason why the pod must stay, if there is one.
    pub fixed: Option<Fixed>,
}

/// What pods request of each node.
pub trait Requests: std::fmt::Debug {
    /// Returns the request of a wanted or held pod on a node, or `None` if the node may not take the pod.
    fn request_on(&self, pod: &PodUid, node: &NodeName) -> Option<PodRequest>;
}

/// The cluster and the limits of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// All grants.
    pub ledger: &'a Ledger,
    /// The pods that may move. Holders that are not listed stay.
    pub pods: &'a BTreeMap<PodUid, HeldPod>,
    /// All disruption budgets.
    pub budgets: &'a [DisruptionBudget],
    /// What the pods request of each node.
    pub requests: &'a dyn Requests,
    /// The policy that chooses GPUs and nodes.
    pub policy: &'a Policy,
    /// Upper bound for the number of evictions.
    pub max_moves: usize,
}

/// A pod that wants GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The UID of the pod, or a name for a hypothetical one.
    pub pod: PodUid,
    /// The highest priority of pods that may be evicted for this pod.
    pub max_priority: i32,
}

/// What a plan must reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Goal {
    /// The pods that want GPUs, in the order in which they are placed.
    pub wanted: Vec<Wanted>,
    /// True if each wanted pod needs a node of its own, as in "two nodes with 8 free GPUs".
    pub on_different_nodes: bool,
    /// True if a part of the wanted pods is of no use.
    pub all_or_nothing: bool,
}

/// The move of one pod: its eviction, and the place that is left for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The wanted pod that the move makes room for.
    pub wanted: PodUid,
    /// The node that the pod leaves.
    pub from: NodeName,
    /// The new place of the pod.
    pub to: PodGrant,
    /// The GPU time that the eviction loses.
    pub cost: Duration,
}

/// The moves that make room, and the places of the wanted pods after them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The pods to evict, in this order.
    pub moves: Vec<Move>,
    /// The places of the wanted pods that fit after the moves.
    pub places: Vec<PodGrant>,
    /// The wanted pods that fit nowhere, whatever is moved.
    pub unmet: Vec<PodUid>,
}

/// Sets of victims whose new places are searched for one wanted pod. Most searches end with the first set; on a
/// full cluster each failed one costs a scan of all nodes.
const MAX_TRIED_SETS: usize = 200;

/// Plans the moves that make room for the wanted pods.
///
/// ```
/// # use std::collections::BTreeMap;
/// # use std::time::Duration;
/// use tessera_core::defragment::{Goal, HeldPod, Requests, Scene, Wanted, plan};
/// # use tessera_core::gpu::Gpu;
/// # use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
/// # use tessera_core::ledger::Ledger;
/// # use tessera_core::node::Node;
/// # use tessera_core::placement::Policy;
/// # use tessera_core::request::{ContainerRole, PodRequest, Request};
/// # use tessera_core::topology::Topology;
/// # use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, PodUid};
/// # #[derive(Debug)]
/// # struct Sizes;
/// # impl Requests for Sizes {
/// #     fn request_on(&self, pod: &PodUid, _: &NodeName) -> Option<PodRequest> {
/// #         Some(PodRequest::of_mains([Request::Whole(if pod.0 == "large" { 2 } else { 1 })]))
/// #     }
/// # }
/// # let mut ledger = Ledger::default();
/// # let mut pods = BTreeMap::new();
/// # for name in ["a", "b"] {
/// #     let gpu = |index| Gpu::new(GpuIndex(index), "GPU-x".into(), "T4".into(), MiB(15_360));
/// #     let gpus = vec![gpu(0), gpu(1)];
/// #     ledger.set_node(Node::new(name.into(), gpus, Topology::unknown(2), MilliCpu(8000), MiB(32_768))?);
/// #     let held = ContainerGrant {
/// #         container: "main".to_owned(),
/// #         role: ContainerRole::Main,
/// #         holds: vec![(GpuIndex(0), Hold::Whole)],
/// #     };
/// #     let pod = PodUid(format!("small-{name}"));
/// #     ledger.book(PodGrant {
/// #         pod: pod.clone(),
/// #         node: name.into(),
/// #         cpu: MilliCpu::ZERO,
/// #         memory: MiB::ZERO,
/// #         containers: vec![held],
/// #     }).unwrap();
/// #     pods.insert(pod, HeldPod {
/// #         namespace: "team".to_owned(),
/// #         name: format!("small-{name}"),
/// #         labels: BTreeMap::new(),
/// #         priority: 0,
/// #         cost: Duration::ZERO,
/// #         fixed: None,
/// #     });
/// # }
/// // Each of two nodes with two GPUs has a pod with one GPU, and a pod with two GPUs waits.
/// let requests = &Sizes;
/// let scene = Scene { ledger: &ledger, pods: &pods, budgets: &[], requests, policy: &Policy::Binpack, max_moves: 10 };
/// let goal = Goal { wanted: vec![Wanted { pod: "large".into(), max_priority: 0 }], ..Goal::default() };
/// let plan = plan(scene, &goal);
/// assert_eq!(plan.moves.len(), 1);
/// assert_eq!(plan.moves[0].to.node, "b".into());
/// assert_eq!(plan.places[0].node, "a".into());
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
#[must_use]
pub fn plan(scene: Scene<'_>, goal: &Goal) -> Plan {
    let mut planner = Planner { scene, ledger: scene.ledger.clone(), plan: Plan::default() };
    for wanted in &goal.wanted {
        let taken: BTreeSet<NodeName> = match goal.on_different_nodes {
            true => planner.plan.places.iter().map(|place| place.node.clone()).collect(),
            false => BTreeSet::new(),
        };
        if let Some(step) = planner.step(wanted, &taken) {
            planner.accept(step);
        } else if goal.all_or_nothing {
            let unmet = goal.wanted.iter().map(|wanted| wanted.pod.clone()).collect();
            return Plan { unmet, ..Plan::default() };
        } else {
            planner.plan.unmet.push(wanted.pod.clone());
        }
    }
    planner.plan
}

/// Returns another place for a pod that keeps its GPUs meanwhile, or `None` if there is none now.
#[must_use]
pub fn other_place(scene: Scene<'_>, pod: &PodUid) -> Option<PodGrant> {
    let request = |state: &NodeState| scene.requests.request_on(pod, &state.node().name);
    let nodes: Vec<(&NodeState, PodRequest)> =
        scene.ledger.nodes().filter_map(|state| Some((state, request(state)?))).collect();
    let (state, request) = best(nodes.iter().copied_pairs(), scene.policy)?;
    grant_on(state, pod, request, scene.policy)
}

/// Returns the numbers of pods that must stay, by reason.
#[must_use]
pub fn fixed_pods(pods: &BTreeMap<PodUid, HeldPod>) -> BTreeMap<Fixed, usize> {
    let mut counts = BTreeMap::new();
    for fixed in pods.values().filter_map(|pod| pod.fixed) {
        *counts.entry(fixed).or_default() += 1;
    }
    counts
}

struct Planner<'a> {
    scene: Scene<'a>,
    /// The grants after the moves so far.
    ledger: Ledger,
    plan: Plan,
}

/// What makes room for one wanted pod.
struct Step {
    place: PodGrant,
    moves: Vec<Move>,
}

/// A set of pods whose eviction makes room on a node.
struct VictimSet {
    cost: Duration,
    node: NodeName,
    pods: Vec<PodUid>,
}

impl Planner<'_> {
    /// Returns the cheapest way found to place one wanted pod.
    fn step(&self, wanted: &Wanted, taken: &BTreeSet<NodeName>) -> Option<Step> {
        let free = |state: &&NodeState| !taken.contains(&state.node().name);
        let request = |state: &NodeState| self.scene.requests.request_on(&wanted.pod, &state.node().name);
        let nodes: Vec<(&NodeState, PodRequest)> =
            self.ledger.nodes().filter(free).filter_map(|state| Some((state, request(state)?))).collect();
        if let Some((state, request)) = best(nodes.iter().copied_pairs(), self.scene.policy) {
            let place = grant_on(state, &wanted.pod, request, self.scene.policy)?;
            return Some(Step { place, moves: Vec::new() });
        }
        let mut sets: Vec<VictimSet> = Vec::new();
        for (state, request) in &nodes {
            sets.extend(self.victim_sets(state, request, wanted.max_priority));
        }
        sets.sort_by(|a, b| {
            (a.pods.len(), a.cost, &a.node, &a.pods).cmp(&(b.pods.len(), b.cost, &b.node, &b.pods))
        });
        sets.iter().take(MAX_TRIED_SETS).find_map(|set| self.relocate(wanted, set))
    }

    /// Searches places for the wanted pod and for all victims.
    fn relocate(&self, wanted: &Wanted, set: &VictimSet) -> Option<Step> {
        let mut changed: HashMap<&NodeName, NodeState> = HashMap::new();
        let mut state = self.without(&set.node, &set.pods)?;
        let request = self.scene.requests.request_on(&wanted.pod, &set.node)?;
        let place = grant_on(&state, &wanted.pod, &request, self.scene.policy)?;
        state.add(&place);
        changed.insert(&set.node, state);
        let mut leaving: Vec<&PodGrant> = set.pods.iter().filter_map(|pod| self.ledger.grant(pod)).collect();
        leaving.sort_by_key(|grant| (std::cmp::Reverse(size(grant)), grant.pod.clone()));
        let mut moves = Vec::new();
        for grant in leaving {
            let request = |node: &NodeState| self.scene.requests.request_on(&grant.pod, &node.node().name);
            let states = self.ledger.nodes().map(|known| changed.get(&known.node().name).unwrap_or(known));
            let offers: Vec<(&NodeState, PodRequest)> =
                states.filter_map(|state| Some((state, request(state)?))).collect();
            let (target, request) = best(offers.iter().copied_pairs(), self.scene.policy)?;
            let to = grant_on(target, &grant.pod, request, self.scene.policy)?;
            let mut target = target.clone();
            target.add(&to);
            let name = &self.ledger.node(&to.node)?.node().name;
            changed.insert(name, target);
            let cost = self.scene.pods.get(&grant.pod)?.cost;
            moves.push(Move { wanted: wanted.pod.clone(), from: grant.node.clone(), to, cost });
        }
        Some(Step { place, moves })
    }

    fn accept(&mut self, step: Step) {
        for moved in &step.moves {
            self.ledger.release(&moved.to.pod);
        }
        for grant in step.moves.iter().map(|moved| &moved.to).chain([&step.place]) {
            // The step was found on the same ledger, so there is room.
            self.ledger.observe(grant.clone());
        }
        self.plan.moves.extend(step.moves);
        self.plan.places.push(step.place);
    }

    /// Returns the state of a node without these pods.
    fn without(&self, node: &NodeName, pods: &[PodUid]) -> Option<NodeState> {
        let mut state = NodeState::empty(self.ledger.node(node)?.shared_node());
        let stays = |grant: &PodGrant| !pods.contains(&grant.pod);
        let counted = self.ledger.counted_on(node).map(crate::ledger::NodeGrant::grant);
        counted.filter(|grant| stays(grant)).for_each(|grant| state.add(grant));
        Some(state)
    }

    /// Returns whether the budgets allow these evictions beside those of the plan.
    fn budgets_allow(&self, pods: &[&PodUid]) -> bool {
        let planned = self.plan.moves.iter().map(|moved| &moved.to.pod);
        let evicted = planned.chain(pods.iter().copied()).filter_map(|pod| self.scene.pods.get(pod));
        allow(self.scene.budgets, evicted.map(HeldPod::evicted))
    }
}

impl HeldPod {
    /// Returns the pod as disruption budgets count it.
    pub(crate) fn evicted(&self) -> EvictedPod<'_> {
        EvictedPod { namespace: &self.namespace, name: &self.name, labels: &self.labels }
    }
}

impl Fixed {
    /// Returns the reason as users read it.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::Marked(key) => format!("annotation {key} forbids it"),
            Self::NoController => "no controller would create the pod again".to_owned(),
            Self::BoundToNode => "the pod belongs to its node".to_owned(),
            Self::Gang => "the pod belongs to a gang".to_owned(),
            Self::KnownToKubeScheduler => "only kube-scheduler knows where the pod may go".to_owned(),
            Self::UnknownGpus => "no annotation names the GPUs of the pod".to_owned(),
            Self::Ending => "the pod is being deleted already".to_owned(),
        }
    }
}

/// Pairs of references, as the search for the best node takes them.
trait CopiedPairs<'a> {
    fn copied_pairs(self) -> impl Iterator<Item = (&'a NodeState, &'a PodRequest)>;
}

impl<'a, I: Iterator<Item = &'a (&'a NodeState, PodRequest)>> CopiedPairs<'a> for I {
    fn copied_pairs(self) -> impl Iterator<Item = (&'a NodeState, &'a PodRequest)> {
        self.map(|(state, request)| (*state, request))
    }
}

/// Returns the node that suits the pod best. Ties go to the first node by name.
fn best<'a>(
    offers: impl Iterator<Item = (&'a NodeState, &'a PodRequest)>,
    policy: &Policy,
) -> Option<(&'a NodeState, &'a PodRequest)> {
    let fitting = offers.filter(|(state, request)| filter(state, request, policy).is_ok());
    let scored =
        fitting.filter_map(|(state, request)| Some((score(state, request, policy).ok()?, state, request)));
    let best = scored.max_by(|(a, one, _), (b, other, _)| {
        a.total_cmp(b).then_with(|| other.node().name.cmp(&one.node().name))
    });
    best.map(|(_, state, request)| (state, request))
}

fn grant_on(state: &NodeState, pod: &PodUid, request: &PodRequest, policy: &Policy) -> Option<PodGrant> {
    let containers = place(state, request, policy, GpuSet::EMPTY).ok()?.grants(state.node(), request);
    let (node, cpu, memory) = (state.node().name.clone(), request.cpu, request.memory);
    Some(PodGrant { pod: pod.clone(), node, cpu, memory, containers })
}

/// Returns how hard a pod is to place: its whole GPUs, then the percentages of its shares.
fn size(grant: &PodGrant) -> (usize, u32) {
    let whole = grant.footprint().filter(|(_, usage)| usage.whole).count();
    (whole, grant.footprint().map(|(_, usage)| usage.compute_percent.0).fold(0, u32::saturating_add))
}
