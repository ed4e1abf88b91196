//! A device plugin on a real kubelet: registration in both ways, allocation, rejection and restart.

mod gpus;

use std::{fs, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use kube::api::{LogParams, PostParams};
use serde_json::json;
use tessera_node::{
    device_plugin::{RegistrationMode, ServedPlugin, serve},
    pod_resources::PodResources,
};
use tokio_util::sync::CancellationToken;

use self::gpus::{CDI_KIND, FakeGpus, GRANTS_IN_CONTAINER};
use crate::harness::{Cluster, Harness, Parts, RealNode, pod};

/// Resource served through `plugins_registry`, where the kubelet connects to the plugin.
const CALLED: &str = "e2e.tessera.dev/called";

/// Resource served through `kubelet.sock`, where the plugin connects to the kubelet.
const CALLING: &str = "e2e.tessera.dev/calling";

const SOON: Duration = Duration::from_secs(60);

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts::ALL).await?;
    let node = cluster.add_node(1).await?;
    write_cdi_specification(&node)?;
    let stage = Stage {
        called: start_plugin(&harness, &node, CALLED)?,
        calling: start_plugin(&harness, &node, CALLING)?,
        harness: &harness,
        cluster: &cluster,
        node: &node,
    };

    stage.wait_until_allocatable().await?;
    harness.note("registered in both ways");
    stage.a_pod_gets_what_was_preferred().await?;
    stage.podresources_lists("first", &["b-0", "b-1"]).await?;
    stage.everything_survives_a_kubelet_restart().await?;
    stage.podresources_lists("meanwhile", &["a-0"]).await?;
    stage.podresources_lists("first", &["b-0", "b-1"]).await?;
    stage.a_refusal_is_told_to_the_user().await
}

/// The plugins and their node.
struct Stage<'a> {
    harness: &'a Harness,
    cluster: &'a Cluster,
    node: &'a RealNode,
    called: Arc<FakeGpus>,
    calling: Arc<FakeGpus>,
}

