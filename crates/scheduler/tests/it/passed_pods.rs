//! GPUs of pods that filter has passed are reserved until kube-scheduler calls bind, where kube-scheduler itself does not
//! count them.

use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{SchedulerSettings, State, StateEvent, WatchEvent};
use tessera_scheduler::verb::filter::{FilterVerdicts, PassOn};
use tessera_scheduler::verb::verdict_cache::VerdictCache;
use tessera_sim::apiserver::ApiServer;

use crate::fixtures::*;
use crate::server::{Replica, eventually, make};

const NODES: [&str; 2] = ["a", "b"];

fn uid(pod: &Value) -> PodUid {
    PodUid(parse(pod).metadata.uid)
}

/// Returns a state with the default settings and two nodes with these numbers of GPUs.
fn cluster(gpus: [usize; 2]) -> State {
    let mut state = State::new(SchedulerSettings::default());
    for (name, count) in NODES.into_iter().zip(gpus) {
        set_node(&mut state, &node(name, count, "GiB"));
    }
    state
}

/// Calls filter like the server, and reserves GPUs. Returns the nodes that are passed.
fn pass(state: &mut State, pod: &Value, seconds: u64) -> Vec<String> {
    let args = question(pod, &NODES);
    state.release_passed(&uid(pod));
    let verdicts: FilterVerdicts<'_> = state.filter(&args, &VerdictCache::default());
    let to_reserve = verdicts.to_reserve.filter(|node| state.reserve_passed(&args.pod, node, at(seconds)));
    let fitting: Vec<String> = verdicts.fitting.iter().map(|name| (*name).to_owned()).collect();
    to_reserve.map_or(fitting, |node| vec![node.to_owned()])
}

fn retry_error(state: &State, pod: &Value) -> Option<String> {
    state.waits_for_reservation(&question(pod, &NODES))
}

/// kube-scheduler filters all of these pods before it binds the first one.
#[tokio::test]
async fn pods_that_are_filtered_before_the_first_is_bound_are_all_bound() {
    let api = ApiServer::start().await.unwrap();
    for name in NODES {
        api.create("/api/v1/nodes", node(name, 1, "GiB")).unwrap();
    }
    let replica = Replica::ready(&api, "one").await;
    let filter = async |pod: &Value| {
        replica.post("/scheduler/filter", &json!({"Pod": pod, "NodeNames": NODES, "Nodes": null})).await
    };
    let pods: Vec<Value> = (0..4).map(|number| make(&api, &parts(&format!("p{number}"), 1, 50))).collect();
    eventually(|| replica.app.read().is_waiting(&uid(&pods[3]))).await;
    let mut chosen = Vec::new();
    for pod in &pods {
        let answer = filter(pod).await;
        // kube-scheduler takes any of the nodes that pass.
        let nodes = answer["NodeNames"].as_array().unwrap();
        chosen.push(nodes.last().unwrap().as_str().unwrap().to_owned());
    }
    let late = make(&api, &parts("late", 1, 50));
    let answer = filter(&late).await;
    assert_eq!(answer["NodeNames"], json!([]));
    let error = answer["Error"].as_str().unwrap();
    assert!(error.starts_with("suitable GPUs are reserved for pod team/p"), "{error}");
    assert!(error.contains("which kube-scheduler is binding"), "{error}");
    for (pod, node) in pods.iter().zip(&chosen) {
        assert_eq!(replica.bind(pod, node).await, "");
    }
    let answer = filter(&late).await;
    assert_eq!((&answer["Error"], &answer["NodeNames"]), (&json!(""), &json!([])));
}

#[test]
fn the_next_attempt_of_a_pod_may_choose_among_all_best_nodes() {
    let mut state = cluster([1, 1]);
    let pod = parts("p", 1, 60);
    set_pod(&mut state, &pod);
    assert_eq!(pass(&mut state, &pod, 0), ["a"]);
    assert!(state.is_passed(&uid(&pod)));
    assert_eq!(pass(&mut state, &pod, 1), ["a", "b"], "another extender may have refused the node");
    assert!(!state.is_passed(&uid(&pod)));
    assert_eq!(state.ledger().reservations().count(), 0);
}

