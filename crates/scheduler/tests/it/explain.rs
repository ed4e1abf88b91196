//! Explain, what-if and inspect: the answers for people and older tools.

use serde_json::{Value, json};
use tessera_scheduler::verb::explain::{explain, what_if};

use crate::fixtures::*;

#[test]
fn explain_and_what_if_give_a_reason_per_gpu() {
    let mut state = state(&[node("n", 2, "GiB"), json!({"metadata": {"name": "cpu"}})]);
    bind(&mut state, &share("first", 60), "n");
    set_pod(&mut state, &whole("waiting", 2));
    let explained = serde_json::to_value(explain(&state, "team", "waiting").unwrap().unwrap()).unwrap();
    assert_eq!(explained["summary"], "fits on 0 of 2 nodes");
    assert_eq!(explained["nodes"][0]["reason"], "no GPU");
    assert_eq!(explained["nodes"][1]["reason"], "fewer than 2 idle GPUs");
    assert_eq!(explained["nodes"][1]["gpuReasons"][0]["reason"], "shared: 60% and 9728 MiB are held");
    assert_eq!(explained["nodes"][1]["gpuReasons"][1]["reason"], Value::Null);
    let supposed = serde_json::to_value(what_if(&state, &parse(&whole("supposed", 1))).unwrap()).unwrap();
    assert_eq!(supposed["nodes"][1]["gpus"], json!([{"container": "main", "gpus": [1]}]));
    assert!(explain(&state, "team", "nobody").is_none());
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
