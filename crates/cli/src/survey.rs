//! The state of the cluster: nodes with their GPUs, and the grants of pods in the core's ledger.
//!
//! A survey is a pure value, built from objects of the API server: first from all nodes, then from
//! one pod after the other, so that it need not keep the pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tessera_core::admission::QuotaState;
use tessera_core::claim::{ClaimUid, grants};
use tessera_core::cluster_view::{ClusterView, PlacedPod, PodGpus};
use tessera_core::constraint::NodeConstraints;
use tessera_core::constraint::other_pods::OtherPod;
use tessera_core::forecast::{Forecast, FreeCapacity};
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{GpuUsage, PodGrant};
use tessera_core::ledger::Reservation;
use tessera_core::natural::natural;
use tessera_core::node::NodeState;
use tessera_core::quota::{Quota, QuotaLabels};
use tessera_core::request::{PodRequest, Request, Share};
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, PodUid};
use tessera_core::workload::Workload;
use tessera_wire::foreign::constraint;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::foreign::dra::{ClaimName, DeviceClass, ResourceClaim};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::pod_group::PodGroup;
use tessera_wire::foreign::pod_spec::MIG_PREFIX;
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::dra;
use tessera_wire::tessera::gang::{GangKey, GangProgress};
use tessera_wire::tessera::placed_pod::{has_ended, placed_pod};
use tessera_wire::tessera::reservation::{self, NodeReservation};
use tessera_wire::tessera::rules::Rules;
use tessera_wire::{
    foreign::dialect::DialectSet,
    tessera::parsed_node::{self, ServedDialects},
};

use crate::gangs::Gangs;
use crate::known_pod::KnownPod;

/// The state of the cluster.
#[derive(Debug, Default)]
pub struct Survey {
    /// Rules that the scheduler publishes.
    pub rules: Rules,
    /// Quota of each namespace.
    pub quota: Quota,
    /// All nodes by name, including nodes without GPUs.
    pub nodes: BTreeMap<NodeName, NodeFacts>,
    /// Time of the survey in seconds since 1970. Reservations that ended before do not count.
    pub now_seconds: i64,
    /// Waiting pods that request GPUs, sorted by namespace and name.
    pub waiting: Vec<Pod>,
    /// UIDs of waiting pods that reservations name, if the survey is of one node and has no other waiting pods.
    pub waiting_owners: BTreeSet<String>,
    view: ClusterView,
    /// Facts about the pods on a node that request GPUs, and about the claims that hold GPUs.
    pods: HashMap<PodUid, PodFacts>,
    /// Pods on nodes as the constraints of other pods meet them.
    known_pods: Vec<KnownPod>,
    /// Claims and classes; `None` if they are not served or may not be read.
    claims: Option<Claims>,
    gangs: Gangs,
    /// Pods with GPU requests that exist now.
    workload: Workload,
    /// Forecast for policy `tessera`, made when it is needed.
    forecast: OnceLock<Arc<Forecast>>,
}

/// Claims of dynamic resource allocation, by namespace and name, and their classes by name.
#[derive(Debug, Default)]
struct Claims {
    known: BTreeMap<(String, String), ResourceClaim>,
    classes: BTreeMap<String, DeviceClass>,
}

/// End of the name under which a claim is listed among the pods. No name of a pod contains a slash.
pub(crate) const CLAIM_SUFFIX: &str = "/claim";

/// Unhealthy GPUs of nodes, from gpushare's lists.
pub type UnhealthyGpus = BTreeMap<NodeName, GpuSet>;

/// Facts about a node besides its GPUs.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// Error if the node object cannot be parsed.
    pub problem: Option<String>,
    /// Size of one unit of `aliyun.com/gpu-mem` on the node.
    pub unit: MemoryUnit,
    /// Dialects that the node serves.
    pub dialects: ServedDialects,
    /// True if the node's agent has announced that it does not serve pods now.
    pub is_agent_unavailable: bool,
    /// Amount of `aliyun.com/gpu-mem` that the node offers.
    pub shared_memory: MiB,
    /// Internal address of the node.
    pub address: Option<String>,
    /// Address of the node's agent, if the node has an address.
    pub agent: Option<AgentAddress>,
    /// Labels that quotas refer to.
    pub quota_labels: QuotaLabels,
    /// Value of the condition `Ready`, or `None` without it.
    pub ready: Option<bool>,
    /// Properties that constraints of pods refer to.
    pub constraints: NodeConstraints,
    /// True if the node accepts no new pods.
    pub cordoned: bool,
    /// Reservations of the node's GPUs, also those that have ended.
    pub reservations: Vec<NodeReservation>,
    /// Error if the reservations cannot be parsed.
    pub bad_reservations: Option<String>,
    /// MIG instances by resource, such as `nvidia.com/mig-1g.10gb`.
    pub instances: BTreeMap<String, Instances>,
}

