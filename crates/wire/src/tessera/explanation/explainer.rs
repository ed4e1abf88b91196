//! The one function behind every explanation, whether the scheduler or a kubectl plugin makes it.

use std::collections::BTreeMap;

use tessera_core::admission::{Admission, NodeOffer, NodeVerdict, PodQuery, QuotaState, RejectReason};
use tessera_core::claim::ClaimUid;
use tessera_core::cluster_view::ClusterView;
use tessera_core::constraint::other_pods::{ClosedNodes, OtherPod};
use tessera_core::constraint::{NodeConstraints, PodConstraints, UnmetConstraint};
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::{Ledger, NodeGrant};
use tessera_core::node::NodeState;
use tessera_core::placement::{PlacementError, Policy, place};
use tessera_core::preemption::RunningPod;
use tessera_core::quota::{GpuAmount, NamespaceUsage, QuotaLabels};
use tessera_core::remedy;
use tessera_core::request::{MemoryRequest, PodRequest, Request};
use tessera_core::units::{Count, NodeName, PodUid};

use super::{
    KubeSchedulerReport, NodeExplanation, PodExplanation, Relief, Room, SmallerRequest, request_text,
};
use crate::foreign::dialect::{Dialect, MemoryUnit};
use crate::foreign::objects::{Pod, PodSpec};
use crate::foreign::pod_spec::MIG_PREFIX;
use crate::tessera::grant;
use crate::tessera::parsed_node::ServedDialects;
use crate::tessera::parsed_pod::{BadPodObject, ParsedPod, PolicyResolver};

/// Largest number of nodes on which pods are searched whose end would help. Trying all sets of pods
/// on thousands of nodes would take minutes.
const MAX_SEARCHED_NODES: usize = 64;

/// Reason for the place of a pod that requests no GPU in one of Tessera's dialects.
const OTHERS_REASON: &str = "kube-scheduler chose the node; it counts these resources itself";

/// Facts about the cluster that explanations need.
pub trait ClusterFacts: PolicyResolver {
    /// Returns a node, or the reason why it takes no pods.
    fn node(&self, name: &NodeName) -> Result<NodeFacts<'_>, RejectReason>;
    /// Returns the quotas and their use.
    fn quota(&self) -> QuotaState<'_>;
    /// Returns all grants on a node.
    fn grants_on(&self, name: &NodeName) -> Vec<&PodGrant>;
    /// Returns the grant of a placed pod, or `None` if its GPUs are unknown.
    fn known_grant(&self, uid: &PodUid) -> Option<&PodGrant>;
    /// Returns whether a node of the cluster offers this resource outside Tessera's dialects.
    fn is_offered(&self, resource: &str) -> bool;
    /// Returns the nodes and grants behind these facts.
    fn view(&self) -> &ClusterView;
    /// Returns the pods on nodes whose labels, anti-affinity and ports are known: those that request GPUs.
    fn other_pods(&self) -> Box<dyn Iterator<Item = (&NodeName, OtherPod<'_>)> + '_>;
    /// Returns a pod as NAMESPACE/NAME.
    fn pod_name(&self, uid: &PodUid) -> Option<String>;
    /// Returns the memory unit of nodes that do not publish theirs.
    fn default_unit(&self) -> MemoryUnit;
    /// Returns the GPUs that the claims of a pod need and do not have yet, as far as this is known.
    fn claim_requests(&self, _pod: &Pod) -> Vec<Request> {
        Vec::new()
    }
    /// Returns whether the policy of this source ranks nodes as the scheduler does. Only the scheduler knows the forecast
    /// of policy `tessera`, which counts pods that have ended, and a table of policy `static` that comes from a file.
    fn knows_ranks(&self, _policy: &Policy) -> bool {
        true
    }
    /// Returns the rule by which the scheduler can refuse nodes for a pod of this policy, if this source does not know it.
    fn unknown_rule(&self, _policy: &Policy) -> Option<&'static str> {
        None
    }
    /// Returns how many MIG instances of this resource the pods of a node hold.
    fn held_instances(&self, node: &NodeName, resource: &str) -> u64;
    /// Describes the reservation for a pod, if there is one.
    fn reservation_report(&self, _uid: &PodUid) -> Option<String> {
        None
    }

