//! Tests of the dashboard's views: they convert a state to JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};
use tessera_scheduler::dashboard::decisions::{Decision, DecisionOutcome};
use tessera_scheduler::dashboard::usage::UsageLog;
use tessera_scheduler::dashboard::view::{
    ListQuery, cluster, explanation, node as one, nodes, pods, quota, waste,
};
use tessera_scheduler::state::{SchedulerSettings, State, StateEvent, WatchEvent};

use crate::fixtures::*;

fn json_of(view: impl Serialize) -> Value {
    serde_json::to_value(view).unwrap()
}

/// Returns a state with two nodes of two GPUs. The first node has shares of 60 % and 30 % on one
/// GPU and a pod on the other; the second is empty.
fn some() -> State {
    let mut second = node("second", 2, "GiB");
    let inventory = json!({"memoryUnit": "GiB",
        "gpus": [{"uuid": "GPU-x", "minor": 3, "model": "V100", "memoryMiB": 32_768, "numa": 1, "unhealthy": true},
                 {"uuid": "GPU-y", "minor": 4, "model": "V100", "memoryMiB": 32_768, "numa": 1}],
        "links": [[0, 1, "PIX", 2]]});
    second["metadata"]["annotations"] =
        json!({"tessera.dev/inventory": inventory.to_string(), "tessera.dev/agent": "http://a:1"});
    let mut state = state(&[node("first", 2, "GiB"), second, json!({"metadata": {"name": "plain"}})]);
    bind(&mut state, &share("a", 60), "first");
    bind(&mut state, &share("b", 30), "first");
    bind(&mut state, &whole("c", 1), "first");
    set_pod(&mut state, &whole("waits", 2));
    state
}

fn filter(text: &str) -> ListQuery {
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    let fields: serde_json::Map<String, Value> = pairs
        .map(|(key, value)| {
            let is_number = matches!(key, "fullness" | "offset" | "limit");
            let value = if is_number { json!(value.parse::<u64>().unwrap()) } else { json!(value) };
            (key.to_owned(), value)
        })
        .collect();
    serde_json::from_value(Value::Object(fields)).unwrap()
}

#[test]
fn cluster_view_sums_up_gpus_models_and_namespaces() {
    let view = json_of(cluster::cluster(&some()));
    assert_eq!(
        (&view["nodes"], &view["placedPods"], &view["waitingPods"]),
        (&json!(2), &json!(3), &json!(1))
    );
    let gpus = &view["gpus"];
    for (key, expected) in [
        ("total", 4),
        // The second GPU without a grant is unhealthy.
        ("idle", 1),
        ("shared", 1),
        ("whole", 1),
        ("unhealthy", 1),
        ("overbooked", 0),
        ("computeHeld", 190),
    ] {
        assert_eq!(gpus[key], expected, "{key}");
    }
    assert_eq!(gpus["taken"], 1.9);
    // GPU 0 of the first node carries two shares, and GPU 1 is held as a whole.
    assert_eq!(
        (&gpus["memoryMiB"], &gpus["memoryHeldMiB"]),
        (&json!(2 * GPU_MIB + 65_536), &json!(9_728 + 4_864 + GPU_MIB))
    );
    let names: Vec<&Value> = view["models"].as_array().unwrap().iter().map(|model| &model["model"]).collect();
    assert_eq!(names, ["T4", "V100"]);
    assert_eq!(view["models"][0]["fullness"], json!([0, 0, 0, 0, 1, 0]));
    assert_eq!(view["models"][1]["fullness"], json!([1, 0, 0, 0, 0, 0]));
    let team = json!({"namespace": "team", "placedPods": 3, "waitingPods": 1, "computeHeld": 190, "memoryHeldMiB": 9_728 + 4_864 + GPU_MIB});
    assert_eq!(view["namespaces"], json!([team]));
    // Free are a tenth of a GPU and one healthy GPU. Expected pods request two GPUs at once, or
    // shares.
    let left = view["fragmentation"]["left"].as_f64().unwrap();
    let useless = view["fragmentation"]["useless"].as_f64().unwrap();
    assert!((left - 1.1).abs() < 1e-9 && useless > 0.0 && useless < left, "{left} {useless}");
    assert_eq!(
        json_of(cluster::map(&some())),
        json!([{"model": "T4", "nodes": [["first", 95, 0]]}, {"model": "V100", "nodes": [["second", 0, 1]]}])
    );
}

