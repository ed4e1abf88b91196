//! Claims through the real kube-scheduler and `tessera scheduler --dra`, on virtual nodes with slices as agents write
//! them.

mod mixture;
mod offers;
mod sets;
mod shares;
mod speed;
mod stale;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod, PodResourceClaim};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};
use tessera_wire::{
    foreign::dra::ResourceClaim,
    tessera::dra::{DRIVER, gpu_of_device},
};

use super::{
    Replica, SOON, Site,
    front::{self, Front},
    pods::asking,
};
use crate::harness::{Cluster, Component, Harness, Parts, add_claim, resource, slice_of};

/// Flag of a scheduler that takes part in the allocation of claims.
const CLAIMS: &str = "--dra";

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: true }).await?;
    cluster.create_shipped("agent/rbac.yaml").await?;
    cluster.create_shipped("agent-dra/dra.yaml").await?;
    let site = Site::of(&harness, cluster.into()).await?;
    site.apply("dra.yaml").await?;
    sets::run(&site).await?;
    shares::run(&site).await?;
    stale::run(&site).await?;
    mixture::run(&site).await?;
    speed::run(&site).await
}

/// One real node whose agent serves device plugins and claims.
pub(crate) async fn both_offers(harness: Harness) -> Result<()> {
    offers::run(harness).await
}

/// A kube-scheduler with one replica of ours.
struct Pair {
    replica: Replica,
    kube_scheduler: Component,
    front: Front,
}

impl Pair {
    async fn start(site: &Site, name: &str) -> Result<Self> {
        Self::start_with(site, name, &[CLAIMS]).await
    }

    async fn start_with(site: &Site, name: &str, flags: &[&str]) -> Result<Self> {
        let replica = site.replica_with(&format!("{name}-extender"), None, flags)?;
        site.ready(&replica).await?;
        let front = Front::start(vec![replica.addresses]).await?;
        let kube_scheduler = site.kube_scheduler_for_claims(name, &front).await?;
        Ok(Self { replica, kube_scheduler, front })
    }

    async fn stop(self) -> Result<()> {
        self.kube_scheduler.kill()?;
        self.replica.component.stop().await
    }
}

impl Site {
    /// Starts kube-scheduler with the shipped configuration, but an extender that is called for every pod, because claims
    /// are no resources.
    async fn kube_scheduler_for_claims(&self, name: &str, front: &Front) -> Result<Component> {
        let (configuration, kubeconfig) = self.shipped_configuration()?;
        let cut = configuration.find("    managedResources:").context("no managed resources")?;
        let configuration = configuration[..cut].to_owned();
        self.start_kube_scheduler(name, configuration, &kubeconfig, front.address).await
    }

    /// Adds nodes and their slices.
    async fn add_nodes(&self, nodes: &[Node]) -> Result<()> {
        let slices = nodes.iter().map(slice_of).collect::<Result<Vec<_>>>()?;
        let cluster = &self.cluster;
        cluster.create_all(&Api::<Node>::all(cluster.client()), nodes.iter().cloned()).await?;
        cluster.create_all(&cluster.resources("ResourceSlice"), slices.into_iter()).await
    }

    /// Deletes all pods, claims, slices and nodes.
    async fn clear(&self) -> Result<()> {
        self.delete_pods_and_claims().await?;
        let (all, how) = (ListParams::default(), DeleteParams::default());
        self.cluster.resources("ResourceSlice").delete_collection(&how, &all).await?;
        Api::<Node>::all(self.cluster.client()).delete_collection(&how, &all).await?;
        Ok(())
    }

    /// Deletes all pods and claims and waits until the controllers have released the claims.
    async fn delete_pods_and_claims(&self) -> Result<()> {
        self.delete_all_pods().await?;
        let claims = self.cluster.resources("ResourceClaim");
        let all = ListParams::default();
        claims.delete_collection(&DeleteParams::default(), &all).await?;
        self.harness
            .wait_for("all claims to be gone", SOON, async || {
                Ok(claims.list_metadata(&all).await?.items.is_empty().then_some(()))
            })
            .await
    }

    async fn claims(&self) -> Result<Vec<ResourceClaim>> {
        let list = self.cluster.resources("ResourceClaim").list(&ListParams::default()).await?;
        let parsed =
            list.items.into_iter().map(|claim| Ok(serde_json::from_value(serde_json::to_value(claim)?)?));
        parsed.collect()
    }

    /// Creates claims, and a pod with the same name for each.
    async fn create_claiming(&self, claims: Vec<(String, Value)>) -> Result<()> {
        let objects = claims.iter().map(|(name, spec)| resource("ResourceClaim", name, spec.clone()));
        let objects = objects.collect::<Result<Vec<_>>>()?;
        self.cluster.create_all(&self.cluster.resources("ResourceClaim"), objects.into_iter()).await?;
        let pods = claims.iter().map(|(name, _)| claiming(name)).collect::<Result<Vec<_>>>()?;
        self.cluster.create_all(&self.cluster.pods(), pods.into_iter()).await
    }

