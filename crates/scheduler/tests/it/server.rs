//! Tests of the whole server against an API server in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use tessera_cluster::lease::LeaseTiming;
use tessera_scheduler::dashboard::{AgentReader, view};
use tessera_scheduler::notices::Notices;
use tessera_scheduler::run::{Membership, Neighbour, lead};
use tessera_scheduler::server::{App, router};
use tessera_scheduler::state::{SchedulerSettings, State};
use tessera_sim::apiserver::{ApiServer, BindingFault};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::fixtures::*;

const SOON: Duration = Duration::from_secs(20);
const QUICK: LeaseTiming = LeaseTiming {
    duration: Duration::from_secs(2),
    renew_within: Duration::from_secs(1),
    retry: Duration::from_millis(50),
};
const PODS: &str = "/api/v1/namespaces/team/pods";

pub(crate) struct Replica {
    pub(crate) app: Arc<App>,
    pub(crate) router: Router,
    pub(crate) task: JoinHandle<()>,
    pub(crate) stop: Option<oneshot::Sender<()>>,
}

impl Replica {
    pub(crate) fn start(api: &ApiServer, identity: &str) -> Self {
        Self::reading(api, identity, AgentReader::default())
    }

    /// Starts a replica that reads agents in this way.
    pub(crate) fn reading(api: &ApiServer, identity: &str, agents: AgentReader) -> Self {
        Self::beside(api, identity, agents, None)
    }

    /// Starts a replica beside this kube-scheduler.
    pub(crate) fn beside(
        api: &ApiServer,
        identity: &str,
        agents: AgentReader,
        neighbour: Option<Neighbour>,
    ) -> Self {
        Self::with(api, agents, |membership| Membership {
            identity: identity.to_owned(),
            neighbour,
            ..membership
        })
    }

    /// Starts a replica with this part in the election.
    pub(crate) fn with(
        api: &ApiServer,
        agents: AgentReader,
        change: impl FnOnce(Membership) -> Membership,
    ) -> Self {
        Self::with_settings(api, SchedulerSettings::default(), agents, change)
    }

    /// Starts a replica with these settings and this part in the election.
    pub(crate) fn with_settings(
        api: &ApiServer,
        settings: SchedulerSettings,
        agents: AgentReader,
        change: impl FnOnce(Membership) -> Membership,
    ) -> Self {
        let client = tessera_cluster::connect_to(&api.url()).unwrap();
        let app = App::new(State::new(settings.clone()), client.clone());
        let app = Arc::new(app.with_notices(Notices::start(client)).with_agents(agents));
        let membership = change(Membership {
            identity: String::new(),
            namespace: "kube-system".to_owned(),
            lease: "tessera-scheduler".to_owned(),
            timing: QUICK,
            pages: None,
            verbs: None,
            is_behind_service: false,
            neighbour: None,
        });
        let (stop, stopped) = oneshot::channel();
        let stopped = async move { drop(stopped.await) };
        let task = tokio::spawn(lead(Arc::clone(&app), settings, membership, None, stopped));
        Self { router: router(Arc::clone(&app), 1 << 20, &[], None), app, task, stop: Some(stop) }
    }

    pub(crate) async fn ready(api: &ApiServer, identity: &str) -> Self {
        let replica = Self::start(api, identity);
        eventually(|| replica.app.is_ready()).await;
        replica
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: impl Into<Body>) -> (u16, Vec<u8>) {
        let request = Request::builder().method(method).uri(path).body(body.into()).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let code = response.status().as_u16();
        (code, to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec())
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Value {
        let (code, answer) = self.call("POST", path, body.to_string()).await;
        assert_eq!(code, 200);
        serde_json::from_slice(&answer).unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let (code, answer) = self.call("GET", path, Body::empty()).await;
        (code, String::from_utf8(answer).unwrap())
    }

    pub(crate) async fn bind(&self, pod: &Value, node: &str) -> String {
        let args = serde_json::to_value(bind_args(pod, node)).unwrap();
        self.post("/scheduler/bind", &args).await["Error"].as_str().unwrap().to_owned()
    }
}

/// Waits until a condition holds that other tasks of the test bring about.
pub(crate) async fn eventually(mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < SOON, "waited in vain");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) fn make(api: &ApiServer, pod: &Value) -> Value {
    api.create(PODS, pod.clone()).unwrap()
}

