//! Measurements of agents, and agents that do not answer.

use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::stage::{GPU, Stage};
use crate::states::{T4, node, share};

fn agent(stage: &Stage, document: Value) -> String {
    stage.runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answer = axum::routing::get(move || async move { axum::Json(document) });
        tokio::spawn(
            async move { axum::serve(listener, axum::Router::new().route("/v1/use", answer)).await },
        );
        url
    })
}

#[test]
fn top_shows_measured_use_and_names_silent_agents() {
    let stage = Stage::new();
    let url = agent(
        &stage,
        json!({
            "gpus": [{ "uuid": "GPU-n1-0", "index": 0, "memoryUsedMiB": 5000, "busyPercent": 61.4 }],
            "containers": [{ "namespace": "team", "pod": "third", "uid": "u", "container": "main", "gpus": [
                { "uuid": "GPU-n1-0", "index": 0, "grantedPercent": 33, "grantedMiB": 5120, "memoryUsedMiB": 4900, "busyPercent": 30.2, "throttledPercent": 4.0 }] }],
        }),
    );
    let mut measured = node("n1", "10.0.0.1", "GiB", &[T4]);
    measured["metadata"]["annotations"]["tessera.dev/agent"] = url.into();
    let mut silent = node("n2", "10.0.0.2", "GiB", &[T4]);
    silent["metadata"]["annotations"]["tessera.dev/agent"] = "http://127.0.0.1:1".into();
    stage.node(&measured);
    stage.node(&silent);
    stage.pod(&share("third", "n1", 0, 33, 20));
    let text = stage.text(GPU, &["top"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "NODE  GPU  POD         CONTAINER  BUSY  GRANTED  MEMORY(MiB)  GRANTED(MiB)  WAITED"
    );
    assert_eq!(lines[2], "n1    0    team/third  main       30%   33%      4900         5120          4%");
    assert!(lines[3].starts_with("n2    -    no answer from http://127.0.0.1:1/v1/use: "), "{text}");
    let json: Value = serde_json::from_str(&stage.text(GPU, &["top", "-o", "json"])).unwrap();
    assert_eq!(json["nodes"][0]["containers"][0]["gpus"][0]["memoryUsedMiB"], 4900);
    assert!(json["nodes"][1]["gpus"].is_null() && json["nodes"][1]["error"].is_string(), "{json}");

    let tree = stage.run(GPU, &["tree"]);
    let (shown, warned) = (String::from_utf8(tree.stdout).unwrap(), String::from_utf8(tree.stderr).unwrap());
    assert!(shown.contains("|---GPU0 (pids: [], usedMemory: 5242880000, totalMemory: 16106127360, allocatableCores: 67, allocatableMemory: 10737418240)"), "{shown}");
    assert!(
        warned.starts_with("warning: node n2: usedMemory is unknown and shown as 0: no answer from"),
        "{warned}"
    );
}