/// MIG instances of one profile on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instances {
    /// Number of instances that the node offers.
    pub offered: u64,
    /// Pods that hold instances, as namespace/name, with their number.
    pub pods: Vec<(String, u64)>,
}

impl Instances {
    /// Returns the number of instances that pods hold.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.pods.iter().map(|(_, count)| count).sum()
    }
}

/// Facts about a pod besides its grant.
#[derive(Clone, Debug)]
pub struct PodFacts {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// True if the deletion of the pod has begun. It holds its GPUs until its containers have
    /// ended.
    pub terminating: bool,
}

/// A pod on a node whose GPUs are unknown.
#[derive(Clone, Copy, Debug)]
pub struct UnknownGpus<'a> {
    /// The pod.
    pub facts: &'a PodFacts,
    /// Requested memory. A whole GPU counts with its full memory.
    pub memory: MiB,
}

impl Survey {
    /// Creates a survey of these nodes. GPUs in `unhealthy` count as unhealthy even if the node
    /// reports them as healthy.
    #[must_use]
    pub fn of_nodes(rules: Rules, nodes: impl IntoIterator<Item = Node>, unhealthy: &UnhealthyGpus) -> Self {
        let mut survey = Self { rules, ..Self::default() };
        for node in nodes {
            let name = NodeName(node.metadata.name.clone());
            let mut facts = NodeFacts::new(&node, &survey.rules);
            match parsed_node::parse(&node, survey.rules.unit) {
                Ok(spec) => {
                    (facts.unit, facts.dialects) = (spec.unit, spec.dialects);
                    facts.shared_memory = spec.shared_memory;
                    facts.is_agent_unavailable = spec.is_agent_unavailable;
                    let node = match unhealthy.get(&name) {
                        Some(gpus) => spec.node.with_unhealthy(*gpus),
                        None => Arc::unwrap_or_clone(spec.node),
                    };
                    survey.view.set_node(node, facts.quota_labels.clone(), []);
                }
                Err(error) => facts.problem = Some(error.to_string()),
            }
            survey.nodes.insert(name, facts);
        }
        survey
    }

    /// Enters the claims and what they hold of the nodes. Must come before the pods.
    pub fn set_claims(&mut self, claims: Vec<ResourceClaim>, classes: Vec<DeviceClass>) {
        let dialects = dra::served_dialects(&classes);
        self.nodes.values_mut().for_each(|facts| facts.dialects = facts.dialects.union(dialects));
        for claim in &claims {
            self.enter_claim(claim);
        }
        let key = |claim: &ResourceClaim| (claim.metadata.namespace.clone(), claim.metadata.name.clone());
        self.claims = Some(Claims {
            known: claims.into_iter().map(|claim| (key(&claim), claim)).collect(),
            classes: classes.into_iter().map(|class| (class.metadata.name.clone(), class)).collect(),
        });
    }

    /// Enters what a claim holds of its node. An allocation that is not valid there holds nothing.
    fn enter_claim(&mut self, claim: &ResourceClaim) {
        let Some(node) = dra::pool(claim).map(|pool| NodeName(pool.to_owned())) else { return };
        let Some(state) = self.view.ledger().node(&node) else { return };
        let parts = dra::claim_parts(claim, state.node()).unwrap_or_default();
        if parts.is_empty() {
            return;
        }
        let (uid, namespace) = (ClaimUid(claim.metadata.uid.clone()).holder(), &claim.metadata.namespace);
        let facts = PodFacts {
            namespace: namespace.clone(),
            name: format!("{}{CLAIM_SUFFIX}", claim.metadata.name),
            terminating: claim.metadata.deletion_timestamp.is_some(),
        };
        self.pods.insert(uid.clone(), facts);
        self.view.note_pod(PlacedPod {
            uid,
            namespace: namespace.clone(),
            node,
            cpu: MilliCpu::ZERO,
            memory: MiB::ZERO,
            gpus: PodGpus::Granted(grants(&parts)),
        });
    }

    /// Returns the GPUs that the claims of a pod need and do not have yet.
    #[must_use]
    pub fn waiting_claims(&self, pod: &Pod) -> Vec<Request> {
        let Some(claims) = &self.claims else { return Vec::new() };
        let known = pod.claim_names().filter_map(|name| match name {
            ClaimName::Known(name) => claims.known.get(&(pod.metadata.namespace.clone(), name.to_owned())),
            ClaimName::Pending(_) => None,
        });
        let waiting = known.filter(|claim| claim.status.allocation.is_none());
        waiting.flat_map(|claim| dra::waiting_requests(claim, &claims.classes)).collect()
    }