pub(crate) async fn cluster() -> ApiServer {
    let api = ApiServer::start().await.unwrap();
    for name in ["a", "b"] {
        api.create("/api/v1/nodes", node(name, 2, "GiB")).unwrap();
    }
    api
}

/// Returns the messages of the events about a pod with this reason.
pub(crate) fn told(api: &ApiServer, pod: &str, reason: &str) -> Vec<String> {
    let events = api.list("/api/v1/namespaces/team/events");
    let is_it = |event: &&Value| event["involvedObject"]["name"] == pod && event["reason"] == reason;
    events.iter().filter(is_it).map(|event| event["message"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn events_report_the_chosen_gpus_and_failed_bindings() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("chosen", 1));
    assert_eq!(replica.bind(&pod, "b").await, "");
    eventually(|| !told(&api, "chosen", "GpusChosen").is_empty()).await;
    let message = told(&api, "chosen", "GpusChosen").remove(0);
    assert!(message.starts_with("GPU 0 of node b: the GPU that later sets miss least"), "{message}");
    let pod = make(&api, &whole("refused", 1));
    api.fail_bindings([BindingFault::Refused]);
    assert_ne!(replica.bind(&pod, "b").await, "");
    eventually(|| !told(&api, "refused", "BindingFailed").is_empty()).await;
    let message = told(&api, "refused", "BindingFailed").remove(0);
    assert!(message.contains("the GPUs are free again. The choice was: GPU 1 of node b"), "{message}");
}

#[tokio::test]
async fn a_pod_is_filtered_scored_and_bound() {
    let api = cluster().await;
    let before = make(&api, &whole("early", 2));
    let replica = Replica::ready(&api, "one").await;
    let question = json!({"Pod": before, "NodeNames": ["a", "b", "c"], "Nodes": null});
    let filtered = replica.post("/scheduler/filter", &question).await;
    assert_eq!(filtered["NodeNames"], json!(["a"]), "the GPUs are reserved there");
    assert_eq!(filtered["FailedNodes"], json!({"c": "node is not known yet"}));
    let filtered = replica.post("/scheduler/filter", &question).await;
    assert_eq!(filtered["NodeNames"], json!(["a", "b"]));
    for path in ["/scheduler/prioritize", "/gputopology-scheduler/sort", "/gputopology-schedulersort"] {
        let graded = replica.post(path, &question).await;
        assert_eq!(graded, json!([{"Host": "a", "Score": 10}, {"Host": "b", "Score": 10}]));
    }
    assert_eq!(replica.bind(&before, "b").await, "");
    let bound = api.get(&format!("{PODS}/early")).unwrap();
    assert_eq!(bound["spec"]["nodeName"], "b");
    assert!(bound["metadata"]["annotations"]["tessera.dev/grant"].as_str().unwrap().contains("GPU-b-0"));
    eventually(|| replica.app.read().unconfirmed() == 0).await;
    // The pod is created after the start, so the scheduler learns of it from the watch or by a
    // read.
    let late = make(&api, &whole("late", 1));
    assert_eq!(replica.bind(&late, "b").await, "node b: fewer than 1 idle GPU");
    api.delete(&format!("{PODS}/early")).unwrap();
    eventually(|| replica.app.read().ledger().node(&"b".into()).is_some_and(|node| node.idle().len() == 2))
        .await;
    assert_eq!(replica.bind(&late, "b").await, "");
    let (code, text) = replica.get("/metrics").await;
    assert_eq!(code, 200);
    assert!(text.contains("tessera_scheduler_gpus 4\n"), "{text}");
    assert!(text.contains("# TYPE pod_and_gpu_map_info gauge\n"), "{text}");
    assert!(
        text.contains(
            r#"pod_and_gpu_map_info{gpu_id="GPU-b-0",gpu_model="T4",namespace="team",node="b",pod_name="late"} 1"#
        ),
        "{text}"
    );
    let other = make(&api, &whole("other", 1));
    assert_eq!(replica.bind(&other, "a").await, "");
    let (code, by_node) = replica.get("/metrics/nodes").await;
    assert_eq!(code, 200);
    for node in ["a", "b"] {
        let series = format!(r#"{node}_info{{gpu_id="GPU-{node}-0",gpu_model="T4",namespace="team""#);
        assert!(by_node.contains(&format!("# TYPE {node}_info gauge\n")), "{node}: {by_node}");
        assert!(by_node.contains(&series), "{node}: {by_node}");
    }
    assert_eq!(replica.get("/readyz").await.0, 200);
    assert_eq!(replica.get("/explain/team/nobody").await.0, 404);
    assert!(replica.get("/explain/team/late").await.1.contains("placed on node b"));
    assert_eq!(replica.get("/gpushare-scheduler/inspect/nobody").await.0, 404);
}

#[tokio::test]
async fn serves_every_route_of_the_original_extenders() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("p", 1));
    eventually(|| replica.app.read().is_waiting(&pod["metadata"]["uid"].as_str().unwrap().into())).await;
    let question = json!({"pod": pod, "nodenames": ["a"]});
    let answers = |answer: &Value| answer["NodeNames"] == json!(["a"]);
    for prefix in ["/scheduler", "/gpushare-scheduler", "/gputopology-scheduler", "/gpu-scheduler-extender"] {
        for verb in ["filter", "predicates"] {
            let answer = replica.post(&format!("{prefix}/{verb}"), &question).await;
            assert!(answers(&answer), "{prefix}/{verb}: {answer}");
        }
        for verb in ["prioritize", "priorities", "sort"] {
            assert!(replica.post(&format!("{prefix}/{verb}"), &question).await.is_array(), "{prefix}/{verb}");
        }
        let proposed = json!({"Pod": pod, "NodeNameToMetaVictims": {"a": {"Pods": []}}});
        let answer = replica.post(&format!("{prefix}/preempt"), &proposed).await;
        assert!(answer["NodeNameToMetaVictims"].is_object(), "{prefix}: {answer}");
        let bind = json!({"podName": "p", "podNamespace": "team", "podUID": "other", "node": "a"});
        let answer = replica.post(&format!("{prefix}/bind"), &bind).await;
        assert!(answer["Error"].as_str().unwrap().contains("no longer exists"), "{prefix}: {answer}");
        for path in ["inspect", "inspect/a", "inspect/a?detail=true"] {
            let (code, text) = replica.get(&format!("{prefix}/{path}")).await;
            assert!(code == 200 && text.contains(r#""name":"a""#), "{prefix}/{path}: {code} {text}");
        }
    }
    assert!(replica.post("/gputopology-schedulersort", &question).await.is_array());
    for path in ["/version", "/healthz", "/readyz", "/metrics", "/explain/team/p"] {
        assert_eq!(replica.get(path).await.0, 200, "{path}");
    }
    assert_eq!(replica.post("/what-if", &pod).await["nodes"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn node_objects_are_returned_unchanged() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let mut known = node("a", 2, "GiB");
    known["spec"] = json!({"taints": [{"key": "k"}], "odd": [1, 2, {"x": null}]});
    let question = json!({"pod": whole("p", 1), "nodes": {"items": [known, {"metadata": {"name": "c"}}]}});
    let answer = replica.post("/gpushare-scheduler/filter", &question).await;
    assert_eq!(answer["Nodes"], json!({"items": [known]}));
    assert_eq!(answer["FailedNodes"], json!({"c": "node is not known yet"}));
}

#[tokio::test]
async fn failed_bindings_are_rolled_back_and_lost_answers_are_resolved() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pods: Vec<Value> = ["p1", "p2", "p3"].map(|name| make(&api, &whole(name, 2))).to_vec();
    api.fail_bindings([BindingFault::Refused, BindingFault::AnswerLost]);
    assert!(replica.bind(&pods[0], "a").await.contains("admission denied"));
    assert_eq!(replica.app.read().rolled_back(), 1);
    assert!(replica.bind(&pods[0], "a").await.contains("timed out"), "it happened, but nobody heard");
    assert_eq!(replica.bind(&pods[0], "a").await, "", "the second try finds it done");
    assert!(replica.bind(&pods[1], "a").await.contains("fewer than 2 idle GPUs"));
    api.fail_bindings([BindingFault::Broken]);
    assert!(replica.bind(&pods[1], "b").await.contains("leader changed"));
    // The outcome of that binding is unknown, so its GPUs stay reserved for that pod.
    assert!(replica.bind(&pods[2], "b").await.contains("fewer than 2 idle GPUs"));
    assert_eq!(replica.bind(&pods[1], "b").await, "");
    assert_eq!(api.get(&format!("{PODS}/p2")).unwrap()["spec"]["nodeName"], "b");
    let mut another = pods[2].clone();
    another["metadata"]["uid"] = "another".into();
    assert!(replica.bind(&another, "a").await.contains("no longer exists"));
}

#[tokio::test]
async fn concurrent_binds_never_overbook_a_gpu() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pods: Vec<Value> = (0..40).map(|number| make(&api, &share(&format!("p{number}"), 30))).collect();
    let calls = pods.iter().map(|pod| replica.bind(pod, "a"));
    let errors = futures::future::join_all(calls).await;
    assert_eq!(errors.iter().filter(|error| error.is_empty()).count(), 6, "{errors:?}");
    eventually(|| replica.app.read().unconfirmed() == 0).await;
    assert!(replica.app.read().ledger().overbooked().is_empty());
}

#[tokio::test]
async fn a_second_replica_takes_over_when_the_leader_stops() {
    let api = cluster().await;
    let first = Replica::ready(&api, "first").await;
    let second = Replica::start(&api, "second");
    let pod = make(&api, &whole("p1", 2));
    assert_eq!(first.bind(&pod, "a").await, "");
    assert_eq!(second.get("/readyz").await.0, 503);
    assert!(second.bind(&pod, "a").await.contains("is not the leader"));
    // An aborted task stands for a killed process: it does not release the lease.
    first.task.abort();
    eventually(|| second.app.is_ready()).await;
    eventually(|| !first.app.may_write()).await;
    let next = make(&api, &whole("p2", 2));
    assert!(first.bind(&next, "b").await.contains("may not bind now"));
    assert!(
        second.bind(&next, "a").await.contains("fewer than 2 idle GPUs"),
        "what the first one did is known"
    );
    assert_eq!(second.bind(&next, "b").await, "");
    // A replica that stops in an orderly way releases the lease.
    let mut second = second;
    let third = Replica::start(&api, "third");
    drop(second.stop.take());
    eventually(|| third.app.is_ready()).await;
    assert!(!second.app.is_ready());
}

#[tokio::test]
async fn without_the_api_server_filter_answers_and_bind_is_refused() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("p", 1));
    eventually(|| replica.app.read().is_waiting(&pod["metadata"]["uid"].as_str().unwrap().into())).await;
    api.take_down();
    eventually(|| !replica.app.may_write()).await;
    let question = json!({"Pod": pod, "NodeNames": ["a"]});
    assert_eq!(replica.post("/scheduler/filter", &question).await["NodeNames"], json!(["a"]));
    assert!(replica.bind(&pod, "a").await.contains("may not bind now"));
    api.bring_up();
    eventually(|| replica.app.may_write()).await;
    assert_eq!(replica.bind(&pod, "a").await, "");
}