    /// Returns what the gang of a pod lacks, if the pod belongs to one and this is known.
    fn gang_report(&self, _uid: &PodUid) -> Option<String> {
        None
    }
}

/// Facts about one node.
#[derive(Clone, Copy, Debug)]
pub struct NodeFacts<'a> {
    /// GPUs of the node and what its pods use of them.
    pub state: &'a NodeState,
    /// Size of one unit of `aliyun.com/gpu-mem` on the node.
    pub unit: MemoryUnit,
    /// Dialects that the node serves.
    pub dialects: ServedDialects,
    /// True if the node's agent has announced that it does not serve pods now.
    pub is_agent_unavailable: bool,
    /// Labels that quotas refer to.
    pub quota_labels: &'a QuotaLabels,
    /// Properties that constraints of pods refer to.
    pub constraints: &'a NodeConstraints,
}

/// Pods up to which the room on a node is counted. Each costs a placement, and callers hold a lock meanwhile.
const MAX_ROOM: usize = 200;

/// Collects the verdicts of all nodes on one pod. The caller calls [`Explainer::judge`] for every
/// node, then [`Explainer::find_relief`] for every node if [`Explainer::needs_relief`], so that it
/// may release a lock between two nodes, and then [`Explainer::finish`] without a lock.
#[derive(Debug)]
pub struct Explainer<'a> {
    pod: &'a Pod,
    parsed: ParsedPod<'a>,
    constraints: PodConstraints,
    /// Nodes that other pods close for the pod.
    closed: ClosedNodes,
    /// Requested MIG instances by resource.
    instances: BTreeMap<String, u64>,
    is_hypothetical: bool,
    explanation: PodExplanation,
    /// What the namespaces use without the booking of the pod itself, if it has one.
    usage_without_pod: Option<NamespaceUsage>,
    scores: Vec<(f64, usize)>,
    /// Whether the order of the scores is the scheduler's.
    is_ranked: bool,
    /// Nodes without enough free GPUs, and whether evictions could help.
    short_of_gpus: BTreeMap<NodeName, bool>,
    smaller: LargestRequests,
    /// Copies of the first nodes on which the end of pods could help.
    to_search: Vec<ReliefCase>,
}

/// A copy of a node on which the end of pods could make room.
#[derive(Debug)]
struct ReliefCase {
    state: NodeState,
    request: PodRequest,
    /// Grants on the node with the names of their pods.
    holders: Vec<(PodGrant, String)>,
}

impl ReliefCase {
    /// Searches the fewest pods whose end makes room.
    fn search(&self, policy: &Policy) -> Option<Relief> {
        let holder = |grant| RunningPod {
            grant: NodeGrant::Held(grant),
            priority: 0,
            gang: None,
            quota_released: GpuAmount::default(),
            is_guaranteed: false,
        };
        let holders: Vec<RunningPod<'_>> = self.holders.iter().map(|(grant, _)| holder(grant)).collect();
        let ends = remedy::pods_to_end(&self.state, &holders, &self.request, policy)?;
        let name =
            |uid: &PodUid| self.holders.iter().find(|(grant, _)| grant.pod == *uid).map(|(_, name)| name);
        let pods: Vec<String> = ends.iter().filter_map(name).cloned().collect();
        (!pods.is_empty()).then(|| Relief { node: self.state.node().name.to_string(), pods })
    }
}

