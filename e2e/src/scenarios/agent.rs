//! The agent on a real kubelet, with eight GPUs that exist only in a file.

mod books;
mod exporter;
mod footprint;
mod health;
mod library;
mod misnamed;
mod outage;
mod pods;
mod rights;
mod rounds;
mod situations;
mod stage;
mod strict;

use anyhow::Result;

pub(in crate::scenarios) use self::{
    pods::{Container, asking},
    stage::Stage,
};
use crate::harness::Harness;

/// Every dialect, every kind of pod, one after the other.
pub(crate) async fn dialects(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    // As a manifest: no controller makes pods of it here.
    stage.cluster.create_shipped("agent/agent.yaml").await?;
    stage.node_tells_its_gpus().await?;
    situations::play_all(&stage).await?;
    health::withdrawn_and_back(&stage).await?;
    books::check(&stage).await?;
    harness.note("all books agree");
    rights::end_at_the_node(&stage).await
}

/// Agent and kubelet die while pods come and go.
pub(crate) async fn restarts(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    rounds::run(&stage).await
}

/// The old way of registering; an API server that is away, and a node.
pub(crate) async fn outage(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "kubelet-socket").await?;
    situations::play_all(&stage).await?;
    outage::run(&stage).await?;
    misnamed::run(&stage).await
}

/// Containers are held to their shares.
pub(crate) async fn library(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    library::run(&stage).await
}

/// What the agent costs.
pub(crate) async fn footprint(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    footprint::run(&stage).await
}

/// Who uses which GPU.
pub(crate) async fn exporter(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    exporter::run(&stage).await
}