    /// Returns the claims whose GPUs a pod uses, by name, with what they hold.
    #[must_use]
    pub fn claims_of(&self, pod: &Pod) -> Vec<(&str, &PodGrant)> {
        let known = self.claims.iter().flat_map(|claims| claims.known.values());
        let used = known.filter(|claim| claim.is_reserved_for(&pod.metadata.uid));
        used.filter_map(|claim| {
            let holder = ClaimUid(claim.metadata.uid.clone()).holder();
            Some((claim.metadata.name.as_str(), self.view.ledger().grant(&holder)?))
        })
        .collect()
    }

    /// Adds a pod. Ended pods and pods of nodes outside the survey are skipped.
    pub fn add(&mut self, pod: Pod) {
        self.gangs.add(&pod);
        if has_ended(&pod) {
            return;
        }
        if pod.spec.asks_for_gpus()
            && let Ok(request) = pod.spec.request(self.rules.unit)
        {
            self.workload.see(&request);
        }
        if pod.spec.node_name.is_empty() {
            // Users ask why pods with GPU resources of others wait, too.
            let waits_for_gpus = pod.spec.asks_for_gpus() || !pod.spec.other_gpu_resources().is_empty();
            if waits_for_gpus || !self.waiting_claims(&pod).is_empty() {
                self.waiting.push(pod);
            }
            return;
        }
        let node = NodeName(pod.spec.node_name.clone());
        let Some(facts) = self.nodes.get_mut(&node) else { return };
        for (resource, count) in pod.spec.mig_instances() {
            let name = format!("{}/{}", pod.metadata.namespace, pod.metadata.name);
            facts.instances.entry(resource).or_default().pods.push((name, count));
        }
        let state = self.view.ledger().node(&node);
        let Some(mut placed) = placed_pod(&pod, state.map(NodeState::node), facts.unit) else { return };
        let is_by_claim = self.claims.is_some() && pod.status.extended_resource_claim_status.is_some();
        if is_by_claim {
            // The claim that kube-scheduler made for the pod holds the GPUs.
            placed.gpus = PodGpus::NotRequested;
        }
        // The scheduler knows these pods, too, so that both explain alike.
        if !is_by_claim && (pod.spec.asks_for_gpus() || !pod.spec.other_gpu_resources().is_empty()) {
            self.known_pods.push(KnownPod::new(&pod));
        }
        if placed.gpus != PodGpus::NotRequested {
            let terminating = pod.metadata.deletion_timestamp.is_some();
            let (namespace, name) = (pod.metadata.namespace, pod.metadata.name);
            self.pods.insert(placed.uid.clone(), PodFacts { namespace, name, terminating });
        }
        self.view.note_pod(placed);
    }

    /// Returns the pods on nodes as the constraints of other pods meet them.
    pub(crate) fn known_pods(&self) -> impl Iterator<Item = (&NodeName, OtherPod<'_>)> {
        self.known_pods.iter().map(KnownPod::as_other_pod)
    }

    /// Adds a pod that is known to wait for GPUs, whatever its requests.
    pub fn add_waiting(&mut self, pod: Pod) {
        self.waiting.push(pod);
    }

    /// Completes the survey after the last pod. Sets GPUs aside for pods whose GPUs are unknown,
    /// like the scheduler.
    #[must_use]
    pub fn finish(mut self) -> Self {
        self.view.settle_all();
        self.keep_reservations();
        self.waiting.sort_by(|a, b| {
            let key = |pod: &Pod| (pod.metadata.namespace.clone(), pod.metadata.name.clone());
            key(a).cmp(&key(b))
        });
        self
    }

    /// Enters the reserved parts of GPUs that are free, as the scheduler does.
    fn keep_reservations(&mut self) {
        let listed = self.nodes.iter().flat_map(|(node, facts)| {
            let in_effect = facts.reservations.iter().filter(|entry| self.is_in_effect(entry));
            in_effect.map(|entry| (node.clone(), entry.clone()))
        });
        let in_effect: Vec<(NodeName, NodeReservation)> = listed.collect();
        for (node, reservation) in &in_effect {
            let Some(state) = self.view.ledger().node(node) else { continue };
            let Some(mut place) = reservation.free_parts(state) else { continue };
            if let Some(pod) = reservation.pod.as_ref().filter(|_| reservation.is_free(state)) {
                place.pod = PodUid(pod.uid.clone());
            }
            let kept = Reservation {
                name: reservation.ledger_name(node),
                owner: reservation.beneficiary(),
                until: Duration::from_secs(u64::try_from(reservation.until_seconds()).unwrap_or(0)),
                places: vec![place],
            };
            // The parts are free, so there is no conflict, unless two nodes have reservations for one pod.
            let _reserved = self.view.reserve(kept, None);
        }
    }

