//! Evictions that make room for a waiting gang, and of gangs that kube-scheduler preempts in part.
//!
//! One plan at a time is under way. The GPUs that it frees are kept for its gang in the same step in which they become
//! free. Plans are made in `verb::evictions` and carried out by `run::evictions`, one pod after the other. Nothing of
//! this is stored: a new leader makes a new plan, in which pods that end already count as gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::{Reservation, ReservationName};
use tessera_core::units::{Count, NodeName, PodUid};
use tessera_wire::tessera::eviction;
use tessera_wire::tessera::gang::GangKey;

use super::hold_back::free_parts;
use super::{GangNotice, State, Timestamp};

/// Time for which a plan is carried out. Pods may write checkpoints before they end, and budgets may refuse evictions
/// until replacements run.
pub(crate) const EVICTION_PERIOD: Duration = Duration::from_secs(600);

/// Interval between two plans for a gang if no evictions make room.
const PLAN_INTERVAL: Duration = Duration::from_secs(5);

/// Time after which an eviction that was refused or not answered is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Pods that the events about a gang name.
const MAX_NAMED_PODS: usize = 5;

/// The evictions under way.
#[derive(Debug, Default)]
pub(super) struct Evictions {
    room: Option<Room>,
    /// Gangs of which kube-scheduler preempts some pods.
    broken: BTreeMap<GangKey, Victims>,
    /// Times before which no plan is made for these gangs.
    paused_until: BTreeMap<GangKey, Duration>,
}

/// The plan under way.
#[derive(Debug)]
struct Room {
    plan: RoomPlan,
    victims: Victims,
    /// True if all pods of the plan are gone.
    is_free: bool,
}

/// Pods that are to be evicted.
#[derive(Debug)]
struct Victims {
    pods: BTreeMap<PodUid, Victim>,
    until: Duration,
    why: String,
}

#[derive(Debug, Default)]
struct Victim {
    is_accepted: bool,
    retry_at: Duration,
}

/// Evictions after which a gang has its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomPlan {
    /// The gang that waits.
    pub gang: GangKey,
    /// The priority of its pods. Only pods of lower priority are evicted.
    pub priority: i32,
    /// The places of its pods.
    pub places: Vec<PodGrant>,
    /// The pods to evict, in this order.
    pub victims: Vec<PodUid>,
}

/// A pod to evict now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionOrder {
    /// UID of the pod.
    pub uid: PodUid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// The reason as users read it.
    pub why: String,
}

/// The answer to an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionReply {
    /// The pod ends.
    Accepted,
    /// The pod is gone.
    Gone,
    /// A budget forbids the eviction at present, or there was no answer.
    TryAgain,
}

impl Victims {
    fn new(pods: impl IntoIterator<Item = PodUid>, until: Duration, why: String) -> Self {
        Self { pods: pods.into_iter().map(|pod| (pod, Victim::default())).collect(), until, why }
    }
}

impl State {
    /// Returns whether the scheduler may evict pods.
    #[must_use]
    pub fn may_evict(&self) -> bool {
        self.settings.evict
    }

    /// Returns whether [`State::update_evictions`] has something to do.
    #[must_use]
    pub fn has_evictions(&self) -> bool {
        self.evictions.room.is_some() || !self.evictions.broken.is_empty()
    }

    /// Returns the gang for which the next plan is made: complete, without room, and of the highest priority. While a
    /// plan is under way, no other one is made.
    #[must_use]
    pub fn gang_without_room(&self, now: Timestamp) -> Option<GangKey> {
        if !self.may_evict() || self.evictions.room.is_some() {
            return None;
        }
        let waits = |key: &GangKey| {
            let paused = self.evictions.paused_until.get(key).copied().unwrap_or_default();
            paused <= now.steady && !self.is_paused(key, now)
        };
        self.waiting_gangs().filter(|(_, key)| waits(key)).min().map(|(_, key)| key)
    }

    /// Records that no evictions make room for a gang at present.
    pub fn defer_evictions(&mut self, gang: GangKey, now: Timestamp) {
        self.evictions.paused_until.retain(|_, until| *until > now.steady);
        self.evictions.paused_until.insert(gang, now.steady.saturating_add(PLAN_INTERVAL));
    }

    /// Starts to carry out a plan, and keeps what is free of its places. Returns what the pods of the gang should be
    /// told. A plan whose gang has found room since is dropped.
    pub fn adopt_evictions(&mut self, plan: RoomPlan, now: Timestamp) -> Option<GangNotice> {
        let RoomPlan { gang, priority, victims, .. } = &plan;
        if self.evictions.room.is_some() || !self.waits_for_room(gang) {
            return None;
        }
        self.end_hold_back_for(gang, *priority);
        let names = self.names_of(victims);
        let why = format!("gang {gang} of priority {priority} needs its GPUs");
        let message = format!(
            "evicting {} of lower priority, so that all pods of gang {gang} get GPUs: {names}",
            Count(victims.len(), "pod")
        );
        let notice = GangNotice { pods: self.pods_of_gang(gang), message };
        let until = now.steady.saturating_add(EVICTION_PERIOD);
        let victims = Victims::new(victims.iter().cloned(), until, why);
        let is_needed = !victims.pods.is_empty();
        self.evictions.room = Some(Room { plan, victims, is_free: false });
        self.refresh_evictions();
        is_needed.then_some(notice)
    }

