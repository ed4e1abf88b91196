//! A GPU with errors is withdrawn everywhere and comes back.

use std::{fs::OpenOptions, io::Write as _};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use tessera_core::gpu::Health;
use tessera_wire::tessera::inventory;

use super::stage::{SOON, Stage};

pub(super) async fn withdrawn_and_back(stage: &Stage) -> Result<()> {
    happen(stage, "3 xid 31")?; // An application's own fault: nothing happens.
    happen(stage, "2 xid 79")?;
    for (resource, amount) in [
        ("nvidia.com/gpu", "7"),
        ("aliyun.com/gpu", "7"),
        ("aliyun.com/gpu-mem", "560"),
        ("tencent.com/vcuda-core", "700"),
        ("tencent.com/vcuda-memory", "2240"),
    ] {
        stage.wait_for_allocatable(resource, amount).await?;
    }
    let maps: Api<ConfigMap> = Api::namespaced(stage.cluster.client(), "kube-system");
    let name = format!("unhealthy-gpu-{}", stage.node.name);
    stage
        .harness
        .wait_for("the list of broken GPUs", SOON, async || {
            let list = maps.get(&name).await?.data.unwrap_or_default().remove("gpus");
            Ok((list.as_deref() == Some("2")).then_some(()))
        })
        .await?;
    let annotations = stage.node_object().await?.metadata.annotations.unwrap_or_default();
    let published = inventory::parse(annotations.get(inventory::KEY).context("no inventory")?)?;
    ensure!(published.gpus[2].health == Health::Unhealthy, "the inventory does not report it");
    stage.harness.note("a broken GPU is withdrawn in every dialect, in the inventory and for gpushare");
    happen(stage, "2 back")?;
    stage.wait_until_served().await?;
    stage
        .harness
        .wait_for("the list of broken GPUs to go", SOON, async || {
            Ok(maps.get_opt(&name).await?.is_none().then_some(()))
        })
        .await?;
    happen(stage, "4 xid 63")?;
    stage.wait_for_allocatable("nvidia.com/gpu", "7").await?;
    stage.wait_until_served().await?;
    stage.harness.note("a GPU comes back when it is found again, or after the quiet time");
    Ok(())
}

pub(super) fn happen(stage: &Stage, what: &str) -> Result<()> {
    let file = format!("{}.events", stage.gpus.display());
    let mut events = OpenOptions::new().create(true).append(true).open(file)?;
    events.write_all(format!("{what}\n").as_bytes())?;
    Ok(())
}
