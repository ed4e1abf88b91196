//! Every dialect through the real kube-scheduler, with rejections, quota, preemption, reuse and
//! bypass.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Taint, Toleration};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use super::{
    SOON, Site, admission, certificates,
    front::{self, Front},
    pods::{annotation, asking, gpu_node, share, whole, with_priority},
};
use crate::harness::Harness;

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let nodes = [gpu_node("gib-1", 2, "GiB"), gpu_node("gib-2", 2, "GiB"), gpu_node("mib", 1, "MiB")];
    let site = Site::start(&harness, nodes.into_iter()).await?;
    make_priorities(&site).await?;
    admission::check(&site).await?;
    let replica = site.replica("tessera-scheduler", None)?;
    site.ready(&replica).await?;
    harness.note("the scheduler leads and is ready");
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;

    every_dialect(&site).await?;
    certificates::run(&site, &replica).await?;
    a_bypass_is_seen(&site).await?;
    a_finished_pod_frees_its_gpu(&site).await?;
    a_listed_gpu_is_not_granted(&site).await?;
    quota_holds(&site).await?;
    a_higher_priority_takes_a_fraction(&site).await?;
    a_taint_that_only_asks_is_weighed(&site).await?;
    let metrics = front::get(replica.addresses.pages, "/metrics").await.context("no metrics")?;
    ensure!(metrics.contains("tessera_scheduler_gpus_overbooked 0"), "{metrics}");
    Ok(())
}

async fn every_dialect(site: &Site) -> Result<()> {
    type Asked = &'static [(&'static str, &'static str)];
    let kinds: [(&str, Asked, &str); 5] = [
        ("nvidia", &[("nvidia.com/gpu", "1")], "tessera.dev/grant"),
        ("gputopology", &[("aliyun.com/gpu", "1")], "ALIYUN_COM_GPU_GROUP"),
        ("gpushare", &[("aliyun.com/gpu-mem", "4")], "ALIYUN_COM_GPU_MEM_IDX"),
        (
            "vcuda",
            &[("tencent.com/vcuda-core", "30"), ("tencent.com/vcuda-memory", "8")],
            "tencent.com/predicate-gpu-idx-0",
        ),
        ("vcuda-whole", &[("tencent.com/vcuda-core", "100")], "tencent.com/predicate-gpu-idx-0"),
    ];
    for (name, asked, key) in kinds {
        site.make(&asking(name, asked)).await?;
        let pod = site.bound(name).await?;
        ensure!(!annotation(&pod, key).is_empty(), "{name} has no {key}");
        ensure!(annotation(&pod, "tessera.dev/grant").contains("GPU-"), "{name} has no grant");
        let node = pod.spec.and_then(|spec| spec.node_name).unwrap_or_default();
        site.harness.note(&format!("{name} is on {node}"));
    }
    admission::check_bound(site, "nvidia").await?;
    let chosen = site.event_about("nvidia", "GpusChosen").await?.message.unwrap_or_default();
    ensure!(chosen.starts_with("GPU ") && chosen.contains(" of node "), "the event says {chosen:?}");
    site.harness.note(&format!("nvidia: {chosen}"));
    for name in ["nvidia", "gputopology", "gpushare", "vcuda", "vcuda-whole"] {
        site.end(name).await?;
    }
    // The API server writes it as 8k. Only the node that counts in MiB has as many units.
    site.make(&asking("mebibytes", &[("aliyun.com/gpu-mem", "8000")])).await?;
    let pod = site.bound("mebibytes").await?;
    ensure!(pod.spec.and_then(|spec| spec.node_name).as_deref() == Some("mib"), "the pod is on another node");
    site.end("mebibytes").await?;
    Ok(())
}

