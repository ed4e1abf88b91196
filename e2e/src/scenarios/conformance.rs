//! The requests of the embedded API server's test, sent to a real one. Both must answer alike.

use anyhow::{Result, anyhow};
use axum::http::Request;
use kube::client::Body;
use serde_json::Value;
use tessera_sim::apiserver::conformance;

use crate::harness::{Cluster, Harness, Parts};

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: false }).await?;
    let client = cluster.client();
    let tried = conformance::run(async |request: conformance::ConformanceRequest| {
        let sent = Request::builder()
            .method(request.method.as_str())
            .uri(&request.path)
            .header("accept", &request.accept)
            .header("content-type", &request.media)
            .body(Body::from(request.body.into_bytes()))?;
        let answer = client.send(sent).await?;
        let code = answer.status().as_u16();
        let body = answer.into_body().collect_bytes().await?;
        let body = String::from_utf8_lossy(&body).into_owned();
        if code == 201 && request.path.ends_with("/priorityclasses") {
            let class: Value = serde_json::from_str(&body)?;
            cluster.wait_for_priority_class(class["metadata"]["name"].as_str().unwrap_or_default()).await?;
        }
        anyhow::Ok((code, body))
    });
    let steps = tried.await.map_err(|error| anyhow!("the real API server differs:\n{error}"))?;
    harness.note(&format!("{steps} requests are answered like by the embedded server"));
    Ok(())
}
