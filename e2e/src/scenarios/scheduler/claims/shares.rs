//! Shares that fill all GPUs exactly, created at once.

use anyhow::{Result, ensure};
use tessera_core::topology::Topology;

use super::{Pair, Site, replaced_claims, sets::node, share_of};

const RUNS: usize = 10;
const GPUS: usize = 12;

/// Three shares of 30 % fit on a GPU.
const PODS: usize = 3 * GPUS;
const MEMORY_MIB: u64 = 4096;

pub(super) async fn run(site: &Site) -> Result<()> {
    site.add_nodes(&["full-1", "full-2", "full-3"].map(|name| node(name, &Topology::unknown(GPUS / 3))))
        .await?;
    let pair = Pair::start(site, "shares").await?;
    for run in 0..RUNS {
        let claims = (0..PODS).map(|number| (format!("share-{run}-{number}"), share_of(30, MEMORY_MIB)));
        site.create_claiming(claims.collect()).await?;
        site.all_bound(PODS).await?;
        let held = site.held_by_claims(16_384).await?;
        ensure!(held.len() == GPUS && held.values().all(|held| held.0 == 90), "run {run}: {held:?}");
        site.delete_pods_and_claims().await?;
    }
    let replaced = replaced_claims(&pair.replica).await?;
    pair.stop().await?;
    site.harness.note(&format!(
        "{RUNS} times {PODS} shares of 30 % at once on {GPUS} GPUs: all bound, no GPU over; {replaced} claims corrected"
    ));
    site.clear().await
}
