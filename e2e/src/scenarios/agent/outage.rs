//! The API server is away, and the agent dies meanwhile; the kubelet restarts as well.

use anyhow::Result;

use super::{
    books,
    pods::{Container, asking},
    stage::{SOON, Stage},
};

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let share = [("tencent.com/vcuda-core", "40"), ("tencent.com/vcuda-memory", "20")];
    let pod = |name: &str| asking(name, &[Container::main("main", &share)]);
    stage.create_bound(pod("before"), &[("main", &[3])]).await?;
    stage.cluster.wait_for_phase("before", "Running", SOON).await?;
    books::check(stage).await?;

    stage.cluster.api_server.stop().await?;
    stage.agent.kill()?;
    stage.agent.start_again()?;
    stage
        .harness
        .wait_for("the agent to answer without an API server", SOON, async || {
            Ok(Some(stage.page("/healthz").await?))
        })
        .await?;
    stage.harness.note("the agent starts and stays without an API server");
    stage.cluster.api_server.start_again()?;
    books::check(stage).await?;
    stage.harness.note("the API server is back: all books agree");

    // Pods that are bound while the kubelet is down are admitted when it is back, though the agent has to go to it.
    stage.node.kubelet.stop().await?;
    stage.create_bound(pod("meanwhile"), &[("main", &[6])]).await?;
    stage.node.kubelet.start_again()?;
    stage.cluster.wait_for_phase("meanwhile", "Running", SOON).await?;
    stage.wait_for_annotations("meanwhile", "main", &[6]).await?;
    books::check(stage).await?;
    stage.harness.note("the kubelet restarted: a pod bound meanwhile runs where it was granted");
    Ok(())
}
