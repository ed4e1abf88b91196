//! Random pods of device plugins and of claims on the same nodes, while the scheduler is killed.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use kube::api::{DeleteParams, ListParams};
use serde_json::Value;

use super::{CLAIMS, Pair, Site, is_on_a_node, share_of, whole_gpus};
use crate::scenarios::scheduler::{
    SOON, front,
    pods::{GPU_MEMORY_MIB, annotation, asking, gpu_node, whole},
    random::Dice,
};

const NODES: usize = 4;
const GPUS_PER_NODE: u64 = 4;
const ROUNDS: usize = 8;
/// Pods that are created in each round.
const PODS: usize = 24;
/// Rounds after which the scheduler is killed.
const KILL_EVERY: usize = 2;
/// Time in which pods are bound in a round.
const ROUND: Duration = Duration::from_secs(4);

pub(super) async fn run(site: &Site) -> Result<()> {
    let nodes: Vec<_> =
        (0..NODES).map(|number| gpu_node(&format!("mixed-{number}"), GPUS_PER_NODE, "GiB")).collect();
    site.add_nodes(&nodes).await?;
    let mut pair = Pair::start(site, "mixture").await?;
    let mut dice = Dice(0x2545_F491_4F6C_DD1D);
    let (mut kills, mut bound, mut audits) = (0, 0, 0);
    for round in 0..ROUNDS {
        for number in 0..PODS {
            create(site, &format!("mixed-{round}-{number}"), &mut dice).await?;
        }
        if round % KILL_EVERY == 1 {
            kills += 1;
            pair.replica.component.kill()?;
            pair.replica = site.replica_with(&format!("mixture-extender-{kills}"), None, &[CLAIMS])?;
            pair.front.add(pair.replica.addresses);
            site.ready(&pair.replica).await?;
        }
        let until = tokio::time::Instant::now() + ROUND;
        while tokio::time::Instant::now() < until {
            held(site).await?;
            audits += 1;
        }
        bound += end_some(site, &mut dice).await?;
    }
    let agree = async || {
        let (ours, theirs) = (ledger(&pair).await?, held(site).await?);
        ensure!(ours == theirs, "the ledger has {ours:?}, pods and claims have {theirs:?}");
        Ok(Some(theirs.len()))
    };
    let gpus = site.harness.wait_for("the ledger to agree with pods and claims", SOON, agree).await?;
    pair.stop().await?;
    site.harness.note(&format!(
        "{} pods of device plugins and claims, {bound} ended, {kills} kills, {audits} audits: no GPU over; the ledger \
         agrees on {gpus} GPUs in use",
        ROUNDS * PODS
    ));
    site.clear().await
}

/// Creates a random pod with resources, or with a claim. Memory is in whole GiB, the unit of the ledger's page.
async fn create(site: &Site, name: &str, dice: &mut Dice) -> Result<()> {
    let gib = 1 + dice.roll(8);
    let percent = 5 + dice.roll(60);
    let claim = match dice.roll(6) {
        0 => return site.make(&whole(name, 1 + dice.roll(2))).await,
        1 | 2 => {
            let (cores, memory) = (percent.to_string(), (gib * 4).to_string());
            let asked = [("tencent.com/vcuda-core", cores.as_str()), ("tencent.com/vcuda-memory", &memory)];
            return site.make(&asking(name, &asked)).await;
        }
        3 => whole_gpus(1 + dice.roll(2)),
        _ => share_of(percent, gib * 1024),
    };
    site.create_claiming(vec![(name.to_owned(), claim)]).await
}

/// Deletes about half of the bound pods, with their claims. Returns their number.
async fn end_some(site: &Site, dice: &mut Dice) -> Result<usize> {
    let (pods, claims) = (site.cluster.pods(), site.cluster.resources("ResourceClaim"));
    let mut ended = 0;
    for pod in pods.list(&ListParams::default()).await?.items {
        let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        if !is_bound || dice.roll(2) == 0 {
            continue;
        }
        let name = pod.metadata.name.unwrap_or_default();
        pods.delete(&name, &DeleteParams::default().grace_period(0)).await?;
        if pod.spec.and_then(|spec| spec.resource_claims).is_some() {
            claims.delete(&name, &DeleteParams::default()).await?;
        }
        ended += 1;
    }
    Ok(ended)
}

/// Memory in use of each GPU, in GiB.
pub(super) type Held = BTreeMap<(String, u8), u64>;

/// Returns what bound pods and their claims hold. Fails if it exceeds a GPU.
async fn held(site: &Site) -> Result<Held> {
    let index = |uuid: &str| uuid.rsplit('-').next()?.parse().ok();
    held_on(site, GPU_MEMORY_MIB, index).await
}

/// Returns the same for GPUs with this much memory. `index` returns the index of a GPU with a UUID.
pub(super) async fn held_on(
    site: &Site,
    memory_mib: u64,
    index: impl Fn(&str) -> Option<u8>,
) -> Result<Held> {
    // One list of pods: a pod that ends between two lists leaves its GPUs to another one.
    let pods = site.cluster.pods().list(&ListParams::default()).await?.items;
    let mut held = site.held_by_claims_of(&pods, memory_mib).await?;
    for pod in pods.iter().filter(|pod| is_on_a_node(pod)) {
        let grant = annotation(pod, "tessera.dev/grant");
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        if grant.is_empty() {
            continue;
        }
        let containers: BTreeMap<String, Vec<Value>> = serde_json::from_str(grant)?;
        for gpu in containers.into_values().flatten() {
            let index = gpu["uuid"].as_str().and_then(&index).context("no index")?;
            let percent = gpu["cores"].as_u64().unwrap_or_default();
            let memory = gpu["memoryMiB"].as_u64().unwrap_or(memory_mib);
            let sum = held.entry((node.clone(), index)).or_default();
            *sum = (sum.0 + percent, sum.1 + memory);
            ensure!(sum.0 <= 100 && sum.1 <= memory_mib, "GPU {index} of {node} is over: {sum:?}");
        }
    }
    Ok(held.into_iter().map(|(gpu, (_, memory))| (gpu, memory / 1024)).collect())
}

/// Returns what the ledger of the replica has.
pub(super) async fn ledger(pair: &Pair) -> Result<Held> {
    let page =
        front::get(pair.replica.addresses.pages, "/gpushare-scheduler/inspect").await.context("no page")?;
    let (_, body) = page.split_once("\r\n\r\n").context("no body")?;
    let view: tessera_wire::foreign::inspect::ShareView = serde_json::from_str(body)?;
    let gpus = view
        .nodes
        .iter()
        .flat_map(|node| node.devs.iter().map(|gpu| ((node.name.clone(), gpu.id), gpu.used)));
    Ok(gpus.filter(|(_, used)| *used > 0).collect())
}
