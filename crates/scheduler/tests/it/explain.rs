//! Explain, what-if and inspect: the answers for people and older tools.

use serde_json::{Value, json};
use tessera_scheduler::dashboard::view::{explanation, pods};
use tessera_scheduler::state::{State, StateEvent};
use tessera_scheduler::verb::explain::{explain, what_if};

use crate::fixtures::*;

#[test]
fn explain_and_what_if_give_a_reason_per_gpu() {
    let mut state = state(&[node("n", 2, "GiB"), json!({"metadata": {"name": "cpu"}})]);
    bind(&mut state, &share("first", 60), "n");
    set_pod(&mut state, &whole("waiting", 2));
    let explained = serde_json::to_value(explain(&state, "team", "waiting").unwrap().unwrap()).unwrap();
    assert_eq!(explained["summary"], "waits; the GPUs of 0 of 2 nodes would do");
    assert_eq!(explained["nodes"][0]["reason"], "no GPU");
    assert_eq!(explained["nodes"][1]["reason"], "fewer than 2 idle GPUs");
    assert_eq!(explained["nodes"][1]["gpuReasons"][0]["reason"], "shared: 60% and 9728 MiB are held");
    assert_eq!(explained["nodes"][1]["gpuReasons"][1]["reason"], Value::Null);
    let supposed = serde_json::to_value(what_if(&state, &parse(&whole("supposed", 1))).unwrap()).unwrap();
    assert_eq!(supposed["nodes"][1]["gpus"], json!([{"container": "main", "gpus": [1]}]));
    assert!(explain(&state, "team", "nobody").is_none());
}

