//! Evictions for gangs on the real kube-scheduler and eviction API: a gang of high priority displaces a lower one as a
//! whole, a budget is respected, the rest of a gang follows the pod that kube-scheduler preempts, and a borrower gives
//! GPUs back.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use super::{
    SOON, Site, USER, dialects,
    front::Front,
    pods::{gpu_node, whole, with_priority},
};
use crate::harness::{Cluster, Harness, Parts};

const NODES: [&str; 2] = ["node-1", "node-2"];

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: true }).await?;
    let nodes = NODES.map(|name| gpu_node(name, 8, "GiB"));
    cluster.create_all(&Api::<Node>::all(cluster.client()), nodes.into_iter()).await?;
    let site = Site::of(&harness, cluster.into()).await?;
    dialects::make_priorities(&site).await?;
    let replica = site.replica("tessera-scheduler-1", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;

    // Each node has two GPUs left, so kube-scheduler preempts no pods for the gang with two GPUs for each pod.
    let (low, high) = (Gang { name: "low", size: 2, gpus: 6 }, Gang { name: "high", size: 8, gpus: 2 });
    low.create(&site, 0).await?;
    low.bound(&site).await?;
    guard(&site).await?;
    high.create(&site, 1).await?;
    let text = "gang default/high waits for GPUs for all of its 8 pods at the same time";
    site.refused("high-7", text).await?;
    ensure!(low.left(&site).await? == 2, "a pod was evicted");
    harness.note("without --evict the gang of high priority waits");

    replica.component.kill()?;
    site.apply("evictions.yaml").await?;
    site.cluster.wait_for_rights(USER).await?;
    let replica = site.replica_with("tessera-scheduler-2", None, &["--evict"])?;
    front.add(replica.addresses);
    site.ready(&replica).await?;
    // By the time at which a further pod was tried, the scheduler has searched for evictions.
    site.make(&with_priority(whole("late", 8), 0)).await?;
    site.refused("late", "Insufficient nvidia.com/gpu").await?;
    delete(&site, "late").await?;
    ensure!(low.left(&site).await? == 2, "a pod was evicted against its budget");
    budgets(&site).delete("low", &DeleteParams::default()).await?;
    high.bound(&site).await?;
    ensure!(low.left(&site).await? == 0, "the displaced gang is not gone as a whole");
    for (pod, reason) in [("low-0", "EvictedForGpus"), ("low-1", "EvictedForGpus"), ("high-0", "MakingRoom")]
    {
        let event = site.event_about(pod, reason).await?;
        harness.note(&format!("event about {pod}: {}", event.message.unwrap_or_default()));
    }
    high.delete(&site).await?;

    rest_follows(&site).await?;
    full_nodes(&site).await?;
    a_borrower_gives_back(&site).await
}

/// The namespace `borrower` uses all GPUs, of which half are guaranteed to the namespace `default`.
async fn a_borrower_gives_back(site: &Site) -> Result<()> {
    let client = || site.cluster.client();
    let maps: Api<ConfigMap> = Api::namespaced(client(), "kube-system");
    let guaranteed =
        r#"{"default":{"guaranteed":{"percent":800}},"borrower":{"guaranteed":{"percent":800}}}"#;
    let map = json!({ "metadata": { "name": "gpuquota" }, "data": { "gpu_quota": guaranteed } });
    maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
    let namespaces: Api<Namespace> = Api::all(client());
    let namespace = serde_json::from_value(json!({ "metadata": { "name": "borrower" } }))?;
    namespaces.create(&PostParams::default(), &namespace).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client(), "borrower");
    site.harness
        .wait_for("the service account of the namespace", SOON, async || {
            Ok(accounts.get_opt("default").await?.map(drop))
        })
        .await?;

    let pods: Api<Pod> = Api::namespaced(client(), "borrower");
    for number in 0..4 {
        // The borrower's pods have the higher priority.
        let mut pod = with_priority(whole(&format!("borrower-{number}"), 4), 1);
        pod.metadata.namespace = Some("borrower".to_owned());
        pod.spec.get_or_insert_default().termination_grace_period_seconds = Some(0);
        pods.create(&PostParams::default(), &pod).await?;
    }
    let left = async || {
        let all = pods.list(&ListParams::default()).await?.items;
        let is_bound = |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        Ok::<_, anyhow::Error>((all.len(), all.iter().filter(is_bound).count()))
    };
    let all_bound = async || Ok((left().await? == (4, 4)).then_some(()));
    site.harness.wait_for("the borrower to use all GPUs", SOON, all_bound).await?;
    for number in 0..4 {
        let mut pod = with_priority(whole(&format!("owner-{number}"), 2), 0);
        pod.spec.get_or_insert_default().termination_grace_period_seconds = Some(0);
        site.make(&pod).await?;
    }
    for number in 0..4 {
        site.bound(&format!("owner-{number}")).await?;
    }
    ensure!(left().await? == (2, 2), "the borrower does not hold exactly its guarantee");
    // The next pod is beyond the guarantee, so nothing is evicted for it.
    site.make(&with_priority(whole("owner-4", 2), 0)).await?;
    site.refused("owner-4", "Insufficient nvidia.com/gpu").await?;
    ensure!(left().await? == (2, 2), "a pod was evicted below the guarantee of its namespace");
    site.harness.note("a borrower gives back to the owner, and keeps its own guarantee");
    Ok(())
}

