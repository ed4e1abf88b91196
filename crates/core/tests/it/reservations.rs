//! Reservations keep GPUs for pods through any history, and leave no trace when they end.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_core::cluster_view::ClusterView;
use tessera_core::grant::PodGrant;
use tessera_core::ledger::{Conflict, Ledger, LedgerChange, NodeGrant, Reservation, ReservationName};
use tessera_core::node::{Node, NodeState};
use tessera_core::quota::QuotaLabels;
use tessera_core::units::PodUid;

use crate::arbitrary;

#[derive(Clone, Debug)]
enum Event {
    Book(PodGrant),
    Release(PodUid),
    Reserve(Reservation),
    Cancel(ReservationName),
    ReleasePlace(PodUid),
}

fn name() -> impl Strategy<Value = ReservationName> {
    (0..4u8).prop_map(|number| ReservationName(format!("gang-{number}")))
}

fn reservation() -> impl Strategy<Value = Reservation> {
    (name(), vec(arbitrary::pod_grant(), 1..5), 0..100u64).prop_map(|(name, places, until)| Reservation {
        name,
        owner: "a gang".to_owned(),
        until: Duration::from_secs(until),
        places,
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => arbitrary::pod_grant().prop_map(Event::Book),
        2 => arbitrary::pod_uid().prop_map(Event::Release),
        4 => reservation().prop_map(Event::Reserve),
        1 => name().prop_map(Event::Cancel),
        1 => arbitrary::pod_uid().prop_map(Event::ReleasePlace),
    ]
}

/// The expected grants and places, kept by the test itself.
#[derive(Default)]
struct World {
    held: BTreeMap<PodUid, PodGrant>,
    reserved: BTreeMap<PodUid, (ReservationName, PodGrant)>,
}

impl World {
    fn apply(&mut self, ledger: &mut Ledger, event: Event) {
        match event {
            Event::Book(grant) => {
                if ledger.book(grant.clone()).is_ok() {
                    self.reserved.remove(&grant.pod);
                    self.held.insert(grant.pod.clone(), grant);
                }
            }
            Event::Release(pod) => {
                ledger.release(&pod);
                self.held.remove(&pod);
            }
            Event::Reserve(reservation) => {
                let Reservation { name, places, .. } = reservation.clone();
                if ledger.reserve(reservation).is_ok() {
                    let places = places.into_iter().map(|place| (place.pod.clone(), (name.clone(), place)));
                    self.reserved.extend(places);
                }
            }
            Event::Cancel(name) => {
                ledger.cancel_reservation(&name);
                self.reserved.retain(|_, (known, _)| *known != name);
            }
            Event::ReleasePlace(pod) => {
                let known = self.reserved.remove(&pod).is_some();
                assert_eq!(ledger.release_place(&pod) == LedgerChange::Changed, known);
            }
        }
    }

    /// Returns a node that carries exactly these grants and places.
    fn state(&self, node: &NodeState) -> NodeState {
        let mut state = NodeState::empty(node.shared_node());
        let places = self.reserved.values().map(|(_, place)| place);
        let on_node = self.held.values().chain(places).filter(|grant| grant.node == node.node().name);
        on_node.for_each(|grant| state.add(grant));
        state
    }
}

fn ledger_of(nodes: &[Node]) -> Ledger {
    let mut ledger = Ledger::default();
    nodes.iter().for_each(|node| {
        ledger.set_node(node.clone());
    });
    ledger
}

/// Returns the reservation with those of its places that fit beside each other.
fn fitting(nodes: &[Node], mut wanted: Reservation) -> Reservation {
    let mut scratch = ledger_of(nodes);
    wanted.places.retain(|place| scratch.grant(&place.pod).is_none() && scratch.book(place.clone()).is_ok());
    wanted
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn any_history_equals_the_grants_and_places_that_are_left(
        nodes in vec(arbitrary::node(), 1..4),
        events in vec(event(), 0..40),
    ) {
        let mut ledger = ledger_of(&nodes);
        let mut world = World::default();
        for event in events {
            world.apply(&mut ledger, event);
            prop_assert!(ledger.overbooked().is_empty(), "grants and places together exceed a GPU");
        }
        for state in ledger.nodes() {
            prop_assert_eq!(state, &world.state(state));
            let name = &state.node().name;
            let places = ledger.counted_on(name).filter(|counted| matches!(counted, NodeGrant::Reserved(_)));
            let expected = world.reserved.values().filter(|(_, place)| place.node == *name);
            prop_assert_eq!(places.count(), expected.count());
        }
        for (pod, (_, place)) in &world.reserved {
            prop_assert_eq!(ledger.place(pod), Some(place));
        }
    }

    #[test]
    fn a_reservation_is_made_as_a_whole_or_not_at_all(
        nodes in vec(arbitrary::node(), 1..4),
        events in vec(event(), 0..20),
        wanted in reservation(),
    ) {
        let mut ledger = ledger_of(&nodes);
        let mut world = World::default();
        events.into_iter().for_each(|event| world.apply(&mut ledger, event));
        let before = ledger.clone();
        let reserved = ledger.reserve(wanted.clone());
        if reserved.is_ok() {
            prop_assert!(wanted.places.iter().all(|place| ledger.place(&place.pod) == Some(place)));
            ledger.cancel_reservation(&wanted.name);
        }
        // Whether it was refused or cancelled, nothing of it is left.
        for state in before.nodes() {
            prop_assert_eq!(ledger.node(&state.node().name), Some(state));
        }
        prop_assert!(ledger.reservations().eq(before.reservations()));
    }

    #[test]
    fn a_member_is_booked_on_its_place_whatever_else_is_booked(
        nodes in vec(arbitrary::node(), 1..4),
        wanted in reservation(),
        others in vec(arbitrary::pod_grant(), 0..20),
    ) {
        let mut ledger = ledger_of(&nodes);
        let wanted = fitting(&nodes, wanted);
        ledger.reserve(wanted.clone()).unwrap();
        for other in others {
            if ledger.place(&other.pod).is_none() {
                let _refused = ledger.book(other);
            }
        }
        for place in wanted.places {
            prop_assert_eq!(ledger.book(place.clone()), Ok(LedgerChange::Changed));
            prop_assert_eq!(ledger.grant(&place.pod), Some(&place));
            prop_assert!(ledger.overbooked().is_empty());
        }
        prop_assert_eq!(ledger.reservations().count(), 0, "a reservation ends with its last place");
    }

    #[test]
    fn reserved_places_are_charged_like_grants(nodes in vec(arbitrary::node(), 1..4), wanted in reservation()) {
        let mut view = ClusterView::default();
        nodes.iter().for_each(|node| view.set_node(node.clone(), QuotaLabels::default(), []));
        let wanted = fitting(&nodes, wanted);
        view.reserve(wanted.clone(), Some("team")).unwrap();
        let reserved = view.usage().of("team");
        for place in wanted.places.clone() {
            view.book(place, "team".to_owned()).unwrap();
        }
        prop_assert_eq!(view.usage().of("team"), reserved);
        wanted.places.iter().for_each(|place| view.remove_pod(&place.pod));
        view.reserve(wanted.clone(), Some("team")).unwrap();
        view.cancel_reservation(&wanted.name);
        prop_assert_eq!(view.usage().of("team"), Default::default());
    }
}

#[test]
fn two_pods_exchange_their_places() {
    use tessera_core::gpu::Gpu;
    use tessera_core::grant::{ContainerGrant, Hold};
    use tessera_core::request::ContainerRole;
    use tessera_core::topology::Topology;
    use tessera_core::units::{GpuIndex, MiB};

    let node = |name: &str| {
        let gpu = Gpu::new(GpuIndex(0), "GPU-x".into(), "T4".into(), MiB(16_384));
        Node::new(name.into(), vec![gpu], Topology::unknown(1), Default::default(), Default::default())
            .unwrap()
    };
    let place = |pod: &str, node: &str| PodGrant {
        pod: pod.into(),
        node: node.into(),
        cpu: Default::default(),
        memory: Default::default(),
        containers: vec![ContainerGrant {
            container: "main".into(),
            role: ContainerRole::Main,
            holds: vec![(GpuIndex(0), Hold::Whole)],
        }],
    };
    let mut ledger = ledger_of(&[node("a"), node("b")]);
    let gang = Reservation {
        name: ReservationName("gang".to_owned()),
        owner: "gang team/train".to_owned(),
        until: Duration::from_secs(9),
        places: vec![place("one", "a"), place("two", "b")],
    };
    ledger.reserve(gang.clone()).unwrap();
    assert_eq!(ledger.reserve(gang.clone()), Err(Conflict::ReservationExists(gang.name.clone())));
    ledger.exchange_places(&"one".into(), &"two".into());
    assert_eq!(ledger.place(&"one".into()), Some(&place("one", "b")));
    assert_eq!(ledger.place(&"two".into()), Some(&place("two", "a")));
    assert_eq!(ledger.reservation_owner(&"two".into()), Some("gang team/train"));
    assert!(ledger.ended_reservations(Duration::from_secs(8)).is_empty());
    assert_eq!(ledger.ended_reservations(Duration::from_secs(9)), [gang.name]);
    let refused = ledger.book(place("other", "a")).unwrap_err();
    assert_eq!(refused.to_string(), "GPU 0 of node a has not enough left");
}
