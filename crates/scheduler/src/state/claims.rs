//! Claims of dynamic resource allocation: what they hold by the watch, and what is booked for them while their pods are
//! bound.
//!
//! The ledger has each claim once, whatever the number of its pods. A booking counts instead of the watch until the watch
//! shows the booked GPUs, because a correction takes two writes and the watch lags behind.

mod users;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use tessera_core::admission::{QuotaState, RejectReason};
use tessera_core::claim::{ClaimPart, ClaimUid, Exchange, Replacement, Review, grants, review};
use tessera_core::cluster_view::{PlacedPod, PodGpus};
use tessera_core::grant::{ContainerGrant, Hold, PodGrant};
use tessera_core::placement::PlacementError;
use tessera_core::quota::{GpuAmount, OverQuota};
use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName, PodUid};
use tessera_wire::foreign::dialect::{DialectSet, MemoryUnit};
use tessera_wire::foreign::dra::{ClaimName, ClaimedRequest, Consumer, DeviceClass, ResourceClaim};
use tessera_wire::foreign::extender::BindingArgs;
use tessera_wire::foreign::objects::{Condition, Pod};
use tessera_wire::tessera::dra::{self, BadAllocation, Fixed};
use tessera_wire::tessera::excerpt::excerpt;
use tessera_wire::tessera::parsed_node::ServedDialects;
use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};

use super::evictions::Claimant;
use super::{BindRefusal, GpuPod, State, Timestamp, WatchEvent};

pub(crate) use self::users::ClaimGroup;

/// Namespace and name of a claim.
type ClaimKey = (String, String);

/// Time after which a booking that the watch has not confirmed is dropped. By then the watch has shown the outcome of
/// every write.
const UNCONFIRMED_PERIOD: Duration = Duration::from_secs(75);

/// Reports on waiting claims that are kept until they are written as events. Events are limited to a few a second.
const MAX_WAITS: usize = 64;

/// All claims and classes, and the bookings of claims.
#[derive(Debug, Default)]
pub(super) struct Claims {
    classes: BTreeMap<String, DeviceClass>,
    known: HashMap<ClaimKey, ResourceClaim>,
    /// The names of the known claims, by the holder in the ledger.
    names: HashMap<PodUid, ClaimKey>,
    /// The claims with devices on each node.
    on_node: HashMap<NodeName, BTreeSet<ClaimKey>>,
    bookings: HashMap<ClaimUid, ClaimBooking>,
    unlisted: HashSet<ClaimKey>,
    /// Dialects whose resources a class serves without a device plugin.
    dialects: DialectSet,
    /// Pods on nodes that use claims.
    users: HashMap<PodUid, Box<GpuPod>>,
    /// Names of the slices of nodes that offer GPUs to claims.
    offering: HashSet<String>,
    /// What kube-scheduler reported lately of pods that wait for claims.
    waits: Vec<ClaimWait>,
}

/// What kube-scheduler reports of a pod that waits for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimWait {
    /// Namespace of the claim and of the pod.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    /// UID of the claim.
    pub uid: String,
    /// Name of the pod and the report, for the owner of the claim.
    pub message: String,
}

#[derive(Debug)]
struct ClaimBooking {
    key: ClaimKey,
    node: NodeName,
    parts: Vec<ClaimPart>,
    begun: Duration,
    /// Time at which the bind ended; `None` while it runs.
    ended: Option<Duration>,
}

/// What happens to one claim of a pod that is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimPlan {
    /// UID of the claim.
    pub uid: ClaimUid,
    /// The GPUs that the claim holds from now on.
    pub parts: Vec<ClaimPart>,
    /// The reason why the GPUs must be written to the claim, or `None` if the allocation stays.
    pub replaced: Option<Replacement>,
}

/// The end of a claim's part in a bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The claim has the booked GPUs, or may have them.
    Kept,
    /// The claim was not written.
    Unwritten,
}

