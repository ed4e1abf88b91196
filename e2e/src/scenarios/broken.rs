//! Scenarios that fail on purpose.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::api::PostParams;

use crate::harness::{Cluster, Harness, Parts, pod};

/// Kills kube-scheduler, so that the pod is never bound.
pub(crate) async fn component(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts::ALL).await?;
    let node = cluster.add_node(1).await?;
    cluster.pods().create(&PostParams::default(), &pod("first", "sleep 1000", &[])).await?;
    cluster.wait_for_phase("first", "Running", Duration::from_secs(60)).await?;
    cluster.scheduler.as_ref().context("no scheduler")?.crash();
    cluster.pods().create(&PostParams::default(), &pod("second", "true", &[])).await?;
    cluster.wait_for_phase("second", "Succeeded", Duration::from_secs(60)).await?;
    drop(node);
    Ok(())
}

/// Panics while a pod runs.
pub(crate) async fn panic(harness: Harness) -> Result<()> {
    let _cluster = Cluster::start(&harness, Parts { scheduler: false, controllers: false }).await?;
    panic!("on purpose");
}

/// Hangs while a pod runs.
pub(crate) async fn hang(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts::ALL).await?;
    let _node = cluster.add_node(1).await?;
    cluster.pods().create(&PostParams::default(), &pod("first", "sleep 1000", &[])).await?;
    cluster.wait_for_phase("first", "Running", Duration::from_secs(60)).await?;
    harness.note("hanging");
    std::future::pending().await
}
