//! Reservations that people make with a node annotation: GPUs that are kept for a waiting pod, or for none.
//!
//! They follow from nodes and pods alone, so a new leader finds them again. The reserved parts may still be in use;
//! whatever becomes free of them is kept in the same step. As soon as the pod of a reservation fits on the node, the
//! GPUs that it gets there are its place, as for a pod of a gang.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tessera_core::grant::PodGrant;
use tessera_core::ledger::{Reservation, Revision};
use tessera_core::node::NodeState;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::extender::ExtenderArgs;
use tessera_wire::tessera::parsed_pod::ParsedPod;
use tessera_wire::tessera::reservation::{self, BadReservations, NodeReservation};

use super::{Claimant, GpuPod, ReadableNode, State, Timestamp};

/// The reservations of all nodes.
#[derive(Debug, Default)]
pub(super) struct NodeReservations {
    /// The reservations of each node that has any, ended or not.
    by_node: BTreeMap<NodeName, Vec<NodeReservation>>,
    /// The revision of each node at which its reservations were last refreshed, if they depend on nothing but the node.
    kept_at: HashMap<NodeName, Revision>,
    /// The nodes whose annotation cannot be read, with its value and the reason.
    unreadable: BTreeMap<NodeName, (String, String)>,
    /// The unreadable nodes that [`State::take_unreadable_reservations`] has not returned yet.
    unreported: BTreeSet<NodeName>,
}

impl NodeReservations {
    /// Returns whether no node has reservations.
    pub(super) fn is_empty(&self) -> bool {
        self.by_node.is_empty()
    }
}

impl State {
    /// Replaces the reservations of a node by those of its annotations. An annotation that cannot be parsed reserves
    /// nothing.
    pub(super) fn set_node_reservations(&mut self, node: &NodeName, annotations: &BTreeMap<String, String>) {
        let found = reservation::parse(annotations);
        self.record_unreadable_reservations(node, annotations, found.as_ref().err());
        let found = found.unwrap_or_default();
        if found.is_empty() && !self.node_reservations.by_node.contains_key(node) {
            return;
        }
        self.node_reservations.kept_at.remove(node);
        let known = self.node_reservations.by_node.remove(node).unwrap_or_default();
        for gone in known.iter().filter(|known| !found.contains(known)) {
            self.view.cancel_reservation(&gone.ledger_name(node));
        }
        if !found.is_empty() {
            self.node_reservations.by_node.insert(node.clone(), found);
        }
    }

    /// Records whether the annotation of a node can be read. Each unreadable value is reported once.
    fn record_unreadable_reservations(
        &mut self,
        node: &NodeName,
        annotations: &BTreeMap<String, String>,
        error: Option<&BadReservations>,
    ) {
        let known = &mut self.node_reservations;
        let Some(error) = error else {
            if known.unreadable.remove(node).is_some() {
                known.unreported.remove(node);
            }
            return;
        };
        let value = annotations.get(reservation::KEY).map_or("", String::as_str);
        if known.unreadable.get(node).is_some_and(|(seen, _)| seen == value) {
            return;
        }
        known.unreadable.insert(node.clone(), (value.to_owned(), error.to_string()));
        known.unreported.insert(node.clone());
    }

    /// Returns the nodes whose reservations cannot be read, with the reason. A node is returned again only after its
    /// annotation has changed.
    pub fn take_unreadable_reservations(&mut self) -> Vec<(NodeName, String)> {
        let known = &mut self.node_reservations;
        let unreported = std::mem::take(&mut known.unreported);
        let reason = |node: NodeName| {
            let (_, reason) = known.unreadable.get(&node)?;
            Some((node, reason.clone()))
        };
        unreported.into_iter().filter_map(reason).collect()
    }

    /// Keeps what is free of the reserved GPUs, and gives up what has ended.
    pub(super) fn refresh_node_reservations(&mut self) {
        if self.node_reservations.is_empty() {
            return;
        }
        let all = self.node_reservations.by_node.iter();
        let due: Vec<(NodeName, Vec<NodeReservation>)> = all
            .filter(|(node, all)| !self.is_up_to_date(node, all))
            .map(|(node, all)| (node.clone(), all.clone()))
            .collect();
        for (node, all) in due {
            // If a reservation changes the node, the next call checks all reservations of the node again.
            let revision = self.revision(&node).filter(|_| self.depend_on_node_alone(&all));
            self.refresh_reservations_of(&node, all);
            match revision {
                Some(revision) => self.node_reservations.kept_at.insert(node, revision),
                None => self.node_reservations.kept_at.remove(&node),
            };
        }
    }

    /// Returns whether the node has not changed since its reservations were refreshed, and they depend on nothing else.
    fn is_up_to_date(&self, node: &NodeName, all: &[NodeReservation]) -> bool {
        let kept_at = self.node_reservations.kept_at.get(node);
        kept_at.is_some_and(|kept_at| self.revision(node) == Some(*kept_at)) && self.depend_on_node_alone(all)
    }

    /// Returns whether these reservations keep the same until their node changes: they are for no pod, and have not
    /// ended.
    fn depend_on_node_alone(&self, all: &[NodeReservation]) -> bool {
        all.iter().all(|one| one.pod.is_none() && one.until_seconds() > self.event_unix_seconds)
    }

    fn revision(&self, node: &NodeName) -> Option<Revision> {
        self.ledger().position(&node.0).map(|position| self.ledger().changed(position))
    }

