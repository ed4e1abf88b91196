//! Binding a pod: choose and book in one step, then confirm or take back.

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_core::admission::weigh;
use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::Conflict;
use tessera_core::placement::{describe, place};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::extender::BindingArgs;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::grant::{self, BadGrant};

use super::entries::PodEntry;
use super::pods::ListGeneration;
use super::{GpuPod, State};
use crate::verb::ask::{BadPodObject, ParsedPod};
use crate::verb::reason::RejectReason;

/// A promise of ours that no watch has shown yet.
#[derive(Clone, Debug)]
pub(super) struct Booking {
    node: NodeName,
    order: BindOrder,
    /// Calls that are on their way to the API server.
    in_flight: u32,
    /// Whether one of them succeeded.
    bound: bool,
    /// Since when nobody knows whether the API server took it.
    doubt: Option<Duration>,
    /// When it was made.
    made: Duration,
    /// Whether a list did not show the pod: it was made after the list, or is gone.
    unlisted: bool,
}

/// The time, from whoever has a clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timestamp {
    /// Since some moment in the past; never goes back.
    pub steady: Duration,
    /// Since 1970, nanoseconds: what old tools order pods by.
    pub unix_nanos: u128,
}

/// What is to be done for a bind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindStep {
    /// Nothing: the pod is there already, by an earlier call.
    Done,
    /// The watch has not shown the pod yet: ask the API server for it, then try again.
    Fetch,
    /// Send a Binding, then tell how it went.
    Send(BindOrder),
}

/// What is to be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindOrder {
    /// The Binding's annotations: the grant.
    pub annotations: BTreeMap<String, String>,
    /// Which GPUs, for people.
    pub chosen: String,
    /// Why these.
    pub why: String,
}

/// How a Binding went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The API server took it.
    Bound,
    /// It did not, and will not.
    Refused,
    /// Nobody knows: the connection broke, or time ran out.
    Unknown,
}

