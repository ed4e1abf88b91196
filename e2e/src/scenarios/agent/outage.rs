//! The API server is down while the agent is killed. The kubelet restarts as well.

use anyhow::Result;

use super::{
    allocations,
    pods::{Container, asking},
    stage::{SOON, Stage},
};

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let share = [("tencent.com/vcuda-core", "40"), ("tencent.com/vcuda-memory", "20")];
    let pod = |name: &str| asking(name, &[Container::main("main", &share)]);
    stage.create_bound(pod("before"), &[("main", &[3])]).await?;
    stage.cluster.wait_for_phase("before", "Running", SOON).await?;
    allocations::check(stage).await?;

    stage.cluster.api_server.stop().await?;
    stage.agent.kill()?;
    stage.agent.start_again()?;
    stage
        .harness
        .wait_for("the agent to answer without an API server", SOON, async || {
            Ok(Some(stage.page("/healthz").await?))
        })
        .await?;
    stage.harness.note("the agent starts and keeps running without the API server");
    stage.cluster.api_server.start_again()?;
    allocations::check(stage).await?;
    stage.harness.note("the API server is back: all allocations agree");

    // Pods that are bound while the kubelet is down are admitted after its restart, although the
    // agent must register again.
    stage.node.kubelet.stop().await?;
    stage.create_bound(pod("meanwhile"), &[("main", &[6])]).await?;
    stage.node.kubelet.start_again()?;
    stage.cluster.wait_for_phase("meanwhile", "Running", SOON).await?;
    stage.wait_for_annotations("meanwhile", "main", &[6]).await?;
    allocations::check(stage).await?;
    stage.harness.note("the kubelet restarted: a pod that was bound meanwhile runs on its granted GPU");
    Ok(())
}
