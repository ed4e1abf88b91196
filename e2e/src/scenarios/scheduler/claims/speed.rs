//! Pods with claims per second: kube-scheduler alone, and with our extender, in turn.

use anyhow::Result;
use tessera_core::topology::Topology;

use super::{Pair, Site, sets::node, share_of};
use crate::scenarios::scheduler::{SOON, throughput::measure::bound};

const NODES: usize = 60;
const PODS: usize = 400;
const ROUNDS: usize = 3;

pub(super) async fn run(site: &Site) -> Result<()> {
    let nodes: Vec<_> =
        (0..NODES).map(|number| node(&format!("fast-{number:02}"), &Topology::unknown(8))).collect();
    site.add_nodes(&nodes).await?;
    let (mut alone, mut with) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        create(site, &format!("alone-{round}")).await?;
        let kube_scheduler =
            site.cluster.start_scheduler(&format!("speed-alone-{round}"), serde_json::json!({}))?;
        alone.push(rate(site).await?);
        kube_scheduler.kill()?;
        site.delete_pods_and_claims().await?;

        create(site, &format!("with-{round}")).await?;
        let pair = Pair::start(site, &format!("speed-{round}")).await?;
        with.push(rate(site).await?);
        pair.stop().await?;
        site.held_by_claims(16_384).await?;
        site.delete_pods_and_claims().await?;
    }
    let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len() as f64;
    // Rates are only reported: on a busy machine they vary too much.
    site.harness.note(&format!(
        "{NODES} nodes, {PODS} pods with claims: {:.0} pods/s by kube-scheduler alone, {:.0} with the extender, {:.0} %; \
         rounds {alone:.0?} and {with:.0?}",
        mean(&alone),
        mean(&with),
        mean(&with) / mean(&alone) * 100.0
    ));
    site.clear().await
}

async fn create(site: &Site, prefix: &str) -> Result<()> {
    site.create_claiming((0..PODS).map(|number| (format!("{prefix}-{number}"), share_of(30, 4096))).collect())
        .await
}

/// Returns the pods that are bound per second, from the first to the last one.
async fn rate(site: &Site) -> Result<f64> {
    let seconds = site.harness.complete("all pods to be bound", 3 * SOON, bound(site, PODS, || ())).await?;
    Ok((PODS - 1) as f64 / seconds)
}