#[test]
fn cluster_view_of_an_empty_cluster_is_zero() {
    let view = json_of(cluster::cluster(&state(&[])));
    assert_eq!(
        (&view["nodes"], &view["gpus"]["total"], &view["fragmentation"]["left"]),
        (&json!(0), &json!(0), &json!(0.0))
    );
}

/// A GPU that is cordoned or in MIG mode works. It is neither idle nor a problem, and every view says so.
#[test]
fn cordoned_gpus_and_gpus_in_mig_mode_are_no_problems() {
    let mut node = node("n", 4, "GiB");
    let text = node["metadata"]["annotations"]["tessera.dev/inventory"].as_str().unwrap();
    let mut inventory: Value = serde_json::from_str(text).unwrap();
    for (gpu, reason) in [(1, "mig-mode"), (2, "pending-reset")] {
        inventory["gpus"][gpu]["unhealthy"] = true.into();
        inventory["gpus"][gpu]["reason"] = reason.into();
    }
    let uuid = inventory["gpus"][0]["uuid"].clone();
    node["metadata"]["annotations"]["tessera.dev/inventory"] = inventory.to_string().into();
    node["metadata"]["annotations"]["tessera.dev/gpu-cordon"] = uuid;
    let state = state(&[node]);
    let totals = json_of(cluster::cluster(&state))["gpus"].clone();
    for (key, expected) in [("idle", 1), ("cordoned", 1), ("inMigMode", 1), ("unhealthy", 1)] {
        assert_eq!(totals[key], expected, "{key}: {totals}");
    }
    let list = json_of(nodes::nodes(&state, &filter("")).items);
    let states: Vec<Value> = list[0]["gpus"]
        .as_array()
        .unwrap()
        .iter()
        .map(|gpu| json!([gpu["healthy"], gpu["faulty"], gpu["problem"]]))
        .collect();
    assert_eq!(
        states,
        [
            json!([false, false, "cordoned"]),
            json!([false, false, "in MIG mode"]),
            json!([false, true, "awaiting a reset for retired memory"]),
            json!([true, false, null]),
        ]
    );
    assert_eq!(json_of(cluster::map(&state))[0]["nodes"][0][2], 1, "one GPU has a fault");
}

