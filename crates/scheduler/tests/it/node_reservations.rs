//! Reservations by node annotations: kept while GPUs become free, given to their pod, found again after a restart.

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindStep, State, StateEvent, Timestamp, WatchEvent};
use tessera_scheduler::verb::verdict_cache::VerdictCache;

use crate::fixtures::*;

const UNTIL: &str = "2026-01-02T03:04:05Z";

/// Seconds since 1970 of [`UNTIL`].
const UNTIL_SECONDS: u64 = 1_767_323_045;

/// Returns a node with a reservation of these GPUs.
fn reserving(name: &str, pod: Option<&Value>, gpus: &[usize]) -> Value {
    let mut node = node(name, 2, "GiB");
    let uuid = |gpu: &usize| json!({ "uuid": format!("GPU-{name}-{gpu}") });
    let mut reservation = json!({ "name": "r", "owner": "jane", "until": UNTIL,
        "gpus": gpus.iter().map(uuid).collect::<Vec<_>>() });
    if let Some(pod) = pod {
        let meta = &pod["metadata"];
        reservation["pod"] =
            json!({ "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"] });
    }
    node["metadata"]["annotations"]["tessera.dev/reservations"] = json!([reservation]).to_string().into();
    node
}

fn end_pod(state: &mut State, pod: &Value) {
    state.handle(StateEvent::Pod(WatchEvent::Gone(parse(pod))));
}

/// Returns the nodes that filter passes for a pod.
fn passed(state: &State, pod: &Value, nodes: &[&str]) -> Vec<String> {
    let args = question(pod, nodes);
    if let Some(node) = state.reserved_node(&args) {
        return vec![node.to_owned()];
    }
    let verdicts = state.filter(&args, &VerdictCache::default());
    verdicts.fitting.iter().map(|name| (*name).to_owned()).collect()
}

fn on(mut pod: Value, node: &str, gpu: usize) -> Value {
    pod["spec"]["nodeName"] = node.into();
    let grant = json!({ "main": [{ "uuid": format!("GPU-{node}-{gpu}"), "index": gpu, "cores": 100 }] });
    pod["metadata"]["annotations"] = json!({ "tessera.dev/grant": grant.to_string() });
    pod
}

#[test]
fn gpus_that_become_free_are_kept_for_the_pod() {
    let (large, small) = (whole("large", 2), whole("small", 1));
    let mut state = state(&[reserving("a", Some(&large), &[0, 1]), node("b", 2, "GiB")]);
    let held = on(whole("held", 1), "a", 0);
    set_pod(&mut state, &held);
    set_pod(&mut state, &on(whole("other", 1), "b", 0));
    set_pod(&mut state, &large);
    assert_eq!(passed(&state, &small, &["a", "b"]), ["b"], "the free GPU of node a is kept");
    assert_eq!(passed(&state, &large, &["a", "b"]), [""; 0]);
    let explanation = tessera_scheduler::verb::explain::explain(&state, "team", "large").unwrap().unwrap();
    assert!(explanation.reservation.unwrap().contains("not all of them are free yet"));
    end_pod(&mut state, &held);
    assert_eq!(passed(&state, &small, &["a"]), [""; 0], "so is the GPU that became free");
    assert!(state.waits_for_reservation(&question(&small, &["a"])).unwrap().contains("pod team/large"));
    assert_eq!(passed(&state, &large, &["a", "b"]), ["a"]);
    let BindStep::Send(order) = state.begin_bind(&bind_args(&large, "a"), at(1)).unwrap() else {
        panic!("nothing to send");
    };
    assert!(order.why.contains("reserved for this pod"), "{}", order.why);
    assert_eq!(state.ledger().reservations().count(), 0, "the place became the grant");
}

