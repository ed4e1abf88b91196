//! Binding a pod: the GPUs are chosen and booked in one step, then the booking is confirmed or rolled back.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tessera_core::admission::RejectReason;
use tessera_core::grant::{PodGrant, gpus as gpus_of};
use tessera_core::ledger::Conflict;
use tessera_core::placement::describe;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::extender::BindingArgs;
use tessera_wire::foreign::objects::{Pod, PodSpec};
use tessera_wire::tessera::grant::{self, BadGrant};
use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};

use super::pods::ListGeneration;
use super::{GpuPod, State};

/// A booking that the watch has not confirmed yet.
#[derive(Clone, Debug)]
pub(super) struct Booking {
    node: NodeName,
    order: BindOrder,
    /// Bindings under way to the API server.
    in_flight: u32,
    /// True if the API server has accepted a Binding.
    bound: bool,
    /// Time of the last Binding whose outcome is unknown.
    uncertain_since: Option<Duration>,
    /// Time of the booking.
    booked_at: Duration,
    /// True if a list did not contain the pod: the pod is newer than the list, or is gone.
    unlisted: bool,
    /// True if kube-scheduler sends the Binding itself, so its outcome is known only from the watch.
    reserved: bool,
}

/// All bookings that the watch has not confirmed yet. A pod may have one of each kind.
#[derive(Debug, Default)]
pub(super) struct Bookings {
    current: HashMap<PodUid, Booking>,
    in_doubt: HashMap<PodUid, Booking>,
}

/// Distinguishes the two bookings of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BookingKind {
    /// The newest booking of the pod.
    Current,
    /// A booking in doubt: its Binding has an unknown outcome, and the pod has been booked on another node since.
    InDoubt,
}

/// The current time, passed in by the caller because the state has no clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timestamp {
    /// Monotonic time since the start of the process.
    pub steady: Duration,
    /// Nanoseconds since 1970, by which older tools order pods.
    pub unix_nanos: u128,
}

impl Timestamp {
    /// Returns the seconds since 1970.
    pub(crate) fn unix_seconds(self) -> i64 {
        i64::try_from(self.unix_nanos / 1_000_000_000).unwrap_or(i64::MAX)
    }
}

/// The next step of a bind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindStep {
    /// No step is left: an earlier call has bound the pod to this node.
    Done,
    /// The watch has not shown the pod yet. The caller reads it from the API server and calls
    /// [`State::begin_bind_with`].
    Fetch,
    /// The caller sends a Binding and reports the outcome to [`State::end_bind`].
    Send(BindOrder),
}

/// The contents of a Binding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindOrder {
    /// The annotations with the grant.
    pub annotations: BTreeMap<String, String>,
    /// The chosen GPUs as text.
    pub chosen: String,
    /// The reason for the choice as text.
    pub why: String,
    /// Time before which the Binding must not be sent, because the kubelet may not know the devices of the GPUs yet.
    pub not_before: Option<Duration>,
}

/// The outcome of a Binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The API server accepted the Binding.
    Bound,
    /// The API server refused the Binding.
    Refused,
    /// The outcome is unknown: the connection broke, or the call timed out.
    Unknown,
}

/// A pod whose Binding has an unknown outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UncertainBinding {
    uid: PodUid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
}