/// GPUs that get no new pods are not free capacity, and the views say why: the node is cordoned or not ready, or an
/// administrator has cordoned the GPU.
#[test]
fn nodes_and_gpus_that_get_no_pods_are_not_free() {
    let mut cordoned = node("cordoned", 2, "GiB");
    cordoned["spec"]["unschedulable"] = true.into();
    let mut down = node("down", 2, "GiB");
    down["status"]["conditions"] = json!([{"type": "Ready", "status": "Unknown"}]);
    let mut up = node("up", 2, "GiB");
    up["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    let inventory: Value =
        serde_json::from_str(up["metadata"]["annotations"]["tessera.dev/inventory"].as_str().unwrap())
            .unwrap();
    up["metadata"]["annotations"]["tessera.dev/gpu-cordon"] = inventory["gpus"][0]["uuid"].clone();
    let state = state(&[cordoned, down, up]);
    let view = json_of(cluster::cluster(&state));
    assert_eq!((&view["notReadyNodes"], &view["cordonedNodes"]), (&json!(1), &json!(1)));
    assert_eq!((&view["gpus"]["unhealthy"], &view["gpus"]["cordoned"]), (&json!(0), &json!(1)));
    assert_eq!(view["fragmentation"]["left"], 1.0, "only one GPU takes pods");
    let list = json_of(nodes::nodes(&state, &filter("")).items);
    let status = |number: usize| (list[number]["ready"].clone(), list[number]["cordoned"].clone());
    assert_eq!(status(0), (Value::Null, json!(true)));
    assert_eq!(status(1), (json!(false), Value::Null));
    assert_eq!(status(2), (json!(true), Value::Null));
    let trouble = nodes::nodes(&state, &filter("state=trouble")).items;
    assert_eq!(trouble.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["down"]);
}

/// A pod of another scheduler has a reason, too: the name of that scheduler.
#[test]
fn a_pod_without_a_report_names_its_scheduler() {
    let mut state = some();
    let mut foreign = whole("foreign", 1);
    foreign["spec"]["schedulerName"] = "other".into();
    set_pod(&mut state, &foreign);
    let rows = json_of(pods::pods(&state, &filter("state=waiting")).items);
    let of = |name: &str| rows.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone();
    assert_eq!(of("foreign")["unreported"], "other");
    assert_eq!(of("waits")["unreported"], "default-scheduler");
    let placed = json_of(pods::pods(&state, &filter("state=placed")).items);
    assert!(placed.as_array().unwrap().iter().all(|row| row["unreported"].is_null()), "{placed}");
}

#[test]
fn node_list_applies_every_filter() {
    let mut state = some();
    let mut broken = node("broken", 1, "GiB");
    broken["metadata"]["annotations"]["tessera.dev/inventory"] = "{".into();
    set_node(&mut state, &broken);
    let check = |text: &str, expected: &[&str]| {
        let page = nodes::nodes(&state, &filter(text));
        assert_eq!(page.items.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), expected, "{text}");
        page.total
    };
    check("", &["broken", "first", "second"]);
    check("model=V100", &["second"]);
    check("model=V", &[]);
    check("namespace=team", &["first"]);
    check("namespace=nobody", &[]);
    check("dialect=vcuda", &["first", "second"]);
    check("q=FIRS", &["first"]);
    check("q=waits", &[]);
    check("q=gpu-y", &["second"]);
    check("fullness=4", &["first"]);
    check("fullness=0", &["second"]);
    check("state=trouble", &["broken", "second"]);
    assert_eq!(check("offset=1&limit=1", &["first"]), 3);
    assert_eq!(check("offset=9", &[]), 3);
    assert!(
        json_of(nodes::nodes(&state, &filter("q=broken")))["items"][0]["problem"]
            .as_str()
            .unwrap()
            .contains("tessera.dev/inventory")
    );
}

#[test]
fn tiles_show_the_share_of_each_pod() {
    let view = json_of(nodes::nodes(&some(), &filter("q=first")));
    let slice = |pod: &str, compute: u32, memory: u64| json!({"namespace": "team", "pod": pod, "compute": compute, "memoryMiB": memory});
    let gpus = &view["items"][0]["gpus"];
    assert_eq!(gpus[0]["pods"], json!([slice("a", 60, 9_728), slice("b", 30, 4_864)]));
    assert_eq!(
        (&gpus[0]["computeHeld"], &gpus[0]["memoryHeldMiB"], &gpus[0]["whole"]),
        (&json!(90), &json!(14_592), &json!(false))
    );
    assert_eq!(gpus[1]["pods"], json!([slice("c", 100, GPU_MIB)]));
    assert_eq!(gpus[1]["whole"], true);
}

#[test]
fn node_view_shows_gpus_links_and_host() {
    let state = some();
    let view = json_of(one::node(&state, "second").unwrap());
    assert_eq!(
        view["identities"],
        json!([{"uuid": "GPU-x", "minor": 3, "numa": 1}, {"uuid": "GPU-y", "minor": 4, "numa": 1}])
    );
    assert_eq!(view["links"], json!([{"a": 0, "b": 1, "pcie": "PIX", "nvlinks": 2}]));
    assert_eq!((&view["gpus"][0]["healthy"], &view["gpus"][1]["healthy"]), (&json!(false), &json!(true)));
    assert_eq!(view["host"]["cpuMilli"], 64_000);
    assert_eq!(view["hasAgent"], true);
    assert_eq!(one::agent(&state, "second").map(|address| address.url).as_deref(), Some("http://a:1"));
    assert_eq!(one::agent(&state, "first"), None);
    assert_eq!(json_of(one::node(&state, "plain").unwrap())["gpus"], json!([]));
    assert!(one::node(&state, "nobody").is_none());
}

