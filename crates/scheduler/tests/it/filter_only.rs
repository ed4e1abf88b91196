//! A kube-scheduler that calls filter alone and binds by itself, as gpu-admission is configured.

use serde_json::{Value, json};
use tessera_core::units::{GpuIndex, PodUid};
use tessera_scheduler::state::{BindOutcome, BindStep, State, StateEvent, UnhealthyGpus, WatchEvent};
use tessera_sim::apiserver::ApiServer;

use crate::fixtures::*;
use crate::server::{Replica, eventually, make};

const PODS: &str = "/api/v1/namespaces/team/pods";

/// Calls filter as gpu-admission's configuration makes kube-scheduler do, with whole nodes.
async fn predicates(replica: &Replica, pod: &Value, nodes: &[Value]) -> Value {
    let question = json!({ "Pod": pod, "Nodes": { "items": nodes }, "NodeNames": null });
    replica.post("/scheduler/predicates", &question).await
}

fn passed(answer: &Value) -> Vec<&str> {
    let nodes = answer["Nodes"]["items"].as_array().unwrap();
    nodes.iter().map(|node| node["metadata"]["name"].as_str().unwrap()).collect()
}

fn bind_as_kube_scheduler(api: &ApiServer, pod: &Value, node: &str) {
    let name = pod["metadata"]["name"].as_str().unwrap();
    let binding =
        json!({ "metadata": { "uid": pod["metadata"]["uid"] }, "target": { "kind": "Node", "name": node } });
    api.bind(&format!("{PODS}/{name}/binding"), &binding).unwrap();
}

/// The sum of all requests fits the node, but no two of these pods fit one GPU.
#[tokio::test]
async fn nine_pods_of_60_percent_take_seven_gpus_and_two_wait() {
    let api = ApiServer::start().await.unwrap();
    let nodes = [api.create("/api/v1/nodes", node("p40s", 7, "GiB")).unwrap()];
    let replica = Replica::ready(&api, "one").await;
    let pods: Vec<Value> = (0..9).map(|number| make(&api, &share(&format!("p{number}"), 60))).collect();
    let mut waiting = Vec::new();
    for pod in &pods {
        let answer = predicates(&replica, pod, &nodes).await;
        assert_eq!(answer["Error"], "");
        match passed(&answer).as_slice() {
            [] => waiting.push(answer["FailedNodes"]["p40s"].as_str().unwrap().to_owned()),
            node => bind_as_kube_scheduler(&api, pod, node[0]),
        }
    }
    assert_eq!(waiting, ["no GPU with 60% and 9728 MiB left"; 2]);
    let bound = api.list(PODS).into_iter().filter(|pod| pod["spec"]["nodeName"] == "p40s");
    let mut gpus: Vec<String> = bound
        .map(|pod| {
            let annotations = &pod["metadata"]["annotations"];
            assert_eq!(annotations["tencent.com/predicate-node"], "p40s");
            assert!(annotations["tessera.dev/grant"].as_str().unwrap().contains("GPU-p40s-"));
            annotations["tencent.com/predicate-gpu-idx-0"].as_str().unwrap().to_owned()
        })
        .collect();
    gpus.sort();
    assert_eq!(gpus, ["0", "1", "2", "3", "4", "5", "6"]);
    eventually(|| replica.app.read().unconfirmed() == 0).await;
    api.delete(&format!("{PODS}/p0")).unwrap();
    eventually(|| {
        replica
            .app
            .read()
            .ledger()
            .grant(&PodUid(pods[0]["metadata"]["uid"].as_str().unwrap().into()))
            .is_none()
    })
    .await;
    assert_eq!(passed(&predicates(&replica, &pods[8], &nodes).await), ["p40s"]);
}