#[test]
fn a_reservation_ends_with_its_time_its_pod_or_its_annotation() {
    let large = whole("large", 2);
    let small = whole("small", 1);
    let now = |seconds: u64| Timestamp { unix_nanos: u128::from(seconds) * 1_000_000_000, ..at(seconds) };
    let mut by_time = state(&[reserving("a", None, &[0, 1])]);
    assert_eq!(passed(&by_time, &small, &["a"]), [""; 0]);
    by_time.expire_gangs(now(UNTIL_SECONDS - 1));
    assert_eq!(passed(&by_time, &small, &["a"]), [""; 0]);
    by_time.expire_gangs(now(UNTIL_SECONDS));
    assert_eq!(passed(&by_time, &small, &["a"]), ["a"]);
    let mut by_pod = state(&[reserving("a", Some(&large), &[0, 1])]);
    assert_eq!(passed(&by_pod, &small, &["a"]), ["a"], "the pod does not exist yet");
    set_pod(&mut by_pod, &large);
    assert_eq!(passed(&by_pod, &small, &["a"]), [""; 0]);
    end_pod(&mut by_pod, &large);
    assert_eq!(passed(&by_pod, &small, &["a"]), ["a"]);
    let mut by_annotation = state(&[reserving("a", None, &[0, 1])]);
    set_node(&mut by_annotation, &node("a", 2, "GiB"));
    assert_eq!(passed(&by_annotation, &small, &["a"]), ["a"]);
    let mut wrong = node("a", 2, "GiB");
    wrong["metadata"]["annotations"]["tessera.dev/reservations"] = "nonsense".into();
    set_node(&mut by_annotation, &wrong);
    assert_eq!(passed(&by_annotation, &small, &["a"]), ["a"]);
}

#[test]
fn each_value_that_cannot_be_read_is_reported_once() {
    let wrong = |text: &str| {
        let mut node = node("a", 2, "GiB");
        node["metadata"]["annotations"]["tessera.dev/reservations"] = text.into();
        node
    };
    let no_time = r#"[{"name": "r", "owner": "jane", "until": "soon", "gpus": []}]"#;
    let mut state = state(&[wrong("nonsense")]);
    let mut reported = |change: Option<Value>| {
        change.iter().for_each(|node| set_node(&mut state, node));
        let reasons = state.take_unreadable_reservations();
        reasons.into_iter().map(|(node, reason)| format!("{node}: {reason}")).collect::<Vec<_>>()
    };
    let first = reported(None);
    assert_eq!(first.len(), 1);
    assert!(first[0].starts_with("a: annotation tessera.dev/reservations is not understood"), "{first:?}");
    assert_eq!(reported(Some(wrong("nonsense"))), [""; 0], "a heartbeat does not change the value");
    assert!(reported(Some(wrong(no_time)))[0].contains(r#"the end "soon" of reservation "r""#));
    assert_eq!(reported(Some(node("a", 2, "GiB"))), [""; 0]);
    assert_eq!(reported(Some(wrong(no_time))).len(), 1, "the value was away in between");
}

#[test]
fn the_pod_may_go_elsewhere() {
    let large = whole("large", 2);
    let mut state = state(&[reserving("a", Some(&large), &[0, 1]), node("b", 2, "GiB")]);
    set_pod(&mut state, &large);
    assert_eq!(passed(&state, &large, &["a", "b"]), ["a"]);
    assert_eq!(passed(&state, &large, &["b"]), ["b"], "kube-scheduler did not offer node a");
    assert!(state.begin_bind(&bind_args(&large, "b"), at(1)).is_ok());
    assert_eq!(state.ledger().reservations().count(), 0);
    assert_eq!(passed(&state, &whole("small", 1), &["a"]), ["a"]);
}

proptest! {
    /// The reserved GPUs depend on nodes and pods alone, in whatever order the watch shows them, and no GPU carries
    /// more than it has.
    #[test]
    fn any_order_of_events_leads_to_the_same_reservations(
        order in Just((0..5).collect::<Vec<usize>>()).prop_shuffle(),
        ended in 0..3_usize,
    ) {
        let large = whole("large", 2);
        let events = |state: &mut State, event: usize| match event {
            0 => set_node(state, &reserving("a", Some(&large), &[0, 1])),
            1 => set_node(state, &reserving("b", None, &[1])),
            2 => set_pod(state, &large),
            3 => set_pod(state, &on(whole("one", 1), "a", 0)),
            _ => set_pod(state, &on(whole("two", 1), "b", 1)),
        };
        let play = |order: &[usize]| {
            let mut state = state(&[]);
            order.iter().for_each(|event| events(&mut state, *event));
            if ended > 0 {
                end_pod(&mut state, &on(whole("one", 1), "a", 0));
            }
            if ended > 1 {
                end_pod(&mut state, &on(whole("two", 1), "b", 1));
            }
            let names: Vec<_> = state.ledger().reservations().cloned().collect();
            let places: Vec<_> =
                names.iter().map(|name| state.ledger().reservation(name).unwrap().places).collect();
            assert!(state.ledger().overbooked().is_empty());
            (names, places, state.ledger().place(&PodUid("uid-large".to_owned())).is_some())
        };
        let (names, places, is_placed) = play(&order);
        prop_assert_eq!(is_placed, ended > 0);
        prop_assert_eq!((names, places, is_placed), play(&[0, 1, 2, 3, 4]));
    }
}