    /// Ends plans that are over. Returns what the pods of gangs that got no room in time should be told.
    pub fn update_evictions(&mut self, now: Timestamp) -> Option<GangNotice> {
        let left: Vec<(GangKey, bool)> = self
            .evictions
            .broken
            .iter()
            .map(|(gang, victims)| (gang.clone(), victims.until > now.steady && self.has_left(victims)))
            .collect();
        left.iter().filter(|(_, has_left)| !has_left).for_each(|(gang, _)| {
            self.evictions.broken.remove(gang);
        });
        let room = self.evictions.room.as_ref()?;
        let gang = room.plan.gang.clone();
        if !self.waits_for_room(&gang) {
            self.end_evictions();
            return None;
        }
        let is_free = !self.has_left(&room.victims);
        let timeout = self.settings.gang_timeout;
        let room = self.evictions.room.as_mut()?;
        if is_free && !room.is_free {
            // kube-scheduler may have a reason of its own to keep the gang from its places.
            room.is_free = true;
            room.victims.until = room.victims.until.min(now.steady.saturating_add(timeout));
        }
        if now.steady < room.victims.until {
            self.refresh_evictions();
            return None;
        }
        let left: Vec<PodUid> = room.victims.pods.keys().cloned().collect();
        let left: Vec<PodUid> = left.into_iter().filter(|pod| self.pod(pod).is_some()).collect();
        let reason = match left.is_empty() {
            true => "its pods were not bound to the GPUs that became free".to_owned(),
            false => format!("{} did not end in time: {}", Count(left.len(), "pod"), self.names_of(&left)),
        };
        let message = format!("evictions made no room for gang {gang}, which tries again later: {reason}");
        self.evictions.paused_until.insert(gang.clone(), now.steady.saturating_add(EVICTION_PERIOD));
        self.end_evictions();
        Some(GangNotice { pods: self.pods_of_gang(&gang), message })
    }

    /// Returns the pod to evict now. The caller sends the eviction and calls [`State::record_eviction`].
    #[must_use]
    pub fn next_eviction(&self, now: Timestamp) -> Option<EvictionOrder> {
        let room = self.evictions.room.as_ref();
        // The order of the plan counts.
        let planned = room.into_iter().flat_map(|room| {
            room.plan
                .victims
                .iter()
                .filter_map(|uid| Some((uid, room.victims.pods.get(uid)?, &room.victims.why)))
        });
        let broken = self.evictions.broken.values();
        let broken = broken.flat_map(|all| all.pods.iter().map(|(uid, victim)| (uid, victim, &all.why)));
        planned.chain(broken).find_map(|(uid, victim, why)| {
            let is_due = !victim.is_accepted && victim.retry_at <= now.steady;
            let pod = self.pod(uid).filter(|pod| is_due && pod.node.is_some() && !pod.is_ending)?;
            let (namespace, name) = (pod.namespace.clone(), pod.name.clone());
            Some(EvictionOrder { uid: uid.clone(), namespace, name, why: why.clone() })
        })
    }

    /// Records the answer to an eviction.
    pub fn record_eviction(&mut self, uid: &PodUid, reply: EvictionReply, now: Timestamp) {
        let Evictions { room, broken, .. } = &mut self.evictions;
        let all = room.iter_mut().map(|room| &mut room.victims).chain(broken.values_mut());
        for victim in all.filter_map(|victims| victims.pods.get_mut(uid)) {
            match reply {
                EvictionReply::Accepted | EvictionReply::Gone => victim.is_accepted = true,
                EvictionReply::TryAgain => victim.retry_at = now.steady.saturating_add(RETRY_INTERVAL),
            }
        }
    }

    /// Evicts the other pods of a gang of which kube-scheduler preempts a pod. Called before the pod is forgotten.
    pub(super) fn follow_preemption(&mut self, uid: &PodUid) {
        if !self.may_evict() || !self.pod(uid).is_some_and(|pod| pod.is_preempted && pod.node.is_some()) {
            return;
        }
        let Some(gang) = self.placed_gang_of(uid).cloned() else { return };
        if self.evictions.broken.contains_key(&gang) {
            return;
        }
        let others: Vec<PodUid> = self.gang_on_nodes(&gang).filter(|other| *other != uid).cloned().collect();
        let may_go = |uid: &PodUid| {
            self.pod(uid).is_some_and(|pod| eviction::fixed_for_others(&pod.annotations).is_none())
        };
        let others: BTreeSet<PodUid> = others.into_iter().filter(may_go).collect();
        let why = format!("kube-scheduler preempts another pod of gang {gang}");
        let until = self.event_time.saturating_add(EVICTION_PERIOD);
        if !others.is_empty() {
            self.evictions.broken.insert(gang, Victims::new(others, until, why));
        }
    }

