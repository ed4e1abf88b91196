//! Reservations: GPUs that are kept for pods that are not bound yet.
//!
//! A reservation counts on its nodes like grants do. It is made as a whole or not at all, and ends
//! when it is cancelled or when every pod that it is for has its grant. The ledger has no clock:
//! callers pass the time and cancel what has ended.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Conflict, Ledger, LedgerChange, NodeGrant};
use crate::grant::PodGrant;
use crate::node::NodeState;
use crate::units::{NodeName, PodUid};

/// The name of a reservation, unique in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReservationName(pub String);

/// GPUs of one or several nodes that are kept for pods that are not bound yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The name of the reservation.
    pub name: ReservationName,
    /// The object that the GPUs are kept for, as users know it.
    pub owner: String,
    /// The time at which the reservation ends, measured by the caller's clock.
    pub until: Duration,
    /// What is kept, with the pod that each place is for. A pod has at most one place.
    pub places: Vec<PodGrant>,
}

/// A reservation in the ledger.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    owner: String,
    until: Duration,
    places: BTreeMap<PodUid, Arc<PodGrant>>,
}

/// All reservations, and the reservation of each pod that has a place.
#[derive(Clone, Debug, Default)]
pub(super) struct Reservations {
    by_name: BTreeMap<ReservationName, Entry>,
    name_of: HashMap<PodUid, ReservationName>,
}

impl fmt::Display for ReservationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl Reservations ===

impl Reservations {
    /// Returns the places on one node, by reservation and pod UID.
    pub(super) fn on(&self, node: &NodeName) -> impl Iterator<Item = &PodGrant> {
        let places = self.by_name.values().flat_map(|entry| entry.places.values());
        places.map(AsRef::as_ref).filter(move |place| place.node == *node)
    }

    fn place(&self, pod: &PodUid) -> Option<&PodGrant> {
        self.by_name.get(self.name_of.get(pod)?)?.places.get(pod).map(AsRef::as_ref)
    }

    /// Removes the place of a pod, and the reservation with its last place.
    fn take(&mut self, pod: &PodUid) -> Option<Arc<PodGrant>> {
        let name = self.name_of.remove(pod)?;
        let entry = self.by_name.get_mut(&name)?;
        let place = entry.places.remove(pod);
        if entry.places.is_empty() {
            self.by_name.remove(&name);
        }
        place
    }
}

// === impl Ledger ===

impl Ledger {
    /// Reserves all places, or none of them if one does not fit.
    pub fn reserve(&mut self, reservation: Reservation) -> Result<(), Conflict> {
        let Reservation { name, owner, until, places } = reservation;
        if self.reservations.by_name.contains_key(&name) {
            return Err(Conflict::ReservationExists(name));
        }
        self.check_places(&places)?;
        let mut kept = BTreeMap::new();
        for place in places {
            self.reservations.name_of.insert(place.pod.clone(), name.clone());
            self.count(&place);
            kept.insert(place.pod.clone(), Arc::new(place));
        }
        if !kept.is_empty() {
            self.reservations.by_name.insert(name, Entry { owner, until, places: kept });
        }
        Ok(())
    }

    fn check_places(&self, places: &[PodGrant]) -> Result<(), Conflict> {
        let mut states: HashMap<&NodeName, NodeState> = HashMap::new();
        let mut pods: HashMap<&PodUid, &NodeName> = HashMap::new();
        for place in places {
            let holder = self.grant(&place.pod).or_else(|| self.reservations.place(&place.pod));
            let taken = holder.map(|holder| &holder.node).or_else(|| pods.insert(&place.pod, &place.node));
            if let Some(node) = taken {
                return Err(Conflict::AlreadyBooked { pod: place.pod.clone(), node: node.clone() });
            }
            let known = self.node(&place.node).ok_or_else(|| Conflict::UnknownNode(place.node.clone()))?;
            let state = states.entry(&place.node).or_insert_with(|| known.clone());
            super::check_room(state, place)?;
            state.add(place);
        }
        Ok(())
    }

