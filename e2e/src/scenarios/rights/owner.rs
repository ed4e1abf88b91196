//! The owner of a pod with a share cannot lift the limits of the share, neither when the pod is
//! created nor later.

use anyhow::{Context, Result, ensure};
use axum::http::Method;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{Attempt, all_refused};
use crate::harness::{Cluster, Harness};

const PODS: &str = "/api/v1/namespaces/default/pods";
const CEILING: &str = "tencent.com/vcuda-core-limit";

pub(super) async fn check(harness: &Harness, cluster: &Cluster) -> Result<()> {
    let (admin, pods) = (cluster.client(), cluster.pods());
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    let refused: Vec<Attempt> = containers()
        .into_iter()
        .map(|(added, text)| Attempt::new(&Method::POST, PODS, with(&added), text))
        .collect();
    all_refused(cluster, &admin, &refused).await?;
    for added in harmless() {
        let pod: Pod = serde_json::from_value(with(&added))?;
        pods.create(&parameters, &pod).await.with_context(|| added.to_string())?;
    }
    // Whole GPUs are not limited, so nothing can be lifted.
    let mut whole = with(&json!({ "env": [{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "all" }] }));
    whole["spec"]["containers"][0]["resources"]["limits"] = json!({ "nvidia.com/gpu": "1" });
    pods.create(&parameters, &serde_json::from_value(whole)?).await?;
    harness.note("pods whose containers would lift the limits of a share are refused");

    pods.create(&PostParams::default(), &serde_json::from_value(with(&json!({})))?).await?;
    debugging(cluster).await?;
    harness.note("the same holds for ephemeral containers");
    ceiling(harness, cluster).await?;
    harness.note("the ceiling of a running pod changes only in labelled namespaces");
    Ok(())
}

/// Returns a pod with a share, with these fields added to its container.
fn with(added: &Value) -> Value {
    let mut container = json!({
        "name": "main", "image": "none",
        "resources": { "limits": { "tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "4" } },
    });
    for (key, value) in added.as_object().into_iter().flatten() {
        container[key] = value.clone();
    }
    json!({
        "metadata": { "name": "share", "annotations": { CEILING: "50" } },
        "spec": { "containers": [container], "volumes": [{ "name": "v", "emptyDir": {} }] },
    })
}

/// Returns fields of a container that must be refused, with the texts of their refusals.
fn containers() -> Vec<(Value, String)> {
    let mut all = Vec::new();
    for name in [
        "NVIDIA_VISIBLE_DEVICES",
        "LD_PRELOAD",
        "LD_AUDIT",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_MPS_PIPE_DIRECTORY",
    ] {
        let text = format!("container main: env {name} would change which GPUs or libraries");
        all.push((json!({ "env": [{ "name": name, "value": "all" }] }), text));
    }
    for path in [
        "/etc/ld.so.preload",
        "/etc/tessera",
        "/etc/tessera/control",
        "//etc/./tessera/",
        "etc/tessera",
        "/usr/lib/tessera",
        "/lib/tessera",
        "/etc",
        "/data/../etc/tessera",
    ] {
        let text = format!("container main: a volume at {path} would cover the files");
        all.push((json!({ "volumeMounts": [{ "name": "v", "mountPath": path }] }), text));
    }
    for limits in [
        json!({ "aliyun.com/gpu-mem": "4" }),
        json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000" }),
        json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50" }),
        json!({ "nvidia.com/gpu": "1", "nvidia.com/gpucores": "30" }),
    ] {
        let added =
            json!({ "env": [{ "name": "LD_PRELOAD", "value": "all" }], "resources": { "limits": limits } });
        all.push((added, "container main: env LD_PRELOAD would change which GPUs or libraries".to_owned()));
    }
    let privileged = json!({ "securityContext": { "privileged": true } });
    all.push((privileged, "container main: securityContext.privileged opens every GPU".to_owned()));
    all
}

/// Returns fields of a container that must be accepted.
fn harmless() -> [Value; 3] {
    [
        json!({ "env": [{ "name": "LD_LIBRARY_PATH", "value": "/opt/lib" }] }),
        json!({ "env": [{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "void" }] }),
        json!({ "volumeMounts": [{ "name": "v", "mountPath": "/etc/settings" }] }),
    ]
}

async fn debugging(cluster: &Cluster) -> Result<()> {
    let path = format!("{PODS}/share/ephemeralcontainers");
    let debugger = |added: &Value| {
        let mut container = json!({ "name": "debugger", "image": "none" });
        for (key, value) in added.as_object().into_iter().flatten() {
            container[key] = value.clone();
        }
        json!({ "spec": { "ephemeralContainers": [container] } })
    };
    let variable = json!({ "env": [{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "all" }] });
    let mount = json!({ "volumeMounts": [{ "name": "v", "mountPath": "/etc/ld.so.preload" }] });
    let privileged = json!({ "securityContext": { "privileged": true } });
    let refused = [
        (variable, "container debugger: env NVIDIA_VISIBLE_DEVICES"),
        (mount, "container debugger: a volume at /etc/ld.so.preload"),
        (privileged, "container debugger: securityContext.privileged"),
    ];
    let refused = refused.map(|(added, text)| Attempt::new(&Method::PATCH, &path, debugger(&added), text));
    all_refused(cluster, &cluster.client(), &refused).await?;
    let harmless = Attempt::new(&Method::PATCH, &path, debugger(&json!({})), "");
    cluster.client().request::<Value>(harmless.request()?).await?;
    Ok(())
}

async fn ceiling(harness: &Harness, cluster: &Cluster) -> Result<()> {
    let path = format!("{PODS}/share");
    let change = |value: Value| json!({ "metadata": { "annotations": { CEILING: value } } });
    let text = "annotation tencent.com/vcuda-core-limit can be set only when the pod is created";
    let refused = [json!("100"), json!("10"), json!(null)]
        .map(|value| Attempt::new(&Method::PATCH, &path, change(value), text));
    all_refused(cluster, &cluster.client(), &refused).await?;
    let label = json!({ "metadata": { "labels": { "tessera.dev/ceiling-changes": "allowed" } } });
    let namespaces: Api<Namespace> = Api::all(cluster.client());
    namespaces.patch("default", &PatchParams::default(), &Patch::Merge(label)).await?;
    let patch = Patch::Merge(change(json!("100")));
    let changed = harness
        .wait_for("the label of the namespace to take effect", super::SOON, async || {
            Ok(cluster.pods().patch("share", &PatchParams::default(), &patch).await.ok())
        })
        .await?;
    let annotations = changed.metadata.annotations.unwrap_or_default();
    ensure!(annotations.get(CEILING).is_some_and(|value| value == "100"), "the pod has {annotations:?}");
    Ok(())
}
