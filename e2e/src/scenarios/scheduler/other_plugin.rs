//! Another device plugin registers `nvidia.com/gpu` after the agent, as NVIDIA's does that starts later.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use tessera_node::device_plugin::{
    Allocation, DevicePlugin, PluginDevice, PluginRefusal, PreferenceRequest, RegistrationMode, ServedPlugin,
    serve,
};
use tessera_wire::tessera::inventory;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{SOON, Scheduling, together::staying};
use crate::{
    harness::Harness,
    scenarios::agent::{Stage, eight_gpus},
};

const NVIDIA: &str = "nvidia.com/gpu";

/// The agent compares devices twice, every 10 s.
const NOTICED: Duration = Duration::from_secs(60);

/// A plugin that offers all GPUs by their UUIDs, whatever other pods hold, and prefers the first ones.
struct OtherPlugin(watch::Sender<Vec<PluginDevice>>);

impl DevicePlugin for OtherPlugin {
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>> {
        self.0.subscribe()
    }

    async fn prefer(&self, wish: PreferenceRequest) -> Result<Vec<String>, PluginRefusal> {
        let first: BTreeSet<String> = wish.available.into_iter().collect();
        Ok(first.into_iter().take(wish.count).collect())
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<Allocation, PluginRefusal> {
        let envs = [("NVIDIA_VISIBLE_DEVICES".to_owned(), ids.join(","))].into();
        Ok(Allocation { envs, ..Allocation::default() })
    }

    async fn pre_start(&self, _: Vec<String>) -> Result<(), PluginRefusal> {
        Ok(())
    }
}

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    let scheduling = Scheduling::start(&harness, stage.cluster.clone()).await?;
    let site = &scheduling.site;

    let share = [("tencent.com/vcuda-core", "50"), ("tencent.com/vcuda-memory", "40")];
    site.make(&staying("share", &share)).await?;
    stage.cluster.wait_for_phase("share", "Running", SOON).await?;
    stage.wait_for_allocatable(NVIDIA, "7").await?;

    start_other_plugin(&stage);
    stage.wait_for_allocatable(NVIDIA, "8").await?;
    wait_until_withheld(&stage, &[NVIDIA]).await?;
    harness.note("the agent left the resource to the later plugin, and withholds it while a share is held");

    // The other plugin would give away the GPU with the share.
    site.make(&staying("theirs", &[(NVIDIA, "1")])).await?;
    site.refused("theirs", "node does not offer this kind of GPU resource").await?;
    stage.delete("share").await?;
    wait_until_withheld(&stage, &[]).await?;
    stage.cluster.wait_for_phase("theirs", "Running", SOON).await?;
    let log = stage.log("theirs", "main").await?;
    let seen = log.lines().find_map(|line| line.strip_prefix("NVIDIA_VISIBLE_DEVICES="));
    let first = eight_gpus().gpus.iter().map(|gpu| gpu.uuid.to_string()).min();
    ensure!(seen == first.as_deref(), "the container sees {seen:?}, the other plugin prefers {first:?}");
    harness.note("without the share, the other plugin served the pod");

    // The agent still serves its other resources, without the GPU that the other plugin gave away.
    stage.wait_for_allocatable("aliyun.com/gpu", "7").await?;
    site.make(&staying("rest", &[("aliyun.com/gpu", "7")])).await?;
    stage.cluster.wait_for_phase("rest", "Running", SOON).await?;
    let held = held_by_pods(&stage).await?;
    ensure!(held.len() == 8, "{held:?} are held");
    ensure!(held.iter().collect::<BTreeSet<_>>().len() == 8, "a GPU was given away twice: {held:?}");
    stage.wait_for_allocatable(NVIDIA, "8").await?;
    wait_until_withheld(&stage, &[NVIDIA]).await?;
    harness.note("pods of both plugins hold all GPUs, each GPU once");
    Ok(())
}

fn start_other_plugin(stage: &Stage) {
    let device = |id: String| PluginDevice { id, healthy: true, numa_node: None };
    let devices = eight_gpus().gpus.iter().map(|gpu| device(gpu.uuid.to_string())).collect();
    let served = ServedPlugin {
        plugin: Arc::new(OtherPlugin(watch::Sender::new(devices))),
        resource: NVIDIA.to_owned(),
        registration: RegistrationMode::KubeletSocket(stage.node.kubelet_root().join("device-plugins")),
    };
    // The task ends with the process.
    tokio::spawn(serve(served, CancellationToken::new()));
}

async fn wait_until_withheld(stage: &Stage, resources: &[&str]) -> Result<()> {
    stage
        .harness
        .wait_for(&format!("{resources:?} to be withheld"), NOTICED, async || {
            let annotations = stage.node_object().await?.metadata.annotations.unwrap_or_default();
            let published = annotations.get(inventory::KEY).context("no inventory")?;
            ensure!(inventory::parse(published)?.withheld == resources, "the node publishes {published}");
            Ok(Some(()))
        })
        .await
}

/// Returns the UUIDs of the GPUs that the kubelet has given to pods as whole GPUs.
async fn held_by_pods(stage: &Stage) -> Result<Vec<String>> {
    let pods = stage.pod_resources.list().await?;
    let containers = pods.iter().flat_map(|pod| &pod.containers);
    Ok(containers.flat_map(|container| container.ids.values().flatten().cloned()).collect())
}