/// The reason why a pod is not bound. The state is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum BindRefusal {
    /// The pod's request cannot be parsed.
    #[error(transparent)]
    Pod(#[from] BadPodObject),
    /// The node cannot take the pod any more.
    #[error("node {node}: {reason}")]
    Node {
        /// The chosen node.
        node: NodeName,
        /// Why the node rejects the pod.
        reason: RejectReason,
    },
    /// The pod is bound to another node.
    #[error("pod {pod} is already on node {node}")]
    Elsewhere {
        /// UID of the pod that is bound elsewhere.
        pod: PodUid,
        /// The other node.
        node: NodeName,
    },
    /// A Binding to another node is under way.
    #[error("pod {pod} is being bound to node {node} by another call")]
    Busy {
        /// UID of the pod that another call binds.
        pod: PodUid,
        /// The other node.
        node: NodeName,
    },
    /// The API server has the pod, but the last list of pods did not contain it, so its booking could not be
    /// confirmed.
    #[error("pod {0} is not in the list of pods yet; kube-scheduler retries after the watch has shown it")]
    Unseen(PodUid),
    /// Another scheduler is responsible for the pod.
    #[error(
        "pod {pod} is scheduled by {scheduler}, which this extender does not serve; --scheduler-name adds it"
    )]
    NotServed {
        /// UID of the pod.
        pod: PodUid,
        /// The scheduler that the pod names.
        scheduler: String,
    },
    /// The pod names none of the resources for which kube-scheduler calls this extender.
    #[error("pod {0} requests no GPU resource; the extender binds only pods that do (managedResources)")]
    NoGpus(PodUid),
    /// The place of the pod in its gang is on another node.
    #[error("the place of pod {pod} in its gang is on node {node}; kube-scheduler retries")]
    OtherPlace {
        /// UID of the pod.
        pod: PodUid,
        /// The node of the place.
        node: NodeName,
    },
    /// The gang of the pod has no places at present.
    #[error("gang {gang} of pod {pod} has no reserved GPUs any more; kube-scheduler retries")]
    NoPlace {
        /// UID of the pod.
        pod: PodUid,
        /// The gang of the pod.
        gang: String,
    },
    /// The ledger has no room for the grant.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The grant cannot be written as annotations.
    #[error(transparent)]
    Grant(#[from] BadGrant),
}

/// Time after which the outcome of a Binding can be read from the API server. The API server gives up on a
/// request after one minute, so a Binding without an answer has either been applied by then or never will be.
const UNCERTAIN_PERIOD: Duration = Duration::from_secs(75);

/// The same time for a Binding that kube-scheduler sends itself. kube-scheduler waits up to 10 minutes for the volumes of
/// a pod before it sends one.
const RESERVED_PERIOD: Duration = Duration::from_secs(600 + 75);

// === impl Booking ===

impl Booking {
    /// Returns whether no Binding without an answer can be under way any more.
    fn is_certain(&self, now: Timestamp) -> bool {
        let period = if self.reserved { RESERVED_PERIOD } else { UNCERTAIN_PERIOD };
        let since = self.uncertain_since.unwrap_or(now.steady);
        self.in_flight == 0 && now.steady.saturating_sub(since) > period
    }
}

// === impl Bookings ===

impl Bookings {
    /// Returns the number of bookings.
    pub(super) fn len(&self) -> usize {
        self.current.len() + self.in_doubt.len()
    }

    /// Returns whether the pod is booked on a node, and not only in doubt.
    pub(super) fn has_current(&self, uid: &PodUid) -> bool {
        self.current.contains_key(uid)
    }

    fn of_kind(&mut self, kind: BookingKind) -> &mut HashMap<PodUid, Booking> {
        match kind {
            BookingKind::Current => &mut self.current,
            BookingKind::InDoubt => &mut self.in_doubt,
        }
    }
}

// === impl State ===

impl State {
    /// Chooses the GPUs and books them. Later calls see them as taken, whatever the outcome of the Binding.
    pub fn begin_bind(&mut self, args: &BindingArgs, now: Timestamp) -> Result<BindStep, BindRefusal> {
        let uid = PodUid(args.pod_uid.clone());
        let name = NodeName(args.node.clone());
        if let Some(booking) = self.bookings.current.get_mut(&uid) {
            if booking.node == name {
                if booking.bound {
                    return Ok(BindStep::Done);
                }
                booking.in_flight += 1;
                // kube-scheduler leaves the Binding to the bind verb, so it has not sent one for the reservation.
                if std::mem::take(&mut booking.reserved) {
                    booking.uncertain_since = None;
                }
                return Ok(BindStep::Send(booking.order.clone()));
            }
            let is_busy = booking.bound || booking.in_flight > 0;
            let node = booking.node.clone();
            // A pod has at most one booking in doubt. It must be resolved before a second one.
            if is_busy || self.bookings.in_doubt.contains_key(&uid) {
                return Err(BindRefusal::Busy { pod: uid, node });
            }
            self.put_in_doubt(&uid, now);
        }
        let Some(pod) = self.pod(&uid) else { return Ok(BindStep::Fetch) };
        match &pod.node {
            Some(node) if *node == name => return Ok(BindStep::Done),
            Some(node) => return Err(BindRefusal::Elsewhere { pod: uid, node: node.clone() }),
            None => {}
        }
        self.check_scheduler(&uid, &pod.spec)?;
        let was_passed = self.cancel_passed(&uid);
        let booked = self.book_anew(&uid, &name, now);
        if was_passed && booked.is_err() {
            self.keep_what_is_free();
        }
        let order = booked?;
        let booking = Booking {
            node: name,
            order: order.clone(),
            in_flight: 1,
            bound: false,
            uncertain_since: None,
            booked_at: now.steady,
            unlisted: false,
            reserved: false,
        };
        self.bookings.current.insert(uid, booking);
        Ok(BindStep::Send(order))
    }