/// A pod of which nobody knows whether it was bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UncertainBinding {
    uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// Why a pod is not bound. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum BindRefusal {
    /// What the pod asks for cannot be read.
    #[error(transparent)]
    Ask(#[from] BadPodObject),
    /// The node will not do, though it did a moment ago.
    #[error("node {node}: {reason}")]
    Node {
        /// Which node.
        node: NodeName,
        /// Why not.
        reason: RejectReason,
    },
    /// The pod is on another node.
    #[error("pod {pod} is already on node {node}")]
    Elsewhere {
        /// Which pod.
        pod: PodUid,
        /// Where.
        node: NodeName,
    },
    /// Another call for another node is on its way.
    #[error("pod {pod} is just being bound to node {node}")]
    Busy {
        /// Which pod.
        pod: PodUid,
        /// Where.
        node: NodeName,
    },
    /// The API server has it, and the last list of pods had not. Its GPU could not be booked for good.
    #[error("pod {0} is not in the list of pods yet; it is bound when the watch shows it")]
    Unseen(PodUid),
    /// The book has no room for it, though a verdict said so.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The grant cannot be written.
    #[error(transparent)]
    Grant(#[from] BadGrant),
}

/// An API server gives up on a request after a minute: past that, one whose answer was lost has either happened, and can be asked
/// about, or never will.
const DOUBT: Duration = Duration::from_secs(75);

impl State {
    /// Chooses the GPUs and books them. Whoever comes next sees them taken, whatever becomes of the Binding.
    pub fn begin_bind(&mut self, args: &BindingArgs, now: Timestamp) -> Result<BindStep, BindRefusal> {
        let uid = PodUid(args.pod_uid.clone());
        let name = NodeName(args.node.clone());
        if let Some(booking) = self.bookings.get_mut(&uid) {
            if booking.node == name {
                if booking.bound {
                    return Ok(BindStep::Done);
                }
                booking.in_flight += 1;
                return Ok(BindStep::Send(booking.order.clone()));
            }
            let is_busy = booking.bound || booking.in_flight > 0;
            let node = booking.node.clone();
            // One doubt can be set aside; a second node in doubt is waited for.
            if is_busy || self.bookings.contains_key(&aside(&uid)) {
                return Err(BindRefusal::Busy { pod: uid, node });
            }
            self.set_doubt_aside(&uid);
        }
        let Some(pod) = self.pod(&uid) else { return Ok(BindStep::Fetch) };
        match &pod.node {
            Some(node) if *node == name => return Ok(BindStep::Done),
            Some(node) => return Err(BindRefusal::Elsewhere { pod: uid, node: node.clone() }),
            None => {}
        }
        let (grant, order) = self.decide(&uid, pod, &name, now)?;
        self.ledger.book(grant)?;
        self.charge(&uid);
        let booking = Booking {
            node: name,
            order: order.clone(),
            in_flight: 1,
            bound: false,
            doubt: None,
            made: now.steady,
            unlisted: false,
        };
        self.bookings.insert(uid, booking);
        Ok(BindStep::Send(order))
    }

    /// The same for a pod the API server had to be asked for. What is to be sent, unless the pod is there already; for one that asks for no GPU
    /// that is an order without a grant.
    pub fn begin_bind_with(
        &mut self,
        pod: Pod,
        asked: ListGeneration,
        args: &BindingArgs,
        now: Timestamp,
    ) -> Result<Option<BindOrder>, BindRefusal> {
        let wants_gpu = pod.spec.asks_for_gpus();
        self.apply_read(pod, asked);
        match self.begin_bind(args, now)? {
            BindStep::Done => Ok(None),
            BindStep::Send(order) => Ok(Some(order)),
            BindStep::Fetch if wants_gpu => Err(BindRefusal::Unseen(PodUid(args.pod_uid.clone()))),
            BindStep::Fetch => Ok(Some(BindOrder::default())),
        }
    }

    fn decide(
        &self,
        uid: &PodUid,
        pod: &GpuPod,
        name: &NodeName,
        now: Timestamp,
    ) -> Result<(PodGrant, BindOrder), BindRefusal> {
        let refused = |reason| BindRefusal::Node { node: name.clone(), reason };
        let ask = ParsedPod::new(self, &pod.namespace, &pod.spec, &pod.annotations)?;
        let judged = self.judge(name, &ask).map_err(refused)?;
        let request = ask.request(judged.spec.unit);
        let weighed = weigh(judged.state, &request);
        let placement = place(judged.state, &weighed, &ask.policy, GpuSet::EMPTY)
            .map_err(|refusal| refused(RejectReason::Placement(refusal)))?;
        let containers = placement.grants(&request);
        let annotations =
            grant::annotations(&pod.spec, &containers, &judged.spec.node, judged.spec.unit, now.unix_nanos)?;
        let gpus = placement.gpus.iter().copied().fold(GpuSet::EMPTY, GpuSet::union);
        let why = describe(judged.state, &weighed, &ask.policy, &placement);
        let order = BindOrder { annotations, chosen: format!("GPU {gpus} of node {name}"), why };
        let (cpu, memory) = (request.cpu, request.memory);
        Ok((PodGrant { pod: uid.clone(), node: name.clone(), cpu, memory, containers }, order))
    }

    /// How a Binding went. A booking whose fate is unknown is kept: the GPU may be taken.
    pub fn end_bind(&mut self, uid: &PodUid, outcome: BindOutcome, now: Timestamp) {
        let Some(booking) = self.bookings.get_mut(uid) else { return };
        booking.in_flight = booking.in_flight.saturating_sub(1);
        match outcome {
            BindOutcome::Bound => booking.bound = true,
            BindOutcome::Unknown => booking.doubt = booking.doubt.or(Some(now.steady)),
            BindOutcome::Refused if booking.bound || booking.in_flight > 0 || booking.doubt.is_some() => {}
            BindOutcome::Refused => self.take_back(uid),
        }
    }

    /// Pods whose bookings have been in doubt for so long that the API server must know by now. Ask it, then
    /// [`State::settle`].
    #[must_use]
    pub fn uncertain_bindings(&self, now: Timestamp) -> Vec<UncertainBinding> {
        let past = |since: Duration| now.steady.saturating_sub(since) > DOUBT;
        let is_due = |booking: &Booking| {
            let lost = booking.in_flight == 0 && !booking.bound && booking.doubt.is_some_and(past);
            // Bound, and perhaps deleted before any watch showed it.
            lost || (booking.bound && booking.unlisted && past(booking.made))
        };
        let due = self.bookings.iter().filter(|(_, booking)| is_due(booking));
        due.filter_map(|(booked, _)| {
            let uid = from_aside(booked);
            let pod = self.pod(&uid)?;
            Some(UncertainBinding { uid, namespace: pod.namespace.clone(), name: pod.name.clone() })
        })
        .collect()
    }

    /// The API server's word on a pod in doubt, asked after the doubt was due: nothing of it is on its way any more.
    pub fn resolve_uncertain(&mut self, doubt: &UncertainBinding, found: Option<Pod>, now: Timestamp) {
        let uid = &doubt.uid;
        match found.filter(|pod| pod.metadata.uid == uid.0) {
            None => self.end_pod(uid.clone()),
            Some(pod) if !pod.spec.node_name.is_empty() => self.apply_newest_read(pod),
            Some(_) => {
                let past = |booking: &Booking| {
                    let since = booking.doubt.unwrap_or(now.steady);
                    booking.in_flight == 0 && now.steady.saturating_sub(since) > DOUBT
                };
                for booked in [uid.clone(), aside(uid)] {
                    if self.bookings.get(&booked).is_some_and(past) {
                        self.take_back(&booked);
                    }
                }
            }
        }
    }

    /// Nothing came of a booking.
    fn take_back(&mut self, booked: &PodUid) {
        let booking = self.bookings.remove(booked);
        self.rolled_back += 1;
        self.make_room(booked);
        // Nothing else kept a pod that no list has shown. If it is there, the watch will tell.
        if booking.is_some_and(|booking| booking.unlisted) {
            self.drop_missing_pod(from_aside(booked));
        }
    }

    /// A list did not show this pod. One that is booked may have been made after the list, and asked for by name: it stays
    /// until the watch or time tells.
    pub(super) fn pod_missing_from_list(&mut self, uid: &PodUid) {
        match self.bookings.get_mut(uid) {
            Some(booking) => booking.unlisted = true,
            None => self.drop_missing_pod(uid.clone()),
        }
    }

    /// Whether a list did not show this pod, and no watch has since.
    pub(super) fn is_missed(&self, uid: &PodUid) -> bool {
        self.missing.contains(uid) || self.bookings.get(uid).is_some_and(|booking| booking.unlisted)
    }

    /// The watch shows a pod: it is there, whatever lists have missed.
    pub(super) fn mark_shown(&mut self, uid: &PodUid) {
        self.unlisted_pods.remove(uid);
        self.missing.remove(uid);
        if let Some(booking) = self.bookings.get_mut(uid) {
            booking.unlisted = false;
        }
    }

    /// The watch has told what became of the pod: from now on only that counts.
    pub(super) fn confirm(&mut self, uid: &PodUid) {
        self.bookings.remove(uid);
        let aside = aside(uid);
        if self.bookings.remove(&aside).is_some() {
            self.make_room(&aside);
        }
    }

    /// A booking in doubt, while its pod goes to another node: it keeps its GPUs under another name until the doubt is over.
    fn set_doubt_aside(&mut self, uid: &PodUid) {
        let Some(booking) = self.bookings.remove(uid) else { return };
        let Some(grant) = self.ledger.grant(uid).cloned() else { return };
        self.leave(uid);
        let aside = aside(uid);
        self.ledger.observe(PodGrant { pod: aside.clone(), ..grant });
        self.bookings.insert(aside, booking);
    }

    /// Whether the pod waits.
    #[must_use]
    pub fn is_waiting(&self, uid: &PodUid) -> bool {
        matches!(self.pods.get(uid), Some(PodEntry::Gpu(pod)) if pod.node.is_none())
    }
}

const ASIDE: &str = "/in-doubt";

fn aside(uid: &PodUid) -> PodUid {
    PodUid(format!("{uid}{ASIDE}"))
}

fn from_aside(booked: &PodUid) -> PodUid {
    PodUid(booked.0.strip_suffix(ASIDE).unwrap_or(&booked.0).to_owned())
}