/// Every reason for which kube-scheduler can leave a pod waiting although the GPUs of a node would do: a change
/// of the pod, a change of the node, and the reason of the node where the objects tell it.
fn obstacles() -> Vec<(&'static str, Value, Value, Option<&'static str>)> {
    let term = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}]);
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let near = json!([{"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "db"}}}]);
    let spec = |key: &str, value: Value| json!({ "spec": { key: value } });
    let limits = |resource: &str, amount: &str| json!({"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", resource: amount}}}]}});
    let both = |resource: &str, amount: &str| {
        json!({"spec": {"containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", resource: amount}}},
            {"name": "log", "resources": {"limits": {resource: amount}}},
        ]}})
    };
    let taint = json!({"spec": {"taints": [{"key": "gpu", "value": "a", "effect": "NoSchedule"}]}});
    let none = || json!({});
    vec![
        (
            "cordon",
            none(),
            json!({"spec": {"unschedulable": true}}),
            Some("node is cordoned (unschedulable)"),
        ),
        (
            "taint",
            none(),
            taint,
            Some("node has the taint gpu=a:NoSchedule, which the pod does not tolerate"),
        ),
        (
            "selector",
            spec("nodeSelector", json!({"zone": "b"})),
            none(),
            Some("node lacks the label zone=b of the pod's nodeSelector"),
        ),
        (
            "node-affinity",
            spec("affinity", json!({"nodeAffinity": {required: {"nodeSelectorTerms": term}}})),
            none(),
            Some("node does not match the pod's node affinity"),
        ),
        ("cpu", limits("cpu", "1000"), none(), Some("not enough CPU")),
        ("memory", limits("memory", "1000Gi"), none(), Some("not enough memory")),
        (
            "resource",
            limits("nvidia.com/mig-1g.5gb", "3000"),
            none(),
            Some("node offers 0 of nvidia.com/mig-1g.5gb, and the pod requests 3000"),
        ),
        ("pod-affinity", spec("affinity", json!({"podAffinity": {required: near}})), none(), None),
        ("anti-affinity", spec("affinity", json!({"podAntiAffinity": {required: near}})), none(), None),
        (
            "spread",
            spec("topologySpreadConstraints", json!([{"whenUnsatisfiable": "DoNotSchedule"}])),
            none(),
            None,
        ),
        (
            "volume",
            spec("volumes", json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}])),
            none(),
            None,
        ),
        (
            "ports",
            json!({"spec": {"containers": [{"name": "main", "ports": [{"containerPort": 80, "hostPort": 80}],
                "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}),
            none(),
            None,
        ),
        (
            "claims",
            spec("resourceClaims", json!([{"name": "nic", "resourceClaimName": "nic"}])),
            none(),
            None,
        ),
        (
            "pods",
            none(),
            json!({"status": {"allocatable": {"pods": "0"}}}),
            Some("node has its largest number of pods, 0"),
        ),
        (
            "storage",
            limits("ephemeral-storage", "2Ki"),
            json!({"status": {"allocatable": {"ephemeral-storage": "1Ki"}}}),
            Some("node offers 1 KiB of ephemeral-storage, and the pod requests 2 KiB"),
        ),
        (
            "huge-pages",
            limits("hugepages-2Mi", "4Mi"),
            none(),
            Some("node offers 0 B of hugepages-2Mi, and the pod requests 4 MiB"),
        ),
        (
            "storage-of-containers",
            both("ephemeral-storage", "600"),
            json!({"status": {"allocatable": {"ephemeral-storage": "1Ki"}}}),
            Some("node offers 1 KiB of ephemeral-storage, and the pod requests 1.1 KiB"),
        ),
        (
            "huge-pages-of-containers",
            both("hugepages-2Mi", "4Mi"),
            json!({"status": {"allocatable": {"hugepages-2Mi": "6Mi"}}}),
            Some("node offers 6 MiB of hugepages-2Mi, and the pod requests 8 MiB"),
        ),
        (
            "network-of-containers",
            both("rdma/hca", "2"),
            json!({"status": {"allocatable": {"rdma/hca": "3"}}}),
            Some("node offers 3 of rdma/hca, and the pod requests 4"),
        ),
        // Only kube-scheduler knows how many of them other pods hold.
        ("network", limits("rdma/hca", "1"), json!({"status": {"allocatable": {"rdma/hca": "1"}}}), None),
        ("gate", spec("schedulingGates", json!([{"name": "hold"}])), none(), None),
        ("other-plugin", none(), none(), None),
    ]
}

fn merge(object: &mut Value, change: &Value) {
    match (object, change) {
        (Value::Object(object), Value::Object(change)) => {
            change.iter().for_each(|(key, value)| merge(object.entry(key).or_insert(Value::Null), value));
        }
        (object, change) => *object = change.clone(),
    }
}

#[test]
fn a_waiting_pod_is_never_said_to_fit() {
    for (name, pod_change, node_change, reason) in obstacles() {
        let mut node = node("n", 2, "GiB");
        merge(&mut node, &node_change);
        let mut pod = whole(name, 1);
        merge(&mut pod, &pod_change);
        let message = format!("0/1 nodes are available: {name}.");
        pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
        pod["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": message, "lastTransitionTime": "2026-01-01T00:00:01Z"}]);
        let mut state = state(&[node]);
        set_pod(&mut state, &pod);
        let explained = serde_json::to_value(explain(&state, "team", name).unwrap().unwrap()).unwrap();
        let shown = serde_json::to_value(explanation::of_pod(&state, "team", name).unwrap()).unwrap();
        let row = serde_json::to_value(pods::pod(&state, "team", name).unwrap()).unwrap();
        for answer in [&explained, &shown] {
            assert_eq!(answer["kubeScheduler"]["message"], message, "{name}");
            assert!(
                answer["summary"].as_str().unwrap().starts_with("waits; the GPUs of "),
                "{name}: {answer}"
            );
            let text = answer.to_string();
            assert!(!text.contains(r#""fits":true"#) && !text.contains("fits on"), "{name}: {text}");
        }
        assert_eq!((&row["kubeScheduler"]["message"], &row["state"]), (&json!(message), &json!("waiting")));
        assert_eq!(row["created"], "2026-01-01T00:00:00Z", "{name}");
        assert_eq!(explained["nodes"][0]["reason"].as_str(), reason, "{name}");
        assert_eq!(explained["nodes"][0]["wouldDo"], reason.is_none(), "{name}");
        // A hypothetical pod with the same constraints gets the same answer.
        let supposed = serde_json::to_value(what_if(&state, &parse(&pod)).unwrap()).unwrap();
        let needs_others = [
            "pod-affinity",
            "anti-affinity",
            "spread",
            "volume",
            "ports",
            "claims",
            "storage",
            "huge-pages",
            "storage-of-containers",
            "huge-pages-of-containers",
            "network-of-containers",
            "network",
        ]
        .contains(&name);
        assert_eq!(supposed["unchecked"].is_array(), needs_others, "{name}: {supposed}");
        // Where only kube-scheduler can tell, a hypothetical pod is not said to fit either.
        assert_eq!(supposed["nodes"][0]["wouldDo"], reason.is_none(), "{name}");
        assert_eq!(supposed["nodes"][0]["fits"], reason.is_none() && !needs_others, "{name}");
        let is_said_to_fit = supposed["summary"].as_str().unwrap().starts_with("fits on 1");
        assert_eq!(is_said_to_fit, reason.is_none() && !needs_others, "{name}: {supposed}");
        assert_eq!(supposed["room"].is_array(), is_said_to_fit, "{name}: {supposed}");
    }
}

/// What pods with GPUs on nodes say is evaluated. What pods without GPUs say is known to kube-scheduler alone, which the
/// explanation names.
#[test]
fn anti_affinity_and_ports_of_pods_with_gpus_close_nodes() {
    const HOST: &str = "kubernetes.io/hostname";
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let away = |key: &str| {
        let term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": "train"}}});
        json!({"podAntiAffinity": {required: [term]}})
    };
    let named = |name: &str, app: &str, affinity: Value| {
        let mut pod = whole(name, 1);
        pod["metadata"]["labels"] = json!({ "app": app });
        pod["spec"]["affinity"] = affinity;
        pod
    };
    let nodes = ["a", "b", "c"].map(|name| {
        let mut node = node(name, 2, "GiB");
        let zone = if name == "c" { "y" } else { "x" };
        node["metadata"]["labels"] = json!({HOST: name, "zone": zone});
        node
    });
    let mut state = state(&nodes);
    let mut train = named("train", "train", json!(null));
    train["spec"]["containers"][0]["ports"] = json!([{"containerPort": 29500, "hostPort": 29500}]);
    bind(&mut state, &train, "a");
    bind(&mut state, &named("alone", "web", away("zone")), "c");
    let reasons = |pod: &Value, is_hypothetical: bool| -> Vec<Value> {
        let explained = match is_hypothetical {
            true => what_if(&state, &parse(pod)),
            false => {
                let mut state = self::state(&nodes);
                bind(&mut state, &train, "a");
                bind(&mut state, &named("alone", "web", away("zone")), "c");
                set_pod(&mut state, pod);
                explain(&state, "team", pod["metadata"]["name"].as_str().unwrap()).unwrap()
            }
        };
        let explained = serde_json::to_value(explained.unwrap()).unwrap();
        let nodes = explained["nodes"].as_array().unwrap();
        let would_do = nodes.iter().filter(|node| node["wouldDo"] == true).count();
        let summary = explained["summary"].as_str().unwrap();
        assert!(summary.contains(&format!("{would_do} of 3 nodes")), "{summary}");
        for node in nodes.iter().filter(|node| node["wouldDo"] == false) {
            assert_eq!(node["mayResolve"], true, "the node opens when the other pod ends: {node}");
        }
        nodes.iter().map(|node| node["reason"].clone()).collect()
    };
    let excluded = |key: &str| json!(format!("a pod there is excluded by the pod's anti-affinity ({key})"));
    let excluding = json!("a pod there excludes the pod by its anti-affinity (zone)");
    for is_hypothetical in [true, false] {
        let check = |pod: Value, expected: [Value; 3]| {
            assert_eq!(reasons(&pod, is_hypothetical), expected, "{is_hypothetical} {pod}");
        };
        check(named("one", "web", away(HOST)), [excluded(HOST), Value::Null, Value::Null]);
        check(named("two", "web", away("zone")), [excluded("zone"), excluded("zone"), Value::Null]);
        // The anti-affinity of a pod on a node counts, too.
        check(named("three", "train", json!(null)), [Value::Null, Value::Null, excluding.clone()]);
        let mut port = named("four", "web", json!(null));
        port["spec"]["containers"][0]["ports"] = json!([{"hostPort": 29500}]);
        check(port, [json!("port 29500/TCP of the host is in use"), Value::Null, Value::Null]);
        // Pods of another namespace do not count.
        let mut elsewhere = named("five", "web", away(HOST));
        elsewhere["spec"]["affinity"]["podAntiAffinity"][required][0]["namespaces"] = json!(["other"]);
        check(elsewhere, [Value::Null, Value::Null, Value::Null]);
    }
}

/// A full node may get room by evictions. One that offers too little never does.
#[test]
fn evictions_could_help_where_pods_hold_what_is_missing() {
    let mig = "nvidia.com/mig-1g.5gb";
    let mut sliced = node("n", 2, "GiB");
    sliced["status"]["allocatable"][mig] = "1".into();
    sliced["status"]["allocatable"]["pods"] = "1".into();
    let mut state = state(std::slice::from_ref(&sliced));
    let mut holder = pod("holder", &[(mig, "1")]);
    holder["spec"]["nodeName"] = "n".into();
    set_pod(&mut state, &holder);
    let verdict = |state: &State, pod: &Value| {
        let explained = serde_json::to_value(what_if(state, &parse(pod)).unwrap()).unwrap();
        (
            explained["nodes"][0]["reason"].as_str().unwrap().to_owned(),
            explained["nodes"][0]["mayResolve"].clone(),
        )
    };
    let (reason, may_resolve) = verdict(&state, &whole("full", 1));
    assert_eq!((reason.as_str(), may_resolve), ("node has its largest number of pods, 1", json!(true)));
    sliced["status"]["allocatable"]["pods"] = "110".into();
    set_node(&mut state, &sliced);
    let (reason, may_resolve) = verdict(&state, &pod("slice", &[(mig, "1")]));
    assert_eq!(reason, format!("node has 0 of 1 {mig} left, and the pod requests 1"));
    assert_eq!(may_resolve, json!(true));
    let (reason, may_resolve) = verdict(&state, &pod("large", &[(mig, "2")]));
    assert_eq!(reason, format!("node offers 1 of {mig}, and the pod requests 2"));
    assert_eq!(may_resolve, json!(false));
}

#[test]
fn pods_with_resources_of_others_say_so() {
    let mut state = state(&[node("n", 2, "GiB")]);
    set_pod(&mut state, &pod("slice", &[("nvidia.com/mig-1g.5gb", "1")]));
    let explained = serde_json::to_value(explain(&state, "team", "slice").unwrap().unwrap()).unwrap();
    assert_eq!(explained["unserved"], json!(["nvidia.com/mig-1g.5gb"]));
    let row = serde_json::to_value(pods::pod(&state, "team", "slice").unwrap()).unwrap();
    assert_eq!((&row["unserved"], &row["state"]), (&json!(["nvidia.com/mig-1g.5gb"]), &json!("waiting")));
    assert_eq!(explained["nodes"][0]["wouldDo"], false, "{explained}");
}

/// Whether an agent with `--mig-strategy mixed` or another plugin offers the resource: it is served, on that node only.
#[test]
fn resources_of_others_are_served_where_a_node_offers_them() {
    let mig = "nvidia.com/mig-1g.5gb";
    let mut sliced = node("sliced", 2, "GiB");
    sliced["status"]["allocatable"][mig] = "7".into();
    let mut foreign =
        json!({"metadata": {"name": "foreign"}, "status": {"allocatable": {"cpu": "8", "amd.com/gpu": "2"}}});
    let mut state = state(&[node("plain", 2, "GiB"), sliced.clone(), foreign.clone()]);
    set_pod(&mut state, &pod("slice", &[(mig, "1")]));
    set_pod(&mut state, &pod("other", &[("amd.com/gpu", "1")]));
    let unserved = |state: &State, name: &str| {
        let explained = serde_json::to_value(explain(state, "team", name).unwrap().unwrap()).unwrap();
        let row = serde_json::to_value(pods::pod(state, "team", name).unwrap()).unwrap();
        let would_do: Vec<Value> = explained["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|node| node["wouldDo"] == true)
            .cloned()
            .collect();
        (
            explained["unserved"].clone(),
            row["unserved"].clone(),
            would_do.iter().map(|node| node["node"].clone()).collect(),
        )
    };
    let (explained, row, would_do): (Value, Value, Vec<Value>) = unserved(&state, "slice");
    assert_eq!((explained, row), (Value::Null, Value::Null));
    assert_eq!(would_do, [json!("sliced")]);
    assert_eq!(unserved(&state, "other").0, Value::Null, "a node without GPUs of ours offers it");
    sliced["status"]["allocatable"].as_object_mut().unwrap().remove(mig);
    foreign["status"]["allocatable"] = json!({"cpu": "8"});
    set_node(&mut state, &sliced);
    set_node(&mut state, &foreign);
    assert_eq!(unserved(&state, "slice").0, json!([mig]), "no node offers it any more");
    assert_eq!(unserved(&state, "other").0, json!(["amd.com/gpu"]));
}

/// GPUs that are reserved for a pod do not count against it, nor does its use of the quota.
#[test]
fn the_booking_of_a_pod_does_not_count_against_it() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let limits = r#"{"team":{"percent":100}}"#;
    state.handle(StateEvent::Quota(tessera_wire::foreign::quota::parse(limits, "the ConfigMap").unwrap()));
    let reserved = whole("reserved", 1);
    set_pod(&mut state, &reserved);
    state.begin_bind(&bind_args(&reserved, "n"), at(0)).unwrap();
    let explained = serde_json::to_value(explain(&state, "team", "reserved").unwrap().unwrap()).unwrap();
    assert_eq!(
        (&explained["nodes"][0]["wouldDo"], &explained["waits"]),
        (&json!(true), &json!(true)),
        "{explained}"
    );
    assert_eq!(explained["relief"], Value::Null, "{explained}");
    set_pod(&mut state, &whole("other", 1));
    let explained = serde_json::to_value(explain(&state, "team", "other").unwrap().unwrap()).unwrap();
    assert_eq!(explained["nodes"][0]["wouldDo"], false, "it counts against other pods");
}

/// The room on a node is counted up to a bound, because each pod costs a placement under a lock.
#[test]
fn room_is_counted_up_to_a_bound() {
    let room = |gpus: usize, percent: u32| {
        let state = state(&[node("n", gpus, "GiB")]);
        let pod =
            pod("p", &[("tencent.com/vcuda-core", &percent.to_string()), ("tencent.com/vcuda-memory", "1")]);
        let explained = what_if(&state, &parse(&pod)).unwrap();
        explained.room.iter().map(|room| (room.pods, room.or_more)).collect::<Vec<_>>()
    };
    assert_eq!(room(2, 50), [(4, false)]);
    assert_eq!(room(4, 1), [(200, true)], "four GPUs with room for 64 pods each by their memory");
}

#[test]
fn a_placed_pod_says_where_it_is_and_why_without_the_log_of_decisions() {
    let mut state = state(&[node("n", 2, "GiB")]);
    bind(&mut state, &share("half", 50), "n");
    let explained = serde_json::to_value(explain(&state, "team", "half").unwrap().unwrap()).unwrap();
    assert_eq!((&explained["placedOn"], &explained["waits"]), (&json!("n"), &json!(false)));
    assert_eq!(explained["holds"], json!(["GPU0: 50% and 8192 MiB"]));
    assert!(!explained["placementReason"].as_str().unwrap().is_empty(), "{explained}");
}

#[test]
fn inspect_answers_in_the_format_of_the_originals() {
    let mut node = node("n", 2, "GiB");
    node["metadata"]["annotations"]["NODE_TYPE"] = "big".into();
    let mut state = state(&[node]);
    bind(&mut state, &pod("p", &[("aliyun.com/gpu-mem", "6")]), "n");
    assert_eq!(
        serde_json::to_value(state.inspect_share(None)).unwrap(),
        json!({"nodes": [{"name": "n", "totalGPU": 32, "usedGPU": 6, "unit": "GiB", "devs": [
            {"id": 0, "totalGPU": 16, "usedGPU": 6, "pods": [{"name": "p", "namespace": "team", "usedGPU": 6}]},
            {"id": 1, "totalGPU": 16, "usedGPU": 0, "pods": []},
        ]}]})
    );
    assert_eq!(
        serde_json::to_value(state.inspect_topology(Some("n"), false)).unwrap(),
        json!({"nodes": [{"name": "n", "totalGPU": 2, "usedGPU": 1}]})
    );
    let detailed = serde_json::to_value(state.inspect_topology(Some("n"), true)).unwrap();
    assert_eq!(detailed["nodes"][0]["type"], "big");
    assert_eq!(detailed["policy"], "tessera");
    assert!(state.inspect_topology(Some("nobody"), true).error.contains("nobody"));
}
