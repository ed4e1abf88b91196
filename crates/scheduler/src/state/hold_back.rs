//! The hold-back: GPUs that become free go to the first waiting gang for a while, not to a stream of small pods.
//!
//! Only one gang holds GPUs back at a time: of the gangs whose pods all exist, one with pods on nodes, then the one with
//! the highest priority, then the one that waits longest. It chooses the nodes that can take it once they are empty and
//! that lack the fewest GPUs, and reserves whatever becomes free there for a limited time. Then the other waiting gangs
//! have their turns, and small pods as much time, before the gang holds back GPUs again.

use std::cmp::Reverse;
use std::time::Duration;

use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, PodGrant};
use tessera_core::ledger::{Reservation, ReservationName};
use tessera_core::node::NodeState;
use tessera_core::request::ContainerRole;
use tessera_core::units::{MiB, MilliCpu, NodeName, PodUid};
use tessera_wire::tessera::gang::GangKey;

use super::{State, Timestamp};

/// The gang that holds back GPUs at present.
#[derive(Clone, Debug)]
pub(super) struct HoldBack {
    gang: GangKey,
    priority: i32,
    until: Duration,
    nodes: Vec<NodeName>,
}

/// The order in which waiting gangs get room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    /// True if no pod of the gang has a node.
    is_new: bool,
    /// The highest priority in the gang.
    priority: Reverse<i32>,
    /// Time of the first attempt to place the gang.
    since: Duration,
}

impl Turn {
    /// Returns the highest priority in the gang.
    pub(super) fn priority(self) -> i32 {
        self.priority.0
    }
}

impl State {
    /// Ends a hold-back that is over and starts that of the first waiting gang.
    pub(super) fn update_hold_back(&mut self, now: Timestamp) {
        if let Some(held) = &self.hold_back
            && (now.steady >= held.until || !self.waits_for_room(&held.gang))
        {
            self.end_hold_back();
        }
        if self.hold_back.is_some() {
            return self.refresh_hold_back();
        }
        let in_round = |(turn, key): (Turn, GangKey)| {
            let gang = self.gangs.get(&key).filter(|gang| gang.holds_back_after <= now.steady)?;
            (!self.evicts_for(&key)).then_some((gang.round, turn, key))
        };
        let Some((round, turn, gang)) = self.waiting_gangs().filter_map(in_round).min() else { return };
        let priority = turn.priority();
        let nodes = self.nodes_to_empty(&gang);
        let period = self.settings.gang_hold_back;
        let until = now.steady.saturating_add(period);
        self.hold_back_round = self.hold_back_round.max(round);
        if let Some(known) = self.gangs.get_mut(&gang) {
            known.round = self.hold_back_round + 1;
            known.holds_back_after = until.saturating_add(period);
        }
        if !nodes.is_empty() && until > now.steady {
            self.hold_back = Some(HoldBack { gang, priority, until, nodes });
            self.refresh_hold_back();
        }
    }

    /// Returns the complete gangs that do not fit, each with its turn.
    pub(super) fn waiting_gangs(&self) -> impl Iterator<Item = (Turn, GangKey)> {
        self.gangs().filter_map(|(key, status)| {
            let gang = self.gangs.get(key)?;
            let since = gang.waits_since.filter(|_| gang.no_room_at.is_some())?;
            let priority = status
                .missing()
                .iter()
                .filter_map(|uid| self.member(uid))
                .map(super::GpuPod::priority)
                .max()?;
            let is_new = self.nodes_of_gang(key).is_empty();
            let turn = Turn { is_new, priority: Reverse(priority), since };
            status.is_complete().then(|| (turn, key.clone()))
        })
    }

    /// Returns whether the gang is complete and does not fit.
    pub(super) fn waits_for_room(&self, key: &GangKey) -> bool {
        self.gangs.get(key).is_some_and(|gang| gang.no_room_at.is_some())
            && self
                .gang_status(key)
                .is_some_and(|status| status.is_complete() && !status.missing().is_empty())
    }