async fn a_bypass_is_seen(site: &Site) -> Result<()> {
    let mut sneaked = whole("sneaked", 1);
    if let Some(spec) = &mut sneaked.spec {
        spec.node_name = Some("mib".into());
    }
    site.make(&sneaked).await?;
    let mut asking =
        asking("after-sneaked", &[("tencent.com/vcuda-core", "10"), ("tencent.com/vcuda-memory", "1")]);
    if let Some(spec) = &mut asking.spec {
        spec.node_selector = Some([("kubernetes.io/hostname".to_owned(), "mib".to_owned())].into());
    }
    site.make(&asking).await?;
    site.refused("after-sneaked", "no GPU with 10% and 256 MiB left").await?;
    site.end("sneaked").await?;
    site.bound("after-sneaked").await?;
    site.end("after-sneaked").await?;
    site.harness.note("a pod with nodeName is counted until it ends");
    Ok(())
}

async fn a_finished_pod_frees_its_gpu(site: &Site) -> Result<()> {
    site.make(&whole("first-half", 2)).await?;
    site.make(&whole("other-half", 2)).await?;
    site.bound("first-half").await?;
    site.bound("other-half").await?;
    site.make(&whole("waits", 2)).await?;
    // kube-scheduler itself counts whole GPUs of one resource.
    site.refused("waits", "Insufficient nvidia.com/gpu").await?;
    site.make(&asking("waits-too", &[("aliyun.com/gpu", "2")])).await?;
    site.refused("waits-too", "fewer than 2 idle GPUs").await?;
    site.end("first-half").await?;
    site.end("other-half").await?;
    site.bound("waits").await?;
    site.bound("waits-too").await?;
    site.end("waits").await?;
    site.end("waits-too").await?;
    site.harness.note("GPUs of finished pods are reused across dialects");
    Ok(())
}

/// A GPU on gpushare's list of unhealthy GPUs is not granted, although the node reports it as
/// healthy.
async fn a_listed_gpu_is_not_granted(site: &Site) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(site.cluster.client(), "kube-system");
    let map = json!({ "metadata": { "name": "unhealthy-gpu-mib" }, "data": { "gpus": "0" } });
    maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
    site.make(&asking("sick", &[("aliyun.com/gpu-mem", "8000")])).await?;
    site.refused("sick", "no GPU with 8000 MiB left").await?;
    maps.delete("unhealthy-gpu-mib", &DeleteParams::default()).await?;
    a_pod_comes_and_ends(site, "passing").await?;
    site.bound("sick").await?;
    site.end("sick").await?;
    Ok(())
}

/// kube-scheduler does not watch ConfigMaps. It tries pods again when another pod ends.
async fn a_pod_comes_and_ends(site: &Site, name: &str) -> Result<()> {
    site.make(&asking(name, &[("cpu", "1")])).await?;
    site.bound(name).await?;
    site.end(name).await
}