    /// Chooses GPUs of the node for a waiting pod and enters them into the ledger.
    fn book_anew(&mut self, uid: &PodUid, node: &NodeName, now: Timestamp) -> Result<BindOrder, BindRefusal> {
        let pod = self.pod(uid).ok_or_else(|| BindRefusal::Unseen(uid.clone()))?;
        let (grant, order) = self.decide(uid, pod, node, now)?;
        let namespace = pod.namespace.clone();
        self.view.book(grant, namespace)?;
        Ok(order)
    }

    /// Continues a bind with the pod as read from the API server. Returns the Binding to send, or `None` if the
    /// pod is bound already. A pod that names a GPU resource with the amount 0 gets a Binding without a grant.
    pub fn begin_bind_with(
        &mut self,
        pod: Pod,
        read_at: ListGeneration,
        args: &BindingArgs,
        now: Timestamp,
    ) -> Result<Option<BindOrder>, BindRefusal> {
        let uid = PodUid(args.pod_uid.clone());
        self.check_scheduler(&uid, &pod.spec)?;
        if !pod.spec.names_gpu_resources() {
            return Err(BindRefusal::NoGpus(uid));
        }
        let wants_gpu = pod.spec.asks_for_gpus();
        self.apply_read(pod, read_at);
        match self.begin_bind(args, now)? {
            BindStep::Done => Ok(None),
            BindStep::Send(order) => Ok(Some(order)),
            BindStep::Fetch if wants_gpu => Err(BindRefusal::Unseen(uid)),
            BindStep::Fetch => Ok(Some(BindOrder::default())),
        }
    }

    pub(crate) fn check_scheduler(&self, uid: &PodUid, spec: &PodSpec) -> Result<(), BindRefusal> {
        if self.settings.served.serve(&spec.scheduler_name) {
            return Ok(());
        }
        Err(BindRefusal::NotServed { pod: uid.clone(), scheduler: spec.scheduler_name.clone() })
    }

    fn decide(
        &self,
        uid: &PodUid,
        pod: &GpuPod,
        name: &NodeName,
        now: Timestamp,
    ) -> Result<(PodGrant, BindOrder), BindRefusal> {
        let refused = |reason| BindRefusal::Node { node: name.clone(), reason };
        let parsed = ParsedPod::new(self, &pod.namespace, &pod.spec, &pod.annotations)?;
        let node = self.readable_node(&name.0).map_err(refused)?;
        let request = parsed.request(node.spec.unit);
        let admission = self.admission(&node, &parsed, &request);
        admission.check_served().map_err(|mismatch| refused(mismatch.into()))?;
        let (containers, why) = match self.place_of_member(uid, name)? {
            Some(place) => {
                let why = self.describe_gang(uid).or_else(|| self.describe_reserved(uid));
                (place.containers.clone(), why.unwrap_or_default())
            }
            None => {
                let placement = admission.place().map_err(refused)?;
                let why = describe(node.state, &admission.request(), &parsed.policy, &placement);
                (placement.grants(&node.spec.node, &request), why)
            }
        };
        let mut annotations =
            grant::annotations(&pod.spec, &containers, &node.spec.node, node.spec.unit, now.unix_nanos)?;
        let gpus = gpus_of(&containers);
        annotations.insert(grant::REASON_KEY.to_owned(), why.clone());
        let not_before = self.releases.settled_at(now.steady, name, gpus, self.dialects(&pod.spec));
        let order = BindOrder { annotations, chosen: format!("GPU {gpus} of node {name}"), why, not_before };
        let (cpu, memory) = (request.cpu, request.memory);
        Ok((PodGrant { pod: uid.clone(), node: name.clone(), cpu, memory, containers }, order))
    }

