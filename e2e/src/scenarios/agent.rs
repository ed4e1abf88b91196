//! The agent on a real kubelet with eight simulated GPUs.

mod allocations;
mod dra;
mod driver;
mod exporter;
mod footprint;
mod health;
mod library;
mod mig;
mod misnamed;
mod outage;
mod pods;
mod prepared;
mod rounds;
mod situations;
mod stage;
mod strict;

use anyhow::Result;

pub(in crate::scenarios) use self::{
    allocations::check as check_allocations,
    pods::{Container, asking},
    stage::{HAMI, Stage, eight_gpus, offered},
};
use crate::harness::Harness;

/// Every dialect and every kind of pod, one after the other.
pub(crate) async fn dialects(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    // The manifest only: no controller creates its pods here.
    stage.cluster.create_shipped("agent/agent.yaml").await?;
    stage.node_publishes_its_gpus().await?;
    situations::play_all(&stage).await?;
    health::withdrawn_and_back(&stage).await?;
    allocations::check(&stage).await?;
    harness.note("all allocations agree");
    Ok(())
}

/// Agent and kubelet are killed while pods start and end.
pub(crate) async fn restarts(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    rounds::run(&stage).await
}

/// Registration by kubelet.sock, an outage of the API server, and a missing node.
pub(crate) async fn outage(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "kubelet-socket").await?;
    situations::play_all(&stage).await?;
    outage::run(&stage).await?;
    misnamed::run(&stage).await
}

/// Containers are limited to their shares.
pub(crate) async fn library(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    library::run(&stage).await
}

/// Claims of dynamic resource allocation.
pub(crate) async fn dra(harness: Harness) -> Result<()> {
    let stage = Stage::start_with_claims(&harness).await?;
    dra::run(&stage).await
}

/// Containers get the driver's files without a container runtime of NVIDIA's.
pub(crate) async fn driver(harness: Harness) -> Result<()> {
    driver::run(&harness).await
}

/// Instances of GPUs in MIG mode as resources of their own.
pub(crate) async fn mig_mixed(harness: Harness) -> Result<()> {
    mig::mixed(&harness).await
}

/// Instances of GPUs in MIG mode as GPUs.
pub(crate) async fn mig_single(harness: Harness) -> Result<()> {
    mig::single(&harness).await
}

/// CPU and memory of the agent.
pub(crate) async fn footprint(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    footprint::run(&stage).await
}

/// Usage of GPUs by container.
pub(crate) async fn exporter(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    exporter::run(&stage).await
}
