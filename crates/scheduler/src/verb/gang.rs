//! Places the pods of a gang together: no pod passes filter before all missing members have their places.

use std::collections::HashMap;

use tessera_core::admission::{Admission, NodeOffer, PodQuery, QuotaState, RejectReason, Service};
use tessera_core::gang::{GangClass, GangNode, GangPlan, GangWait, TopologyWish, nodes_to_empty, plan};
use tessera_core::grant::PodGrant;
use tessera_core::ledger::{NodeGrant, Reservation};
use tessera_core::node::NodeState;
use tessera_core::quota::{GpuAmount, OverQuota};
use tessera_core::request::PodRequest;
use tessera_core::units::{Count, NodeName, PodUid};
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::extender::ExtenderArgs;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::foreign::pod_group::PodGroupApi;
use tessera_wire::tessera::gang::{self, GangKey, GangProgress};
use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};
use tessera_wire::tessera::preferences::{BadPreference, BadPreferences};

use super::filter::FilterVerdicts;
use super::sample::MIN_SAMPLE;
use crate::state::{Claimant, GangStatus, GpuPod, ReadableNode, State, Timestamp, reservation_name};

/// Labels of nodes by which gangs are kept together, the narrowest level first: NVLink domains, racks, blocks, zones.
pub const TOPOLOGY_KEYS: [&str; 11] = [
    "nvidia.com/gpu.clique",
    "cloud.provider.com/topology-rack",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-subblock",
    "topology.k8s.aws/network-node-layer-2",
    "cloud.provider.com/topology-block",
    "cloud.google.com/gce-topology-block",
    "topology.k8s.aws/network-node-layer-1",
    "topology.kubernetes.io/rack",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
];

/// What filter answers for a pod of a gang.
#[derive(Clone, Debug, PartialEq)]
enum MemberVerdict<'n> {
    /// The pod is placed like a pod without a gang: the gang has all its members.
    Alone,
    /// The place of the pod is on this node.
    Place(&'n str),
    /// The pod waits.
    Wait(GangWait),
    /// kube-scheduler should try again soon, because no event of the cluster will tell it to.
    Retry(String),
}

/// Members that may be exchanged: they request the same and accept the same nodes.
pub(super) struct MemberClass<'a> {
    members: Vec<PodUid>,
    pod: ParsedPod<'a>,
    spec: &'a GpuPod,
    requests: Vec<(MemoryUnit, PodRequest)>,
    /// True for the pod of the call, if it may only use the offered nodes.
    is_restricted: bool,
}

/// The states of nodes and the limits with which a gang is placed.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'s> {
    /// States that count instead of those of the ledger.
    pub(super) states: Option<&'s HashMap<NodeName, NodeState>>,
    pub(super) quota: QuotaState<'s>,
}

impl Surroundings<'_> {
    /// Returns the service of a node in these surroundings. Where pods are left out of the states, the devices that the
    /// agent has withdrawn because of them are back.
    fn service(&self, now: Service) -> Service {
        match now {
            Service::Withdrawn if self.states.is_some() => Service::Offered,
            now => now,
        }
    }
}

/// Returns whether the pod may belong to a gang, by its keys alone. Most pods do not, and this is all they cost.
#[must_use]
pub fn is_in_gang(pod: &Pod) -> bool {
    !matches!(gang::membership(pod), Ok(None))
}

