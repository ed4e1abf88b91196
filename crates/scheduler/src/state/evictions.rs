//! Evictions that make room for waiting pods, and of gangs of which other pods are preempted or never come.
//!
//! One plan at a time is under way. The GPUs that it frees are kept in the same step in which they become free. Plans are
//! made in `verb::evictions` and carried out by `run::evictions`, one pod after the other. Nothing of this is stored: a
//! new leader makes a new plan, in which pods that end already count as gone.

mod kept;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use tessera_core::grant::PodGrant;
use tessera_core::quota::GpuAmount;
use tessera_core::units::{Count, MiB, PodUid};
use tessera_wire::tessera::eviction;
use tessera_wire::tessera::gang::GangKey;

use self::kept::name;
use super::{GangNotice, GpuPod, State, Timestamp};

/// Time for which a plan is carried out. Pods may write checkpoints before they end, and budgets may refuse evictions
/// until replacements run.
const EVICTION_PERIOD: Duration = Duration::from_secs(600);

/// Interval between two plans for the same pods if no evictions make room.
const PLAN_INTERVAL: Duration = Duration::from_secs(5);

/// Time after which an eviction that was refused or not answered is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Pods that the events name.
const MAX_NAMED_PODS: usize = 5;

/// The evictions under way.
#[derive(Debug, Default)]
pub(super) struct Evictions {
    room: Option<Room>,
    /// Gangs that have lost a part, or never got it, and their pods on nodes.
    broken: BTreeMap<GangKey, Victims>,
    /// Times before which no plan is made for these pods.
    paused_until: BTreeMap<Claimant, Duration>,
}

/// The pods that evictions make room for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claimant {
    /// All pods of a gang that have no node.
    Gang(GangKey),
    /// A pod without a gang.
    Pod(PodUid),
}

/// The reason why other pods have to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Their priority is lower than this one.
    Priority(i32),
    /// Their namespaces use more than their guarantees, and that of the claimant uses less.
    Guarantee,
}

/// The plan under way.
#[derive(Debug)]
struct Room {
    plan: RoomPlan,
    victims: Victims,
    /// The claimant as users know it.
    owner: String,
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

/// Evictions after which the claimant has its places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomPlan {
    /// The pods that wait.
    pub claimant: Claimant,
    /// The reason for the evictions.
    pub claim: Claim,
    /// The places of the waiting pods.
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

impl fmt::Display for Claimant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gang(gang) => write!(f, "gang {gang}"),
            Self::Pod(uid) => write!(f, "pod {uid}"),
        }
    }
}

impl Victims {
    fn new(pods: impl IntoIterator<Item = PodUid>, until: Duration, why: String) -> Self {
        Self { pods: pods.into_iter().map(|pod| (pod, Victim::default())).collect(), until, why }
    }
}