/// The reason why a pod with claims is not bound. Nothing is booked.
#[derive(Debug, thiserror::Error)]
pub enum ClaimRefusal {
    /// The controller manager has not made a claim yet.
    #[error("the claim from template {0} does not exist yet; kube-scheduler retries after it was made")]
    Pending(String),
    /// A claim has no allocation.
    #[error("claim {0} is not allocated; kube-scheduler will allocate it in the next attempt")]
    NotAllocated(String),
    /// A claim is not reserved for the pod.
    #[error("claim {0} is not reserved for this pod; kube-scheduler will reserve it in the next attempt")]
    NotReserved(String),
    /// Another call binds a pod with this claim.
    #[error("claim {0} is part of another bind; kube-scheduler retries")]
    Busy(String),
    /// The allocation cannot be served by the node.
    #[error("claim {claim}: {reason}")]
    Allocation {
        /// Name of the claim.
        claim: String,
        /// The error of the allocation.
        reason: Box<BadAllocation>,
    },
    /// A GPU has too little left, and the GPUs of the claim must stay.
    #[error(
        "claim {claim}: GPU {gpu} of node {node} has too little left, and its GPUs cannot be replaced: {reason}"
    )]
    Fixed {
        /// Name of the claim.
        claim: String,
        /// Index of the GPU on the node.
        gpu: GpuIndex,
        /// The chosen node.
        node: NodeName,
        /// Why the GPUs must stay.
        reason: Box<Fixed>,
    },
    /// A GPU has too little left, and no other GPU of the node has room.
    #[error(
        "claim {claim}: GPU {gpu} of node {node} has too little left, and no other GPU of its kind has room"
    )]
    NoRoom {
        /// Name of the claim.
        claim: String,
        /// Index of the GPU on the node.
        gpu: GpuIndex,
        /// The chosen node.
        node: NodeName,
    },
    /// The pod or the node cannot take part.
    #[error(transparent)]
    Bind(#[from] BindRefusal),
}

impl ClaimRefusal {
    /// Returns the name of the claim that lacks GPUs, or `None` for a reason that ends by itself.
    #[must_use]
    pub fn claim(&self) -> Option<&String> {
        match self {
            Self::Allocation { claim, .. } | Self::Fixed { claim, .. } | Self::NoRoom { claim, .. } => {
                Some(claim)
            }
            Self::Pending(_)
            | Self::NotAllocated(_)
            | Self::NotReserved(_)
            | Self::Busy(_)
            | Self::Bind(_) => None,
        }
    }
}

impl State {
    pub(super) fn handle_class(&mut self, change: WatchEvent<DeviceClass>) {
        match change {
            // Classes are missing for a moment. Without a class nothing is replaced and less is judged.
            WatchEvent::Listing => self.claims.classes.clear(),
            WatchEvent::Set(class) => drop(self.claims.classes.insert(class.metadata.name.clone(), class)),
            WatchEvent::Gone(class) => drop(self.claims.classes.remove(&class.metadata.name)),
            WatchEvent::Listed => {}
        }
        let dialects = dra::served_dialects(self.claims.classes.values());
        if self.claims.dialects != dialects {
            self.claims.dialects = dialects;
            let nodes: Vec<NodeName> = self.ledger().nodes().map(|node| node.node().name.clone()).collect();
            nodes.iter().for_each(|node| self.view.mark_changed(node));
        }
    }

    pub(super) fn handle_claim(&mut self, change: WatchEvent<ResourceClaim>) {
        match change {
            WatchEvent::Listing => self.claims.unlisted = self.claims.known.keys().cloned().collect(),
            WatchEvent::Set(claim) => self.set_claim(claim),
            WatchEvent::Gone(claim) => self.remove_claim(&key(&claim)),
            WatchEvent::Listed => {
                for key in std::mem::take(&mut self.claims.unlisted) {
                    self.remove_claim(&key);
                }
            }
        }
        self.refresh_evictions();
    }

