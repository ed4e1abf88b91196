//! Gangs: which pods belong together, and the reservations of those that are being placed.
//!
//! All of it follows from the pods that the watch shows, so a new leader needs nothing else. A reservation is made
//! for all missing members or for none of them, in one step.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tessera_core::gang::TopologyWish;
use tessera_core::ledger::{Reservation, ReservationName, Revision};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::gang::{GangKey, GangOrigin, Membership};
use tessera_wire::tessera::reservation;

use super::passed_pods::is_of_passed_pod;
use super::{GpuPod, State, Timestamp};

/// Longest time for which a pod is known only from a call of kube-scheduler. The watch shows a pod earlier.
const ANNOUNCED_PERIOD: Duration = Duration::from_secs(30);

/// A part of the reason of `GangWait::NoRoom`.
const WAITS_FOR_ROOM: &str = " waits for GPUs for all of its ";

/// All gangs with pods that have not ended.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    by_key: BTreeMap<GangKey, Gang>,
    key_of: HashMap<PodUid, GangKey>,
}

/// The pods of one gang, and how far its placement is.
#[derive(Debug, Default)]
pub(crate) struct Gang {
    /// Pods with GPUs, waiting or placed.
    members: BTreeSet<PodUid>,
    /// Pods that count for the size and need no place: without GPUs, or ended with success.
    without_place: BTreeSet<PodUid>,
    /// Pods that kube-scheduler has filtered and the watch has not shown yet.
    announced: BTreeMap<PodUid, (Duration, Box<GpuPod>)>,
    /// Nodes that kube-scheduler did not offer for a member when its place was there.
    excluded: BTreeSet<(PodUid, NodeName)>,
    /// The state of the ledger in which the members did not fit.
    pub(super) no_room_at: Option<Revision>,
    /// Time of the first attempt to place the gang.
    pub(super) waits_since: Option<Duration>,
    /// Time until which the gang makes no reservation, because the last one ended unused.
    paused_until: Option<Duration>,
    /// The round of hold-backs in which the gang has its turn, and the time before which it holds back none.
    pub(super) round: u64,
    pub(super) holds_back_after: Duration,
    /// True if the events about missing pods are written.
    is_reported: bool,
    /// Time since which some pods of the gang have nodes and others have none.
    half_bound_since: Option<Duration>,
}

/// What a gang lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GangStatus {
    /// Number of pods in the gang.
    pub(crate) size: usize,
    /// Number of pods that exist.
    pub(crate) present: usize,
    /// Members without a node, the oldest first.
    pub(crate) waiting: Vec<PodUid>,
    /// Number of members that have a node or need none.
    pub(crate) settled: usize,
    pub(crate) topology: TopologyWish,
}

/// A message for the pods of a gang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GangNotice {
    /// Namespace, name and UID of the pods.
    pub pods: Vec<(String, String, String)>,
    /// Text of the event, with the missing pods.
    pub message: String,
}

impl Gang {
    /// Records that the members do not fit. Gangs that wait already have their turns before this one.
    fn wait_from(&mut self, now: Timestamp, current_round: u64) {
        if self.waits_since.is_none() {
            self.round = current_round + 1;
        }
        self.waits_since.get_or_insert(now.steady);
    }
}

impl GangStatus {
    /// Returns the members that the next reservation is for.
    pub(crate) fn missing(&self) -> &[PodUid] {
        let count = self.size.saturating_sub(self.settled).min(self.waiting.len());
        &self.waiting[..count]
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.present >= self.size
    }
}

impl Gangs {
    fn entry(&mut self, uid: &PodUid, membership: &Membership) -> &mut Gang {
        if self.key_of.get(uid).is_some_and(|known| *known != membership.gang) {
            self.remove(uid);
        }
        self.key_of.insert(uid.clone(), membership.gang.clone());
        self.by_key.entry(membership.gang.clone()).or_default()
    }

    fn remove(&mut self, uid: &PodUid) -> Option<GangKey> {
        let key = self.key_of.remove(uid)?;
        let gang = self.by_key.get_mut(&key)?;
        gang.members.remove(uid);
        gang.without_place.remove(uid);
        gang.announced.remove(uid);
        if gang.members.is_empty() && gang.announced.is_empty() && gang.without_place.is_empty() {
            self.by_key.remove(&key);
        }
        Some(key)
    }

    pub(super) fn get(&self, key: &GangKey) -> Option<&Gang> {
        self.by_key.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &GangKey) -> Option<&mut Gang> {
        self.by_key.get_mut(key)
    }
}