/// kube-scheduler asks the extender about no node, because both are full by its own count.
async fn full_nodes(site: &Site) -> Result<()> {
    let (low, high) = (Gang { name: "full", size: 2, gpus: 8 }, Gang { name: "top", size: 2, gpus: 8 });
    low.create(site, 0).await?;
    low.bound(site).await?;
    high.create(site, 1).await?;
    high.bound(site).await?;
    ensure!(low.left(site).await? == 0, "the displaced gang is not gone as a whole");
    site.harness.note("a gang of 2x8 GPUs displaces one of lower priority as a whole");
    high.delete(site).await
}

/// kube-scheduler preempts a gang on one node only. The scheduler evicts the pod on the other node.
async fn rest_follows(site: &Site) -> Result<()> {
    let last = Gang { name: "last", size: 2, gpus: 8 };
    last.create(site, 0).await?;
    last.bound(site).await?;
    site.make(&with_priority(whole("single", 8), 1)).await?;
    site.bound("single").await?;
    site.harness
        .wait_for("both pods of the preempted gang to end", SOON, async || {
            Ok((last.left(site).await? == 0).then_some(()))
        })
        .await?;
    site.harness.note("both pods of a gang end, of which kube-scheduler preempts one");
    delete(site, "single").await
}

/// A gang of pods with whole GPUs.
struct Gang {
    name: &'static str,
    size: usize,
    gpus: u64,
}

impl Gang {
    fn pods(&self) -> impl Iterator<Item = String> {
        (0..self.size).map(|number| format!("{}-{number}", self.name))
    }

    /// Creates the pods, whose deletion takes no time.
    async fn create(&self, site: &Site, priority: i32) -> Result<()> {
        for name in self.pods() {
            let mut pod = with_priority(whole(&name, self.gpus), priority);
            let size = format!("{}/{}", self.name, self.size);
            pod.metadata.annotations.get_or_insert_default().insert("tessera.dev/gang".into(), size);
            pod.metadata.labels.get_or_insert_default().insert("gang".into(), self.name.into());
            // No kubelet ends pods on a virtual node.
            pod.spec.get_or_insert_default().termination_grace_period_seconds = Some(0);
            site.make(&pod).await?;
        }
        Ok(())
    }

    async fn bound(&self, site: &Site) -> Result<()> {
        for name in self.pods() {
            site.bound(&name).await?;
        }
        Ok(())
    }

    /// Returns the number of pods that exist and are not ending.
    async fn left(&self, site: &Site) -> Result<usize> {
        let of_gang = ListParams::default().labels(&format!("gang={}", self.name));
        let pods = site.cluster.pods().list(&of_gang).await?.items;
        Ok(pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).count())
    }

    async fn delete(&self, site: &Site) -> Result<()> {
        for name in self.pods() {
            delete(site, &name).await?;
        }
        Ok(())
    }
}

fn budgets(site: &Site) -> Api<PodDisruptionBudget> {
    Api::default_namespaced(site.cluster.client())
}

/// Creates a budget that allows no eviction of the gang `low`, and waits until its status says so.
async fn guard(site: &Site) -> Result<()> {
    let budget = serde_json::from_value(json!({
        "metadata": { "name": "low" },
        "spec": { "minAvailable": 2, "selector": { "matchLabels": { "gang": "low" } } },
    }))?;
    budgets(site).create(&PostParams::default(), &budget).await?;
    site.harness
        .wait_for("the budget to count its pods", SOON, async || {
            let status = budgets(site).get("low").await?.status;
            Ok(status.filter(|status| status.observed_generation.is_some()).map(drop))
        })
        .await
}

async fn delete(site: &Site, name: &str) -> Result<()> {
    site.cluster.pods().delete(name, &DeleteParams::default().grace_period(0)).await?;
    Ok(())
}
