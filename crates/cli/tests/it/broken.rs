//! The plugins read gpushare's lists of unhealthy GPUs, like the scheduler.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::stage::{GPU, SHARE, Stage};
use crate::states::{T4, node};

/// Returns two nodes with two GPUs each. A list names the second GPU of the first node as
/// unhealthy.
fn stage() -> Stage {
    let stage = Stage::of(&["a", "b"].map(|name| node(name, "10.0.0.1", "GiB", &[T4, T4])), &[]);
    let list = json!({ "metadata": { "name": "unhealthy-gpu-a" }, "data": { "gpus": "1,x" } });
    stage.server.create("/api/v1/namespaces/kube-system/configmaps", list).unwrap();
    stage
}

/// Returns for each node which GPUs are shown as healthy.
fn healthy(stage: &Stage, program: &str, arguments: &[&str]) -> Value {
    let text = stage.text(program, &[arguments, &["-o", "json"]].concat());
    let shown: Value = serde_json::from_str(&text).unwrap();
    let nodes = shown["nodes"].as_array().unwrap().iter();
    nodes
        .map(|node| {
            node["gpus"].as_array().unwrap().iter().map(|gpu| gpu["healthy"].clone()).collect::<Value>()
        })
        .collect()
}

#[test]
fn every_command_treats_listed_gpus_as_unhealthy() {
    let stage = stage();
    assert_eq!(healthy(&stage, GPU, &[]), json!([[true, false], [true, true]]));
    assert_eq!(healthy(&stage, SHARE, &[]), json!([[true, false], [true, true]]));
    assert_eq!(healthy(&stage, GPU, &["a"]), json!([[true, false]]));
    let answer = stage.text(GPU, &["what-if", "nvidia.com/gpu=2", "-o", "name"]);
    assert_eq!(answer, "node/b\n");
}

/// Most users may read nodes and pods, but nothing in kube-system.
#[test]
fn works_without_permission_to_read_the_lists() {
    let stage = stage();
    let real = stage.server.url();
    let url = stage.runtime.block_on(async {
        let answer = move |uri: axum::http::Uri| {
            let real = real.clone();
            async move {
                if uri.path().contains("configmaps") {
                    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "reason": "Forbidden", "code": 403, "message": "configmaps is forbidden" });
                    return (StatusCode::FORBIDDEN, status.to_string());
                }
                let mut client = tessera_sim::http::HttpClient::new(&real).unwrap();
                let path = uri.path_and_query().unwrap().as_str();
                let (code, body) = client.send("GET", path, &[], "").await.unwrap();
                (StatusCode::from_u16(code).unwrap(), body)
            }
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
        url
    });
    std::fs::write(stage.kubeconfig(), crate::stage::kubeconfig(&url)).unwrap();
    assert_eq!(healthy(&stage, GPU, &[]), json!([[true, true], [true, true]]));
    assert_eq!(healthy(&stage, GPU, &["a"]), json!([[true, true]]));
}