impl<'a> Explainer<'a> {
    /// Starts the explanation of a pod. `is_hypothetical` is true for a pod that does not exist.
    pub fn new(facts: &impl ClusterFacts, pod: &'a Pod, is_hypothetical: bool) -> Result<Self, BadPodObject> {
        let claimed = facts.claim_requests(pod);
        let parsed = ParsedPod::of(facts, pod)?.with_claims(&claimed);
        let placed_on =
            Some(&pod.spec.node_name).filter(|node| !node.is_empty() && !is_hypothetical).cloned();
        let waits = placed_on.is_none() && !is_hypothetical;
        let report = pod.status.conditions.unscheduled.as_deref().cloned().map(KubeSchedulerReport::from);
        let unit = match &placed_on {
            Some(node) => {
                facts.node(&NodeName(node.clone())).map_or_else(|_| facts.default_unit(), |node| node.unit)
            }
            None => facts.default_unit(),
        };
        let mut holds =
            holds(facts.known_grant(&PodUid(pod.metadata.uid.clone())).filter(|_| placed_on.is_some()));
        let mut placement_reason = pod.metadata.annotations.get(grant::REASON_KEY).cloned();
        if placed_on.is_some() && !pod.spec.asks_for_gpus() {
            holds.extend(pod.spec.other_gpu_amounts().iter().map(|(name, count)| format!("{count} {name}")));
            placement_reason = placement_reason.or_else(|| Some(OTHERS_REASON.to_owned()));
        }
        let unchecked = pod.spec.unchecked_constraints().into_iter().map(str::to_owned);
        let explanation = PodExplanation {
            namespace: pod.metadata.namespace.clone(),
            pod: pod.metadata.name.clone(),
            asks: [
                request_text::of_pod(&pod.spec, unit),
                request_text::of_claims(&claimed),
                offered(facts, &pod.spec),
            ]
            .concat(),
            holds,
            placement_reason,
            waits,
            unreported: (waits && report.is_none()).then(|| pod.spec.scheduler().to_owned()),
            kube_scheduler: report.filter(|_| waits),
            gang: facts.gang_report(&PodUid(pod.metadata.uid.clone())).filter(|_| waits),
            reservation: facts.reservation_report(&PodUid(pod.metadata.uid.clone())).filter(|_| waits),
            unchecked: if placed_on.is_none() { unchecked.collect() } else { Vec::new() },
            unknown_rule: facts
                .unknown_rule(&parsed.policy)
                .filter(|_| placed_on.is_none() && pod.spec.asks_for_gpus())
                .map(str::to_owned),
            unserved: unserved(facts, &pod.spec),
            policy: parsed.policy.to_string(),
            placed_on,
            ..PodExplanation::default()
        };
        let constraints = pod.spec.constraints();
        let mut instances = constraints.other_resources.clone();
        instances.retain(|resource, _| resource.starts_with(MIG_PREFIX));
        let closed = match &explanation.placed_on {
            Some(_) => ClosedNodes::default(),
            None => closed_nodes(facts, pod),
        };
        let uid = PodUid(pod.metadata.uid.clone());
        let is_booked = waits && facts.view().ledger().grant(&uid).is_some();
        let usage_without_pod = is_booked.then(|| facts.view().usage_without(&uid));
        Ok(Self {
            pod,
            is_ranked: facts.knows_ranks(&parsed.policy),
            parsed,
            constraints,
            closed,
            instances,
            is_hypothetical,
            explanation,
            usage_without_pod,
            scores: Vec::new(),
            short_of_gpus: BTreeMap::new(),
            smaller: LargestRequests::default(),
            to_search: Vec::new(),
        })
    }

    /// Adds the verdict of one node.
    pub fn judge(&mut self, facts: &impl ClusterFacts, name: &NodeName) {
        let (mut view, score) = self.verdict(facts, name);
        view.fits = view.would_do && self.is_hypothetical && !self.explanation.is_undecided();
        if let Some(score) = score {
            self.scores.push((score, self.explanation.nodes.len()));
        }
        if view.fits
            && let Ok(node) = facts.node(name)
        {
            let pods = self.room(&node);
            self.explanation.room.push(Room { node: name.to_string(), pods, or_more: pods == MAX_ROOM });
        }
        self.explanation.nodes.push(view);
    }

