//! A kube-scheduler that calls filter alone and binds by itself, as gpu-admission is configured.

use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{BindStep, State};
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
async fn one_node_is_passed_on_and_a_new_attempt_replaces_the_last() {
    let api = ApiServer::start().await.unwrap();
    let nodes = ["a", "b"].map(|name| api.create("/api/v1/nodes", node(name, 1, "GiB")).unwrap());
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &share("p", 60));
    let first = predicates(&replica, &pod, &nodes).await;
    assert_eq!(passed(&first).len(), 1);
    assert_eq!(replica.app.read().unconfirmed(), 1);
    let again = predicates(&replica, &pod, &nodes[1..]).await;
    assert_eq!(passed(&again), ["b"]);
    assert_eq!(replica.app.read().unconfirmed(), 1, "the first attempt is released");
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
    assert!(state.uncertain_bindings(at(75)).is_empty());
    let uncertain = state.uncertain_bindings(at(76));
    assert_eq!(uncertain.len(), 1);
    state.resolve_uncertain(&uncertain[0], Some(parse(&first)), at(76));
    assert_eq!(filter(&state, &second, &["a"]).node_names.unwrap(), ["a"]);
    // kube-scheduler's Binding of another attempt is seen.
    reserve(&mut state, &first, "a", 100);
    let mut bound = first;
    bound["spec"]["nodeName"] = "a".into();
    set_pod(&mut state, &bound);
    assert_eq!(state.unconfirmed(), 0);
    assert_eq!(filter(&state, &second, &["a"]).node_names.unwrap(), [""; 0]);
}
