//! What a node with a real GPU offers and publishes.

use anyhow::{Context, Result, ensure};
use tessera_wire::tessera::inventory;

use super::bench::Bench;
use crate::harness::Harness;

pub(super) async fn run(harness: &Harness) -> Result<()> {
    // The start waits for the capacity of every dialect.
    let bench = Bench::start(harness, &[]).await?;
    let annotations = bench.stage.node_object().await?.metadata.annotations.unwrap_or_default();
    let published = inventory::parse(annotations.get(inventory::KEY).context("no inventory")?)?;
    let [gpu] = published.gpus.as_slice() else { anyhow::bail!("{published:?}") };
    let host = &bench.host;
    let found = (gpu.uuid.to_string(), gpu.model.to_string(), gpu.memory.0);
    let told = (host.uuid.clone(), host.model.clone(), host.memory_mib);
    ensure!(found == told, "the node publishes {found:?}, and nvidia-smi says {told:?}");
    harness.note(&format!("the node publishes {} with {} MiB", host.model, host.memory_mib));

    let gpus = bench.inspect("kubectl-inspect-gpu", &[])?;
    ensure!(gpus == "NAME    ALLGPU  USEDGPU\nnode-1  1       0\n", "{gpus}");
    let shares = bench.inspect("kubectl-inspect-gpushare", &[])?;
    let total = format!("0/{}", host.memory_mib / 1024);
    ensure!(shares.contains("node-1") && shares.contains(&total), "{shares}");
    let overview = bench.inspect("kubectl-inspect-gpu", &["overview"])?;
    ensure!(overview.contains("node-1"), "{overview}");
    harness.note(&format!("kubectl inspect gpu, gpushare and gpu overview:\n{gpus}{shares}{overview}"));
    Ok(())
}
