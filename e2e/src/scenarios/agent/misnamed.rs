//! An agent with a wrong node name, so that its node is missing in the cluster.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, api::PostParams};
use tessera_wire::tessera::inventory;

use super::stage::{SOON, Stage, eight_gpus, fetch};
use crate::harness::{free_port, virtual_node};

const NAME: &str = "misnamed";

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let directory = stage.harness.state(NAME)?;
    let pages = format!("127.0.0.1:{}", free_port()?);
    // A token can name only a node that exists, so this agent has the rights of an administrator.
    let kubeconfig = stage.cluster.kubeconfig(NAME, "system:masters")?;
    let program = stage
        .harness
        .tessera()?
        .arguments(["agent", "--dialects=nvidia", "--pages-access=open", "--probes-listen=off"])
        .argument(format!("--node-name={NAME}"))
        .argument(format!("--kubeconfig={}", kubeconfig.display()))
        .argument(format!("--gpus=simulated:{}", stage.gpus.display()))
        .argument(format!("--grants={}", directory.join("grants").display()))
        .argument(format!("--kubelet-root={}", directory.join("kubelet").display()))
        .argument(format!("--listen={pages}"));
    let agent = stage.harness.start("tessera-agent-misnamed", program)?;
    let says = format!("the cluster has no node named {NAME}");
    stage
        .harness
        .wait_for("the agent to miss its node", SOON, async || {
            let (head, body) = fetch(&pages, "/readyz").await?;
            ensure!(head.contains(" 503 ") && body.contains(&says), "it answers {head:?} {body:?}");
            Ok(Some(()))
        })
        .await?;
    let nodes: Api<Node> = Api::all(stage.cluster.client());
    nodes.create(&PostParams::default(), &virtual_node(NAME)).await?;
    stage
        .harness
        .wait_for("the node to publish its GPUs", SOON, async || {
            let annotations = nodes.get(NAME).await?.metadata.annotations.unwrap_or_default();
            let published = annotations.get(inventory::KEY).context("no inventory")?;
            ensure!(inventory::parse(published)?.gpus == eight_gpus().gpus, "the node publishes {published}");
            Ok(Some(()))
        })
        .await?;
    stage.harness.note("an agent without a node reports that, and publishes its GPUs when the node appears");
    agent.kill()
}