#[tokio::test]
async fn no_binding_is_sent_if_the_lease_expires_while_the_pod_is_read() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    // Without this task, the lease is not renewed and no watch shows the pod.
    replica.task.abort();
    let pod = make(&api, &whole("p", 1));
    api.hold_requests();
    let lead_for = |within| {
        let timing = LeaseTiming { duration: within, renew_within: within, retry: within };
        replica.app.lead_until(replica.app.now().steady, timing);
    };
    lead_for(SOON);
    let runs_out = async {
        eventually(|| api.waiting_requests() > 0).await;
        lead_for(Duration::ZERO);
        api.release_requests();
    };
    let (error, ()) = tokio::join!(replica.bind(&pod, "a"), runs_out);
    assert!(error.contains("may not bind now"), "{error}");
    assert!(api.get(&format!("{PODS}/p")).unwrap()["spec"]["nodeName"].is_null());
    assert_eq!(replica.app.read().unconfirmed(), 0, "its GPUs are free again");
}

#[tokio::test]
async fn a_leader_that_lost_its_lease_reads_the_cluster_again() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("p", 1));
    api.fail_bindings([BindingFault::Refused]);
    assert_ne!(replica.bind(&pod, "a").await, "");
    assert_eq!(replica.app.read().rolled_back(), 1);
    // The replica loses the API server, but no other replica takes the lease: the state is kept.
    api.take_down();
    eventually(|| !replica.app.may_write()).await;
    api.bring_up();
    eventually(|| replica.app.may_write()).await;
    assert_eq!(replica.app.read().rolled_back(), 1);
    // Another replica takes and releases the lease while this one is cut off: the state is read
    // again.
    api.take_down();
    eventually(|| !replica.app.may_write()).await;
    let lease = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/tessera-scheduler";
    api.patch(lease, &json!({"spec": {"holderIdentity": ""}})).unwrap();
    api.bring_up();
    eventually(|| replica.app.may_write()).await;
    assert_eq!(replica.app.read().rolled_back(), 0, "it read the cluster anew");
}

