//! The GPUs that are kept for waiting pods while others are evicted for them.

use std::collections::BTreeMap;

use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::{Reservation, ReservationName};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::tessera::gang::GangKey;

use super::{Claimant, Room, RoomPlan};
use crate::state::hold_back::free_parts;
use crate::state::{State, reservation_name};

impl State {
    /// Keeps what is free of the places of the plan. Called whenever a pod ends. As soon as a single pod fits on its
    /// place, the place is its own.
    pub(in crate::state) fn refresh_evictions(&mut self) {
        let Some(Room { plan, victims, owner, .. }) = &self.evictions.room else { return };
        if matches!(plan.claimant, Claimant::Pod(_)) && !self.is_claimant_waiting(&plan.claimant) {
            return self.end_evictions();
        }
        let (name, until) = (name(&plan.claimant), victims.until);
        let known = self.view.ledger().reservation(&name).map(|known| known.places).unwrap_or_default();
        let whole = match &plan.claimant {
            Claimant::Pod(uid) => self.kept_place_of(uid, &plan.places),
            Claimant::Gang(_) => None,
        };
        let kept: Vec<PodGrant> = match &whole {
            Some(place) => vec![place.clone()],
            None => self.free_parts_of(plan),
        };
        if kept == known {
            return;
        }
        let owner = format!("{owner}, for which pods are evicted");
        let namespace = whole.and_then(|place| Some(self.pod(&place.pod)?.namespace.clone()));
        self.view.cancel_reservation(&name);
        // The parts are free, so a conflict is impossible.
        let _reserved =
            self.view.reserve(Reservation { name, owner, until, places: kept }, namespace.as_deref());
    }

    /// Returns the place of a waiting pod, if all of it is free.
    fn kept_place_of(&self, uid: &PodUid, places: &[PodGrant]) -> Option<PodGrant> {
        let place = places.first().filter(|_| self.ledger().grant(uid).is_none())?;
        let own = self.view.state_without(&place.node, uid);
        let own = own.or_else(|| {
            self.view.state_without(&place.node, &holder(&Claimant::Pod(uid.clone()), &place.node))
        });
        let state = own.as_ref().or_else(|| self.ledger().node(&place.node))?;
        let mut holds = place.containers.iter().flat_map(|container| &container.holds);
        holds.all(|(gpu, hold)| state.fits(*gpu, *hold)).then(|| place.clone())
    }

    /// Returns what is free of the GPUs of a plan, one place for each node.
    fn free_parts_of(&self, plan: &RoomPlan) -> Vec<PodGrant> {
        let mut gpus: BTreeMap<&NodeName, GpuSet> = BTreeMap::new();
        for place in &plan.places {
            let all = gpus.entry(&place.node).or_default();
            *all = all.union(place.gpus());
        }
        let free = gpus.into_iter().filter_map(|(node, gpus)| {
            let holder = holder(&plan.claimant, node);
            let without = self.view.state_without(node, &holder);
            free_parts(without.as_ref().or_else(|| self.ledger().node(node))?, gpus, holder)
        });
        free.collect()
    }

    /// Frees the GPUs that are kept for waiting pods while they are placed. Returns whether any are kept.
    pub(crate) fn lift_evictions(&mut self, claimant: &Claimant) -> bool {
        let is_own = self.evictions.room.as_ref().is_some_and(|room| room.plan.claimant == *claimant);
        if is_own {
            self.view.cancel_reservation(&name(claimant));
        }
        is_own
    }

    /// Keeps GPUs again for a gang that was not placed, or ends the evictions for one that was.
    pub(crate) fn restore_evictions(&mut self, gang: &GangKey) {
        if self.waits_for_room(gang) { self.refresh_evictions() } else { self.end_evictions() }
    }
}

/// Returns the name of the reservation that keeps the freed GPUs.
pub(super) fn name(claimant: &Claimant) -> ReservationName {
    ReservationName(match claimant {
        Claimant::Gang(gang) => format!("evictions/{}", reservation_name(gang)),
        Claimant::Pod(uid) => format!("evictions/pod/{uid}"),
    })
}

/// Returns the UID that keeps parts of a node. No pod has such a UID, because UIDs have no spaces.
fn holder(claimant: &Claimant, node: &NodeName) -> PodUid {
    PodUid(format!("room for {claimant} on {node}"))
}