#[test]
fn pod_list_applies_every_filter_and_details_show_grants() {
    let mut state = some();
    set_pod(&mut state, &pod("odd", &[("nvidia.com/gpu", "half")]));
    let check = |text: &str, expected: &[&str]| {
        let page = pods::pods(&state, &filter(text));
        assert_eq!(page.items.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(), expected, "{text}");
    };
    check("", &["odd", "waits", "a", "b", "c"]);
    check("state=waiting", &["odd", "waits"]);
    check("sort=name", &["a", "b", "c", "odd", "waits"]);
    check("state=placed", &["a", "b", "c"]);
    check("dialect=vcuda", &["a", "b"]);
    check("model=T4", &["a", "b", "c"]);
    check("q=first", &["a", "b", "c"]);
    check("q=wait&namespace=team", &["waits"]);
    check("namespace=other", &[]);
    let detail = json_of(pods::pod(&state, "team", "b").unwrap());
    assert_eq!(
        detail["asks"],
        json!([{"container": "main", "role": "main", "dialect": "vcuda", "compute": 30, "memoryMiB": 4_864}])
    );
    let grant = json!({"container": "main", "index": 0, "uuid": "GPU-first-0", "model": "T4", "whole": false, "compute": 30, "memoryMiB": 4_864});
    assert_eq!(detail["grants"], json!([grant]));
    assert_eq!((&detail["state"], &detail["node"]), (&json!("placed"), &json!("first")));
    assert!(detail["annotations"]["tessera.dev/grant"].is_string());
    let odd = json_of(pods::pod(&state, "team", "odd").unwrap());
    assert!(
        odd["problem"]
            .as_str()
            .unwrap()
            .starts_with("container main: nvidia.com/gpu: half is not a number; write 1")
    );
    assert!(pods::pod(&state, "team", "nobody").is_none());
    // The node is chosen, but the binding is not confirmed yet.
    set_pod(&mut state, &whole("soon", 1));
    state.begin_bind(&bind_args(&whole("soon", 1), "second"), at(0)).unwrap();
    let soon = json_of(pods::pod(&state, "team", "soon").unwrap());
    assert_eq!((&soon["state"], &soon["node"]), (&json!("booking"), &json!("second")));
}

#[test]
fn waiting_pods_show_the_reasons_of_the_newest_decision() {
    let state = some();
    let mut page = pods::pods(&state, &filter(""));
    let uid = |name: &str| page.items.iter().find(|pod| pod.name == name).unwrap().uid.clone();
    let refused = |kind, nodes| DecisionOutcome::FitsNowhere { refused: BTreeMap::from([(kind, nodes)]) };
    let told = [
        ("waits", DecisionOutcome::NoVictims),
        ("waits", refused("fewer-idle", 3)),
        ("waits", refused("no-gpu", 9)),
        ("a", refused("no-gpu", 1)),
    ];
    let decisions: Vec<Decision> = told
        .into_iter()
        .map(|(pod, outcome)| Decision {
            sequence: 1,
            unix_millis: 0,
            times: 1,
            namespace: "team".into(),
            pod: pod.into(),
            uid: uid(pod),
            outcome,
        })
        .collect();
    pods::add_refusals(&mut page.items, &decisions);
    let rows = json_of(page);
    let rows = rows["items"].as_array().unwrap().iter();
    let told: Vec<_> =
        rows.filter(|row| row["refused"].is_object()).map(|row| (&row["name"], &row["refused"])).collect();
    assert_eq!(told, [(&json!("waits"), &json!({"fewer-idle": 3}))], "the placed one waits no more");
}

