//! The whole way on a real GPU: kube-scheduler, our scheduler, a real kubelet, the agent, the library and
//! PyTorch programs of the host.

mod bench;
mod discovery;
mod escapes;
mod host;
mod kills;
mod mig;
mod pods;
mod shares;
mod usage;
mod whole;
mod words;

use anyhow::Result;

use crate::harness::Harness;

pub(crate) async fn discovery(harness: Harness) -> Result<()> {
    discovery::run(&harness).await
}

pub(crate) async fn whole(harness: Harness) -> Result<()> {
    whole::run(&harness).await
}

pub(crate) async fn shares(harness: Harness) -> Result<()> {
    shares::run(&harness).await
}

pub(crate) async fn kills(harness: Harness) -> Result<()> {
    kills::run(&harness).await
}

pub(crate) async fn hami(harness: Harness) -> Result<()> {
    words::hami(&harness).await
}

pub(crate) async fn claims(harness: Harness) -> Result<()> {
    words::claims(&harness).await
}

pub(crate) async fn escapes(harness: Harness) -> Result<()> {
    escapes::run(&harness).await
}

pub(crate) async fn mig(harness: Harness) -> Result<()> {
    mig::run(&harness).await
}
