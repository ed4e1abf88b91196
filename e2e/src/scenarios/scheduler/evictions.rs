//! Evictions for gangs on the real kube-scheduler and eviction API: a gang of high priority displaces a lower one as a
//! whole, a budget is respected, and the rest of a gang follows the pod that kube-scheduler preempts.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Node;
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
    site.refused("high-0", text).await?;
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
    full_nodes(&site).await
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
