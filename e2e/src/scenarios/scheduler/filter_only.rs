//! gpu-admission's configuration: kube-scheduler calls the filter verb alone, with whole nodes, and binds by itself.

use std::{collections::BTreeSet, fs, net::SocketAddr};

use anyhow::{Result, ensure};
use axum::http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

use super::{
    SOON, Site, USER, front,
    pods::{annotation, gpu_node, share},
};
use crate::harness::{Component, Harness, free_port};

/// The file that gpu-admission's documents write to `/etc/kubernetes/gpu-quota-admission.config`.
const QUOTA_CONFIG: &str = r#"{
    "QuotaConfigMapName": "gpuquota",
    "QuotaConfigMapNamespace": "kube-system",
    "GPUModelLabel": "gaia.tencent.com/gpu-model",
    "GPUPoolLabel": "gaia.tencent.com/gpu-pool"
}"#;

const GPUS: usize = 7;
const PODS: usize = 9;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let site = Site::start(&harness, [gpu_node("p40s", GPUS as u64, "GiB")].into_iter()).await?;
    site.apply("admission-policy.yaml").await?;
    site.apply("filter-only.yaml").await?;
    let (_scheduler, extender) = start_as_gpu_admission(&site).await?;
    let _kube_scheduler = start_kube_scheduler(&site, extender)?;

    // All requests together fit the node, but no two of them fit one GPU.
    for number in 0..PODS {
        site.make(&share(&format!("p{number}"), 60)).await?;
    }
    let bound = wait_for_bound(&site, GPUS).await?;
    let gpus: BTreeSet<&str> =
        bound.iter().map(|pod| annotation(pod, "tencent.com/predicate-gpu-idx-0")).collect();
    ensure!(gpus == BTreeSet::from(["0", "1", "2", "3", "4", "5", "6"]), "the pods got {gpus:?}");
    for pod in &bound {
        ensure!(annotation(pod, "tencent.com/predicate-node") == "p40s", "the pod has no predicate-node");
        ensure!(annotation(pod, "tessera.dev/grant").contains("GPU-p40s-"), "the pod has no grant");
    }
    let waiting = waiting(&site).await?;
    ensure!(waiting.len() == PODS - GPUS, "{waiting:?} wait");
    for name in &waiting {
        site.refused(name, "no GPU with 60% and 9728 MiB left").await?;
    }
    harness.note(&format!("{GPUS} pods have a GPU each, {waiting:?} wait"));

    the_scheduler_writes_grants_only(&site, &waiting[0]).await?;

    let first = bound.iter().filter_map(|pod| pod.metadata.name.as_deref()).next().unwrap_or_default();
    site.cluster.pods().delete(first, &DeleteParams::default().grace_period(0)).await?;
    wait_for_bound(&site, GPUS).await?;
    harness.note(&format!("after {first} was deleted, a waiting pod got its GPU"));
    Ok(())
}

/// The right to annotate pods is no right to change them otherwise.
async fn the_scheduler_writes_grants_only(site: &Site, pod: &str) -> Result<()> {
    let client = tessera_cluster::connect(Some(&site.cluster.kubeconfig(USER, "e2e")?)).await?;
    for (patch, text) in [
        (json!({ "metadata": { "labels": { "a": "b" } } }), "may not change metadata.labels of pods"),
        (json!({ "metadata": { "annotations": { "a": "b" } } }), "may not change the annotation a of pods"),
        (json!({ "spec": { "activeDeadlineSeconds": 1 } }), "may not change the field spec of pods"),
    ] {
        let request = Request::patch(format!("/api/v1/namespaces/default/pods/{pod}"))
            .header("content-type", "application/merge-patch+json")
            .body(patch.to_string().into_bytes())?;
        site.cluster.wait_for_refusal(&client, request, text).await?;
    }
    site.harness.note("the scheduler may write nothing but grants to pods");
    Ok(())
}

/// Starts `tessera scheduler` with gpu-admission's command line, with the rights of its service account.
async fn start_as_gpu_admission(site: &Site) -> Result<(Component, SocketAddr)> {
    let config = site.harness.state("gpu-admission")?.join("gpu-quota-admission.config");
    fs::write(&config, QUOTA_CONFIG)?;
    let free = || Ok::<_, anyhow::Error>(SocketAddr::from(([127, 0, 0, 1], free_port()?)));
    let (address, health) = (free()?, free()?);
    let kubeconfig = site.cluster.kubeconfig(USER, "e2e")?;
    let program = site.harness.tessera()?.arguments([
        "scheduler".to_owned(),
        format!("--address={address}"),
        "--v=4".to_owned(),
        "--logtostderr=true".to_owned(),
        "--incluster-mode=false".to_owned(),
        format!("--config={}", config.display()),
        format!("--kubeconfig={}", kubeconfig.display()),
        "--dashboard-listen=off".to_owned(),
        format!("--health-listen={health}"),
    ]);
    let component = site.harness.start("gpu-admission", program)?;
    site.harness
        .wait_for("the scheduler to be ready", SOON, async || Ok(front::is_ready(health).await.then_some(())))
        .await?;
    Ok((component, address))
}

fn start_kube_scheduler(site: &Site, extender: SocketAddr) -> Result<Component> {
    let kubeconfig = site.cluster.kubeconfig("system:kube-scheduler", "e2e")?.display().to_string();
    let configuration = json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": { "kubeconfig": kubeconfig },
        "leaderElection": { "leaderElect": false },
        "extenders": [{
            "urlPrefix": format!("http://{extender}/scheduler"),
            "filterVerb": "predicates",
            "enableHTTPS": false,
            "nodeCacheCapable": false,
        }],
    });
    site.cluster.start_configured_scheduler("kube-scheduler", &configuration.to_string(), &kubeconfig)
}

/// Waits until this many pods have a node.
async fn wait_for_bound(site: &Site, count: usize) -> Result<Vec<Pod>> {
    let pods = site.cluster.pods();
    site.harness
        .wait_for(&format!("{count} pods to be bound"), SOON, async || {
            let all = pods.list(&ListParams::default()).await?.items;
            let bound: Vec<Pod> = all.into_iter().filter(is_bound).collect();
            ensure!(bound.len() <= count, "{} pods are bound", bound.len());
            Ok((bound.len() == count).then_some(bound))
        })
        .await
}

async fn waiting(site: &Site) -> Result<Vec<String>> {
    let all = site.cluster.pods().list(&ListParams::default()).await?.items;
    Ok(all.into_iter().filter(|pod| !is_bound(pod)).filter_map(|pod| pod.metadata.name).collect())
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
}
