//! Invalid requests and forged annotations are rejected when a pod is created.

use anyhow::{Result, ensure};
use axum::http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use super::{
    Site,
    pods::{asking, whole},
};

/// Requests of a pod and the text of its rejection.
const REFUSED: &[(&[(&str, &str)], &str)] = &[
    (
        &[("tencent.com/vcuda-core", "150"), ("tencent.com/vcuda-memory", "30")],
        "tencent.com/vcuda-core: 150 is more than one GPU but not a multiple of 100; write 100 or 200 for whole GPUs, or at most 99 for a share of one",
    ),
    (
        &[("tencent.com/vcuda-core", "50")],
        "tencent.com/vcuda-core: 50 is a share of a GPU and needs memory; add tencent.com/vcuda-memory, in units of 256 MiB (such as 30 for 7680 MiB), or write tencent.com/vcuda-core: 100 for a whole GPU",
    ),
    (
        &[("tencent.com/vcuda-memory", "30")],
        "tencent.com/vcuda-memory: 30 needs tencent.com/vcuda-core too; add tencent.com/vcuda-core: 1 to 99 for a share, or 100 for a whole GPU",
    ),
    (
        &[("aliyun.com/gpu-mem", "10G")],
        "aliyun.com/gpu-mem: 10G means 10000000000 units of GiB; write the number of units, such as 10",
    ),
    (
        &[("aliyun.com/gpu-count", "1")],
        "aliyun.com/gpu-count only reports how many GPUs a node has; request memory with aliyun.com/gpu-mem",
    ),
    (
        &[("nvidia.com/gpu", "1"), ("aliyun.com/gpu-mem", "8")],
        "requests both nvidia.com/gpu and aliyun.com/gpu-mem; keep one of them",
    ),
    (&[("nvidia.com/gpu", "65")], "more GPUs than a node can have; write at most 64"),
];

/// Annotations that a pod may not bring.
const FORGED: [&str; 3] = ["tessera.dev/grant", "ALIYUN_COM_GPU_GROUP", "tencent.com/predicate-gpu-idx-0"];

pub(super) async fn check(site: &Site) -> Result<()> {
    site.apply("admission-policy.yaml").await?;
    let (first, text) = REFUSED[0];
    for (pod, text) in [(asking("bad", first), text), (forged(FORGED[0]), "is written by the scheduler")] {
        let request = Request::post("/api/v1/namespaces/default/pods")
            .header("content-type", "application/json")
            .body(serde_json::to_vec(&pod)?)?;
        site.cluster.wait_for_refusal(&site.cluster.client(), request, text).await?;
    }
    for (asked, text) in REFUSED {
        let reply = refusal(site, asking("bad", asked)).await?.unwrap_or_default();
        ensure!(reply.contains(text), "{asked:?} was answered with {reply:?}");
    }
    for key in FORGED {
        let reply = refusal(site, forged(key)).await?.unwrap_or_default();
        let text = format!("annotation {key} is written by the scheduler and the agent only; remove it");
        ensure!(reply.contains(&text), "{key} was answered with {reply:?}");
    }
    site.harness.note("invalid requests and forged annotations are rejected with the documented texts");
    Ok(())
}

/// Verifies that only the agent may change or remove the grant of a pod.
pub(super) async fn check_bound(site: &Site, name: &str) -> Result<()> {
    for value in [json!("{}"), json!(null)] {
        let patch = json!({ "metadata": { "annotations": { "tessera.dev/grant": value } } });
        let outcome = site.cluster.pods().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        ensure!(outcome.is_err(), "the grant of {name} was changed to {value}");
    }
    let harmless = json!({ "metadata": { "labels": { "note": "harmless" } } });
    site.cluster.pods().patch(name, &PatchParams::default(), &Patch::Merge(&harmless)).await?;
    Ok(())
}

fn forged(key: &str) -> Pod {
    let mut pod = whole("bad", 1);
    pod.metadata.annotations = Some([(key.to_owned(), "0".to_owned())].into());
    pod
}

/// Returns why a pod was rejected. Returns `None` and deletes the pod if it was created.
async fn refusal(site: &Site, pod: Pod) -> Result<Option<String>> {
    match site.cluster.pods().create(&PostParams::default(), &pod).await {
        Err(kube::Error::Api(status)) => Ok(Some(status.message.clone())),
        Err(error) => Err(error.into()),
        Ok(made) => {
            let name = made.metadata.name.unwrap_or_default();
            site.cluster.pods().delete(&name, &kube::api::DeleteParams::default().grace_period(0)).await?;
            Ok(None)
        }
    }
}