    fn verdict(&mut self, facts: &impl ClusterFacts, name: &NodeName) -> (NodeExplanation, Option<f64>) {
        let node = match facts.node(name) {
            Ok(node) => node,
            Err(reason) => return (NodeExplanation::rejected(&name.0, &reason.into()), None),
        };
        // A reservation is for the pod, so it does not count against the pod.
        let uid = PodUid(self.pod.metadata.uid.clone());
        let without_pod =
            self.usage_without_pod.as_ref().and_then(|_| facts.view().state_without(name, &uid));
        let quota = match &self.usage_without_pod {
            Some(usage) => QuotaState { usage, ..facts.quota() },
            None => facts.quota(),
        };
        let offer = NodeOffer {
            state: without_pod.as_ref().unwrap_or(node.state),
            service: node.dialects.service(self.parsed.shape.dialects, node.is_agent_unavailable),
            quota_labels: node.quota_labels,
        };
        let request = self.parsed.request(node.unit);
        let query =
            PodQuery { namespace: self.parsed.namespace, request: &request, policy: &self.parsed.policy };
        let verdict = Admission { offer, query, quota: Some(quota) }.verdict_with_host();
        // A node without GPUs, or without this kind of GPU, is rejected for that and not for its taints.
        let concerns_gpus = match &verdict {
            NodeVerdict::Fits(_) => true,
            NodeVerdict::Rejected(rejection) => lacks_gpus(&rejection.reason),
        };
        let is_pod = |grant: &&PodGrant| grant.pod != uid && !ClaimUid::is_holder(&grant.pod);
        let pods = facts.view().ledger().grants_on(name).filter(is_pod).count();
        let is_full = || node.constraints.unmet_by_pods(u64::try_from(pods).unwrap_or(u64::MAX));
        let unmet = self.constraints.unmet_on(&name.0, node.constraints).or_else(is_full);
        let unmet = unmet.or_else(|| self.lacking_instances(facts, name, node.constraints));
        let unmet = unmet.or_else(|| self.closed.unmet_on(name, &node.constraints.labels));
        if let Some(unmet) = unmet.filter(|_| concerns_gpus) {
            return (NodeExplanation::unmet(&name.0, &unmet), None);
        }
        if let NodeVerdict::Rejected(rejection) = &verdict
            && lacks_gpus(&rejection.reason)
        {
            self.short_of_gpus.insert(name.clone(), rejection.reason.may_resolve());
        }
        let (mut explanation, score) = NodeExplanation::new(&name.0, &request, verdict);
        if score.is_none() {
            explanation.reserved_for = reserved_for(facts.view().ledger(), name, &uid);
        }
        (explanation, score)
    }

    /// Returns the MIG instances that the pod requests and that other pods of the node hold.
    fn lacking_instances(
        &self,
        facts: &impl ClusterFacts,
        name: &NodeName,
        node: &NodeConstraints,
    ) -> Option<UnmetConstraint> {
        self.instances.iter().find_map(|(resource, requested)| {
            let offered = node.other_resources.get(resource).copied().unwrap_or(0);
            let left = offered.saturating_sub(facts.held_instances(name, resource));
            let (resource, requested) = (resource.clone(), *requested);
            (left < requested).then_some(UnmetConstraint::InUse { resource, left, offered, requested })
        })
    }

    /// Returns whether the pod has a node, so that no other node is of interest.
    #[must_use]
    pub fn is_placed(&self) -> bool {
        self.explanation.placed_on.is_some()
    }

    /// Returns whether the pod waits and no node would do, so that relief is of interest.
    #[must_use]
    pub fn needs_relief(&self) -> bool {
        !self.is_placed() && self.scores.is_empty()
    }