    /// Reserves what is free on the nodes of the hold-back. Called whenever a pod ends.
    pub(super) fn refresh_hold_back(&mut self) {
        let Some(HoldBack { gang, until, nodes, .. }) = &self.hold_back else { return };
        let mut is_kept = true;
        let mut places = Vec::new();
        for node in nodes {
            let holder = holder(gang, node);
            let known = self.ledger().place(&holder);
            let without = self.view.state_without(node, &holder);
            let state = without.as_ref().or_else(|| self.ledger().node(node));
            let free = state.and_then(|state| free_parts(state, state.node().topology().gpus(), holder));
            is_kept &= free.as_ref() == known;
            places.extend(free);
        }
        // A new reservation of the same parts would make filter judge the nodes and place all waiting gangs again.
        if is_kept {
            return;
        }
        let (name, owner, until) = (name(gang), format!("gang {gang}, which waits for more"), *until);
        self.view.cancel_reservation(&name);
        // The parts are free, so a conflict is impossible.
        let _reserved = self.view.reserve(Reservation { name, owner, until, places }, None);
    }

    /// Frees the GPUs that are held back for a gang while it is placed. Returns whether it holds any back. A gang with
    /// pods on nodes comes before all others, so it ends their hold-back.
    pub(crate) fn lift_hold_back(&mut self, gang: &GangKey) -> bool {
        let is_others = self.hold_back.as_ref().is_some_and(|held| held.gang != *gang);
        if is_others && !self.nodes_of_gang(gang).is_empty() {
            self.end_hold_back();
        }
        let is_own = self.hold_back.as_ref().is_some_and(|held| held.gang == *gang);
        if is_own {
            self.view.cancel_reservation(&name(gang));
        }
        is_own
    }

    /// Holds GPUs back again for a gang that was not placed, or ends the hold-back of one that was.
    pub(crate) fn restore_hold_back(&mut self, gang: &GangKey) {
        if self.waits_for_room(gang) {
            self.refresh_hold_back();
        } else {
            self.end_hold_back();
        }
    }

    /// Ends the hold-back and the evictions for a gang in favour of a pod of higher priority. Returns whether there were
    /// any.
    pub fn yield_hold_back(&mut self, priority: i32) -> bool {
        let yields = self.yields_hold_back(priority);
        if self.evicts_for_less_than(priority) {
            self.end_evictions();
        }
        if self.hold_back.as_ref().is_some_and(|held| held.priority < priority) {
            self.end_hold_back();
        }
        yields
    }

    /// Returns whether a gang of lower priority holds back GPUs, or pods are evicted for one.
    #[must_use]
    pub fn yields_hold_back(&self, priority: i32) -> bool {
        self.hold_back.as_ref().is_some_and(|held| held.priority < priority)
            || self.evicts_for_less_than(priority)
    }

    /// Returns whether GPUs that are held back on a node are free for the gang: its own, and those of a gang of lower
    /// priority.
    pub(crate) fn is_held_back_for(&self, place: &PodGrant, gang: &GangKey, priority: i32) -> bool {
        self.hold_back.as_ref().is_some_and(|held| {
            (held.gang == *gang || held.priority < priority) && place.pod == holder(&held.gang, &place.node)
        })
    }

    /// Ends the hold-back if it is that of the gang, or of a gang of lower priority.
    pub(super) fn end_hold_back_for(&mut self, gang: &GangKey, priority: i32) {
        if self.hold_back.as_ref().is_some_and(|held| held.gang == *gang || held.priority < priority) {
            self.end_hold_back();
        }
    }

    fn end_hold_back(&mut self) {
        if let Some(held) = self.hold_back.take() {
            self.view.cancel_reservation(&name(&held.gang));
        }
    }
}

fn name(gang: &GangKey) -> ReservationName {
    ReservationName(format!("hold-back/{}", super::reservation_name(gang)))
}

/// Returns the UID that holds GPUs back on a node. No pod has such a UID, because UIDs have no spaces.
fn holder(gang: &GangKey, node: &NodeName) -> PodUid {
    PodUid(format!("hold-back {gang} {node}"))
}

/// Returns the free parts of these GPUs of a node as one place, or `None` if nothing is free.
pub(super) fn free_parts(state: &NodeState, gpus: GpuSet, pod: PodUid) -> Option<PodGrant> {
    let holds: Vec<_> = gpus.iter().filter_map(|gpu| Some((gpu, state.free_hold(gpu)?))).collect();
    let node = state.node().name.clone();
    let containers = vec![ContainerGrant { container: String::new(), role: ContainerRole::Main, holds }];
    let place = PodGrant { pod, node, cpu: MilliCpu::ZERO, memory: MiB::ZERO, containers };
    (!place.containers[0].holds.is_empty()).then_some(place)
}