    fn set_claim(&mut self, claim: ResourceClaim) {
        let key = key(&claim);
        self.claims.unlisted.remove(&key);
        let uid = ClaimUid(claim.metadata.uid.clone());
        let known = self.claims.known.get(&key);
        if known == Some(&claim) {
            return;
        }
        if known.is_some_and(|known| known.metadata.uid != uid.0) {
            self.remove_claim(&key);
        }
        self.claims.unindex(&key);
        if let Some(pool) = dra::pool(&claim) {
            let node = NodeName(pool.to_owned());
            self.claims.on_node.entry(node).or_default().insert(key.clone());
        }
        self.claims.names.insert(uid.holder(), key.clone());
        self.claims.known.insert(key.clone(), claim);
        let shown = self.watched_parts(&key);
        if self.claims.bookings.get(&uid).is_some_and(|booking| booking.is_shown(shown.as_ref())) {
            self.claims.bookings.remove(&uid);
        }
        self.settle_claim(&key);
    }

    fn remove_claim(&mut self, key: &ClaimKey) {
        self.claims.unlisted.remove(key);
        self.claims.unindex(key);
        if let Some(claim) = self.claims.known.remove(key) {
            let uid = ClaimUid(claim.metadata.uid);
            self.claims.bookings.remove(&uid);
            self.claims.names.remove(&uid.holder());
            self.view.remove_pod(&uid.holder());
        }
    }

    /// Returns namespace and name of the claim that is this holder of the ledger.
    pub(crate) fn claim_name(&self, holder: &PodUid) -> Option<(&str, &str)> {
        self.claims.names.get(holder).map(|(namespace, name)| (namespace.as_str(), name.as_str()))
    }

    /// Returns the claims that hold GPUs, with what they hold.
    pub(crate) fn claim_holders(&self) -> impl Iterator<Item = (&PodGrant, &ResourceClaim)> {
        self.claims
            .names
            .iter()
            .filter_map(|(holder, key)| Some((self.ledger().grant(holder)?, self.claims.known.get(key)?)))
    }