impl State {
    /// Enters a pod with GPUs into its gang.
    pub(super) fn join_gang(&mut self, uid: &PodUid) {
        match self.gpu_pods.get(uid).and_then(|pod| pod.gang.clone()) {
            Some(membership) => {
                let gang = self.gangs.entry(uid, &membership);
                gang.announced.remove(uid);
                gang.members.insert(uid.clone());
            }
            None => self.leave_gang(uid),
        }
    }

    /// Enters a pod that counts for the size of its gang and needs no place.
    pub(super) fn join_gang_without_place(&mut self, uid: &PodUid, membership: &Membership) {
        let gang = self.gangs.entry(uid, membership);
        gang.members.remove(uid);
        gang.without_place.insert(uid.clone());
    }

    /// Remembers a pod that kube-scheduler filters before the watch has shown it.
    pub(crate) fn announce(&mut self, uid: &PodUid, membership: &Membership, pod: &Pod, now: Timestamp) {
        if self.gpu_pods.contains_key(uid) {
            return;
        }
        let gang = self.gangs.entry(uid, membership);
        gang.announced.insert(uid.clone(), (now.steady, Box::new(GpuPod::new(pod.clone()))));
    }

    /// Removes a pod from its gang. A gang that is incomplete without the pod gives its reservation back.
    pub(super) fn leave_gang(&mut self, uid: &PodUid) {
        if let Some(key) = self.gangs.remove(uid) {
            self.cancel_if_incomplete(&key);
        }
    }

    pub(super) fn cancel_if_incomplete(&mut self, key: &GangKey) {
        if !self.gang_status(key).is_some_and(|status| status.is_complete()) {
            self.cancel_gang(key);
        }
    }

    /// Returns what a gang lacks, or `None` if it is unknown or nothing states its size.
    pub(crate) fn gang_status(&self, key: &GangKey) -> Option<GangStatus> {
        let gang = self.gangs.by_key.get(key)?;
        let pods = || gang.members.iter().filter_map(|uid| Some((uid, self.member(uid)?)));
        let announced = || gang.announced.iter().map(|(uid, (_, pod))| (uid, pod.as_ref()));
        let memberships = || pods().chain(announced()).filter_map(|(_, pod)| pod.gang.as_ref());
        let object = self.pod_groups.get(key);
        let size = memberships().filter_map(|member| member.size).max().or_else(|| object?.size)?;
        let is_waiting =
            |uid: &PodUid, pod: &GpuPod| pod.node.is_none() && self.ledger().grant(uid).is_none();
        let mut waiting: Vec<(&PodUid, &GpuPod)> =
            pods().chain(announced()).filter(|(uid, pod)| is_waiting(uid, pod)).collect();
        waiting.sort_by(|(_, a), (_, b)| (&a.created, &a.name).cmp(&(&b.created, &b.name)));
        let present = gang.members.len() + gang.announced.len() + gang.without_place.len();
        let topologies =
            memberships().map(|member| &member.topology).chain(object.map(|group| &group.topology));
        Some(GangStatus {
            size: usize::try_from(size).unwrap_or(usize::MAX),
            present,
            settled: present - waiting.len(),
            waiting: waiting.into_iter().map(|(uid, _)| uid.clone()).collect(),
            topology: topologies
                .filter(|wish| **wish != TopologyWish::Any)
                .max_by_key(|wish| rank(wish))
                .cloned()
                .unwrap_or_default(),
        })
    }

    /// Returns a member of a gang, as the watch or kube-scheduler shows it.
    pub(crate) fn member(&self, uid: &PodUid) -> Option<&GpuPod> {
        let announced = || {
            let gang = self.gangs.by_key.get(self.gangs.key_of.get(uid)?)?;
            gang.announced.get(uid).map(|(_, pod)| pod.as_ref())
        };
        self.pod(uid).or_else(announced)
    }

    /// Returns the gang of a pod, if its size is known.
    pub(crate) fn gang_of(&self, uid: &PodUid) -> Option<(&GangKey, GangStatus)> {
        let key = self.gangs.key_of.get(uid)?;
        let status = self.gang_status(key).filter(|status| status.size > 1)?;
        Some((key, status))
    }

    /// Returns the gang of a pod, also if its size is unknown.
    pub(crate) fn gang_key_of(&self, uid: &PodUid) -> Option<&GangKey> {
        self.gangs.key_of.get(uid)
    }