    /// Returns the place that is reserved for a pod on this node, or `None` for a pod that is placed alone.
    fn place_of_member(&self, uid: &PodUid, node: &NodeName) -> Result<Option<&PodGrant>, BindRefusal> {
        if let Some(place) = self.reserved_place(uid) {
            // kube-scheduler may have a reason to prefer another node, and the reservation is given up then.
            return Ok(Some(place).filter(|place| place.node == *node));
        }
        if let Some(place) = self.ledger().place(uid) {
            return if place.node == *node {
                Ok(Some(place))
            } else {
                Err(BindRefusal::OtherPlace { pod: uid.clone(), node: place.node.clone() })
            };
        }
        match self.gang_of(uid) {
            Some((key, status)) if status.settled < status.size => {
                Err(BindRefusal::NoPlace { pod: uid.clone(), gang: key.to_string() })
            }
            _ => Ok(None),
        }
    }

    /// Records the outcome of a Binding. A booking with an unknown outcome is kept, because the pod may be bound.
    pub fn end_bind(&mut self, uid: &PodUid, outcome: BindOutcome, now: Timestamp) {
        let Some(booking) = self.bookings.current.get_mut(uid) else { return };
        booking.in_flight = booking.in_flight.saturating_sub(1);
        match outcome {
            BindOutcome::Bound => booking.bound = true,
            BindOutcome::Unknown => booking.uncertain_since = Some(now.steady),
            BindOutcome::Refused
                if booking.bound || booking.in_flight > 0 || booking.uncertain_since.is_some() => {}
            BindOutcome::Refused => {
                self.roll_back(uid, BookingKind::Current);
                // The gang of the pod may have members on nodes, so its GPUs are kept for the next attempt.
                self.plan_started_gangs(now);
                self.update_node_reservations(now);
            }
        }
    }

    /// Keeps a booking until the watch shows the Binding that kube-scheduler sends itself. Without one the booking is
    /// resolved like that of a Binding with an unknown outcome.
    pub fn keep_reservation(&mut self, uid: &PodUid, now: Timestamp) {
        self.end_bind(uid, BindOutcome::Unknown, now);
        if let Some(booking) = self.bookings.current.get_mut(uid) {
            booking.reserved = !booking.bound;
        }
    }