impl State {
    /// Answers filter for a pod of a gang. Returns `None` if the pod is judged like a pod without one.
    pub fn filter_member<'a, N: AsRef<str>>(
        &mut self,
        args: &'a ExtenderArgs<N>,
        now: Timestamp,
    ) -> Option<FilterVerdicts<'a>> {
        let offered: Vec<&str> = args.names().collect();
        let verdict = match self.judge_member(&args.pod, &offered, now) {
            Ok(verdict) => verdict,
            Err(bad) => return Some(FilterVerdicts::of_bad_pod(&offered, &bad)),
        };
        match verdict {
            MemberVerdict::Alone => None,
            MemberVerdict::Place(node) => Some(FilterVerdicts::only(node)),
            MemberVerdict::Wait(wait) => {
                Some(FilterVerdicts::all_rejected(&offered, &RejectReason::Gang(wait)))
            }
            MemberVerdict::Retry(error) => {
                let mut verdicts = FilterVerdicts::default();
                verdicts.fail(error);
                Some(verdicts)
            }
        }
    }

    fn judge_member<'n>(
        &mut self,
        pod: &Pod,
        offered: &[&'n str],
        now: Timestamp,
    ) -> Result<MemberVerdict<'n>, BadPodObject> {
        let membership =
            gang::membership(pod).map_err(|bad| BadPreferences(vec![BadPreference::Gang(bad)]))?;
        // The pod's own errors are reported before those of its gang.
        let parsed = ParsedPod::of(self, pod)?;
        let Some(membership) = membership.filter(|_| parsed.wants_gpu()) else {
            return Ok(MemberVerdict::Alone);
        };
        let uid = PodUid(pod.metadata.uid.clone());
        self.announce(&uid, &membership, pod, now);
        let key = membership.gang;
        if self.lacks_pod_group(&key) {
            return Ok(MemberVerdict::Wait(no_group(&key)));
        }
        let Some((_, status)) = self.gang_of(&uid) else { return Ok(MemberVerdict::Alone) };
        let find = |node: &NodeName| offered.iter().copied().find(|name| *name == node.0);
        if let Some(grant) = self.ledger().grant(&uid) {
            // The outcome of the last Binding is unknown, and another attempt must go to the same node.
            let node = find(&grant.node);
            return Ok(node.map_or_else(|| not_offered(&key), MemberVerdict::Place));
        }
        if self.ledger().place(&uid).is_some() && !self.is_sound(&key) {
            self.cancel_gang(&key);
        }
        if self.ledger().place(&uid).is_some() {
            return Ok(self.go_to_place(&key, &status, &uid, offered, now));
        }
        if status.settled >= status.size {
            return Ok(MemberVerdict::Alone);
        }
        if !status.is_complete() {
            let GangStatus { size, present, .. } = status;
            return Ok(MemberVerdict::Wait(GangWait::Incomplete { gang: key.to_string(), present, size }));
        }
        Ok(self.plan_and_reserve(&key, &status, &uid, offered, now))
    }

    /// Sends a member to the place that is reserved for it, or to that of a member that requests the same.
    fn go_to_place<'n>(
        &mut self,
        key: &GangKey,
        status: &GangStatus,
        uid: &PodUid,
        offered: &[&'n str],
        now: Timestamp,
    ) -> MemberVerdict<'n> {
        let is_offered = |node: &NodeName| offered.iter().copied().find(|name| *name == node.0);
        let own = self.ledger().place(uid).map(|place| place.node.clone());
        if let Some(node) = own.as_ref().and_then(is_offered) {
            return MemberVerdict::Place(node);
        }
        let others = status.waiting.iter().filter(|other| *other != uid && self.are_alike(uid, other));
        let exchange =
            others.filter_map(|other| Some((other, is_offered(&self.ledger().place(other)?.node)?)));
        if let Some((other, node)) = exchange.map(|(other, node)| (other.clone(), node)).next() {
            self.view_mut().exchange_places(uid, &other);
            return MemberVerdict::Place(node);
        }
        if offered.len() >= MIN_SAMPLE {
            return MemberVerdict::Retry(format!(
                "gang {key} has a place for this pod, but not on the {} nodes that kube-scheduler offered; \
                 kube-scheduler will try other nodes",
                offered.len()
            ));
        }
        // kube-scheduler has a reason of its own to keep the pod from the node, so the gang is placed again.
        if let Some(node) = own {
            self.exclude(key, uid, node);
        }
        self.cancel_gang(key);
        match self.gang_of(uid).map(|(_, status)| status) {
            Some(status) => self.plan_and_reserve(key, &status, uid, offered, now),
            None => not_offered(key),
        }
    }

    /// Returns whether both pods request the same of the same nodes, so that they may exchange their places.
    fn are_alike(&self, one: &PodUid, other: &PodUid) -> bool {
        match (self.member(one), self.member(other)) {
            (Some(one), Some(other)) => {
                one.spec.request(MemoryUnit::GiB).ok() == other.spec.request(MemoryUnit::GiB).ok()
                    && one.annotations == other.annotations
                    && one.spec.constraints() == other.spec.constraints()
            }
            _ => false,
        }
    }

    /// Returns whether all places of a gang can still be granted.
    fn is_sound(&self, key: &GangKey) -> bool {
        let Some(reservation) = self.ledger().reservation(&reservation_name(key)) else { return false };
        reservation.places.iter().all(|place| {
            let Some(state) = self.ledger().node(&place.node) else { return false };
            place.footprint().all(|(index, _)| {
                let gpu = state.node().gpu(index);
                gpu.is_some_and(|gpu| gpu.health.is_healthy() && !state.used(index).exceeds(gpu.memory))
            })
        })
    }

    fn plan_and_reserve<'n>(
        &mut self,
        key: &GangKey,
        status: &GangStatus,
        uid: &PodUid,
        offered: &[&'n str],
        now: Timestamp,
    ) -> MemberVerdict<'n> {
        let gang = key.to_string();
        if !status.missing().contains(uid) {
            return MemberVerdict::Wait(GangWait::Surplus { gang });
        }
        if self.is_paused(key, now) {
            return MemberVerdict::Retry(GangWait::Paused { gang }.to_string());
        }
        let no_room = GangWait::NoRoom {
            gang: gang.clone(),
            missing: status.missing().len(),
            topology: status.topology.clone(),
        };
        if self.has_no_room(key) {
            return self.wait_or_retry(key, no_room);
        }
        let has_held_back = self.lift_hold_back(key);
        let has_evictions = self.lift_evictions(&Claimant::Gang(key.clone()));
        let verdict = self.try_to_reserve(key, status, uid, offered, no_room, now);
        if has_evictions {
            self.restore_evictions(key);
        }
        if has_held_back {
            self.restore_hold_back(key);
        }
        if has_held_back || has_evictions {
            // What is kept for the gang changes nodes, and the gang does not fit because of that.
            if matches!(verdict, MemberVerdict::Wait(GangWait::NoRoom { .. }) | MemberVerdict::Retry(_)) {
                self.record_no_room(key, now);
            }
        }
        verdict
    }

    fn try_to_reserve<'n>(
        &mut self,
        key: &GangKey,
        status: &GangStatus,
        uid: &PodUid,
        offered: &[&'n str],
        no_room: GangWait,
        now: Timestamp,
    ) -> MemberVerdict<'n> {
        let gang = key.to_string();
        let is_sample = offered.len() >= MIN_SAMPLE;
        let places = match self.places(key, status, Some((uid, offered)), false) {
            Ok(Some(places)) => Ok(Some(places)),
            // Without the restriction the plan would be reserved for another sample of nodes.
            Ok(None) if is_sample => self.places(key, status, None, false),
            other => other,
        };
        let places = match places {
            Ok(Some(places)) => places,
            Ok(None) => {
                self.record_no_room(key, now);
                return self.wait_or_retry(key, no_room);
            }
            Err(over) => return MemberVerdict::Wait(GangWait::Quota { gang, over }),
        };
        if self.reserve_gang(key, places, now).is_err() {
            return self.wait_or_retry(key, no_room);
        }
        let node = self.ledger().place(uid).map(|place| place.node.clone());
        let found = offered.iter().copied().find(|name| node.as_ref().is_some_and(|node| node.0 == *name));
        match found {
            Some(node) => MemberVerdict::Place(node),
            None if is_sample => MemberVerdict::Retry(format!(
                "gang {key} has places now, but none on the {} nodes that kube-scheduler offered; kube-scheduler will \
                 try other nodes",
                offered.len()
            )),
            None => not_offered(key),
        }
    }

    fn reserve_gang(
        &mut self,
        key: &GangKey,
        places: Vec<PodGrant>,
        now: Timestamp,
    ) -> Result<(), tessera_core::ledger::Conflict> {
        let reservation = Reservation {
            name: reservation_name(key),
            owner: format!("gang {key}"),
            until: now.steady.saturating_add(self.gang_timeout()),
            places,
        };
        self.view_mut().reserve(reservation, Some(&key.namespace))?;
        self.record_reserved(key);
        Ok(())
    }

    /// Reserves places for the missing members of gangs that have members on nodes, the oldest gang first. A new
    /// leader does so before it answers, because another pod could take the GPUs otherwise.
    pub fn plan_started_gangs(&mut self, now: Timestamp) {
        let started: Vec<(GangKey, GangStatus)> = self
            .started_gangs()
            .filter(|(_, status)| status.is_complete() && !status.missing().is_empty())
            .map(|(key, status)| (key.clone(), status))
            .collect();
        for (key, status) in started {
            if self.ledger().has_reservation(&reservation_name(&key)) || self.is_paused(&key, now) {
                continue;
            }
            if let Ok(Some(places)) = self.places(&key, &status, None, false) {
                // A conflict is impossible, and the next call of filter tries again.
                let _reserved = self.reserve_gang(&key, places, now);
            }
        }
    }

    /// Returns the nodes that could take the missing members of a gang once their pods have ended, with the fewest GPUs
    /// in use.
    pub(crate) fn nodes_to_empty(&self, key: &GangKey) -> Vec<NodeName> {
        let Some(status) = self.gang_status(key) else { return Vec::new() };
        let classes = self.classes(status.missing(), None);
        let Ok(nodes) = self.gang_nodes(key, &status, &classes, &[], self.surroundings()) else {
            return Vec::new();
        };
        let found = nodes_to_empty(&demands(&classes), &nodes, &status.topology);
        found.into_iter().map(|node| nodes[node].state.node().name.clone()).collect()
    }

    /// Makes kube-scheduler try again while other gangs hold reservations, because the end of a reservation is no
    /// event of the cluster.
    fn wait_or_retry<'n>(&self, key: &GangKey, wait: GangWait) -> MemberVerdict<'n> {
        let own = reservation_name(key);
        match self.ledger().reservations().find(|name| !name.0.ends_with(&own.0)) {
            Some(_) => MemberVerdict::Retry(format!("{wait}; GPUs are reserved for others at present")),
            None => MemberVerdict::Wait(wait),
        }
    }

    /// Returns a place for each missing member, or `None` if they do not fit together. The pod of the call gets a
    /// place on an offered node.
    fn places(
        &self,
        key: &GangKey,
        status: &GangStatus,
        caller: Option<(&PodUid, &[&str])>,
        is_restricted: bool,
    ) -> Result<Option<Vec<PodGrant>>, OverQuota> {
        let classes = self.classes(status.missing(), caller.map(|(uid, _)| uid).filter(|_| is_restricted));
        let offered = caller.map(|(_, offered)| offered).unwrap_or_default();
        let nodes = self.gang_nodes(key, status, &classes, offered, self.surroundings())?;
        let Some(placed) = plan(&demands(&classes), &nodes, &status.topology) else { return Ok(None) };
        let assigned = assign(&classes, &nodes, placed, caller);
        let is_offered = |place: &PodGrant| offered.contains(&place.node.0.as_str());
        if let Some((uid, _)) = caller
            && !assigned.iter().any(|place| place.pod == *uid && is_offered(place))
        {
            // The offered nodes are another condition for this pod alone.
            return if is_restricted { Ok(None) } else { self.places(key, status, caller, true) };
        }
        self.check_quota(key, &assigned, self.quota_state())?;
        Ok(Some(assigned))
    }

    /// Groups the members that may be exchanged.
    pub(super) fn classes<'s>(
        &'s self,
        missing: &[PodUid],
        restricted: Option<&PodUid>,
    ) -> Vec<MemberClass<'s>> {
        let mut classes: Vec<MemberClass<'s>> = Vec::new();
        for uid in missing {
            let Some(spec) = self.member(uid) else { continue };
            let Ok(pod) = ParsedPod::new(self, &spec.namespace, &spec.spec, &spec.annotations) else {
                continue;
            };
            let pod = match spec.spec.resource_claims.is_empty() {
                true => pod,
                false => pod.with_claims(&self.waiting_claims(&spec.to_object(uid))),
            };
            let is_restricted = restricted == Some(uid);
            let alike = classes.iter_mut().find(|class| {
                !class.is_restricted
                    && !is_restricted
                    && class.members.first().is_some_and(|other| self.are_alike(uid, other))
            });
            match alike {
                Some(class) => class.members.push(uid.clone()),
                None => classes.push(MemberClass {
                    members: vec![uid.clone()],
                    pod,
                    spec,
                    requests: Vec::new(),
                    is_restricted,
                }),
            }
        }
        let units: Vec<MemoryUnit> = self.memory_units();
        for class in &mut classes {
            let request = |unit: &MemoryUnit| (*unit, class.pod.request(*unit).into_owned());
            class.requests = units.iter().map(request).collect();
        }
        classes
    }

    fn surroundings(&self) -> Surroundings<'_> {
        Surroundings { states: None, quota: self.quota_state() }
    }

    fn memory_units(&self) -> Vec<MemoryUnit> {
        let mut units = Vec::new();
        for node in self.readable_nodes() {
            if !units.contains(&node.spec.unit) {
                units.push(node.spec.unit);
            }
        }
        units
    }

    fn readable_nodes(&self) -> impl Iterator<Item = ReadableNode<'_>> {
        let positions = self.ledger().positions_in(0..self.ledger().positions());
        let readable = positions.filter_map(|position| self.readable_at(position));
        readable.filter(|node| !node.spec.node.gpus().is_empty())
    }

    /// Returns the nodes as the members meet them. Fails if the quota excludes all nodes.
    pub(super) fn gang_nodes<'s>(
        &'s self,
        key: &GangKey,
        status: &GangStatus,
        classes: &'s [MemberClass<'s>],
        offered: &[&str],
        around: Surroundings<'s>,
    ) -> Result<Vec<GangNode<'s>>, OverQuota> {
        let constraints: Vec<_> = classes.iter().map(|class| class.spec.spec.constraints()).collect();
        let with_members = self.nodes_of_gang(key);
        let wished = match &status.topology {
            TopologyWish::Any => None,
            TopologyWish::Preferred(key) | TopologyWish::Required(key) => Some(key.as_str()),
        };
        let mut over = None;
        let mut nodes = Vec::new();
        for node in self.readable_nodes() {
            let name = &node.spec.node.name;
            let state = around.states.and_then(|states| states.get(name)).unwrap_or(node.state);
            let labels = self.constraints(name);
            let label = |key: &str| labels.and_then(|known| known.labels.get(key)).map(String::as_str);
            let requests = classes.iter().zip(&constraints).map(|(class, constraints)| {
                let (_, request) = class.requests.iter().find(|(unit, _)| *unit == node.spec.unit)?;
                let offer = NodeOffer {
                    state,
                    service: around.service(
                        node.spec.dialects.service(class.pod.shape.dialects, node.spec.is_agent_unavailable),
                    ),
                    quota_labels: node.quota_labels,
                };
                let query = PodQuery { namespace: &key.namespace, request, policy: &class.pod.policy };
                let quota = around.quota.limiting(&key.namespace);
                if let Err(reason) = (Admission { offer, query, quota }).check() {
                    if let RejectReason::Quota(reason) = reason {
                        over.get_or_insert(reason);
                    }
                    return None;
                }
                let needs_slice = !class.spec.spec.resource_claims.is_empty();
                let may_use = (!needs_slice || self.offers_claims(name))
                    && labels.is_none_or(|known| constraints.unmet_on(&name.0, known).is_none())
                    && (!class.is_restricted || offered.contains(&name.0.as_str()))
                    && !class.members.iter().any(|uid| self.is_excluded(key, uid, name));
                may_use.then_some(request)
            });
            let requests: Vec<Option<&PodRequest>> = requests.collect();
            let has_member = with_members.contains(name);
            if has_member || requests.iter().any(Option::is_some) {
                nodes.push(GangNode {
                    state,
                    domains: TOPOLOGY_KEYS.iter().map(|key| label(key)).collect(),
                    wished: wished.and_then(label),
                    requests,
                    has_member,
                });
            }
        }
        match over {
            Some(over) if nodes.is_empty() => Err(over),
            _ => Ok(nodes),
        }
    }

    /// Checks that the quota allows all members at the same time.
    pub(super) fn check_quota(
        &self,
        key: &GangKey,
        places: &[PodGrant],
        quota: QuotaState<'_>,
    ) -> Result<(), OverQuota> {
        let Some(quota) = quota.limiting(&key.namespace) else { return Ok(()) };
        let mut usage = quota.usage.clone();
        for place in places {
            let Ok(node) = self.readable_node(&place.node.0) else { continue };
            let amount = GpuAmount::of_grants(&place.containers, &node.spec.node);
            quota.quota.allows(&key.namespace, &usage, node.quota_labels, amount)?;
            usage.add(&key.namespace, node.quota_labels.model.as_deref().unwrap_or_default(), amount);
        }
        Ok(())
    }

    /// Returns why kube-scheduler should try a pod again soon that fits nowhere: GPUs of an offered node are reserved,
    /// and the end of a reservation is no event of the cluster.
    #[must_use]
    pub fn waits_for_reservation<N: AsRef<str>>(&self, args: &ExtenderArgs<N>) -> Option<String> {
        self.ledger().reservations().next()?;
        if let Some(place) = self.reserved_place(&PodUid(args.pod.metadata.uid.clone())) {
            return Some(format!(
                "GPUs of node {} are reserved for this pod, but kube-scheduler did not offer the node; kube-scheduler \
                 will try again",
                place.node
            ));
        }
        let pod = ParsedPod::of(self, &args.pod).ok()?.with_claims(&self.waiting_claims(&args.pod));
        if !pod.wants_gpu() {
            return None;
        }
        args.names().find_map(|name| {
            let node = self.readable_node(name).ok()?;
            let name = NodeName(name.to_owned());
            let reserved = |counted: &NodeGrant<'_>| matches!(counted, NodeGrant::Reserved(_));
            let place = self.ledger().counted_on(&name).find(reserved)?;
            let owner = self.ledger().reservation_owner(&place.grant().pod)?;
            let mut state = NodeState::empty(node.state.shared_node());
            let others = self.ledger().counted_on(&name).filter(|counted| !reserved(counted));
            others.for_each(|counted| state.add(counted.grant()));
            let request = pod.request(node.spec.unit);
            let free = ReadableNode { state: &state, ..node };
            self.admission(&free, &pod, &request).score().ok()?;
            Some(format!("suitable GPUs are reserved for {owner} at present; kube-scheduler will try again"))
        })
    }

    /// Describes where the gang of a pod is placed, for the reason of its placement.
    pub(crate) fn describe_gang(&self, uid: &PodUid) -> Option<String> {
        let (key, status) = self.gang_of(uid)?;
        let reserved = self.ledger().reservation(&reservation_name(key));
        let mut nodes = self.nodes_of_gang(key);
        nodes.extend(reserved.iter().flat_map(|reserved| &reserved.places).map(|place| &place.node));
        let (pods, nodes) = (Count(status.size, "pod"), Count(nodes.len(), "node"));
        Some(format!("gang {key} of {pods} is placed together on {nodes}"))
    }

    /// Describes what a waiting pod of a gang waits for.
    pub(crate) fn describe_waiting_gang(&self, uid: &PodUid) -> Option<String> {
        let lacking = self.gang_key_of(uid).filter(|key| self.lacks_pod_group(key));
        if let Some(key) = lacking {
            return Some(no_group(key).to_string());
        }
        let (key, status) = self.gang_of(uid)?;
        let GangStatus { size, present, settled, .. } = status;
        let reserved_on = self.ledger().place(uid).map(|place| &place.node);
        let unplaced = match self.evictions_left(&Claimant::Gang(key.clone())) {
            None => "no nodes have GPUs for all of them at the same time".to_owned(),
            Some(0) => "GPUs for all of them are free and kept for the gang".to_owned(),
            Some(left) => {
                format!("it waits for the end of {}, evicted to make room for it", Count(left, "pod"))
            }
        };
        Some(GangProgress { size, present, settled }.describe(key, reserved_on, &unplaced))
    }
}