/// A waiting pod and its annotations change no verdict. kube-scheduler itself updates the pod after
/// a refusal.
#[tokio::test]
async fn a_deleted_pod_counts_as_a_change_and_a_waiting_one_does_not() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let news = || replica.app.retry_wait.changes();
    let before = news();
    let pod = make(&api, &whole("p", 1));
    eventually(|| view::pods::pod(&replica.app.read(), "team", "p").is_some()).await;
    assert_eq!(news(), before);
    assert_eq!(replica.bind(&pod, "a").await, "");
    api.delete("/api/v1/namespaces/team/pods/p").unwrap();
    eventually(|| news() > before).await;
}

#[tokio::test]
async fn a_watch_that_cannot_resume_lists_again() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("p", 2));
    assert_eq!(replica.bind(&pod, "a").await, "");
    api.compact();
    api.delete(&format!("{PODS}/p")).unwrap();
    api.compact();
    eventually(|| replica.app.read().ledger().node(&"a".into()).is_some_and(|node| node.idle().len() == 2))
        .await;
    assert!(replica.app.is_ready());
}

#[tokio::test]
async fn hostile_bodies_get_a_valid_answer_and_change_nothing() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let known = make(&api, &share("p", 30));
    eventually(|| replica.app.read().is_waiting(&known["metadata"]["uid"].as_str().unwrap().into())).await;
    let filter = |answer: &Value| answer["Error"].is_string() && answer["FailedNodes"].is_object();
    type IsContract<'a> = &'a dyn Fn(&Value) -> bool;
    let verbs: [(&str, IsContract<'_>); 4] = [
        ("/scheduler/filter", &filter),
        ("/scheduler/prioritize", &|answer| answer.is_array()),
        ("/scheduler/preempt", &|answer| answer["NodeNameToMetaVictims"].is_object()),
        ("/scheduler/bind", &|answer| answer["Error"].as_str().is_some_and(|error| !error.is_empty())),
    ];
    let whole_question = json!({
        "Pod": known, "NodeNames": ["a", "b"], "NodeNameToVictims": {"a": {"Pods": [known]}},
        "PodName": "nobody", "PodNamespace": "team", "PodUID": "x", "Node": "a",
    })
    .to_string();
    let mut bodies: Vec<Vec<u8>> = [
        "",
        "{}",
        "[]",
        "null",
        "{\"Pod\":null}",
        "{\"Pod\":{\"spec\":{\"containers\":7}},\"NodeNames\":[]}",
        "{\"Pod\":{},\"NodeNames\":null,\"Nodes\":null}",
        "{\"PodName\":1}",
        "\u{0}",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    bodies.push("[".repeat(100_000).into_bytes());
    bodies.push(vec![b' '; 2 << 20]);
    let mut runner = TestRunner::new(Config { cases: 60, ..Config::default() });
    let broken = (any::<prop::sample::Index>(), any::<u8>(), any::<bool>());
    for _ in 0..60 {
        let (place, byte, cut) = broken.new_tree(&mut runner).unwrap().current();
        let mut body = whole_question.clone().into_bytes();
        let place = place.index(body.len());
        if cut {
            body.truncate(place)
        } else {
            body[place] = byte
        }
        bodies.push(body);
    }
    for body in bodies {
        for (path, is_contract) in verbs {
            let (code, answer) = replica.call("POST", path, body.clone()).await;
            let text = String::from_utf8_lossy(&answer).into_owned();
            let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
            let parsed: Value =
                serde_json::from_slice(&answer).unwrap_or_else(|_| panic!("{path} {shown}: {text}"));
            assert_eq!(code, 200, "{path} {shown}");
            assert!(is_contract(&parsed), "{path} {shown}: {text}");
        }
    }
    assert_eq!(replica.app.read().unconfirmed(), 0);
    assert!(replica.app.read().ledger().nodes().all(|node| node.idle().len() == 2));
}