    /// Returns the UID of a pod on a node that uses claims, and the names of these claims with what they hold, sorted by
    /// name. Returns `None` if no claim is reserved for a pod of this name.
    pub(crate) fn claims_of_placed(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<(&str, Vec<(&str, &PodGrant)>)> {
        let is_placed =
            |user: &&Consumer| user.name == name && self.ledger().grant(&PodUid(user.uid.clone())).is_some();
        let used = self.claim_holders().filter(|(_, claim)| claim.metadata.namespace == namespace);
        let mut claims: Vec<(&str, &str, &PodGrant)> = used
            .filter_map(|(grant, claim)| {
                let user = claim.consumer_pods().find(is_placed)?;
                Some((claim.metadata.name.as_str(), user.uid.as_str(), grant))
            })
            .collect();
        claims.sort_by_key(|(claim, ..)| *claim);
        let (_, uid, _) = *claims.first()?;
        Some((uid, claims.into_iter().map(|(claim, _, grant)| (claim, grant)).collect()))
    }

    /// Notes a new report of kube-scheduler on a pod, for the owners of the claims that the pod waits for.
    pub(super) fn note_claim_wait(&mut self, pod: &Pod, earlier: Option<&Condition>) {
        let Some(report) = pod.status.conditions.unscheduled.as_deref() else { return };
        if pod.spec.resource_claims.is_empty() || earlier.is_some_and(|known| known.message == report.message)
        {
            return;
        }
        let message = excerpt(format!("pod {} waits: {}", pod.metadata.name, report.message));
        let waits = |claim: &ResourceClaim| ClaimWait {
            namespace: claim.metadata.namespace.clone(),
            claim: claim.metadata.name.clone(),
            uid: claim.metadata.uid.clone(),
            message: message.clone(),
        };
        let claims = self.claims_of(pod).filter(|claim| claim.status.allocation.is_none());
        let new: Vec<ClaimWait> = claims.map(waits).collect();
        let room = MAX_WAITS.saturating_sub(self.claims.waits.len());
        self.claims.waits.extend(new.into_iter().take(room));
    }

    /// Returns the new reports on pods that wait for claims.
    pub(crate) fn take_claim_waits(&mut self) -> Vec<ClaimWait> {
        std::mem::take(&mut self.claims.waits)
    }

    /// Returns whether there are new reports on pods that wait for claims.
    pub(crate) fn has_claim_waits(&self) -> bool {
        !self.claims.waits.is_empty()
    }

    /// Returns whether the pod waits for GPUs of claims, as far as its claims are known.
    pub(super) fn waits_for_claims(&self, pod: &Pod) -> bool {
        self.settings.dra && !pod.spec.resource_claims.is_empty() && !self.waiting_claims(pod).is_empty()
    }

    /// Returns what a claim holds by the watch, if its node is known and the allocation is valid there.
    fn watched_parts(&self, key: &ClaimKey) -> Option<(NodeName, Vec<ClaimPart>)> {
        let claim = self.claims.known.get(key)?;
        let node = NodeName(dra::pool(claim)?.to_owned());
        let spec = self.entry(&node)?.spec.as_ref().ok()?;
        match dra::claim_parts(claim, &spec.node) {
            Ok(parts) => Some((node, parts)),
            Err(error) => {
                tracing::debug!(claim = %format_args!("{}/{}", key.0, key.1), %error, "the allocation is ignored");
                None
            }
        }
    }

    /// Enters what a claim holds by the watch, unless a booking counts for it.
    fn settle_claim(&mut self, key: &ClaimKey) {
        let Some(claim) = self.claims.known.get(key) else { return };
        let uid = ClaimUid(claim.metadata.uid.clone());
        if self.claims.bookings.contains_key(&uid) {
            return;
        }
        match self.watched_parts(key).filter(|(_, parts)| !parts.is_empty()) {
            Some((node, parts)) => self.view.set_pod(PlacedPod {
                uid: uid.holder(),
                namespace: key.0.clone(),
                node,
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
                gpus: PodGpus::Granted(grants(&parts)),
            }),
            None => self.view.remove_pod(&uid.holder()),
        }
    }

    /// Enters the claims of a node again, because its GPUs have changed.
    pub(super) fn settle_claims_on(&mut self, node: &NodeName) {
        let keys: Vec<ClaimKey> = self.claims.on_node.get(node).into_iter().flatten().cloned().collect();
        keys.iter().for_each(|key| self.settle_claim(key));
    }

    /// Returns whether claims count and pods with claims are bound.
    pub(crate) fn serves_claims(&self) -> bool {
        self.settings.dra
    }

    /// Returns the dialects that a node serves by device plugins, and those that claims serve everywhere.
    pub(crate) fn served_dialects(&self, by_plugins: ServedDialects) -> ServedDialects {
        by_plugins.union(self.claims.dialects)
    }

    /// Returns whether a bind must read the pod and its claims from the API server.
    #[must_use]
    pub fn may_use_claims(&self, args: &BindingArgs) -> bool {
        let uid = PodUid(args.pod_uid.clone());
        self.settings.dra
            && self.pod(&uid).is_none_or(|pod| {
                let dialects = pod.spec.claims(MemoryUnit::GiB).unwrap_or_default();
                let wanted =
                    dialects.iter().fold(DialectSet::default(), |set, claim| set.with(claim.dialect));
                let node = self.readable_node(&args.node);
                !pod.spec.resource_claims.is_empty()
                    || !node.is_ok_and(|node| node.spec.dialects.allocatable.covers(wanted))
            })
    }

    /// Returns the GPUs that the claims of a pod need at least and do not have yet.
    pub(crate) fn waiting_claims(&self, pod: &Pod) -> Vec<Request> {
        let claims = self.claims_of(pod).filter(|claim| claim.status.allocation.is_none());
        claims.flat_map(|claim| dra::waiting_requests(claim, &self.claims.classes)).collect()
    }

    /// Checks that no container of a pod requests GPUs both by resources and by a claim.
    pub(crate) fn check_containers(&self, pod: &Pod) -> Result<(), BadPodObject> {
        if !self.settings.dra || pod.spec.resource_claims.is_empty() || !pod.spec.asks_for_gpus() {
            return Ok(());
        }
        let requests = pod.spec.claims(MemoryUnit::GiB).unwrap_or_default();
        let has_gpus = |name: &str| {
            let claim = self.claims.known.get(&(pod.metadata.namespace.clone(), name.to_owned()));
            claim.is_some_and(|claim| dra::names_gpus(claim, &self.claims.classes))
        };
        let mixes =
            |used: &ClaimedRequest<'_>| requests.iter().any(|request| request.container == used.container);
        let mixed = pod.claimed_requests().filter(mixes).find(|used| has_gpus(used.claim));
        mixed.map_or(Ok(()), |used| Err(BadPodObject::ClaimBesideResources(used.container.to_owned())))
    }

    /// Returns the nodes where the allocation of a claim of the pod exceeds the quota, or has no room any more and cannot
    /// be corrected. If kube-scheduler finds no other node, it clears the allocation.
    pub(crate) fn stale_claims(&self, pod: &Pod) -> Vec<(NodeName, RejectReason)> {
        let stale = |claim: &ResourceClaim| {
            let (node, parts) = self.watched_parts(&key(claim))?;
            if let Err(over) = self.check_claim_quota(claim, &pod.metadata.uid, &node, &grants(&parts)) {
                return Some((node, RejectReason::Quota(over)));
            }
            let policy = self.policy(None);
            let uid = ClaimUid(claim.metadata.uid.clone());
            let without = self.view.state_without(&node, &uid.holder())?;
            let exchange = if claim.status.reserved_for.iter().any(|by| by.uid != pod.metadata.uid) {
                return None;
            } else {
                Exchange::SameKind { distinct: false }
            };
            let Review::NoRoom(gpu) = review(&without, &parts, exchange, &policy, Default::default()) else {
                return None;
            };
            let part = parts.iter().find(|part| part.gpus.contains(&gpu))?;
            let count = u8::try_from(part.gpus.len()).unwrap_or(u8::MAX);
            let error = match part.hold {
                Hold::Whole => PlacementError::FewerIdle(count),
                Hold::Share { compute_percent, memory } => {
                    let memory = MemoryRequest::Amount(memory);
                    PlacementError::NoShare(Share { count, compute_percent, memory })
                }
            };
            Some((node, error.into()))
        };
        self.claims_of(pod).filter_map(stale).collect()
    }

    /// Checks that the namespace may have these GPUs for a claim of the pod, whatever the claim holds now. A claim that
    /// other pods use holds its GPUs already, so one more pod takes nothing.
    fn check_claim_quota(
        &self,
        claim: &ResourceClaim,
        pod_uid: &str,
        node: &NodeName,
        containers: &[ContainerGrant],
    ) -> Result<(), OverQuota> {
        let namespace = &claim.metadata.namespace;
        let Some(QuotaState { quota, usage }) = self.quota_state().limiting(namespace) else { return Ok(()) };
        let Ok(target) = self.readable_node(&node.0) else { return Ok(()) };
        if claim.status.reserved_for.iter().any(|by| by.uid != pod_uid) {
            return Ok(());
        }
        let mut usage = usage.clone();
        let held = self.ledger().grant(&ClaimUid(claim.metadata.uid.clone()).holder());
        if let Some(held) = held
            && let Ok(holder) = self.readable_node(&held.node.0)
        {
            let model = holder.quota_labels.model.as_deref().unwrap_or_default();
            usage.remove(namespace, model, GpuAmount::of_grants(&held.containers, holder.state.node()));
        }
        let more = GpuAmount::of_grants(containers, target.state.node());
        quota.allows(namespace, &usage, target.quota_labels, more)
    }

    fn claims_of<'a>(&'a self, pod: &'a Pod) -> impl Iterator<Item = &'a ResourceClaim> {
        let names = if self.settings.dra { Some(pod.claim_names()) } else { None };
        names.into_iter().flatten().filter_map(|name| match name {
            ClaimName::Known(name) => {
                self.claims.known.get(&(pod.metadata.namespace.clone(), name.to_owned()))
            }
            ClaimName::Pending(_) => None,
        })
    }

    /// Books the claims of a pod on its node, with the GPUs that were allocated or with better ones. `pod` and `claims`
    /// must have been read from the API server, because kube-scheduler wrote them moments ago.
    ///
    /// # Errors
    /// Fails without a booking if a claim cannot be served on the node.
    pub fn book_claims(
        &mut self,
        args: &BindingArgs,
        pod: &Pod,
        claims: &[ResourceClaim],
        now: Timestamp,
    ) -> Result<Vec<ClaimPlan>, ClaimRefusal> {
        // What evictions have made free for the pod is for its claims.
        let is_claimant = self.lift_evictions(&Claimant::Pod(PodUid(args.pod_uid.clone())));
        let mut plans = Vec::new();
        for claim in claims {
            match self.book_claim(args, pod, claim, now) {
                Ok(plan) => plans.extend(plan),
                Err(refusal) => {
                    plans.iter().for_each(|plan: &ClaimPlan| self.drop_booking(&plan.uid));
                    self.refresh_evictions();
                    return Err(refusal);
                }
            }
        }
        if is_claimant {
            self.end_evictions();
        }
        Ok(plans)
    }

    fn book_claim(
        &mut self,
        args: &BindingArgs,
        pod: &Pod,
        claim: &ResourceClaim,
        now: Timestamp,
    ) -> Result<Option<ClaimPlan>, ClaimRefusal> {
        let name = || claim.metadata.name.clone();
        if claim.status.allocation.is_none() {
            return Err(ClaimRefusal::NotAllocated(name()));
        }
        if dra::pool(claim).is_none() {
            return Ok(None);
        }
        if !claim.is_reserved_for(&args.pod_uid) {
            return Err(ClaimRefusal::NotReserved(name()));
        }
        let uid = ClaimUid(claim.metadata.uid.clone());
        if self.claims.bookings.get(&uid).is_some_and(|booking| booking.ended.is_none()) {
            return Err(ClaimRefusal::Busy(name()));
        }
        let node_name = NodeName(args.node.clone());
        let refused = |reason| BindRefusal::Node { node: node_name.clone(), reason };
        let node = self.readable_node(&args.node).map_err(refused)?;
        let parsed = ParsedPod::of(self, pod).map_err(BindRefusal::from)?;
        let parts = dra::claim_parts(claim, &node.spec.node)
            .map_err(|reason| ClaimRefusal::Allocation { claim: name(), reason: Box::new(reason) })?;
        if parts.is_empty() {
            return Ok(None);
        }
        let holder = uid.holder();
        let without = self.view.state_without(&node_name, &holder);
        let without = without.as_ref().unwrap_or(node.state);
        let exchange = dra::exchange(claim, &args.pod_uid, &self.claims.classes);
        let freedom = exchange.as_ref().copied().unwrap_or(Exchange::None);
        let links = parsed.request(MemoryUnit::GiB).link_sensitivity;
        let (parts, replaced) = match review(without, &parts, freedom, &parsed.policy, links) {
            Review::Keep => (parts, None),
            Review::Replace { parts, why } => (parts, Some(why)),
            Review::NoRoom(gpu) => {
                let (claim, node) = (name(), node_name.clone());
                return Err(match exchange {
                    Err(reason) => ClaimRefusal::Fixed { claim, gpu, node, reason: Box::new(reason) },
                    Ok(_) => ClaimRefusal::NoRoom { claim, gpu, node },
                });
            }
        };
        let containers = grants(&parts);
        self.check_claim_quota(claim, &args.pod_uid, &node_name, &containers)
            .map_err(|over| refused(RejectReason::Quota(over)))?;
        let (cpu, memory) = (MilliCpu::ZERO, MiB::ZERO);
        let grant = PodGrant { pod: holder.clone(), node: node_name.clone(), cpu, memory, containers };
        self.view.remove_pod(&holder);
        if let Err(conflict) = self.view.book(grant, claim.metadata.namespace.clone()) {
            self.settle_claim(&key(claim));
            return Err(BindRefusal::from(conflict).into());
        }
        let booking = ClaimBooking {
            key: key(claim),
            node: node_name,
            parts: parts.clone(),
            begun: now.steady,
            ended: None,
        };
        self.claims.bookings.insert(uid.clone(), booking);
        Ok(Some(ClaimPlan { uid, parts, replaced }))
    }

    /// Records the end of a claim's part in a bind.
    pub fn end_claim(&mut self, uid: &ClaimUid, outcome: ClaimOutcome, now: Timestamp) {
        if outcome == ClaimOutcome::Unwritten {
            return self.drop_booking(uid);
        }
        let Some(booking) = self.claims.bookings.get_mut(uid) else { return };
        booking.ended = Some(now.steady);
        let key = booking.key.clone();
        let shown = self.watched_parts(&key);
        if self.claims.bookings.get(uid).is_some_and(|booking| booking.is_shown(shown.as_ref())) {
            self.drop_booking(uid);
        }
    }

    /// Returns whether the watch should have confirmed a booking by now.
    #[must_use]
    pub fn has_expired_claims(&self, now: Timestamp) -> bool {
        self.claims.bookings.values().any(|booking| booking.is_expired(now))
    }

    /// Drops the bookings that the watch should have confirmed by now, so that the watch counts again.
    pub fn expire_claim_bookings(&mut self, now: Timestamp) {
        let bookings = self.claims.bookings.iter().filter(|(_, booking)| booking.is_expired(now));
        let due: Vec<ClaimUid> = bookings.map(|(uid, _)| uid.clone()).collect();
        due.iter().for_each(|uid| self.drop_booking(uid));
    }

    fn drop_booking(&mut self, uid: &ClaimUid) {
        let Some(booking) = self.claims.bookings.remove(uid) else { return };
        let is_known = self.claims.known.get(&booking.key).is_some_and(|claim| claim.metadata.uid == uid.0);
        if is_known {
            self.settle_claim(&booking.key);
        } else {
            self.view.remove_pod(&uid.holder());
        }
    }
}

// === impl Claims ===

impl Claims {
    fn unindex(&mut self, key: &ClaimKey) {
        let Some(pool) = self.known.get(key).and_then(dra::pool) else { return };
        let node = NodeName(pool.to_owned());
        if let Some(claims) = self.on_node.get_mut(&node) {
            claims.remove(key);
            if claims.is_empty() {
                self.on_node.remove(&node);
            }
        }
    }
}

// === impl ClaimBooking ===

impl ClaimBooking {
    fn is_expired(&self, now: Timestamp) -> bool {
        // A bind takes seconds, so one without an end was interrupted.
        now.steady.saturating_sub(self.ended.unwrap_or(self.begun)) > UNCONFIRMED_PERIOD
    }

    /// Returns whether the watch shows the booked GPUs.
    fn is_shown(&self, shown: Option<&(NodeName, Vec<ClaimPart>)>) -> bool {
        let Some((node, parts)) = shown else { return false };
        *node == self.node && grants(parts) == grants(&self.parts)
    }
}

fn key(claim: &ResourceClaim) -> ClaimKey {
    (claim.metadata.namespace.clone(), claim.metadata.name.clone())
}
