//! The requests of the embedded API server's test, sent to a real one. Both must answer alike.

use anyhow::{Context, Result, anyhow, bail, ensure};
use axum::http::Request;
use futures::StreamExt;
use kube::{
    api::{DeleteParams, Patch, PatchParams, PostParams},
    client::Body,
};
use serde_json::{Value, json};
use tessera_cluster::{
    get_pod,
    watch::{self, WatchChange},
};
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
    a_watched_pod_is_the_pod_that_is_read(&harness, &cluster).await
}

/// The watch of pods is in protobuf, and a read is in JSON. Both must show the same pod.
async fn a_watched_pod_is_the_pod_that_is_read(harness: &Harness, cluster: &Cluster) -> Result<()> {
    let preferred = "preferredDuringSchedulingIgnoredDuringExecution";
    let resources =
        json!({ "limits": { "nvidia.com/gpu": "2", "memory": "1Gi" }, "requests": { "cpu": "500m" } });
    let container = |name: &str| {
        json!({ "name": name, "image": "none", "resources": resources,
                "env": [{ "name": "HOME", "value": "/" }, { "name": "SUBMITTER", "value": "jane" }] })
    };
    let mut sidecar = container("side");
    sidecar["restartPolicy"] = "Always".into();
    let term =
        json!({ "weight": 1, "preference": { "matchExpressions": [{ "key": "a", "operator": "Exists" }] } });
    let spread = json!({ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway" });
    let pod = json!({
        "metadata": { "name": "watched", "labels": { "app": "a" }, "annotations": { "tessera.dev/policy": "link" },
                      "finalizers": ["example.com/stays"] },
        "spec": {
            "schedulerName": "tessera", "nodeName": "virtual-0", "initContainers": [sidecar], "containers": [container("main")],
            "affinity": { "nodeAffinity": { preferred: [term] } }, "topologySpreadConstraints": [spread],
            "tolerations": [{ "key": "k", "operator": "Exists", "effect": "PreferNoSchedule" }],
        },
    });
    let pods = cluster.pods();
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    let client = cluster.client();
    let mut changes = std::pin::pin!(watch::pods(client.clone()));
    while changes.next().await.context("the watch ended")? != WatchChange::Listed {}
    let statuses = json!([{ "name": "main", "image": "none", "imageID": "", "ready": false, "restartCount": 1,
        "containerID": "containerd://b", "lastState": { "terminated": { "exitCode": 1, "containerID": "containerd://a" } } }]);
    let status = json!({ "status": { "phase": "Running", "message": "why", "startTime": "2027-01-15T08:00:00Z",
                                     "containerStatuses": statuses } });
    pods.patch_status("watched", &PatchParams::default(), &Patch::Merge(&status)).await?;
    pods.delete("watched", &DeleteParams::default().grace_period(0)).await?;
    for what in ["the status", "the deletion"] {
        let change = changes.next().await.context("the watch ended")?;
        let WatchChange::Set(watched) = change else { bail!("{what}: {change:?}") };
        ensure!(
            watched.metadata.name == "watched" && watched.status.phase == "Running",
            "{what}: {watched:?}"
        );
        if watched.metadata.deletion_timestamp.is_some() {
            let read = get_pod(&client, "default", "watched").await?.context("no pod")?;
            ensure!(watched == read, "the watch shows {watched:?}, not {read:?}");
            harness.note("a watch in protobuf shows the pod that a read in JSON shows");
            return Ok(());
        }
    }
    bail!("the watch did not show the deletion")
}