#[tokio::test]
async fn one_node_is_passed_on_and_a_new_attempt_may_choose_another() {
    let api = ApiServer::start().await.unwrap();
    let nodes = ["a", "b"].map(|name| api.create("/api/v1/nodes", node(name, 1, "GiB")).unwrap());
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &share("p", 60));
    let first = predicates(&replica, &pod, &nodes).await;
    assert_eq!(passed(&first).len(), 1);
    assert_eq!(replica.app.read().unconfirmed(), 1);
    let again = predicates(&replica, &pod, &nodes[1..]).await;
    assert_eq!(passed(&again), ["b"]);
    assert_eq!(replica.app.read().unconfirmed(), 2, "the first attempt stays in doubt");
    let kept = api.get(&format!("{PODS}/p")).unwrap();
    assert_eq!(kept["metadata"]["annotations"]["tencent.com/predicate-node"], "b");
    let plain = make(&api, &crate::fixtures::pod("plain", &[("cpu", "1")]));
    assert_eq!(
        passed(&predicates(&replica, &plain, &nodes).await),
        ["a", "b"],
        "pods without GPUs pass unchanged"
    );
    // A kube-scheduler that has the verb bind too may use it.
    assert_eq!(replica.bind(&pod, "b").await, "");
    assert_eq!(api.get(&format!("{PODS}/p")).unwrap()["spec"]["nodeName"], "b");
    eventually(|| replica.app.read().unconfirmed() == 0).await;
}

/// kube-scheduler gives up waiting for its Binding and filters the pod again, and the API server stores the Binding.
#[tokio::test]
async fn gpus_of_an_attempt_whose_binding_may_be_stored_are_not_given_away() {
    let api = ApiServer::start().await.unwrap();
    let nodes = ["a", "b"].map(|name| api.create("/api/v1/nodes", node(name, 1, "GiB")).unwrap());
    let replica = Replica::ready(&api, "one").await;
    let (first, second) = (make(&api, &share("first", 60)), make(&api, &share("second", 60)));
    assert_eq!(passed(&predicates(&replica, &first, &nodes[..1]).await), ["a"]);
    assert_eq!(passed(&predicates(&replica, &first, &nodes[1..]).await), ["b"]);
    assert_eq!(passed(&predicates(&replica, &second, &nodes[..1]).await), [""; 0]);
    bind_as_kube_scheduler(&api, &first, "a");
    eventually(|| replica.app.read().unconfirmed() == 0).await;
    assert_eq!(passed(&predicates(&replica, &second, &nodes).await), ["b"]);
}

#[tokio::test]
async fn another_attempt_gets_the_reserved_gpus_again() {
    let api = ApiServer::start().await.unwrap();
    let nodes = [api.create("/api/v1/nodes", node("a", 1, "GiB")).unwrap()];
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &share("p", 60));
    for _ in 0..3 {
        assert_eq!(passed(&predicates(&replica, &pod, &nodes).await), ["a"]);
        assert_eq!(replica.app.read().unconfirmed(), 1);
    }
    bind_as_kube_scheduler(&api, &pod, "a");
    eventually(|| replica.app.read().unconfirmed() == 0).await;
}

#[tokio::test]
async fn a_pod_that_cannot_be_annotated_keeps_no_gpus() {
    let api = ApiServer::start().await.unwrap();
    let nodes = [api.create("/api/v1/nodes", node("a", 1, "GiB")).unwrap()];
    let replica = Replica::ready(&api, "one").await;
    let mut gone = make(&api, &share("p", 60));
    api.delete(&format!("{PODS}/p")).unwrap();
    gone["metadata"]["uid"] = "another".into();
    let answer = predicates(&replica, &gone, &nodes).await;
    assert_eq!(passed(&answer), [""; 0]);
    assert_ne!(answer["Error"], "");
    assert_eq!(replica.app.read().unconfirmed(), 0);
}

/// Reserves a pod's GPUs as the server does.
fn reserve(state: &mut State, pod: &Value, node: &str, seconds: u64) {
    set_pod(state, pod);
    let step = state.begin_bind(&bind_args(pod, node), at(seconds)).unwrap();
    assert!(matches!(step, BindStep::Send(_)));
    state.keep_reservation(&PodUid(parse(pod).metadata.uid), at(seconds));
}