    /// Keeps what is free of the places of the plan. Called whenever a pod ends.
    pub(super) fn refresh_evictions(&mut self) {
        let Some(Room { plan, victims, .. }) = &self.evictions.room else { return };
        let RoomPlan { gang, places, .. } = plan;
        let (name, until) = (name(gang), victims.until);
        let mut gpus: BTreeMap<&NodeName, GpuSet> = BTreeMap::new();
        for place in places {
            let all = gpus.entry(&place.node).or_default();
            *all = all.union(place.gpus());
        }
        let known = self.view.ledger().reservation(&name).map(|known| known.places).unwrap_or_default();
        let free = gpus.into_iter().filter_map(|(node, gpus)| {
            // No pod has such a UID, because UIDs have no spaces.
            let holder = PodUid(format!("room {gang} {node}"));
            let without = self.view.state_without(node, &holder);
            free_parts(without.as_ref().or(self.view.ledger().node(node))?, gpus, holder)
        });
        let free: Vec<PodGrant> = free.collect();
        if free == known {
            return;
        }
        let owner = format!("gang {gang}, for which pods are evicted");
        self.view.cancel_reservation(&name);
        // The parts are free, so a conflict is impossible.
        let _reserved = self.view.reserve(Reservation { name, owner, until, places: free }, None);
    }

    /// Frees the GPUs that are kept for a gang while it is placed. Returns whether any are kept.
    pub(crate) fn lift_evictions(&mut self, gang: &GangKey) -> bool {
        let is_own = self.evictions.room.as_ref().is_some_and(|room| room.plan.gang == *gang);
        if is_own {
            self.view.cancel_reservation(&name(gang));
        }
        is_own
    }

    /// Keeps GPUs again for a gang that was not placed, or ends the evictions for one that was.
    pub(crate) fn restore_evictions(&mut self, gang: &GangKey) {
        if self.waits_for_room(gang) { self.refresh_evictions() } else { self.end_evictions() }
    }

    /// Returns whether pods are evicted for a gang of lower priority.
    pub(super) fn evicts_for_less_than(&self, priority: i32) -> bool {
        self.evictions.room.as_ref().is_some_and(|room| room.plan.priority < priority)
    }

    pub(super) fn end_evictions(&mut self) {
        if let Some(room) = self.evictions.room.take() {
            self.view.cancel_reservation(&name(&room.plan.gang));
        }
    }

    /// Returns whether a plan for this gang is under way.
    pub(super) fn evicts_for(&self, gang: &GangKey) -> bool {
        self.evictions.room.as_ref().is_some_and(|room| room.plan.gang == *gang)
    }

    /// Returns the number of pods that have still to end for a gang, or `None` without a plan for it.
    pub(crate) fn evictions_left(&self, gang: &GangKey) -> Option<usize> {
        let room = self.evictions.room.as_ref().filter(|room| room.plan.gang == *gang)?;
        Some(room.victims.pods.keys().filter(|uid| self.pod(uid).is_some()).count())
    }

    /// Returns the number of pods that are to be evicted and have not ended.
    pub(crate) fn pending_evictions(&self) -> usize {
        let Evictions { room, broken, .. } = &self.evictions;
        let all = room.iter().map(|room| &room.victims).chain(broken.values());
        let pods: BTreeSet<&PodUid> = all.flat_map(|victims| victims.pods.keys()).collect();
        pods.into_iter().filter(|uid| self.pod(uid).is_some()).count()
    }

    fn has_left(&self, victims: &Victims) -> bool {
        victims.pods.keys().any(|uid| self.pod(uid).is_some())
    }

    /// Returns the names of the first of these pods, as NAMESPACE/NAME.
    fn names_of(&self, pods: &[PodUid]) -> String {
        let known = pods.iter().filter_map(|uid| self.pod(uid));
        let mut names: Vec<String> =
            known.map(|pod| format!("{}/{}", pod.namespace, pod.name)).take(MAX_NAMED_PODS).collect();
        if pods.len() > names.len() {
            names.push(format!("{} more", pods.len() - names.len()));
        }
        names.join(", ")
    }
}

/// Returns the name of the reservation that keeps the freed GPUs.
fn name(gang: &GangKey) -> ReservationName {
    ReservationName(format!("evictions/{}", super::reservation_name(gang)))
}
