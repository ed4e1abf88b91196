//! Proposals of kube-scheduler that the ledger does not accept, and a crash between the two writes of a correction.

use anyhow::{Context, Result, ensure};
use tessera_wire::tessera::dra::DRIVER;

use super::{CLAIMS, Pair, Site, replaced_claims, whole_gpus};
use crate::scenarios::scheduler::{
    front::Front,
    gate::{Gate, Hold},
    pods::{annotation, gpu_node, whole},
};

pub(super) async fn run(site: &Site) -> Result<()> {
    // kube-scheduler does not see what device plugins have given away, so its first proposal is stale.
    site.add_nodes(&[gpu_node("stale", 2, "GiB")]).await?;
    let pair = Pair::start(site, "stale").await?;
    site.make(&whole("plugin", 1)).await?;
    let pod = site.bound("plugin").await?;
    ensure!(annotation(&pod, "tessera.dev/grant").contains("GPU-stale-0"), "the pod has another GPU");
    site.create_claiming(vec![("late".to_owned(), whole_gpus(1))]).await?;
    site.bound("late").await?;
    ensure!(device(site, "late").await? == "gpu-1", "the stale proposal stayed");
    ensure!(replaced_claims(&pair.replica).await? == 1, "the correction is not counted");
    site.create_claiming(vec![("none".to_owned(), whole_gpus(1))]).await?;
    site.refused("none", "0/1 nodes are available").await?;
    pair.stop().await?;
    site.harness.note("a stale proposal is replaced; where no GPU is left the pod waits");
    site.delete_pods_and_claims().await?;

    crash(site).await?;
    site.clear().await
}

/// Kills the scheduler after it has cleared an allocation and before it has set the new one.
async fn crash(site: &Site) -> Result<()> {
    let gate = Gate::start(site).await?;
    let first = site.replica_with("crash-extender-1", Some(&gate.kubeconfig), &[CLAIMS])?;
    site.ready(&first).await?;
    let front = Front::start(vec![first.addresses]).await?;
    let kube_scheduler = site.kube_scheduler_for_claims("crash", &front).await?;
    site.make(&whole("plugin", 1)).await?;
    site.bound("plugin").await?;
    gate.hold(Hold::Allocation);
    site.create_claiming(vec![("torn".to_owned(), whole_gpus(1))]).await?;
    gate.held().await;
    let claim = site.cluster.claim("torn").await?;
    ensure!(claim.status.allocation.is_none(), "the allocation was not cleared: {claim:?}");
    first.component.kill()?;
    gate.hold(Hold::Nothing);
    let second = site.replica_with("crash-extender-2", None, &[CLAIMS])?;
    front.add(second.addresses);
    site.ready(&second).await?;
    site.bound("torn").await?;
    ensure!(device(site, "torn").await? == "gpu-1", "the claim has a GPU that is given away");
    kube_scheduler.kill()?;
    second.component.stop().await?;
    site.harness.note("killed between the two writes of a correction: the next scheduler bound the pod");
    Ok(())
}

async fn device(site: &Site, claim: &str) -> Result<String> {
    let claim = site.cluster.claim(claim).await?;
    Ok(claim.results(DRIVER).next().context("no allocation")?.device.clone())
}