    /// Cancels a reservation. Its places are free afterwards.
    pub fn cancel_reservation(&mut self, name: &ReservationName) -> Option<Reservation> {
        let Entry { owner, until, places } = self.reservations.by_name.remove(name)?;
        let places: Vec<PodGrant> = places.into_values().map(|place| PodGrant::clone(&place)).collect();
        for place in &places {
            self.reservations.name_of.remove(&place.pod);
        }
        let mut nodes: Vec<&NodeName> = places.iter().map(|place| &place.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.into_iter().for_each(|node| self.recount_known(node));
        Some(Reservation { name: name.clone(), owner, until, places })
    }

    /// Releases the place of one pod. The other places of the reservation stay.
    pub fn release_place(&mut self, pod: &PodUid) -> LedgerChange {
        let Some(place) = self.reservations.take(pod) else { return LedgerChange::Unchanged };
        self.recount_known(&place.node);
        LedgerChange::Changed
    }

    /// Exchanges the places of two pods of one reservation. The caller knows that both request the
    /// same.
    pub fn exchange_places(&mut self, one: &PodUid, other: &PodUid) -> LedgerChange {
        let name = self.reservations.name_of.get(one);
        if one == other || name.is_none() || name != self.reservations.name_of.get(other) {
            return LedgerChange::Unchanged;
        }
        let Some(entry) = name.and_then(|name| self.reservations.by_name.get_mut(name)) else {
            return LedgerChange::Unchanged;
        };
        let (Some(first), Some(second)) = (entry.places.remove(one), entry.places.remove(other)) else {
            return LedgerChange::Unchanged;
        };
        let moved = |place: &PodGrant, pod: &PodUid| Arc::new(PodGrant { pod: pod.clone(), ..place.clone() });
        entry.places.insert(one.clone(), moved(&second, one));
        entry.places.insert(other.clone(), moved(&first, other));
        let nodes = [first.node.clone(), second.node.clone()];
        nodes.iter().for_each(|node| self.recount_known(node));
        LedgerChange::Changed
    }

    /// Returns the place that is reserved for a pod.
    #[must_use]
    pub fn place(&self, pod: &PodUid) -> Option<&PodGrant> {
        self.reservations.place(pod)
    }

    /// Returns a copy of a reservation with the places that are left.
    #[must_use]
    pub fn reservation(&self, name: &ReservationName) -> Option<Reservation> {
        let Entry { owner, until, places } = self.reservations.by_name.get(name)?;
        let places = places.values().map(|place| PodGrant::clone(place)).collect();
        Some(Reservation { name: name.clone(), owner: owner.clone(), until: *until, places })
    }

    /// Returns whether a reservation exists.
    #[must_use]
    pub fn has_reservation(&self, name: &ReservationName) -> bool {
        self.reservations.by_name.contains_key(name)
    }

    /// Returns the owner of the reservation in which a pod has its place.
    #[must_use]
    pub fn reservation_owner(&self, pod: &PodUid) -> Option<&str> {
        let entry = self.reservations.by_name.get(self.reservations.name_of.get(pod)?)?;
        Some(&entry.owner)
    }

    /// Returns the names of all reservations.
    pub fn reservations(&self) -> impl Iterator<Item = &ReservationName> {
        self.reservations.by_name.keys()
    }

    /// Returns the reservations whose end has come.
    #[must_use]
    pub fn ended_reservations(&self, now: Duration) -> Vec<ReservationName> {
        let ended = self.reservations.by_name.iter().filter(|(_, entry)| entry.until <= now);
        ended.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the state of a node without the place of one pod, or `None` if the pod has no place
    /// there.
    pub(super) fn without_place(&self, node: &NodeName, pod: &PodUid) -> Option<NodeState> {
        self.reservations.place(pod).filter(|place| place.node == *node)?;
        let mut state = NodeState::empty(self.node(node)?.shared_node());
        let is_own =
            |counted: &NodeGrant<'_>| matches!(counted, NodeGrant::Reserved(place) if place.pod == *pod);
        self.counted_on(node)
            .filter(|counted| !is_own(counted))
            .for_each(|counted| state.add(counted.grant()));
        Some(state)
    }
}