#[test]
fn explanation_counts_match_the_explain_verb() {
    let state = some();
    for name in ["waits", "a"] {
        let sums = explanation::of_pod(&state, "team", name).unwrap();
        let listed = tessera_scheduler::verb::explain::explain(&state, "team", name).unwrap().unwrap();
        assert_eq!((sums.checked, &sums.explanation.policy), (listed.nodes.len(), &listed.policy));
        assert_eq!(sums.would_do, listed.nodes.iter().filter(|view| view.would_do).count());
        let refused: usize = sums.refusals.iter().map(|refusal| refusal.nodes).sum();
        assert_eq!(sums.would_do + refused, sums.checked);
        assert_eq!(sums.explanation.summary, listed.summary);
        for refusal in &sums.refusals {
            let alike = listed.nodes.iter().filter(|view| view.reason.as_deref() == Some(&refusal.reason));
            assert_eq!(alike.count(), refusal.nodes, "{}", refusal.reason);
            assert!(refusal.examples.iter().all(|view| listed.nodes.contains(view)));
        }
    }
    let mut odd = parse(&whole("odd", 1));
    odd.metadata.annotations.insert("tessera.dev/policy".into(), "<b>bold</b>".into());
    let refused = json_of(explanation::what_if(&state, &odd));
    assert!(refused["problem"].as_str().unwrap().contains("<b>bold</b>"), "{refused}");
    assert!(explanation::of_pod(&state, "team", "nobody").is_none());
}

#[test]
fn filter_leaves_cpu_to_kube_scheduler_and_explanations_do_not() {
    let state = state(&[node("n", 2, "GiB")]);
    let greedy = pod("greedy", &[("nvidia.com/gpu", "1"), ("cpu", "1000")]);
    let explained = explanation::what_if(&state, &parse(&greedy));
    assert_eq!((explained.would_do, explained.refusals[0].reason.as_str()), (0, "not enough CPU"));
    assert_eq!(super::fixtures::filter(&state, &greedy, &["n"]).node_names.unwrap().len(), 1);
}

#[test]
fn quota_view_shows_limits_and_usage() {
    let mut state = some();
    let limits = r#"{"team":{"quota":{"T4":2},"pool":["public"],"memoryMiB":40000},"other":{"percent":100}}"#;
    state.handle(StateEvent::Quota(tessera_wire::foreign::quota::parse(limits, "the ConfigMap").unwrap()));
    let held = json!({"compute": 190, "memoryMiB": 14_592 + GPU_MIB});
    assert_eq!(
        json_of(quota::quota(&state)),
        json!([
            {"namespace": "other", "limit": {"pools": [], "compute": 100}, "held": {"compute": 0, "memoryMiB": 0}, "byModel": {}},
            {"namespace": "team", "limit": {"gpus": {"T4": 2}, "pools": ["public"], "memoryMiB": 40_000}, "held": held, "byModel": {"T4": held}},
        ])
    );
    let limits = r#"{"broken":{"percent":"all"}}"#;
    state.handle(StateEvent::Quota(tessera_wire::foreign::quota::parse(limits, "the ConfigMap").unwrap()));
    let view = json_of(quota::quota(&state));
    assert_eq!(view[0]["namespace"], "broken");
    let problem = "the limits of namespace broken in the ConfigMap cannot be read: ";
    assert!(view[0]["problem"].as_str().unwrap().starts_with(problem), "{view}");
    assert_eq!((&view[1]["namespace"], view[1].get("problem")), (&json!("team"), None));
}

/// The oldest waiting pod comes first, and lists can be sorted by age.
#[test]
fn pods_are_sorted_by_age() {
    let mut state = state(&[node("node-2", 2, "GiB"), node("node-10", 2, "GiB")]);
    for (name, created) in [("new", "2026-01-03T00:00:00Z"), ("old", "2026-01-01T00:00:00Z")] {
        let mut pod = whole(name, 8);
        pod["metadata"]["creationTimestamp"] = created.into();
        set_pod(&mut state, &pod);
    }
    let names = |text: &str| -> Vec<String> {
        pods::pods(&state, &filter(text)).items.into_iter().map(|pod| pod.name).collect()
    };
    assert_eq!(
        (names(""), names("sort=youngest")),
        (vec!["old".into(), "new".into()], vec!["new".into(), "old".into()])
    );
    let nodes: Vec<String> =
        nodes::nodes(&state, &filter("")).items.into_iter().map(|node| node.name).collect();
    assert_eq!(nodes, ["node-2", "node-10"], "nodes are in the order in which people count");
}