    /// Waits until so many pods have a node.
    async fn all_bound(&self, count: usize) -> Result<Vec<Pod>> {
        let mut last = String::new();
        let outcome = self
            .harness
            .wait_for(&format!("{count} pods to be bound"), SOON, async || {
                let pods = self.cluster.pods().list(&ListParams::default()).await?.items;
                let is_bound = |pod: &&Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
                last = waiting_reasons(&pods);
                Ok((pods.iter().filter(is_bound).count() == count).then_some(pods))
            })
            .await;
        outcome.with_context(|| format!("waiting: {last}"))
    }

    /// Returns what the claims of bound pods hold of each device: percents and MiB. Fails if it exceeds a GPU.
    async fn held_by_claims(&self, memory_mib: u64) -> Result<BTreeMap<(String, u8), (u64, u64)>> {
        // Pods come first: the claim of a bound pod is final.
        let pods = self.cluster.pods().list(&ListParams::default()).await?.items;
        self.held_by_claims_of(&pods, memory_mib).await
    }

    /// Returns the same for the claims of these pods, which must have been listed before.
    async fn held_by_claims_of(
        &self,
        pods: &[Pod],
        memory_mib: u64,
    ) -> Result<BTreeMap<(String, u8), (u64, u64)>> {
        let is_bound = |uid: &str| {
            let is_it = |pod: &&Pod| pod.metadata.uid.as_deref() == Some(uid);
            pods.iter().filter(is_it).any(is_on_a_node)
        };
        let mut held: BTreeMap<(String, u8), (u64, u64)> = BTreeMap::new();
        for claim in self.claims().await? {
            if !claim.consumer_pods().any(|pod| is_bound(&pod.uid)) {
                continue;
            }
            for result in claim.results(DRIVER) {
                let gpu = gpu_of_device(&result.device).context("an unknown device")?;
                let amount = |name: &str| result.consumed_capacity.get(name).cloned().unwrap_or_default();
                let percent: u64 = amount("cores").0.parse()?;
                let memory = mebibytes(&amount("memory").0)?;
                let sum = held.entry((result.pool.clone(), gpu.0)).or_default();
                *sum = (sum.0 + percent, sum.1 + memory);
                ensure!(
                    sum.0 <= 100 && sum.1 <= memory_mib,
                    "GPU {gpu} of {} is over with {}: {sum:?}",
                    result.pool,
                    claim.metadata.name
                );
            }
        }
        Ok(held)
    }
}

/// Returns whether a pod is on a node and has not ended.
fn is_on_a_node(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    is_bound && !matches!(phase, "Succeeded" | "Failed")
}

/// Returns the messages of pods that wait.
fn waiting_reasons(pods: &[Pod]) -> String {
    let waiting = pods.iter().filter(|pod| pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none()));
    let messages = waiting.filter_map(|pod| {
        let conditions = pod.status.as_ref()?.conditions.as_ref()?;
        let message = conditions.iter().find(|one| one.type_ == "PodScheduled")?.message.clone()?;
        Some(format!("{}: {message}", pod.metadata.name.as_deref().unwrap_or_default()))
    });
    messages.collect::<Vec<_>>().join("\n")
}

/// Returns a pod with the claim of the same name.
fn claiming(name: &str) -> Result<Pod> {
    let mut pod = asking(name, &[]);
    let claim = PodResourceClaim {
        name: "gpu".to_owned(),
        resource_claim_name: Some(name.to_owned()),
        ..PodResourceClaim::default()
    };
    add_claim(&mut pod, claim)?;
    Ok(pod)
}

/// Returns the specification of a claim for whole GPUs.
fn whole_gpus(count: u64) -> Value {
    json!({ "devices": { "requests": [
        { "name": "gpu", "exactly": { "deviceClassName": "tessera", "count": count } },
    ] } })
}

/// Returns the specification of a claim for a share of a GPU.
fn share_of(percent: u64, memory_mib: u64) -> Value {
    json!({ "devices": { "requests": [{ "name": "gpu", "exactly": {
        "deviceClassName": "tessera",
        "capacity": { "requests": { "cores": percent.to_string(), "memory": format!("{memory_mib}Mi") } },
    } }] } })
}

/// Returns an amount of memory in MiB.
fn mebibytes(text: &str) -> Result<u64> {
    let (number, factor) = match text.strip_suffix("Gi") {
        Some(number) => (number, 1024),
        None => (text.strip_suffix("Mi").with_context(|| format!("{text:?} has no known unit"))?, 1),
    };
    Ok(number.parse::<u64>()? * factor)
}

/// Returns the number of replaced claims by the replica's own count.
async fn replaced_claims(replica: &Replica) -> Result<u64> {
    let page = front::get(replica.addresses.pages, "/metrics").await.context("no metrics")?;
    let counts = page.lines().filter_map(|line| {
        let (_, value) = line.strip_prefix("tessera_scheduler_claims_replaced_total{")?.rsplit_once(' ')?;
        value.parse::<u64>().ok()
    });
    Ok(counts.sum())
}