async fn quota_holds(site: &Site) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(site.cluster.client(), "kube-system");
    let write = async |limits: &str| {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "gpuquota" }, "data": { "gpu_quota": limits },
        });
        maps.patch("gpuquota", &PatchParams::apply("e2e").force(), &Patch::Apply(&map)).await
    };
    write(r#"{ "default": { "quota": { "T4": 1 }, "pool": ["public"] } }"#).await?;
    site.make(&whole("within", 1)).await?;
    site.bound("within").await?;
    site.make(&share("beyond", 20)).await?;
    site.refused("beyond", "ExceedsGPUQuota: GPUs of this model").await?;
    let reply = site.event_about("beyond", "QuotaExceeded").await?.message.unwrap_or_default();
    ensure!(
        reply.contains("namespace default holds 1.00 of 1 T4, only in pool public"),
        "the event says {reply:?}"
    );
    site.harness.note(&format!("beyond: {reply}"));
    maps.delete("gpuquota", &DeleteParams::default()).await?;
    site.end("within").await?;
    site.bound("beyond").await?;
    site.end("beyond").await?;

    // A number in quotes is invalid, and the namespace is closed until the quota is corrected.
    write(r#"{ "default": { "quota": { "T4": "1" } } }"#).await?;
    let text = "ExceedsGPUQuota: the limits of namespace default in key gpu_quota of ConfigMap kube-system/gpuquota \
                 cannot be read: invalid type: string \"1\", expected u64; write {";
    site.make(&whole("unread", 1)).await?;
    site.refused("unread", text).await?;
    write(r#"{ "default": { "quota": { "T4": 1 } } }"#).await?;
    a_pod_comes_and_ends(site, "passing-too").await?;
    site.bound("unread").await?;
    site.end("unread").await?;
    maps.delete("gpuquota", &DeleteParams::default()).await?;
    Ok(())
}

/// Every GPU is full of shares of low priority, two on each.
async fn a_higher_priority_takes_a_fraction(site: &Site) -> Result<()> {
    for number in 0..10 {
        let name = format!("low-{number}");
        site.make(&with_priority(share(&name, 50), 0)).await?;
        site.bound(&name).await?;
    }
    site.make(&with_priority(share("urgent", 50), 1)).await?;
    let pods = site.cluster.pods();
    let is_evicted = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    let evicted = site
        .harness
        .wait_for("a pod to be evicted", SOON, async || {
            let all = pods.list(&ListParams::default()).await?.items;
            let evicted: Vec<Pod> = all.into_iter().filter(is_evicted).collect();
            Ok((!evicted.is_empty()).then_some(evicted))
        })
        .await?;
    ensure!(evicted.len() == 1, "evicted were {evicted:?}");
    // No kubelet ends the pod here.
    let victim = evicted[0].metadata.name.clone().unwrap_or_default();
    pods.delete(&victim, &DeleteParams::default().grace_period(0)).await?;
    let urgent = site.bound("urgent").await?;
    let gpu = annotation(&urgent, "tessera.dev/grant").to_owned();
    site.harness.note(&format!("{victim} was evicted for a pod of higher priority, which has {gpu}"));
    Ok(())
}

/// The node with the better GPUs has a taint of effect PreferNoSchedule. kube-scheduler binds pods
/// there that tolerate it.
async fn a_taint_that_only_asks_is_weighed(site: &Site) -> Result<()> {
    let (tier, spot) = ("tier".to_owned(), "spot".to_owned());
    let nodes = ["spot", "steady"].map(|name| {
        let mut node = gpu_node(name, 2, "GiB");
        node.metadata.labels.get_or_insert_default().insert(tier.clone(), "soft".into());
        if name == spot {
            let taint = Taint { key: spot.clone(), effect: "PreferNoSchedule".into(), ..Taint::default() };
            node.spec.get_or_insert_default().taints.get_or_insert_default().push(taint);
        }
        node
    });
    site.cluster.create_all(&Api::<Node>::all(site.cluster.client()), nodes.into_iter()).await?;
    let tolerated =
        Toleration { key: Some(spot.clone()), operator: Some("Exists".into()), ..Toleration::default() };
    let host = ("kubernetes.io/hostname".to_owned(), spot);
    let soft = (tier, "soft".to_owned());
    // A GPU that is in use is better than an idle one, whatever pods the scheduler expects.
    let pods = [
        ("begun", 50, host, vec![], "spot"),
        ("bold", 30, soft.clone(), vec![tolerated], "spot"),
        ("shy", 20, soft, vec![], "steady"),
    ];
    for (name, percent, selector, tolerations, expected) in pods {
        let mut pod = share(name, percent);
        let spec = pod.spec.get_or_insert_default();
        spec.node_selector = Some([selector].into());
        spec.tolerations = Some(tolerations);
        site.make(&pod).await?;
        let node = site.bound(name).await?.spec.and_then(|spec| spec.node_name).unwrap_or_default();
        ensure!(node == expected, "{name} is on {node}");
    }
    site.harness.note("a taint with PreferNoSchedule repels pods that do not tolerate it, although the GPUs there are better");
    Ok(())
}

pub(super) async fn make_priorities(site: &Site) -> Result<()> {
    site.cluster.create_priority_class("low", 0).await?;
    site.cluster.create_priority_class("high", 1000).await
}
