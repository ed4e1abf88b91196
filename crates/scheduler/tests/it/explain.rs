//! Explain, what-if and inspect: the answers for people and older tools.

use serde_json::{Value, json};
use tessera_scheduler::dashboard::view::{explanation, pods};
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
            limits("nvidia.com/gpumem", "3000"),
            none(),
            Some("node offers 0 of nvidia.com/gpumem, and the pod requests 3000"),
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
        assert_eq!(supposed["nodes"][0]["fits"], reason.is_none(), "{name}");
        let needs_others = ["pod-affinity", "anti-affinity", "spread", "volume"].contains(&name);
        assert_eq!(supposed["unchecked"].is_array(), needs_others, "{name}: {supposed}");
    }
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