    /// Returns the node of the pod's reservation if it is among the offered ones, for another attempt of
    /// kube-scheduler with the same GPUs. The Binding of the last attempt may have been stored without an answer, so
    /// the reservation is never released here. It is put in doubt if its GPUs cannot be granted any more.
    pub fn repeat_reservation<'n>(
        &mut self,
        uid: &PodUid,
        mut offered: impl Iterator<Item = &'n str>,
        now: Timestamp,
    ) -> Option<&'n str> {
        let booking = self.bookings.current.get(uid).filter(|booking| booking.reserved)?;
        let node = offered.find(|name| *name == booking.node.0)?;
        if self.are_gpus_healthy(uid) {
            self.bookings.current.get_mut(uid)?.uncertain_since = Some(now.steady);
            return Some(node);
        }
        if !self.bookings.in_doubt.contains_key(uid) {
            self.put_in_doubt(uid, now);
        }
        None
    }

    fn are_gpus_healthy(&self, uid: &PodUid) -> bool {
        let Some(grant) = self.ledger().grant(uid) else { return false };
        let Some(state) = self.ledger().node(&grant.node) else { return false };
        let is_healthy =
            |index| state.node().gpus().iter().any(|gpu| gpu.index == index && gpu.health.is_healthy());
        grant.footprint().all(|(gpu, _)| is_healthy(gpu))
    }

    /// Returns the pods whose uncertain outcome can now be read from the API server. The caller reads each pod
    /// and calls [`State::resolve_uncertain`].
    #[must_use]
    pub fn uncertain_bindings(&self, now: Timestamp) -> Vec<UncertainBinding> {
        let past = |since: Duration| now.steady.saturating_sub(since) > UNCERTAIN_PERIOD;
        let is_due = |booking: &Booking| {
            let lost = !booking.bound && booking.is_certain(now);
            // The pod is bound, but may have been deleted before the watch showed it.
            lost || (booking.bound && booking.unlisted && past(booking.booked_at))
        };
        let all = self.bookings.current.iter().chain(&self.bookings.in_doubt);
        all.filter(|(_, booking)| is_due(booking))
            .filter_map(|(uid, _)| {
                let GpuPod { namespace, name, .. } = self.pod(uid)?;
                Some(UncertainBinding { uid: uid.clone(), namespace: namespace.clone(), name: name.clone() })
            })
            .collect()
    }

    /// Resolves an uncertain booking with the pod as read when no Binding can be under way any more.
    pub fn resolve_uncertain(&mut self, uncertain: &UncertainBinding, found: Option<Pod>, now: Timestamp) {
        let uid = &uncertain.uid;
        match found.filter(|pod| pod.metadata.uid == uid.0) {
            None => self.end_pod(uid.clone()),
            Some(pod) if !pod.spec.node_name.is_empty() => self.apply_newest_read(pod),
            Some(_) => {
                for kind in [BookingKind::Current, BookingKind::InDoubt] {
                    if self.bookings.of_kind(kind).get(uid).is_some_and(|booking| booking.is_certain(now)) {
                        self.roll_back(uid, kind);
                    }
                }
            }
        }
    }

    /// Removes a booking whose Binding failed.
    fn roll_back(&mut self, uid: &PodUid, kind: BookingKind) {
        let booking = self.bookings.of_kind(kind).remove(uid);
        self.rolled_back += 1;
        match kind {
            BookingKind::Current => self.view.remove_pod(uid),
            BookingKind::InDoubt => self.view.release_in_doubt(uid),
        }
        // Only the booking kept a pod that a list did not contain. If the pod exists, the watch will show it.
        if booking.is_some_and(|booking| booking.unlisted) {
            self.drop_missing_pod(uid.clone());
        }
    }

    /// Handles a pod that a list did not contain. A booked pod may be newer than the list, so it stays until the
    /// watch shows it or the booking is resolved.
    pub(super) fn pod_missing_from_list(&mut self, uid: &PodUid) {
        match self.bookings.current.get_mut(uid) {
            Some(booking) => booking.unlisted = true,
            None => self.drop_missing_pod(uid.clone()),
        }
    }

    /// Returns whether a list did not contain this pod and the watch has not shown it since.
    pub(super) fn is_missed(&self, uid: &PodUid) -> bool {
        self.missing.contains(uid) || self.bookings.current.get(uid).is_some_and(|booking| booking.unlisted)
    }

    /// Records that the watch has shown a pod, whatever earlier lists contained.
    pub(super) fn mark_shown(&mut self, uid: &PodUid) {
        self.unlisted_pods.remove(uid);
        self.missing.remove(uid);
        for kind in [BookingKind::Current, BookingKind::InDoubt] {
            if let Some(booking) = self.bookings.of_kind(kind).get_mut(uid) {
                booking.unlisted = false;
            }
        }
    }

    /// Ends the bookings of a pod, because the watch has shown its node or its end. The watch also decides about
    /// the pod's grant, but nothing else would release a booking in doubt.
    pub(super) fn confirm(&mut self, uid: &PodUid) {
        self.bookings.current.remove(uid);
        if self.bookings.in_doubt.remove(uid).is_some() {
            self.view.release_in_doubt(uid);
        }
    }

    /// Keeps the GPUs of an uncertain booking while its pod is bound to another node.
    fn put_in_doubt(&mut self, uid: &PodUid, now: Timestamp) {
        let Some(mut booking) = self.bookings.current.remove(uid) else { return };
        // kube-scheduler has ended the attempt of a reservation, so it sends no Binding for it later than now.
        if std::mem::take(&mut booking.reserved) {
            booking.uncertain_since = Some(now.steady);
        }
        self.view.put_in_doubt(uid);
        self.bookings.in_doubt.insert(uid.clone(), booking);
    }

    /// Returns whether the pod is known and has no node.
    #[must_use]
    pub fn is_waiting(&self, uid: &PodUid) -> bool {
        self.pod(uid).is_some_and(|pod| pod.node.is_none())
    }
}