impl Stage<'_> {
    async fn wait_until_allocatable(&self) -> Result<()> {
        for resource in [CALLED, CALLING] {
            self.harness
                .wait_for(&format!("4 of {resource} to be allocatable"), SOON, async || {
                    let amount = self.node.allocatable(self.cluster, resource).await?;
                    Ok((amount.as_deref() == Some("4")).then_some(()))
                })
                .await?;
        }
        Ok(())
    }

    async fn a_pod_gets_what_was_preferred(&self) -> Result<()> {
        let script = format!("env; cat {GRANTS_IN_CONTAINER}/*; echo end; sleep 1000");
        let first = pod("first", &script, &[(CALLED, "2"), (CALLING, "2")]);
        self.cluster.pods().create(&PostParams::default(), &first).await?;
        self.cluster.wait_for_phase("first", "Running", SOON).await?;
        let log = self
            .harness
            .wait_for("the pod's log", SOON, async || {
                let log = self.cluster.pods().logs("first", &LogParams::default()).await?;
                Ok(log.ends_with("end\n").then_some(log))
            })
            .await?;
        for expected in [
            "E2E_CALLED=b-0,b-1\n",
            "E2E_CALLING=b-0,b-1\n",
            // containerd sets this variable from the CDI specification.
            "E2E_GPU=b\n",
            // The plugin writes this file before the container starts, after its mounts are fixed.
            "granted b-0,b-1\n",
        ] {
            ensure!(log.contains(expected), "{expected:?} is missing in the pod's log:\n{log}");
        }
        self.harness
            .note("a pod holds the preferred devices: environment, CDI, and a file written before its start");
        Ok(())
    }

    async fn podresources_lists(&self, pod: &str, expected: &[&str]) -> Result<()> {
        let pod_resources = PodResources::at(&self.node.pod_resources())?;
        let expected = expected.iter().map(|id| (*id).to_owned()).collect();
        self.harness
            .wait_for(&format!("podresources to list {expected:?} for {pod}"), SOON, async || {
                let pods = pod_resources.list().await?;
                let listed =
                    pods.iter().find(|listed| listed.name == pod).context("the pod is not listed")?;
                let container = listed.containers.first().context("the pod has no container")?;
                let held = |resource| container.ids.get(resource) == Some(&expected);
                Ok((held(CALLED) && held(CALLING)).then_some(()))
            })
            .await?;
        self.harness.note(&format!("podresources lists the devices of {pod}"));
        Ok(())
    }

    /// A pod that is created while the kubelet is down runs after its restart. The running pod
    /// keeps its devices.
    async fn everything_survives_a_kubelet_restart(&self) -> Result<()> {
        let streams_before = (self.called.streams(), self.calling.streams());
        let pods = self.cluster.pods();
        let id_before = pods.get("first").await?.status.and_then(|s| s.container_statuses);
        self.node.kubelet.stop().await?;
        let meanwhile = pod("meanwhile", "sleep 1000", &[(CALLED, "1"), (CALLING, "1")]);
        pods.create(&PostParams::default(), &meanwhile).await?;
        self.harness
            .wait_for("the new pod to be bound", SOON, async || {
                Ok(pods.get("meanwhile").await?.spec.and_then(|spec| spec.node_name))
            })
            .await?;
        self.node.kubelet.start_again()?;
        self.harness
            .wait_for("both plugins to be connected again", SOON, async || {
                let again =
                    self.called.streams() > streams_before.0 && self.calling.streams() > streams_before.1;
                Ok(again.then_some(()))
            })
            .await?;
        self.cluster.wait_for_phase("meanwhile", "Running", SOON).await?;
        self.wait_until_allocatable().await?;
        let container_id = |statuses: Option<Vec<k8s_openapi::api::core::v1::ContainerStatus>>| {
            statuses.and_then(|all| all.into_iter().next()).and_then(|status| status.container_id)
        };
        let id_after = pods.get("first").await?.status.and_then(|s| s.container_statuses);
        ensure!(container_id(id_before) == container_id(id_after), "the running pod was restarted");
        self.harness
            .note("the kubelet restarted: the plugins registered again, the running pod is unchanged, the new pod runs");
        Ok(())
    }

    async fn a_refusal_is_told_to_the_user(&self) -> Result<()> {
        self.called.refuse("the GPUs are resting");
        self.cluster.pods().create(&PostParams::default(), &pod("refused", "true", &[(CALLED, "1")])).await?;
        let refused = self.cluster.wait_for_phase("refused", "Failed", SOON).await?;
        let message = refused.status.and_then(|status| status.message).unwrap_or_default();
        ensure!(message.contains("the GPUs are resting"), "the pod's message is {message:?}");
        self.harness.note("a rejected pod reports the reason");
        Ok(())
    }
}

fn start_plugin(harness: &Harness, node: &RealNode, resource: &str) -> Result<Arc<FakeGpus>> {
    let root = node.kubelet_root();
    let (short, registration) = match resource {
        CALLED => ("called", RegistrationMode::PluginsRegistry(root.join("plugins_registry"))),
        _ => ("calling", RegistrationMode::KubeletSocket(root.join("device-plugins"))),
    };
    let gpus = Arc::new(FakeGpus::new(short, harness.state(&format!("grants-{short}"))?));
    let served = ServedPlugin { plugin: gpus.clone(), resource: resource.to_owned(), registration };
    // The task ends with the process.
    tokio::spawn(async move {
        if let Err(error) = serve(served, CancellationToken::new()).await {
            println!("  {:#}", anyhow::Error::from(error));
        }
    });
    Ok(gpus)
}

/// Writes one CDI device for each GPU, which sets a variable in the container.
fn write_cdi_specification(node: &RealNode) -> Result<()> {
    let devices =
        ["a", "b"].map(|gpu| json!({ "name": gpu, "containerEdits": { "env": [format!("E2E_GPU={gpu}")] } }));
    let specification = json!({ "cdiVersion": "0.6.0", "kind": CDI_KIND, "devices": devices });
    fs::write(node.cdi().join("e2e.json"), specification.to_string())
        .context("cannot write the CDI specification")
}