    /// Finds smaller requests that fit on one node, and keeps a copy of the node if the end of pods could help there.
    /// If a quota, a constraint or the host's CPU is the obstacle, neither helps.
    pub fn find_relief(&mut self, facts: &impl ClusterFacts, name: &NodeName) {
        let (Some(may_resolve), Ok(node)) = (self.short_of_gpus.get(name).copied(), facts.node(name)) else {
            return;
        };
        let request = gpus_only(&self.parsed.request(node.unit));
        let dialect = self.dialect(node.unit);
        for less in remedy::smaller_requests(node.state, &request, &self.parsed.policy) {
            if let Some(text) = dialect.and_then(|dialect| request_text::of_request(dialect, less, node.unit))
            {
                self.smaller.offer(less, text, &name.0);
            }
        }
        if may_resolve && self.to_search.len() < MAX_SEARCHED_NODES {
            let named = |grant: &PodGrant| Some((grant.clone(), facts.pod_name(&grant.pod)?));
            let holders = facts.grants_on(name).into_iter().filter_map(named).collect();
            self.to_search.push(ReliefCase { state: node.state.clone(), request, holders });
        }
    }

    fn dialect(&self, unit: MemoryUnit) -> Option<Dialect> {
        self.pod.spec.claims(unit).ok()?.first().map(|claim| claim.dialect)
    }

    /// Counts how many pods like this one fit on a node, one after the other, without quotas, up to [`MAX_ROOM`].
    fn room(&self, node: &NodeFacts<'_>) -> usize {
        // Any number of pods without GPUs would fit.
        if !self.parsed.wants_gpu() {
            return 0;
        }
        let request = self.parsed.request(node.unit);
        let mut state = node.state.clone();
        let mut pods = 0;
        while pods < MAX_ROOM
            && let Ok(placement) = place(&state, &request, &self.parsed.policy, GpuSet::EMPTY)
        {
            let containers = placement.grants(state.node(), &request);
            let (cpu, memory) = (request.cpu, request.memory);
            let node = state.node().name.clone();
            state.add(&PodGrant { pod: "one more".into(), node, cpu, memory, containers });
            pods += 1;
        }
        pods
    }

    /// Returns the explanation with its summary. This searches the pods whose end would help, which may take long, in
    /// the copies of [`Explainer::find_relief`]: the caller must hold no lock.
    #[must_use]
    pub fn finish(mut self) -> PodExplanation {
        let reliefs = self.to_search.iter().filter_map(|case| case.search(&self.parsed.policy));
        self.explanation.relief.extend(reliefs);
        // One node is the best one in every order.
        if self.is_ranked || self.scores.len() == 1 {
            self.scores.sort_by(|(a, _), (b, _)| b.total_cmp(a));
            for (rank, (_, position)) in self.scores.iter().enumerate() {
                self.explanation.nodes[*position].rank = Some(rank + 1);
            }
        }
        let mut explanation = self.explanation;
        explanation.relief.sort_by_key(|relief| relief.pods.len());
        explanation.smaller = self.smaller.into_list();
        let (would_do, nodes) = (self.scores.len(), Count(explanation.nodes.len(), "node"));
        explanation.summary = match (&explanation.placed_on, explanation.waits) {
            (Some(node), _) => format!("placed on node {node}"),
            (None, true) => format!("waits; the GPUs of {would_do} of {nodes} would do"),
            (None, false) if explanation.unknown_rule.is_some() => {
                format!("the GPUs of {would_do} of {nodes} would do; the scheduler checks more")
            }
            (None, false) if explanation.is_undecided() => {
                format!("the GPUs of {would_do} of {nodes} would do; kube-scheduler checks more")
            }
            (None, false) => format!("fits on {would_do} of {nodes}"),
        };
        explanation
    }
}