    fn is_in_effect(&self, reservation: &NodeReservation) -> bool {
        let is_wanted = match &reservation.pod {
            Some(pod) => {
                self.waiting_owners.contains(&pod.uid)
                    || self.waiting.iter().any(|waiting| waiting.metadata.uid == pod.uid)
            }
            None => true,
        };
        is_wanted && reservation.until_seconds() > self.now_seconds
    }

    /// Returns the reservations of a node that are in effect, with what is kept of each GPU now.
    #[must_use]
    pub fn reservations(&self, node: &NodeName) -> Vec<(&NodeReservation, Vec<(GpuIndex, GpuUsage)>)> {
        let facts = self.nodes.get(node);
        let in_effect = facts.into_iter().flat_map(|facts| &facts.reservations);
        let in_effect = in_effect.filter(|reservation| self.is_in_effect(reservation));
        in_effect
            .map(|reservation| {
                let kept = self.view.ledger().reservation(&reservation.ledger_name(node));
                let places = kept.map(|kept| kept.places).unwrap_or_default();
                (reservation, places.iter().flat_map(PodGrant::footprint).collect())
            })
            .collect()
    }

    /// Returns the nodes with GPUs, sorted by name.
    pub fn with_gpus(&self) -> impl Iterator<Item = (&NodeFacts, &NodeState)> {
        self.nodes.iter().filter_map(|(name, facts)| {
            let state = self.view.ledger().node(name)?;
            (!state.node().gpus().is_empty()).then_some((facts, state))
        })
    }

    /// Returns the memory of each GPU by UUID.
    pub(crate) fn gpu_memory(&self) -> BTreeMap<String, MiB> {
        let gpus = self.with_gpus().flat_map(|(_, state)| state.node().gpus());
        gpus.map(|gpu| (gpu.uuid.to_string(), gpu.memory)).collect()
    }

    /// Returns the nodes that share GPU memory, sorted by name, including nodes with an unknown number of GPUs.
    pub fn sharing(&self) -> impl Iterator<Item = (&NodeFacts, &NodeState)> {
        let shares = DialectSet::default().with(Dialect::Gpushare);
        let sharing = self.nodes.iter().filter(move |(_, facts)| facts.dialects.offered.covers(shares));
        sharing.filter_map(|(name, facts)| Some((facts, self.view.ledger().node(name)?)))
    }

    /// Returns the state of a node.
    #[must_use]
    pub fn state(&self, node: &NodeName) -> Option<&NodeState> {
        self.view.ledger().node(node)
    }

    /// Returns the pods on a node whose GPUs are known, with their grants, sorted by namespace and
    /// name.
    #[must_use]
    pub fn holders(&self, node: &NodeName) -> Vec<(&PodFacts, &PodGrant)> {
        let known = self.view.ledger().grants_on(node).filter(|grant| !self.view.is_set_aside(grant));
        let mut holders: Vec<_> =
            known.filter_map(|grant| Some((self.pods.get(&grant.pod)?, grant))).collect();
        holders.sort_by(|(a, _), (b, _)| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        holders
    }

    /// Returns all grants on a node, including guesses for pods whose GPUs are unknown.
    #[must_use]
    pub fn grants(&self, node: &NodeName) -> Vec<&PodGrant> {
        self.view.ledger().grants_on(node).filter(|grant| self.pods.contains_key(&grant.pod)).collect()
    }

    /// Returns the facts of a pod.
    #[must_use]
    pub fn pod(&self, uid: &PodUid) -> Option<&PodFacts> {
        self.pods.get(uid)
    }

    /// Returns the grant of a pod, or `None` if its GPUs are unknown.
    #[must_use]
    pub fn grant(&self, uid: &PodUid) -> Option<&PodGrant> {
        self.view.ledger().grant(uid).filter(|grant| !self.view.is_set_aside(grant))
    }

    /// Returns the pods on a node whose GPUs are unknown, sorted by namespace and name.
    #[must_use]
    pub fn unknown_gpus(&self, node: &NodeName) -> Vec<UnknownGpus<'_>> {
        let gpu_memory = self
            .view
            .ledger()
            .node(node)
            .and_then(|state| state.node().gpus().first())
            .map_or(MiB::ZERO, |gpu| gpu.memory);
        let requests = self.view.unknown_pods(node);
        let mut pods: Vec<UnknownGpus<'_>> = requests
            .filter_map(|(uid, request)| {
                Some(UnknownGpus { facts: self.pods.get(uid)?, memory: memory_of(request, gpu_memory) })
            })
            .collect();
        pods.sort_by(|a, b| (&a.facts.namespace, &a.facts.name).cmp(&(&b.facts.namespace, &b.facts.name)));
        pods
    }