fn no_group(key: &GangKey) -> GangWait {
    let kind = PodGroupApi::of(key.origin).map_or("PodGroup", |api| api.kind);
    GangWait::NoGroup { gang: key.to_string(), kind }
}

fn not_offered<'n>(key: &GangKey) -> MemberVerdict<'n> {
    MemberVerdict::Wait(GangWait::NotOffered { gang: key.to_string() })
}

/// Returns what each class asks for.
pub(super) fn demands<'c>(classes: &'c [MemberClass<'_>]) -> Vec<GangClass<'c>> {
    let demand =
        |class: &'c MemberClass<'_>| GangClass { count: class.members.len(), policy: &class.pod.policy };
    classes.iter().map(demand).collect()
}

/// Assigns the places of a plan to the members. The pod of the call gets one on an offered node, if there is one.
pub(super) fn assign(
    classes: &[MemberClass<'_>],
    nodes: &[GangNode<'_>],
    plan: GangPlan,
    caller: Option<(&PodUid, &[&str])>,
) -> Vec<PodGrant> {
    let mut places: HashMap<usize, Vec<PodGrant>> = HashMap::new();
    for place in plan.places {
        let node = &nodes[place.node];
        let Some(request) = node.requests.get(place.class).copied().flatten() else { continue };
        places.entry(place.class).or_default().push(PodGrant {
            pod: PodUid(String::new()),
            node: node.state.node().name.clone(),
            cpu: request.cpu,
            memory: request.memory,
            containers: place.containers,
        });
    }
    let mut assigned = Vec::new();
    for (number, class) in classes.iter().enumerate() {
        let mut free = places.remove(&number).unwrap_or_default();
        let mut members = class.members.clone();
        if let Some((uid, offered)) = caller
            && let Some(position) = members.iter().position(|member| member == uid)
        {
            members.swap(0, position);
            if let Some(place) = free.iter().position(|place| offered.contains(&place.node.0.as_str())) {
                free.swap(0, place);
            }
        }
        assigned.extend(members.into_iter().zip(free).map(|(pod, place)| PodGrant { pod, ..place }));
    }
    assigned
}