/// A pod that holds a GPU without work is waste, and a pod whose use is unknown is not.
#[test]
fn waste_compares_what_pods_hold_with_what_they_use() {
    let mut state = state(&[node("n", 4, "GiB")]);
    for pod in [whole("idle", 1), share("half", 50), whole("hidden", 1), whole("busy", 1)] {
        bind(&mut state, &pod, "n");
    }
    let container = |name: &str, busy: f64| {
        json!({"namespace": "team", "pod": name, "uid": format!("uid-{name}"), "container": "main",
               "gpus": [{"uuid": "g", "index": 0, "busyPercent": busy, "memoryUsedMiB": 10}]})
    };
    let used = json!({"gpus": [], "containers": [container("idle", 0.0), container("half", 10.0), container("busy", 100.0),
        {"namespace": "team", "pod": "hidden", "uid": "uid-hidden", "container": "main", "gpus": [{"uuid": "g", "index": 2}]}]});
    let mut log = UsageLog::default();
    let holders = ["idle", "half", "busy", "hidden"].map(|name| format!("uid-{name}")).into();
    log.observe(1000, &holders, &serde_json::from_value(used).unwrap());
    log.forget_unsampled(1000);
    log.add_point(waste::totals(&state, &log).point(1000, 3.5));
    let view = json_of(waste::waste(&state, &log, 1000 + waste::IDLE_MILLIS, &ListQuery::default()));
    assert_eq!((&view["heldGpus"], &view["unknownPods"]), (&json!(3.5), &json!(1)));
    assert_eq!((&view["idlePods"], &view["idleGpus"]), (&json!(1), &json!(1.0)));
    // The history has the same sum of the pods' use, and says that it is a lower bound.
    assert_eq!(view["usedGpus"], json!(1.1));
    let rows: Vec<(&Value, &Value, &Value)> = view["pods"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| (&pod["name"], &pod["wastedGpus"], &pod["idle"]))
        .collect();
    assert_eq!(
        rows,
        [
            (&json!("idle"), &json!(1.0), &json!(true)),
            (&json!("half"), &json!(0.4), &json!(false)),
            (&json!("busy"), &json!(0.0), &json!(false)),
        ]
    );
    assert_eq!(view["history"], json!([{"unixMillis": 1000, "held": 3.5, "used": 1.1, "unknownPods": 1}]));
    // A pod that was idle for a second may have been idle for an hour before that.
    let soon = json_of(waste::waste(&state, &log, 2000, &ListQuery::default()));
    assert_eq!((soon.get("idlePods"), soon.get("idleGpus")), (None, None));
    assert_eq!(soon["observedSinceMillis"], json!(1000));
}