/// Returns the nodes that other pods close for a pod.
fn closed_nodes(facts: &impl ClusterFacts, pod: &Pod) -> ClosedNodes {
    let own = pod.spec.as_other_pod(&pod.metadata.namespace, &pod.metadata.labels);
    let label = |node: &NodeName, key: &str| facts.node(node).ok()?.constraints.labels.get(key).cloned();
    ClosedNodes::new(&own, facts.other_pods(), label)
}

/// Returns the objects for which GPUs of a node are reserved, other than the pod itself.
fn reserved_for(ledger: &Ledger, node: &NodeName, pod: &PodUid) -> Vec<String> {
    let places = ledger.counted_on(node).filter_map(|counted| match counted {
        NodeGrant::Reserved(place) if place.pod != *pod => ledger.reservation_owner(&place.pod),
        _ => None,
    });
    let mut owners: Vec<String> = places.map(str::to_owned).collect();
    owners.sort();
    owners.dedup();
    owners
}

/// Returns the requested GPU resources outside Tessera's dialects that a node of the cluster offers, as in a manifest.
pub fn offered(facts: &impl ClusterFacts, pod: &PodSpec) -> Vec<String> {
    let amounts = pod.other_gpu_amounts().into_iter().filter(|(name, _)| facts.is_offered(name));
    amounts.map(|(name, amount)| format!("{name}={amount}")).collect()
}

/// Returns the requested GPU resources that no node of the cluster offers.
pub fn unserved(facts: &impl ClusterFacts, pod: &PodSpec) -> Vec<String> {
    pod.other_gpu_resources().into_iter().filter(|name| !facts.is_offered(name)).collect()
}

/// Returns whether more free GPUs would change the verdict.
fn lacks_gpus(reason: &RejectReason) -> bool {
    match reason {
        RejectReason::Placement(error) => {
            use PlacementError::{Cpu, Memory, NoGpu, WholeOnly};
            !matches!(error, Cpu | Memory | NoGpu | WholeOnly)
        }
        _ => false,
    }
}

/// Drops CPU and memory from a request. kube-scheduler checks them, and relief concerns only GPUs.
fn gpus_only(request: &PodRequest) -> PodRequest {
    PodRequest { cpu: Default::default(), memory: Default::default(), ..request.clone() }
}

pub(super) fn holds(grant: Option<&PodGrant>) -> Vec<String> {
    let footprint = grant.into_iter().flat_map(PodGrant::footprint);
    footprint
        .map(|(gpu, usage)| match (usage.whole, usage.compute_percent.0) {
            (true, _) => format!("GPU{gpu}: whole GPU"),
            (false, 0) => format!("GPU{gpu}: {}", usage.memory),
            (false, _) => format!("GPU{gpu}: {} and {}", usage.compute_percent, usage.memory),
        })
        .collect()
}

/// The largest smaller request of each kind, with the first node where it fits.
#[derive(Debug, Default)]
struct LargestRequests(BTreeMap<u8, (u64, SmallerRequest)>);

impl LargestRequests {
    fn offer(&mut self, request: Request, words: String, node: &str) {
        // Shares can shrink in compute or in memory, so the product compares them.
        let (kind, size) = match request {
            Request::Whole(count) => (0, u64::from(count)),
            Request::Share(share) => {
                let memory = match share.memory {
                    MemoryRequest::Amount(memory) => memory.0,
                    MemoryRequest::PartOfGpu(part) => u64::from(part.0),
                };
                let amount = u64::from(share.compute_percent.0.max(1)).saturating_mul(memory);
                let kind = if share.has_compute() { 2 } else { 1 };
                (kind, amount.saturating_mul(u64::from(share.count)))
            }
        };
        let better = self.0.get(&kind).is_none_or(|(known, _)| size > *known);
        if better {
            self.0.insert(kind, (size, SmallerRequest { request: words, node: node.to_owned() }));
        }
    }

    fn into_list(self) -> Vec<SmallerRequest> {
        self.0.into_values().map(|(_, smaller)| smaller).collect()
    }
}