#[test]
fn a_reservation_ends_with_bind_the_end_of_the_pod_or_a_few_seconds() {
    let other = parts("other", 1, 60);
    let reserved = || {
        let mut state = cluster([1, 0]);
        let pod = parts("p", 1, 60);
        set_pod(&mut state, &pod);
        assert_eq!(pass(&mut state, &pod, 0), ["a"]);
        assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), [""; 0]);
        assert!(retry_error(&state, &other).is_some());
        (state, pod)
    };
    let (mut state, pod) = reserved();
    bind(&mut state, &pod, "a");
    assert_eq!((state.ledger().reservations().count(), retry_error(&state, &other)), (0, None));

    // The API server refuses the Binding.
    let (mut state, pod) = reserved();
    assert!(state.begin_bind(&bind_args(&pod, "a"), at(1)).is_ok());
    state.end_bind(&uid(&pod), tessera_scheduler::state::BindOutcome::Refused, at(1));
    assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), ["a"]);

    // kube-scheduler binds the pod to another node.
    let (mut state, pod) = reserved();
    assert!(state.begin_bind(&bind_args(&pod, "b"), at(1)).is_err());
    assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), ["a"]);

    let (mut state, pod) = reserved();
    end(&mut state, &pod);
    assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), ["a"]);
    assert!(!state.reserve_passed(&parse(&pod), "a", at(1)), "the pod has ended");

    let (mut state, pod) = reserved();
    let mut placed = pod;
    placed["spec"]["nodeName"] = "b".into();
    set_pod(&mut state, &placed);
    assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), ["a"]);

    let (mut state, _) = reserved();
    assert!(state.has_reservations_to_check());
    state.expire_gangs(at(4));
    assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), [""; 0]);
    state.expire_gangs(at(5));
    assert_eq!(filter(&state, &other, &["a"]).node_names.unwrap(), ["a"]);
    assert!(!state.has_reservations_to_check());
}

/// The watch lists the pods again, without this one.
#[test]
fn a_pod_that_a_list_did_not_contain_keeps_no_gpus() {
    let mut state = cluster([1, 0]);
    let pod = parts("p", 1, 60);
    set_pod(&mut state, &pod);
    assert_eq!(pass(&mut state, &pod, 0), ["a"]);
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    assert_eq!(state.ledger().reservations().count(), 0);
}

/// kube-scheduler counts what these pods take of a node, or has a reason of its own to choose the node.
#[test]
fn other_pods_keep_their_choice_of_nodes() {
    let mut state = cluster([2, 2]);
    let mut check = |pod: &Value, expected: &[&str]| {
        set_pod(&mut state, pod);
        assert_eq!(pass(&mut state, pod, 0), expected, "{pod}");
        assert_eq!(state.ledger().reservations().count() == 1, expected.len() == 1);
        state.release_passed(&uid(pod));
    };
    check(&parts("part", 1, 60), &["a"]);
    check(&whole("whole", 1), &["a"]);
    check(&share("vcuda", 60), &NODES);
    check(&pod("topology", &[("aliyun.com/gpu", "1")]), &NODES);
    check(&pod("memory", &[("aliyun.com/gpu-mem", "4")]), &NODES);
    let mut prefers = parts("prefers", 1, 60);
    prefers["spec"]["affinity"] = json!({ "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [
        { "weight": 1, "preference": { "matchExpressions": [{ "key": "model", "operator": "Exists" }] } }
    ] } });
    check(&prefers, &NODES);
    let mut unserved = parts("unserved", 1, 60);
    unserved["spec"]["schedulerName"] = "another".into();
    check(&unserved, &NODES);
    let mut all = State::new(SchedulerSettings { pass_on: PassOn::All, ..SchedulerSettings::default() });
    NODES.iter().for_each(|name| set_node(&mut all, &node(name, 2, "GiB")));
    assert_eq!(pass(&mut all, &parts("part", 1, 60), 0), NODES);
}

/// A device of `nvidia.com/gpu` is a whole GPU on this node, so kube-scheduler counts it.
#[test]
fn a_node_with_one_device_for_each_gpu_is_not_reserved() {
    let mut state = State::new(SchedulerSettings::default());
    for name in NODES {
        let mut plain = node(name, 1, "GiB");
        let inventory = &mut plain["metadata"]["annotations"]["tessera.dev/inventory"];
        let mut document: Value = serde_json::from_str(inventory.as_str().unwrap()).unwrap();
        document.as_object_mut().unwrap().remove("nvidiaSlots");
        *inventory = document.to_string().into();
        set_node(&mut state, &plain);
    }
    assert_eq!(pass(&mut state, &whole("whole", 1), 0), NODES);
}
