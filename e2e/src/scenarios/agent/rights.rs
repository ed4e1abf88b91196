//! The agent's token gives no rights beyond its own node.

use anyhow::{Result, bail, ensure};
use axum::http::{Method, Request};
use kube::{Client, api::PostParams};
use serde_json::{Value, json};

use super::stage::Stage;

/// Name of another node.
const ELSEWHERE: &str = "virtual-0000";

pub(super) async fn end_at_the_node(stage: &Stage) -> Result<()> {
    stage.cluster.add_virtual_nodes(1).await?;
    let pod = json!({
        "metadata": { "name": "elsewhere" },
        "spec": { "nodeName": ELSEWHERE, "containers": [{ "name": "main", "image": "none" }] },
    });
    stage.cluster.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    let agent = tessera_cluster::connect(Some(&stage.kubeconfig)).await?;

    let node = &stage.node.name;
    let maps = "/api/v1/namespaces/kube-system/configmaps";
    let no_map = format!("the agent of node {node} may write only the ConfigMap unhealthy-gpu-{node}");
    let no_node = format!("the agent of node {node} may not write to another node");
    let no_pod = format!("the agent of node {node} may not write to pods on another node");
    let map = |name: &str| json!({ "metadata": { "name": name } });
    let annotation = json!({ "metadata": { "annotations": { "tessera.dev/inventory": "{}" } } });
    let capacity = json!({ "status": { "capacity": { "aliyun.com/gpu-count": "8" } } });
    let refused = [
        (Method::POST, maps.to_owned(), map("settings"), &no_map),
        (Method::POST, maps.to_owned(), map(&format!("unhealthy-gpu-{ELSEWHERE}")), &no_map),
        (Method::PATCH, format!("/api/v1/nodes/{ELSEWHERE}"), annotation.clone(), &no_node),
        (Method::PATCH, format!("/api/v1/nodes/{ELSEWHERE}/status"), capacity, &no_node),
        (Method::PATCH, "/api/v1/namespaces/default/pods/elsewhere".to_owned(), annotation, &no_pod),
    ];
    for (method, path, body, text) in refused {
        stage.cluster.wait_for_refusal(&agent, request(&method, &path, &body)?, text).await?;
        let reply = refusal(&agent, &method, &path, &body).await?;
        ensure!(reply.contains(text.as_str()), "{method} {path} was answered with {reply:?}");
    }
    let reply = refusal(&agent, &Method::GET, maps, &json!({})).await?;
    ensure!(reply.contains("is forbidden"), "reading ConfigMaps was answered with {reply:?}");
    stage.harness.note("the token gives no access to other nodes, their pods and other ConfigMaps");
    Ok(())
}

/// Returns the message of the API server's refusal.
async fn refusal(client: &Client, method: &Method, path: &str, body: &Value) -> Result<String> {
    match client.request::<Value>(request(method, path, body)?).await {
        Err(kube::Error::Api(status)) => Ok(status.message.clone()),
        Err(error) => Err(error.into()),
        Ok(answer) => bail!("the request succeeded: {answer}"),
    }
}

fn request(method: &Method, path: &str, body: &Value) -> Result<Request<Vec<u8>>> {
    let media = if *method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
    let request = Request::builder().method(method).uri(path).header("content-type", media);
    Ok(request.body(serde_json::to_vec(body)?)?)
}