    /// Returns how far the gang of a pod is, if the pod belongs to a gang of a known size.
    pub(crate) fn gang_progress(&self, uid: &PodUid) -> Option<(&GangKey, GangProgress)> {
        self.gangs.progress(uid)
    }

    /// Enters the PodGroup of a gang, which states the size for pods that do not.
    pub(crate) fn set_pod_group(&mut self, group: &PodGroup) {
        self.gangs.set_size(&group.gang, group.size);
    }

    /// Returns the names of all nodes in the order of the scheduler's lists.
    pub(crate) fn node_names(&self) -> Vec<&NodeName> {
        let mut names: Vec<&NodeName> = self.nodes.keys().collect();
        names.sort_by(|a, b| natural(&a.0, &b.0));
        names
    }

    /// Returns the forecast that a scheduler makes when it starts. One that has run for long also expects pods like
    /// those that have ended.
    pub(crate) fn forecast(&self) -> Arc<Forecast> {
        let make = || {
            let capacity: FreeCapacity = self.view.ledger().nodes().collect();
            let with_gpus = self.with_gpus().map(|(_, state)| state.node());
            Arc::new(Forecast::new(&self.workload.with(&Workload::guess(with_gpus)), &capacity))
        };
        Arc::clone(self.forecast.get_or_init(make))
    }

    pub(crate) fn cluster_view(&self) -> &ClusterView {
        &self.view
    }

    /// Returns the quotas and their current use.
    #[must_use]
    pub fn limits(&self) -> QuotaState<'_> {
        QuotaState { quota: &self.quota, usage: self.view.usage() }
    }
}

/// Returns the requested memory of all containers together.
fn memory_of(request: &PodRequest, gpu_memory: MiB) -> MiB {
    let of_one = |request: Request| match request {
        Request::Whole(count) => MiB(gpu_memory.0.saturating_mul(u64::from(count))),
        Request::Share(Share { count, memory, .. }) => {
            MiB(memory.on(gpu_memory).0.saturating_mul(u64::from(count)))
        }
    };
    request.containers.iter().filter_map(|container| container.request).map(of_one).sum()
}

impl NodeFacts {
    fn new(node: &Node, rules: &Rules) -> Self {
        let label = |key: &String| node.metadata.labels.get(key).cloned();
        let quota = rules.quota.as_ref();
        let internal = node.status.addresses.iter().find(|address| address.kind == "InternalIP");
        let address = internal.map(|address| address.address.clone());
        let agent = AgentAddress::of(node);
        let constraints = constraint::of_node(node);
        let reservations = reservation::parse(&node.metadata.annotations);
        Self {
            problem: None,
            unit: rules.unit,
            dialects: ServedDialects::default(),
            is_agent_unavailable: false,
            shared_memory: MiB::ZERO,
            agent,
            address,
            quota_labels: QuotaLabels {
                model: quota.and_then(|quota| label(&quota.model_label)),
                pool: quota.and_then(|quota| label(&quota.pool_label)),
            },
            ready: node.is_ready(),
            cordoned: node.spec.unschedulable,
            bad_reservations: reservations.as_ref().err().map(ToString::to_string),
            reservations: reservations.unwrap_or_default(),
            instances: instances(&constraints),
            constraints,
        }
    }

    /// Returns the status in kubectl's form: `Ready`, `NotReady,SchedulingDisabled`.
    #[must_use]
    pub fn status(&self) -> String {
        let ready = match self.ready {
            Some(true) => "Ready",
            Some(false) => "NotReady",
            None => "Unknown",
        };
        if self.cordoned { format!("{ready},SchedulingDisabled") } else { ready.to_owned() }
    }
}

/// Returns the MIG instances among the resources that a node offers.
fn instances(offered: &NodeConstraints) -> BTreeMap<String, Instances> {
    let of_mig = offered.other_resources.iter().filter(|(name, _)| name.starts_with(MIG_PREFIX));
    of_mig.map(|(name, offered)| (name.clone(), Instances { offered: *offered, pods: Vec::new() })).collect()
}