    /// Returns the gang of a pod if the gang has more than one pod with GPUs.
    pub(crate) fn placed_gang_of(&self, uid: &PodUid) -> Option<&GangKey> {
        let (key, _) = self.gang_of(uid)?;
        self.gangs.get(key).filter(|gang| gang.members.len() > 1).map(|_| key)
    }

    /// Returns the highest priority of a pod in the gang.
    pub(crate) fn priority_of_gang(&self, key: &GangKey) -> i32 {
        let members = self.gangs.get(key).into_iter().flat_map(|gang| &gang.members);
        members.filter_map(|uid| self.pod(uid)).map(GpuPod::priority).max().unwrap_or_default()
    }

    /// Returns the members that are bound and not ending.
    pub(crate) fn gang_on_nodes(&self, key: &GangKey) -> impl Iterator<Item = &PodUid> {
        let members = self.gangs.by_key.get(key).into_iter().flat_map(|gang| &gang.members);
        members.filter(|uid| self.pod(uid).is_some_and(|pod| pod.node.is_some() && !pod.is_ending))
    }

    /// Returns whether a member is ending, so that the gang has lost its work already.
    pub(crate) fn is_gang_ending(&self, key: &GangKey) -> bool {
        let members = self.gangs.get(key).into_iter().flat_map(|gang| &gang.members);
        members.filter_map(|uid| self.pod(uid)).any(|pod| pod.is_ending)
    }

    /// Returns the nodes of the members that have one.
    pub(crate) fn nodes_of_gang(&self, key: &GangKey) -> BTreeSet<&NodeName> {
        let members = self.gangs.by_key.get(key).into_iter().flat_map(|gang| &gang.members);
        members.filter_map(|uid| self.ledger().grant(uid).map(|grant| &grant.node)).collect()
    }

    pub(crate) fn is_excluded(&self, key: &GangKey, uid: &PodUid, node: &NodeName) -> bool {
        let gang = self.gangs.by_key.get(key);
        gang.is_some_and(|gang| {
            !gang.excluded.is_empty() && gang.excluded.contains(&(uid.clone(), node.clone()))
        })
    }