/// A claim holds GPUs for its pods, so it wastes what they do not use. What cannot be told apart is unknown, not zero.
#[test]
fn claims_waste_what_their_pods_do_not_use() {
    let mut state =
        state_with(&[node("n", 8, "GiB")], SchedulerSettings { dra: true, ..SchedulerSettings::default() });
    let class = json!({"metadata": {"name": "tessera"}, "spec": {"selectors": [
        {"cel": {"expression": "device.driver == \"gpu.tessera.dev\""}}]}});
    state.handle(StateEvent::Class(WatchEvent::Set(serde_json::from_value(class).unwrap())));
    let pods = |names: &[&str]| -> Vec<Value> {
        names
            .iter()
            .map(|pod| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")}))
            .collect()
    };
    let other = json!({"apiGroup": "example.com", "resource": "jobs", "name": "job", "uid": "uid-job"});
    for (gpu, (name, users)) in [
        ("idle", pods(&["a"])),
        ("shared", pods(&["b", "c"])),
        ("one-of-two", pods(&["d"])),
        ("other-of-two", pods(&["d"])),
        ("silent", pods(&["e"])),
        ("unused", Vec::new()),
        ("used-by-a-job", vec![other]),
    ]
    .into_iter()
    .enumerate()
    {
        let result = json!({"request": "gpu", "driver": "gpu.tessera.dev", "pool": "n", "device": format!("gpu-{gpu}"),
            "consumedCapacity": {"cores": "100", "memory": format!("{GPU_MIB}Mi")}});
        let claim = json!({"metadata": {"name": name, "namespace": "team", "uid": format!("claim-{name}")},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "tessera",
                "allocationMode": "ExactCount", "count": 1}}]}},
            "status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": users}});
        state.handle(StateEvent::Claim(WatchEvent::Set(serde_json::from_value(claim).unwrap())));
    }
    let container = |name: &str, busy: f64| {
        json!({"namespace": "team", "pod": name, "uid": format!("uid-{name}"), "container": "main",
               "gpus": [{"uuid": "g", "index": 0, "busyPercent": busy, "memoryUsedMiB": 10}]})
    };
    let used = [("a", 0.0), ("b", 30.0), ("c", 20.0), ("d", 90.0)].map(|(name, busy)| container(name, busy));
    let users = ["a", "b", "c", "d", "e"].map(|name| format!("uid-{name}")).into();
    let mut log = UsageLog::default();
    log.observe(1000, &users, &serde_json::from_value(json!({"gpus": [], "containers": used})).unwrap());
    let view = json_of(waste::waste(&state, &log, 1000 + waste::IDLE_MILLIS, &ListQuery::default()));
    let rows: Vec<Value> = view["pods"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| json!([pod["name"], pod["isClaim"], pod["wastedGpus"], pod["memoryUsedMiB"], pod["idle"]]))
        .collect();
    assert_eq!(
        rows,
        [
            json!(["idle", true, 1.0, 10, true]),
            // A claim that is reserved for no pod certainly uses nothing. Since when is unknown.
            json!(["unused", true, 1.0, 0, false]),
            json!(["shared", true, 0.5, 20, false]),
        ]
    );
    assert_eq!((&view["heldGpus"], &view["usedGpus"]), (&json!(7.0), &json!(0.5)));
    assert_eq!(
        view["unknownPods"],
        json!(4),
        "the use of two claims is not told apart, of one nothing is known, and one is not reserved for a pod"
    );
}

/// A pod on a node whose GPUs are held by claims has a page, which agrees with its explanation.
#[test]
fn a_pod_with_the_gpus_of_claims_has_a_page() {
    let mut first = node("n", 2, "GiB");
    first["metadata"]["annotations"]["tessera.dev/agent"] = "http://a:1".into();
    let mut state = state_with(&[first], SchedulerSettings { dra: true, ..SchedulerSettings::default() });
    for (gpu, name) in ["large", "small"].into_iter().enumerate() {
        let result = json!({"request": "gpu", "driver": "gpu.tessera.dev", "pool": "n", "device": format!("gpu-{gpu}"),
            "consumedCapacity": {"cores": "50", "memory": format!("{}Mi", GPU_MIB / 2)}});
        let claim = json!({"metadata": {"name": name, "namespace": "team", "uid": format!("claim-{name}")},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "tessera",
                "allocationMode": "ExactCount", "count": 1}}]}},
            "status": {"allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": "user", "uid": "uid-user"}]}});
        state.handle(StateEvent::Claim(WatchEvent::Set(serde_json::from_value(claim).unwrap())));
    }
    assert!(pods::pod(&state, "team", "user").is_none(), "the pod is not on its node yet");
    let mut user = pod("user", &[]);
    user["spec"]["nodeName"] = "n".into();
    user["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "small"}]);
    set_pod(&mut state, &user);
    let shown = json_of(pods::pod(&state, "team", "user").unwrap());
    let why = json_of(explanation::of_pod(&state, "team", "user").unwrap());
    assert_eq!(
        (&shown["state"], &shown["node"], &shown["uid"]),
        (&json!("placed"), &why["placedOn"], &json!("uid-user"))
    );
    let grants = shown["grants"].as_array().unwrap();
    let held: Vec<Value> = grants
        .iter()
        .map(|grant| json!([grant["claim"], grant["index"], grant["compute"], grant["whole"]]))
        .collect();
    assert_eq!(held, [json!(["large", 0, 50, false]), json!(["small", 1, 50, false])]);
    assert_eq!(why["holds"].as_array().unwrap().len(), held.len());
    assert!(pods::agent(&state, "team", "user").is_some(), "its use is read from the agent of its node");
    assert!(pods::pod(&state, "other", "user").is_none());
}

