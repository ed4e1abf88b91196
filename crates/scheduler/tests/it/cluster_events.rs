//! Events of pods, nodes and gpushare's lists of unhealthy GPUs: what is free afterwards.

use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindOutcome, State, StateEvent, UnhealthyGpus, WatchEvent};

use crate::fixtures::*;

#[test]
fn a_pod_holds_its_gpu_until_its_containers_have_ended() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let mut first = bind(&mut state, &whole("first", 1), "n");
    first["status"]["phase"] = "Running".into();
    first["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    set_pod(&mut state, &first);
    assert!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap().is_empty());
    first["status"]["phase"] = "Succeeded".into();
    set_pod(&mut state, &first);
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
    // The deletion of the first pod, days later, does not release the GPU of the second pod.
    bind(&mut state, &whole("second", 1), "n");
    state.handle(StateEvent::Pod(WatchEvent::Gone(parse(&first))));
    assert!(filter(&state, &whole("third", 1), &["n"]).node_names.unwrap().is_empty());
}

#[test]
fn pods_that_bypass_the_scheduler_are_booked_on_their_node() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let mut sneaked = whole("sneaked", 1);
    sneaked["spec"]["nodeName"] = "n".into();
    set_pod(&mut state, &sneaked);
    assert_eq!(filter(&state, &whole("p", 2), &["n"]).failed_nodes["n"], "fewer than 2 idle GPUs");
    // The agent publishes which GPU the pod really uses.
    sneaked["metadata"]["annotations"] =
        json!({"tessera.dev/grant": r#"{"main":[{"uuid":"GPU-n-1","index":1,"cores":100}]}"#});
    set_pod(&mut state, &sneaked);
    let used = state.ledger().node(&"n".into()).unwrap().idle().to_string();
    assert_eq!(used, "0");
}

#[test]
fn released_gpus_go_to_pods_that_bypassed_the_scheduler() {
    let uid = PodUid::from("uid-p");
    let placed = |pod: &Value, node: &str| {
        let mut pod = pod.clone();
        pod["spec"]["nodeName"] = node.into();
        pod
    };
    let check = |why: &str, leave: &dyn Fn(&mut State, &Value)| {
        let mut state = state(&[node("a", 1, "GiB"), node("b", 1, "GiB")]);
        let pod = whole("p", 1);
        set_pod(&mut state, &pod);
        state.begin_bind(&bind_args(&pod, "a"), at(0)).unwrap();
        state.end_bind(&uid, BindOutcome::Unknown, at(1));
        // The booking still holds the only GPU, so none can be set aside for the bypassing pod.
        set_pod(&mut state, &placed(&whole("bypasses", 1), "a"));
        leave(&mut state, &pod);
        assert!(filter(&state, &whole("next", 1), &["a"]).node_names.unwrap().is_empty(), "{why}");
    };
    check("placed by somebody else", &|state, pod| set_pod(state, &placed(pod, "b")));
    check("deleted", &|state, pod| state.handle(StateEvent::Pod(WatchEvent::Gone(parse(pod)))));
    check("bound elsewhere at the second try", &|state, pod| {
        state.begin_bind(&bind_args(pod, "b"), at(2)).unwrap();
        set_pod(state, &placed(pod, "b"));
    });
}

#[test]
fn nodes_can_be_added_changed_and_removed() {
    let mut state = state(&[node("n", 1, "GiB")]);
    bind(&mut state, &whole("first", 1), "n");
    set_node(&mut state, &node("n", 2, "GiB"));
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
    state.handle(StateEvent::Node(WatchEvent::Gone(serde_json::from_value(node("n", 2, "GiB")).unwrap())));
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).failed_nodes["n"], "node is not known yet");
    set_node(&mut state, &node("n", 1, "GiB"));
    assert!(
        filter(&state, &whole("second", 1), &["n"]).node_names.unwrap().is_empty(),
        "its pod is still there"
    );
    // The list does not contain the pod, which was deleted while the watch was broken.
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn a_late_read_does_not_restore_a_deleted_or_ended_pod() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let bound = bind(&mut state, &whole("first", 1), "n");
    state.handle(StateEvent::Pod(WatchEvent::Gone(parse(&bound))));
    state.apply_read(parse(&bound), state.list_generation());
    assert_eq!(filter(&state, &whole("second", 1), &["n"]).node_names.unwrap(), ["n"]);
    let mut second = bind(&mut state, &whole("second", 1), "n");
    let running = second.clone();
    second["status"]["phase"] = "Succeeded".into();
    set_pod(&mut state, &second);
    state.apply_read(parse(&running), state.list_generation());
    assert_eq!(filter(&state, &whole("third", 1), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn a_read_that_is_older_than_a_list_adds_no_pod() {
    let mut bypasses = whole("p", 1);
    bypasses["spec"]["nodeName"] = "n".into();
    for steps in ["ask list answer", "list ask answer", "ask begin answer end", "begin ask answer end"] {
        let mut state = state(&[node("n", 1, "GiB")]);
        let mut asked = state.list_generation();
        for step in steps.split(' ') {
            match step {
                "ask" => asked = state.list_generation(),
                "answer" => state.apply_read(parse(&bypasses), asked),
                "begin" => state.handle(StateEvent::Pod(WatchEvent::Listing)),
                "end" => state.handle(StateEvent::Pod(WatchEvent::Listed)),
                _ => [WatchEvent::Listing, WatchEvent::Listed]
                    .into_iter()
                    .for_each(|list| state.handle(StateEvent::Pod(list))),
            }
        }
        let is_held = filter(&state, &whole("next", 1), &["n"]).node_names.unwrap().is_empty();
        assert_eq!(is_held, steps == "list ask answer", "{steps}: no list was later than the answer");
    }
}

#[test]
fn gpus_on_the_unhealthy_list_of_gpushare_are_not_granted() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let list = |gpus: &str| UnhealthyGpus {
        node: "n".into(),
        gpus: tessera_wire::foreign::unhealthy::parse(gpus).0,
    };
    let fits = |state: &State, count| filter(state, &whole("p", count), &["n"]).failed_nodes.is_empty();
    state.handle(StateEvent::Unhealthy(WatchEvent::Set(list("1"))));
    assert!(!fits(&state, 2) && fits(&state, 1));
    // An update of the node object does not make the GPU healthy again.
    set_node(&mut state, &node("n", 2, "GiB"));
    assert!(!fits(&state, 2));
    let mut grown = node("n", 3, "GiB");
    grown["metadata"]["labels"]["more"] = "gpus".into();
    set_node(&mut state, &grown);
    assert!(fits(&state, 2) && !fits(&state, 3));
    state.handle(StateEvent::Unhealthy(WatchEvent::Gone(list("1"))));
    assert!(fits(&state, 3));
    // A list may name a node that is not known yet, or be deleted while the watch is broken.
    state.handle(StateEvent::Unhealthy(WatchEvent::Set(UnhealthyGpus { node: "late".into(), ..list("0") })));
    set_node(&mut state, &node("late", 1, "GiB"));
    let late = |state: &State| filter(state, &whole("p", 1), &["late"]).node_names.unwrap().len();
    assert_eq!(late(&state), 0);
    state.handle(StateEvent::Unhealthy(WatchEvent::Listing));
    state.handle(StateEvent::Unhealthy(WatchEvent::Listed));
    assert_eq!(late(&state), 1);
}