    /// Keeps a member from a node that kube-scheduler does not offer for it.
    pub(crate) fn exclude(&mut self, key: &GangKey, uid: &PodUid, node: NodeName) {
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.excluded.insert((uid.clone(), node));
            gang.no_room_at = None;
        }
    }

    /// Returns whether the gang makes no reservation for a while.
    pub(crate) fn is_paused(&self, key: &GangKey, now: Timestamp) -> bool {
        let paused = self.gangs.by_key.get(key).and_then(|gang| gang.paused_until);
        paused.is_some_and(|until| now.steady < until)
    }

    /// Returns whether the members did not fit and no node has changed since.
    pub(crate) fn has_no_room(&self, key: &GangKey) -> bool {
        let known = self.gangs.by_key.get(key).and_then(|gang| gang.no_room_at);
        known == Some(self.ledger().last_change())
    }

    /// Records that the members do not fit now.
    pub(crate) fn record_no_room(&mut self, key: &GangKey, now: Timestamp) {
        let (change, round) = (self.ledger().last_change(), self.hold_back_round);
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.no_room_at = Some(change);
            gang.wait_from(now, round);
        }
    }

    /// Records that a gang waits by the reports on its pods. The extender may never filter them, because kube-scheduler
    /// counts too few GPUs on every node, or a former leader has refused them. The next call of filter tries to place the
    /// gang all the same.
    fn record_shortage(&mut self, key: &GangKey, now: Timestamp) {
        let lacks = |uid: &PodUid| {
            self.member(uid).is_some_and(|pod| pod.lacks_resources() || pod.is_refused_for(WAITS_FOR_ROOM))
        };
        let Some(status) = self.gang_status(key) else { return };
        let is_placed = self.ledger().has_reservation(&reservation_name(key)) || self.is_paused(key, now);
        if is_placed || !status.is_complete() || !status.missing().iter().any(lacks) {
            return;
        }
        let round = self.hold_back_round;
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.no_room_at.get_or_insert_default();
            gang.wait_from(now, round);
        }
    }

    /// Records that the gang has its places.
    pub(crate) fn record_reserved(&mut self, key: &GangKey) {
        if let Some(gang) = self.gangs.get_mut(key) {
            gang.no_room_at = None;
            gang.waits_since = None;
            gang.paused_until = None;
            gang.holds_back_after = Duration::ZERO;
        }
    }

    /// Cancels the reservation of a gang.
    pub(crate) fn cancel_gang(&mut self, key: &GangKey) {
        self.view.cancel_reservation(&reservation_name(key));
    }

    /// Cancels the reservations whose end has come, and forgets pods that the watch never showed. Returns what the
    /// pods of incomplete gangs should be told.
    pub fn expire_gangs(&mut self, now: Timestamp) -> Vec<GangNotice> {
        let mut notices = Vec::new();
        let ended = self.ledger().ended_reservations(now.steady);
        for name in &ended {
            let Some(cancelled) = self.view.cancel_reservation(name) else { continue };
            notices.extend(self.report_unused(cancelled, now));
        }
        if ended.iter().any(is_of_passed_pod) {
            self.keep_what_is_free();
        }
        let overdue: Vec<GangKey> = self.gangs.by_key.keys().cloned().collect();
        for key in overdue {
            self.forget_announced(&key, now);
            notices.extend(self.report_incomplete(&key, now));
            notices.extend(self.give_up_half_bound(&key, now));
            self.record_shortage(&key, now);
        }
        self.update_node_reservations(now);
        self.update_hold_back(now);
        notices
    }

    /// Returns whether [`State::expire_gangs`] has something to do.
    #[must_use]
    pub fn has_reservations_to_check(&self) -> bool {
        !self.gangs.by_key.is_empty()
            || !self.node_reservations.is_empty()
            || self.ledger().reservations().next().is_some()
    }

    /// Pauses a gang whose reservation has ended, so that a gang that cannot start keeps its GPUs at most half of
    /// the time.
    fn report_unused(&mut self, cancelled: Reservation, now: Timestamp) -> Option<GangNotice> {
        let first = cancelled.places.first()?;
        let key = self.gangs.key_of.get(&first.pod)?.clone();
        let timeout = self.settings.gang_timeout;
        // A gang with pods on nodes must not lose its room to others.
        let is_started = !self.nodes_of_gang(&key).is_empty();
        let gang = self.gangs.get_mut(&key)?;
        gang.paused_until = Some(now.steady.saturating_add(timeout)).filter(|_| !is_started);
        gang.excluded.clear();
        self.unused_reservations += 1;
        let named = |uid: &PodUid| self.member(uid).map(|pod| (pod.name.clone(), uid.clone()));
        let mut missing: Vec<String> =
            cancelled.places.iter().filter_map(|place| named(&place.pod)).map(|(name, _)| name).collect();
        missing.sort();
        let message = format!(
            "gang {key} was not bound within {} s, so its reserved GPUs are free again. Missing: {}. The gang tries again; \
             kube-scheduler's events about these pods say what keeps them from their nodes",
            timeout.as_secs(),
            missing.join(", "),
        );
        Some(GangNotice { pods: self.pods_of_gang(&key), message })
    }

    fn report_incomplete(&mut self, key: &GangKey, now: Timestamp) -> Option<GangNotice> {
        let status = self.gang_status(key)?;
        let timeout = self.settings.gang_timeout;
        let gang = self.gangs.get_mut(key)?;
        if status.is_complete() {
            gang.is_reported = false;
            return None;
        }
        // A gang whose pods have nodes loses them one by one when its job ends.
        let waits = !status.waiting.is_empty();
        let since = *gang.waits_since.get_or_insert(now.steady);
        if !waits || gang.is_reported || now.steady.saturating_sub(since) < timeout {
            return None;
        }
        gang.is_reported = true;
        let message = format!(
            "gang {key} waits for pods that do not exist: {} of {} exist. No pod of the gang gets GPUs before all exist; \
             create the others, or correct the size ({})",
            status.present,
            status.size,
            key.origin.describe(),
        );
        Some(GangNotice { pods: self.pods_of_gang(key), message })
    }

    /// Evicts the bound pods of a gang whose other pods have had no nodes for too long, if evictions are on. They hold GPUs
    /// that they cannot use alone. Returns what they should be told.
    fn give_up_half_bound(&mut self, key: &GangKey, now: Timestamp) -> Option<GangNotice> {
        let GangStatus { size, settled, .. } = self.gang_status(key)?;
        let bound: Vec<PodUid> = self.gang_on_nodes(key).cloned().collect();
        let is_half_bound = settled < size && !bound.is_empty();
        // The missing pods had the time of a reservation, and GPUs were held back for them before.
        let period = self.settings.gang_timeout.saturating_add(self.settings.gang_hold_back);
        let gang = self.gangs.get_mut(key)?;
        if !is_half_bound {
            gang.half_bound_since = None;
            return None;
        }
        let since = *gang.half_bound_since.get_or_insert(now.steady);
        if now.steady.saturating_sub(since) < period {
            return None;
        }
        gang.half_bound_since = Some(now.steady);
        let lacks = format!(
            "gang {key}: {settled} of {size} pods have nodes, and the others have had none for {} s",
            period.as_secs()
        );
        let outcome = match self.evict_gang(key, bound, &lacks, now) {
            true => "the pods with GPUs are evicted, so that the gang can start again as a whole",
            false => "the pods with GPUs keep them; create the missing pods, or delete these",
        };
        Some(GangNotice { pods: self.pods_of_gang(key), message: format!("{lacks}; {outcome}") })
    }

    fn forget_announced(&mut self, key: &GangKey, now: Timestamp) {
        let Some(gang) = self.gangs.get_mut(key) else { return };
        let is_late = |since: &Duration| now.steady.saturating_sub(*since) > ANNOUNCED_PERIOD;
        let late: Vec<PodUid> = gang
            .announced
            .iter()
            .filter(|(_, (since, _))| is_late(since))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in late {
            self.leave_gang(&uid);
            self.view.remove_pod(&uid);
        }
    }

    pub(super) fn pods_of_gang(&self, key: &GangKey) -> Vec<(String, String, String)> {
        let members = self.gangs.by_key.get(key).into_iter().flat_map(|gang| &gang.members);
        let pods = members.filter_map(|uid| Some((uid, self.pod(uid)?)));
        pods.map(|(uid, pod)| (pod.namespace.clone(), pod.name.clone(), uid.to_string())).collect()
    }

    /// Returns all gangs whose size is known, with what they lack.
    pub(crate) fn gangs(&self) -> impl Iterator<Item = (&GangKey, GangStatus)> {
        let sized = self.gangs.by_key.keys().filter_map(|key| Some((key, self.gang_status(key)?)));
        sized.filter(|(_, status)| status.size > 1)
    }

    /// Returns the gangs with members on nodes, with what they lack.
    pub(crate) fn started_gangs(&self) -> impl Iterator<Item = (&GangKey, GangStatus)> {
        let has_grant = |gang: &Gang| gang.members.iter().any(|uid| self.ledger().grant(uid).is_some());
        let started = self.gangs.by_key.iter().filter(move |(_, gang)| has_grant(gang));
        started.filter_map(|(key, _)| Some((key, self.gang_status(key).filter(|status| status.size > 1)?)))
    }

    /// Returns the number of GPUs that are reserved, at least in part: for gangs, and by node annotations.
    pub(crate) fn reserved_gpus(&self) -> (usize, usize) {
        let (mut for_gangs, mut on_nodes) = (0, 0);
        for name in self.ledger().reservations().filter(|name| !is_of_passed_pod(name)) {
            let places = self.ledger().reservation(name).map(|reservation| reservation.places);
            let gpus: usize = places.iter().flatten().map(|place| place.footprint().count()).sum();
            match name.0.starts_with(reservation::LEDGER_PREFIX) {
                true => on_nodes += gpus,
                false => for_gangs += gpus,
            }
        }
        (for_gangs, on_nodes)
    }

    /// Returns the number of reservations that ended before all members were bound.
    #[must_use]
    pub fn unused_reservations(&self) -> u64 {
        self.unused_reservations
    }
}

fn rank(wish: &TopologyWish) -> u8 {
    match wish {
        TopologyWish::Any => 0,
        TopologyWish::Preferred(_) => 1,
        TopologyWish::Required(_) => 2,
    }
}

/// Returns the name of a gang's reservation.
pub(crate) fn reservation_name(key: &GangKey) -> ReservationName {
    let origin = match key.origin {
        GangOrigin::Tessera => "tessera",
        GangOrigin::Coscheduling => "coscheduling",
        GangOrigin::Kueue => "kueue",
        GangOrigin::Volcano => "volcano",
        GangOrigin::Kai => "kai",
        GangOrigin::Kubernetes => "kubernetes",
        GangOrigin::JobSet => "jobset",
        GangOrigin::PyTorchJob => "pytorchjob",
        GangOrigin::TensorFlowJob => "tfjob",
        GangOrigin::XgBoostJob => "xgboostjob",
        GangOrigin::PaddleJob => "paddlejob",
        GangOrigin::JaxJob => "jaxjob",
    };
    ReservationName(format!("gang/{origin}/{key}"))
}