#[test]
fn a_reservation_without_a_binding_ends() {
    let mut state = state(&[node("a", 1, "GiB")]);
    let (first, second) = (share("first", 60), share("second", 60));
    reserve(&mut state, &first, "a", 0);
    assert_eq!(filter(&state, &second, &["a"]).node_names.unwrap(), [""; 0]);
    assert!(state.uncertain_bindings(at(675)).is_empty(), "kube-scheduler may wait for volumes");
    let uncertain = state.uncertain_bindings(at(676));
    assert_eq!(uncertain.len(), 1);
    state.resolve_uncertain(&uncertain[0], Some(parse(&first)), at(676));
    assert_eq!(filter(&state, &second, &["a"]).node_names.unwrap(), ["a"]);
    // kube-scheduler's Binding of another attempt is seen.
    reserve(&mut state, &first, "a", 700);
    let mut bound = first;
    bound["spec"]["nodeName"] = "a".into();
    set_pod(&mut state, &bound);
    assert_eq!(state.unconfirmed(), 0);
    assert_eq!(filter(&state, &second, &["a"]).node_names.unwrap(), [""; 0]);
}

#[test]
fn each_attempt_has_the_whole_time_of_a_binding() {
    let mut state = state(&[node("a", 1, "GiB")]);
    let pod = share("p", 60);
    let uid = PodUid(parse(&pod).metadata.uid);
    reserve(&mut state, &pod, "a", 0);
    assert_eq!(state.repeat_reservation(&uid, ["b"].into_iter(), at(70)), None, "the node is not offered");
    assert_eq!(state.repeat_reservation(&uid, ["b", "a"].into_iter(), at(70)), Some("a"));
    assert!(state.uncertain_bindings(at(745)).is_empty());
    assert_eq!(state.uncertain_bindings(at(746)).len(), 1);
}

/// A Binding of the former attempt was sent before the new one began, so it is not under way for long.
#[test]
fn an_attempt_that_ended_is_in_doubt_for_the_time_of_one_request() {
    let mut state = state(&[node("a", 1, "GiB"), node("b", 1, "GiB")]);
    let (pod, other) = (share("p", 60), share("other", 60));
    reserve(&mut state, &pod, "a", 0);
    reserve(&mut state, &pod, "b", 100);
    assert!(state.uncertain_bindings(at(175)).is_empty());
    let uncertain = state.uncertain_bindings(at(176));
    state.resolve_uncertain(&uncertain[0], Some(parse(&pod)), at(176));
    assert_eq!(filter(&state, &other, &["a", "b"]).node_names.unwrap(), ["a"]);
}

#[test]
fn broken_gpus_are_not_reserved_again() {
    let mut state = state(&[node("a", 2, "GiB")]);
    let pod = share("p", 60);
    let uid = PodUid(parse(&pod).metadata.uid);
    reserve(&mut state, &pod, "a", 0);
    let broken = UnhealthyGpus { node: "a".into(), gpus: [GpuIndex(0)].into_iter().collect() };
    state.handle(StateEvent::Unhealthy(WatchEvent::Set(broken)));
    assert_eq!(state.repeat_reservation(&uid, ["a"].into_iter(), at(1)), None);
    reserve(&mut state, &pod, "a", 1);
    let grant = state.ledger().grant(&uid).unwrap();
    assert_eq!(grant.containers[0].gpus().to_string(), "1");
    assert_eq!(state.unconfirmed(), 2);
}

/// With a bind verb kube-scheduler sends no Binding itself, so a refused bind leaves nothing in doubt.
#[test]
fn a_bind_verb_takes_over_the_reservation() {
    let mut state = state(&[node("a", 1, "GiB")]);
    let pod = share("p", 60);
    let uid = PodUid(parse(&pod).metadata.uid);
    reserve(&mut state, &pod, "a", 0);
    assert!(matches!(state.begin_bind(&bind_args(&pod, "a"), at(1)), Ok(BindStep::Send(_))));
    state.end_bind(&uid, BindOutcome::Refused, at(1));
    assert_eq!(state.unconfirmed(), 0);
}