/// Without agents, neither use nor idle pods are known. Without pods, there are none.
#[test]
fn unknown_use_is_not_shown_as_zero() {
    let mut state = state(&[node("n", 4, "GiB")]);
    let log = UsageLog::default();
    let figures = |state: &State| {
        let view = json_of(waste::waste(state, &log, 1 << 40, &ListQuery::default()));
        [view.get("usedGpus").cloned(), view.get("idlePods").cloned(), view.get("idleGpus").cloned()]
    };
    assert_eq!(figures(&state), [Some(json!(0.0)), Some(json!(0)), Some(json!(0.0))]);
    bind(&mut state, &whole("silent", 1), "n");
    assert_eq!(figures(&state), [None, None, None]);
    let point = waste::totals(&state, &log).point(1000, 1.0);
    assert_eq!(json_of(point), json!({"unixMillis": 1000, "held": 1.0, "unknownPods": 1}));
}

/// However many pods are idle, each of them is on a page of the list.
#[test]
fn all_idle_pods_are_listed_page_by_page() {
    const PODS: usize = 130;
    let names: Vec<String> = (0..PODS).map(|number| format!("pod-{number}")).collect();
    let nodes: Vec<Value> =
        (0..PODS.div_ceil(8)).map(|number| node(&format!("n{number}"), 8, "GiB")).collect();
    let mut state = state(&nodes);
    let mut log = UsageLog::default();
    for (number, pods) in names.chunks(8).enumerate() {
        let node = format!("n{number}");
        for pod in pods {
            bind(&mut state, &whole(pod, 1), &node);
        }
        let container = |pod: &String| {
            json!({"namespace": "team", "pod": pod, "uid": format!("uid-{pod}"), "container": "main",
                   "gpus": [{"uuid": "g", "index": 0, "busyPercent": 0.0}]})
        };
        let used = json!({"gpus": [], "containers": pods.iter().map(container).collect::<Vec<_>>()});
        let holders = pods.iter().map(|pod| format!("uid-{pod}")).collect();
        log.observe(1000, &holders, &serde_json::from_value(used).unwrap());
    }
    let listed = |query: &str| {
        let query: ListQuery = serde_json::from_str(query).unwrap();
        let view = waste::waste(&state, &log, 1000 + waste::IDLE_MILLIS, &query);
        assert_eq!((view.idle_pods, view.total), (Some(PODS), PODS));
        view.pods.into_iter().map(|pod| pod.name).collect::<Vec<_>>()
    };
    let first = listed(r#"{"state":"idle","limit":100}"#);
    let rest = listed(r#"{"state":"idle","limit":100,"offset":100}"#);
    assert_eq!([first, rest].concat(), names, "in natural order, because all waste the same");
    let last = listed(r#"{"state":"idle","limit":1,"reversed":true}"#);
    assert_eq!(last.last(), names.last());
    let none = waste::waste(&state, &log, 2000, &serde_json::from_str(r#"{"state":"idle"}"#).unwrap());
    assert_eq!((none.total, none.namespaces), (0, vec!["team".to_owned()]), "idle for a second only");
}