impl RoomPlan {
    /// Returns whether a waiting pod of this priority comes before the claimant.
    fn yields_to(&self, priority: i32) -> bool {
        matches!(self.claim, Claim::Priority(own) if own < priority)
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

    /// Returns the pods for which the next plan is made: a complete gang that does not fit, a pod of a namespace that
    /// uses less than its guarantee, or a pod that waits for claims, the highest priority first. While a plan is
    /// under way, no other one is made.
    #[must_use]
    pub fn next_claimant(&self, now: Timestamp) -> Option<Claimant> {
        if !self.may_evict() || self.evictions.room.is_some() {
            return None;
        }
        let is_paused = |claimant: &Claimant| {
            self.evictions.paused_until.get(claimant).is_some_and(|until| now.steady < *until)
        };
        let gangs = self.waiting_gangs().filter(|(_, key)| !self.is_paused(key, now));
        let gangs = gangs.map(|(turn, key)| (turn, Claimant::Gang(key)));
        let gang = gangs.filter(|(_, claimant)| !is_paused(claimant)).min();
        let pods = self.pods_below_guarantee().map(|(uid, pod)| {
            let turn = (Reverse(pod.priority()), &pod.created);
            (turn, Claimant::Pod(uid.clone()))
        });
        let claiming = self.pods_waiting_for_claims().map(|(uid, pod)| {
            let turn = (Reverse(pod.priority()), &pod.created);
            (turn, Claimant::Pod(uid.clone()))
        });
        let pod = pods.chain(claiming).filter(|(_, claimant)| !is_paused(claimant)).min();
        match (gang, pod) {
            (Some((turn, gang)), Some(((Reverse(priority), _), pod))) => {
                Some(if priority > turn.priority() { pod } else { gang })
            }
            (gang, pod) => gang.map(|(_, gang)| gang).or_else(|| pod.map(|(_, pod)| pod)),
        }
    }

    /// Returns the waiting pods without a gang whose namespaces use less than their guarantees.
    fn pods_below_guarantee(&self) -> impl Iterator<Item = (&PodUid, &GpuPod)> {
        let (quota, usage) = self.quota();
        let least = GpuAmount { compute_percent: 1, memory: MiB(1) };
        let below = quota
            .guarantees()
            .filter(move |(namespace, guarantee)| guarantee.covers(usage.of(namespace).plus(least)));
        let below: BTreeSet<&str> = below.map(|(namespace, _)| namespace).collect();
        let pods = (!below.is_empty()).then(|| self.gpu_pods()).into_iter().flatten();
        pods.filter(move |(uid, pod)| {
            pod.node.is_none()
                && below.contains(pod.namespace.as_str())
                && pod.lacks_gpus()
                && !pod.is_ending
                && self.gang_key_of(uid).is_none()
                && self.ledger().grant(uid).is_none()
                && self.ledger().place(uid).is_none()
                && pod.spec.relations_to_others().is_empty()
        })
    }

    /// Returns the waiting pods without a gang that evictions could serve by claims. kube-scheduler preempts no pods
    /// for claims.
    fn pods_waiting_for_claims(&self) -> impl Iterator<Item = (&PodUid, &GpuPod)> {
        let pods = self.serves_claims().then(|| self.gpu_pods()).into_iter().flatten();
        pods.filter(|(uid, pod)| {
            (pod.lacks_gpus() || pod.is_refused_for("allocate all claims"))
                && self.waits_for_plain_claims(pod)
                && !pod.is_ending
                && self.gang_key_of(uid).is_none()
                && self.ledger().place(uid).is_none()
                // The claims are the only thing that ties the pod to certain nodes.
                && pod.spec.relations_to_others().len() == 1
        })
    }

    /// Records that no evictions make room for these pods at present.
    pub fn defer_evictions(&mut self, claimant: Claimant, now: Timestamp) {
        self.evictions.paused_until.retain(|_, until| *until > now.steady);
        self.evictions.paused_until.insert(claimant, now.steady.saturating_add(PLAN_INTERVAL));
    }

    /// Starts to carry out a plan, and keeps what is free of its places. Returns what the waiting pods should be told.
    /// A plan whose pods have found room since is dropped.
    pub fn adopt_evictions(&mut self, plan: RoomPlan, now: Timestamp) -> Option<GangNotice> {
        let RoomPlan { claimant, claim, victims, .. } = &plan;
        if self.evictions.room.is_some() || !self.is_claimant_waiting(claimant) {
            return None;
        }
        let owner = self.describe_claimant(claimant);
        let (why, of) = match claim {
            Claim::Priority(priority) => {
                (format!("{owner} of priority {priority} needs its GPUs"), "of lower priority")
            }
            Claim::Guarantee => (
                format!(
                    "{owner} gets GPUs that its namespace is guaranteed; this namespace uses more than its guarantee"
                ),
                "of namespaces that use more than their guarantees",
            ),
        };
        if let Claimant::Gang(gang) = claimant {
            let priority = if let Claim::Priority(priority) = claim { *priority } else { i32::MIN };
            self.end_hold_back_for(gang, priority);
        }
        let names = self.names_of(victims);
        let message = format!("evicting {} {of} for {owner}: {names}", Count(victims.len(), "pod"));
        let notice = GangNotice { pods: self.pods_of_claimant(claimant), message };
        let until = now.steady.saturating_add(EVICTION_PERIOD);
        let victims = Victims::new(victims.iter().cloned(), until, why);
        let is_needed = !victims.pods.is_empty();
        self.evictions.room = Some(Room { plan, victims, owner, is_free: false });
        self.refresh_evictions();
        is_needed.then_some(notice)
    }

    /// Ends plans that are over. Returns what waiting pods that got no room in time should be told.
    pub fn update_evictions(&mut self, now: Timestamp) -> Option<GangNotice> {
        let broken = self.evictions.broken.iter();
        let over = broken.filter(|(_, victims)| victims.until <= now.steady || !self.has_left(victims));
        let over: Vec<GangKey> = over.map(|(gang, _)| gang.clone()).collect();
        over.iter().for_each(|gang| drop(self.evictions.broken.remove(gang)));
        let room = self.evictions.room.as_ref()?;
        let claimant = room.plan.claimant.clone();
        if !self.is_claimant_waiting(&claimant) {
            self.end_evictions();
            return None;
        }
        let is_free = !self.has_left(&room.victims);
        let timeout = self.settings.gang_timeout;
        let room = self.evictions.room.as_mut()?;
        if is_free && !room.is_free {
            // kube-scheduler may have a reason of its own to keep the pods from their places.
            room.is_free = true;
            room.victims.until = room.victims.until.min(now.steady.saturating_add(timeout));
        }
        if now.steady < room.victims.until {
            self.refresh_evictions();
            return None;
        }
        let owner = room.owner.clone();
        let left: Vec<PodUid> = room.victims.pods.keys().cloned().collect();
        let left: Vec<PodUid> = left.into_iter().filter(|pod| self.tenant(pod).is_some()).collect();
        let reason = match left.is_empty() {
            true => "the GPUs that became free were not used".to_owned(),
            false => format!("{} did not end in time: {}", Count(left.len(), "pod"), self.names_of(&left)),
        };
        let message = format!("evictions made no room for {owner}, which tries again later: {reason}");
        self.evictions.paused_until.insert(claimant.clone(), now.steady.saturating_add(EVICTION_PERIOD));
        self.end_evictions();
        Some(GangNotice { pods: self.pods_of_claimant(&claimant), message })
    }

    /// Returns the pod to evict now. The caller sends the eviction and calls [`State::record_eviction`].
    #[must_use]
    pub fn next_eviction(&self, now: Timestamp) -> Option<EvictionOrder> {
        let room = self.evictions.room.as_ref();
        // The order of the plan counts.
        let planned = room.into_iter().flat_map(|room| {
            let victims = room.plan.victims.iter();
            victims.filter_map(|uid| Some((uid, room.victims.pods.get(uid)?, &room.victims.why)))
        });
        let broken = self.evictions.broken.values();
        let broken = broken.flat_map(|all| all.pods.iter().map(|(uid, victim)| (uid, victim, &all.why)));
        planned.chain(broken).find_map(|(uid, victim, why)| {
            let is_due = !victim.is_accepted && victim.retry_at <= now.steady;
            let pod = self.tenant(uid).filter(|pod| is_due && pod.node.is_some() && !pod.is_ending)?;
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
        let may_go = |uid: &&PodUid| {
            self.pod(uid).is_some_and(|pod| eviction::fixed_for_others(&pod.annotations).is_none())
        };
        let others = self.gang_on_nodes(&gang).filter(|other| *other != uid);
        let others: BTreeSet<PodUid> = others.filter(may_go).cloned().collect();
        let why = format!("kube-scheduler preempts another pod of gang {gang}");
        let until = self.event_time.saturating_add(EVICTION_PERIOD);
        if !others.is_empty() {
            self.evictions.broken.insert(gang, Victims::new(others, until, why));
        }
    }

    /// Evicts these pods of a gang because of what it lacks: all of them, or none if one may not go. Returns whether they
    /// are evicted.
    pub(super) fn evict_gang(
        &mut self,
        gang: &GangKey,
        pods: Vec<PodUid>,
        why: &str,
        now: Timestamp,
    ) -> bool {
        let may_go = |uid: &PodUid| {
            self.pod(uid).is_some_and(|pod| eviction::fixed_for_others(&pod.annotations).is_none())
        };
        let may_evict = self.may_evict() && pods.iter().all(may_go);
        if may_evict {
            let until = now.steady.saturating_add(EVICTION_PERIOD);
            self.evictions.broken.insert(gang.clone(), Victims::new(pods, until, why.to_owned()));
        }
        may_evict
    }

    /// Returns whether pods are evicted for others of lower priority.
    pub(super) fn evicts_for_less_than(&self, priority: i32) -> bool {
        self.evictions.room.as_ref().is_some_and(|room| room.plan.yields_to(priority))
    }

    pub(super) fn end_evictions(&mut self) {
        if let Some(room) = self.evictions.room.take() {
            self.view.cancel_reservation(&name(&room.plan.claimant));
        }
    }

    /// Returns whether a plan for this gang is under way.
    pub(super) fn evicts_for(&self, gang: &GangKey) -> bool {
        let claimant = self.evictions.room.as_ref().map(|room| &room.plan.claimant);
        matches!(claimant, Some(Claimant::Gang(own)) if own == gang)
    }

    /// Returns whether the plan under way evicts pods because of their priority.
    pub(crate) fn is_evicting_by_priority(&self) -> bool {
        let room = self.evictions.room.as_ref();
        room.is_some_and(|room| matches!(room.plan.claim, Claim::Priority(_)))
    }

    /// Returns the number of pods that have still to end for these ones, or `None` without a plan for them.
    pub(crate) fn evictions_left(&self, claimant: &Claimant) -> Option<usize> {
        let room = self.evictions.room.as_ref().filter(|room| room.plan.claimant == *claimant)?;
        Some(room.victims.pods.keys().filter(|uid| self.tenant(uid).is_some()).count())
    }

    /// Returns the number of pods that are to be evicted and have not ended.
    pub(crate) fn pending_evictions(&self) -> usize {
        let Evictions { room, broken, .. } = &self.evictions;
        let all = room.iter().map(|room| &room.victims).chain(broken.values());
        let pods: BTreeSet<&PodUid> = all.flat_map(|victims| victims.pods.keys()).collect();
        pods.into_iter().filter(|uid| self.tenant(uid).is_some()).count()
    }

    fn is_claimant_waiting(&self, claimant: &Claimant) -> bool {
        match claimant {
            Claimant::Gang(gang) => self.waits_for_room(gang),
            Claimant::Pod(uid) => {
                let waits = |pod: &GpuPod| pod.node.is_none() && !pod.is_ending;
                self.pod(uid).is_some_and(waits) && self.ledger().grant(uid).is_none()
            }
        }
    }

    fn describe_claimant(&self, claimant: &Claimant) -> String {
        let pod = match claimant {
            Claimant::Gang(_) => None,
            Claimant::Pod(uid) => self.pod(uid),
        };
        pod.map_or_else(|| claimant.to_string(), |pod| format!("pod {}/{}", pod.namespace, pod.name))
    }

    /// Returns namespace, name and UID of the waiting pods.
    fn pods_of_claimant(&self, claimant: &Claimant) -> Vec<(String, String, String)> {
        match claimant {
            Claimant::Gang(gang) => self.pods_of_gang(gang),
            Claimant::Pod(uid) => {
                let pod = self.pod(uid);
                pod.map(|pod| (pod.namespace.clone(), pod.name.clone(), uid.to_string()))
                    .into_iter()
                    .collect()
            }
        }
    }

    fn has_left(&self, victims: &Victims) -> bool {
        victims.pods.keys().any(|uid| self.tenant(uid).is_some())
    }

    /// Returns the names of the first of these pods, as NAMESPACE/NAME.
    fn names_of(&self, pods: &[PodUid]) -> String {
        let known = pods.iter().filter_map(|uid| self.tenant(uid));
        let mut names: Vec<String> =
            known.map(|pod| format!("{}/{}", pod.namespace, pod.name)).take(MAX_NAMED_PODS).collect();
        if pods.len() > names.len() {
            names.push(format!("{} more", pods.len() - names.len()));
        }
        names.join(", ")
    }
}