    fn refresh_reservations_of(&mut self, node: &NodeName, all: Vec<NodeReservation>) {
        for reservation in all {
            let name = reservation.ledger_name(node);
            let known = self.ledger().reservation(&name).and_then(|known| known.places.into_iter().next());
            let kept = self.kept_place(node, &reservation, known.as_ref());
            if kept == known {
                continue;
            }
            self.view.cancel_reservation(&name);
            let Some(place) = kept else { continue };
            let namespace = reservation.pod.as_ref().filter(|pod| pod.uid == place.pod.0);
            let namespace = namespace.map(|pod| pod.namespace.clone());
            let until = self.steady_end(&reservation);
            let owner = reservation.beneficiary();
            // The parts are free, so there is no conflict, unless two nodes have reservations for one pod.
            let _reserved = self
                .view
                .reserve(Reservation { name, owner, until, places: vec![place] }, namespace.as_deref());
        }
    }

    /// Returns what a reservation keeps now, given what it has kept so far.
    fn kept_place(
        &self,
        node: &NodeName,
        reservation: &NodeReservation,
        known: Option<&PodGrant>,
    ) -> Option<PodGrant> {
        if reservation.until_seconds() <= self.event_unix_seconds {
            return None;
        }
        let state = self.ledger().node(node)?;
        let without = known.and_then(|known| self.view.state_without(node, &known.pod));
        let state = without.as_ref().unwrap_or(state);
        let Some(owner) = &reservation.pod else { return reservation.free_parts(state) };
        let uid = PodUid(owner.uid.clone());
        let pod = self.pod(&uid).filter(|pod| pod.node.is_none())?;
        if self.ledger().grant(&uid).is_some() {
            return None;
        }
        let is_sound = |place: &&PodGrant| {
            let holds = place.containers.iter().flat_map(|container| &container.holds);
            place.pod == uid && holds.clone().all(|(gpu, hold)| state.fits(*gpu, *hold))
        };
        if let Some(place) = known.filter(is_sound) {
            return Some(place.clone());
        }
        self.place_on(&uid, pod, node, state).or_else(|| reservation.free_parts(state))
    }

    /// Returns the place of a waiting pod on a node in this state, or `None` if the pod does not fit or is in a gang.
    fn place_on(&self, uid: &PodUid, pod: &GpuPod, node: &NodeName, state: &NodeState) -> Option<PodGrant> {
        if self.gang_key_of(uid).is_some() {
            return None;
        }
        let parsed = ParsedPod::new(self, &pod.namespace, &pod.spec, &pod.annotations).ok()?;
        let readable = ReadableNode { state, ..self.readable_node(&node.0).ok()? };
        let request = parsed.request(readable.spec.unit);
        let admission = self.admission(&readable, &parsed, &request);
        admission.check_served().ok()?;
        let containers = admission.place().ok()?.grants(state.node(), &request);
        let (cpu, memory) = (request.cpu, request.memory);
        Some(PodGrant { pod: uid.clone(), node: node.clone(), cpu, memory, containers })
    }

    /// Returns the end of a reservation by the steady clock.
    fn steady_end(&self, reservation: &NodeReservation) -> Duration {
        let left = reservation.until_seconds().saturating_sub(self.event_unix_seconds);
        self.event_time.saturating_add(Duration::from_secs(u64::try_from(left).unwrap_or(0)))
    }

    /// Keeps and gives up reservations at a time without events.
    pub(super) fn update_node_reservations(&mut self, now: Timestamp) {
        if !self.node_reservations.is_empty() {
            self.set_event_time(now);
            self.refresh_node_reservations();
        }
    }

    /// Returns the offered node on which GPUs are reserved for the pod of a call, if the pod is in no gang.
    pub fn reserved_node<'a, N: AsRef<str>>(&self, args: &'a ExtenderArgs<N>) -> Option<&'a str> {
        let place = self.reserved_place(&PodUid(args.pod.metadata.uid.clone()))?;
        args.names().find(|name| *name == place.node.0)
    }

    /// Returns the place that is kept for a pod without a gang, by a node annotation or by evictions.
    pub(crate) fn reserved_place(&self, uid: &PodUid) -> Option<&PodGrant> {
        self.ledger().place(uid).filter(|_| self.gang_key_of(uid).is_none())
    }

    /// Returns the reservations of a node that are in effect: they have not ended, and their pod still waits.
    pub(crate) fn reservations_on(&self, node: &NodeName) -> impl Iterator<Item = &NodeReservation> {
        let waits = |uid: &str| self.pod(&PodUid(uid.to_owned())).is_some_and(|pod| pod.node.is_none());
        let is_wanted =
            move |one: &&NodeReservation| one.pod.as_ref().is_none_or(|pod| waits(pod.uid.as_str()));
        let all = self.node_reservations.by_node.get(node).into_iter().flatten();
        all.filter(|one| one.until_seconds() > self.event_unix_seconds).filter(is_wanted)
    }

    /// Describes the reservation for a waiting pod.
    pub(crate) fn describe_reserved(&self, uid: &PodUid) -> Option<String> {
        if self.evictions_left(&Claimant::Pod(uid.clone())) == Some(0) {
            let node = &self.reserved_place(uid)?.node;
            let why = match self.is_evicting_by_priority() {
                true => " of pods of lower priority",
                false => ", within the guarantee of its namespace",
            };
            return Some(format!("its GPUs on node {node} became free by evictions{why}"));
        }
        let (node, reservation) = self.node_reservations.by_node.iter().find_map(|(node, all)| {
            let is_own = |one: &&NodeReservation| one.pod.as_ref().is_some_and(|pod| pod.uid == uid.0);
            Some((node, all.iter().find(is_own)?))
        })?;
        Some(reservation.describe(node, self.reserved_place(uid).is_some()))
    }
}
