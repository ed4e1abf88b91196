//! What a node reports as allocatable while its GPUs are held: the view of autoscalers and quota tools.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, ListParams},
};

use super::{
    SOON, Scheduling, Site,
    pods::with_priority,
    together::{ending, staying},
};
use crate::{harness::Harness, scenarios::agent::Stage};

/// Rounds in which a pod waits for all GPUs that pods of another dialect release, unless the environment sets
/// another number.
const ROUNDS: usize = 4;

const RESOURCES: [&str; 5] = [
    "nvidia.com/gpu",
    "aliyun.com/gpu",
    "aliyun.com/gpu-mem",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-memory",
];

/// Allocatable amounts of an unused node, in the order of [`RESOURCES`].
const UNUSED: [i64; 5] = [8, 8, 640, 800, 2560];

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    let scheduling = Scheduling::start(&harness, stage.cluster.clone()).await?;
    let capacity = Capacity { stage, site: &scheduling.site };
    capacity.a_share_of_memory_takes_one_gpu().await?;
    capacity.cordoned_gpus_are_not_allocatable().await?;
    capacity.restarts_change_nothing().await?;
    capacity.victims_are_found().await?;
    capacity.a_slow_agent_delays_pods().await?;
    capacity.gpus_change_hands().await
}

struct Capacity<'a> {
    stage: Stage,
    site: &'a Site,
}

impl Capacity<'_> {
    async fn start(&self, pod: Pod) -> Result<()> {
        self.site.make(&pod).await?;
        let name = pod.metadata.name.unwrap_or_default();
        self.stage.cluster.wait_for_phase(&name, "Running", SOON).await?;
        Ok(())
    }

    /// Returns what is allocatable, and what is left of it beside the requests of all pods.
    async fn amounts(&self) -> Result<([i64; 5], [i64; 5])> {
        let node = Api::<Node>::all(self.stage.cluster.client()).get(&self.stage.node.name).await?;
        let pods = self.stage.cluster.pods().list(&ListParams::default()).await?.items;
        let allocatable = node.status.and_then(|status| status.allocatable).context("no status")?;
        let amount =
            |name: &str| allocatable.get(name).and_then(|amount| amount.0.parse().ok()).unwrap_or_default();
        let allocatable = RESOURCES.map(amount);
        let mut left = allocatable;
        for (left, name) in left.iter_mut().zip(RESOURCES) {
            *left -= pods.iter().map(|pod| requested(pod, name)).sum::<i64>();
        }
        Ok((allocatable, left))
    }

    /// Waits until the node reports these amounts, and returns how long that took.
    async fn wait_for(&self, allocatable: [i64; 5], left: [i64; 5], why: &str) -> Result<Duration> {
        let begin = Instant::now();
        let what = format!("{allocatable:?} to be allocatable and {left:?} to be left: {why}");
        self.stage
            .harness
            .wait_for(&what, SOON, async || {
                let found = self.amounts().await?;
                ensure!(found == (allocatable, left), "allocatable and left are {found:?}");
                Ok(Some(()))
            })
            .await?;
        let took = begin.elapsed();
        self.stage.harness.note(&format!("{why}: allocatable {allocatable:?}, left {left:?} ({took:.1?})"));
        Ok(took)
    }

    async fn a_share_of_memory_takes_one_gpu(&self) -> Result<()> {
        self.wait_for(UNUSED, UNUSED, "nothing runs").await?;
        self.start(staying("seven-gib", &[("aliyun.com/gpu-mem", "7")])).await?;
        self.wait_for([7, 7, 640, 800, 2532], [7, 7, 633, 800, 2532], "a pod holds 7 GiB").await?;
        // The node says that it has no room: 7 of 8 devices are allocatable.
        self.site.make(&staying("eight", &[("nvidia.com/gpu", "8")])).await?;
        self.site.refused("eight", "Insufficient nvidia.com/gpu").await?;
        self.start(staying("seven", &[("aliyun.com/gpu", "7")])).await?;
        self.wait_for([0, 7, 80, 100, 292], [0, 0, 73, 100, 292], "and another pod holds 7 GPUs").await?;
        self.stage.delete("seven").await?;
        self.stage.delete("seven-gib").await?;
        self.stage.cluster.wait_for_phase("eight", "Running", SOON).await?;
        self.wait_for([8, 0, 0, 0, 0], [0; 5], "8 GPUs are held").await?;
        self.stage.delete("eight").await?;
        self.wait_for(UNUSED, UNUSED, "all pods have ended").await?;
        Ok(())
    }

    /// A pod that only fits with the cordoned GPUs waits for kube-scheduler, which counts what is allocatable.
    async fn cordoned_gpus_are_not_allocatable(&self) -> Result<()> {
        let node = &self.stage.node.name;
        let cordon = format!("tessera.dev/gpu-cordon={},{}", self.stage.uuid(0), self.stage.uuid(1));
        self.stage.cluster.kubectl(&["annotate", "node", node, &cordon]).await?;
        let rest = [6, 6, 480, 600, 1920];
        self.wait_for(rest, rest, "two GPUs are cordoned").await?;
        self.site.make(&staying("too-many", &[("nvidia.com/gpu", "7")])).await?;
        self.site.refused("too-many", "Insufficient nvidia.com/gpu").await?;
        self.stage.cluster.kubectl(&["annotate", "node", node, "tessera.dev/gpu-cordon-"]).await?;
        self.stage.cluster.wait_for_phase("too-many", "Running", SOON).await?;
        self.stage.delete("too-many").await?;
        self.wait_for(UNUSED, UNUSED, "no GPU is cordoned").await?;
        Ok(())
    }

    async fn restarts_change_nothing(&self) -> Result<()> {
        self.start(staying("memory", &[("aliyun.com/gpu-mem", "7")])).await?;
        self.start(staying("whole", &[("nvidia.com/gpu", "2")])).await?;
        let share = [("tencent.com/vcuda-core", "40"), ("tencent.com/vcuda-memory", "40")];
        self.start(staying("share", &share)).await?;
        let held = self.settled().await?;
        self.stage.node.kubelet.kill()?;
        self.stage.node.kubelet.start_again()?;
        self.stage.agent.kill()?;
        self.stage.agent.start_again()?;
        // The node's status may still be that of the killed kubelet. It is new when one more pod is in it.
        self.stage.wait_until_ready().await?;
        self.start(staying("one-more", &[("nvidia.com/gpu", "1")])).await?;
        let more = |[nvidia, aliyun, memory, core, blocks]: [i64; 5], held| {
            [nvidia - held, aliyun - 1, memory - 80, core - 100, blocks - 320]
        };
        self.wait_for(more(held.0, 0), more(held.1, 1), "agent and kubelet were killed").await?;
        for name in ["memory", "whole", "share", "one-more"] {
            let pod = self.stage.cluster.pods().get(name).await?;
            let restarts = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
            ensure!(restarts.iter().all(|container| container.restart_count == 0), "{name} was restarted");
            self.stage.delete(name).await?;
        }
        self.wait_for(UNUSED, UNUSED, "these pods have ended").await?;
        Ok(())
    }

    /// Waits until everything that the three pods hold is withdrawn, and returns the amounts.
    async fn settled(&self) -> Result<([i64; 5], [i64; 5])> {
        let wait = async || {
            let amounts = self.amounts().await?;
            let [nvidia, aliyun, memory, _, blocks] = amounts.0;
            // Two GPUs are whole, and the shares of 7 and 10 GiB are on one or two others.
            let are_whole = (nvidia == 7 && aliyun == 5) || (nvidia == 6 && aliyun == 4);
            Ok((are_whole && memory == 470 && blocks == 1892).then_some(amounts))
        };
        self.stage.harness.wait_for("held GPUs to be withdrawn", SOON, wait).await
    }

    /// Pods are evicted for pods of their dialect, whatever other dialects hold on the node.
    async fn victims_are_found(&self) -> Result<()> {
        self.start(staying("bystander", &[("aliyun.com/gpu-mem", "7")])).await?;
        self.start(with_priority(staying("low", &[("nvidia.com/gpu", "7")]), 0)).await?;
        self.wait_for([7, 0, 80, 100, 292], [0, 0, 73, 100, 292], "a pod of low priority holds 7 GPUs")
            .await?;
        self.start(with_priority(staying("urgent", &[("nvidia.com/gpu", "7")]), 1)).await?;
        let left = self.stage.cluster.pods().list(&ListParams::default()).await?.items;
        let names: Vec<_> = left.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
        ensure!(names == ["bystander", "urgent"], "{names:?} are left");
        self.stage.harness.note("a pod of higher priority replaced one of its dialect");
        self.stage.delete_all().await?;
        self.wait_for(UNUSED, UNUSED, "these pods have ended").await?;
        Ok(())
    }

    /// kube-scheduler waits for devices that the agent has not offered again, so that no kubelet rejects the pod.
    async fn a_slow_agent_delays_pods(&self) -> Result<()> {
        // Long enough for the withdrawal, also on a busy machine.
        self.start(ending("ends", &[("nvidia.com/gpu", "8")], 15)).await?;
        self.wait_for([8, 0, 0, 0, 0], [0; 5], "a pod that will end holds 8 GPUs").await?;
        self.stage.agent.pause();
        self.stage.cluster.wait_for_phase("ends", "Succeeded", SOON).await?;
        self.site.make(&staying("waits", &[("aliyun.com/gpu", "8")])).await?;
        self.site.refused("waits", "Insufficient aliyun.com/gpu").await?;
        self.stage.agent.resume();
        self.stage.cluster.wait_for_phase("waits", "Running", SOON).await?;
        self.stage.harness.note("a pod waited for an agent that was paused, and then ran");
        self.stage.delete_all().await
    }

    /// Pods that end by themselves release all GPUs to a waiting pod of another dialect. No kubelet rejects it.
    async fn gpus_change_hands(&self) -> Result<()> {
        let rounds =
            std::env::var("TESSERA_E2E_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(ROUNDS);
        let mut longest = Duration::ZERO;
        for round in 0..rounds {
            let (now, next) = match round % 2 {
                0 => ("nvidia.com/gpu", "aliyun.com/gpu"),
                _ => ("aliyun.com/gpu", "nvidia.com/gpu"),
            };
            let (first, second) = (format!("first-{round}"), format!("second-{round}"));
            // Long enough for the withdrawal.
            self.start(ending(&first, &[(now, "8")], 8)).await?;
            self.site.make(&staying(&second, &[(next, "8")])).await?;
            self.stage.cluster.wait_for_phase(&first, "Succeeded", SOON).await?;
            let begin = Instant::now();
            let phase = self
                .stage
                .harness
                .wait_for(&format!("{second} to run or fail"), SOON, async || {
                    let status = self.stage.cluster.pods().get(&second).await?.status.unwrap_or_default();
                    Ok(status.phase.filter(|phase| phase != "Pending"))
                })
                .await?;
            longest = longest.max(begin.elapsed());
            ensure!(phase == "Running", "{second} is {phase}: {:?}", self.stage.pod(&second).await?.status);
            self.stage.cluster.pods().delete(&first, &DeleteParams::default()).await?;
            self.stage.delete(&second).await?;
        }
        self.stage.harness.note(&format!(
            "{rounds} pods got all GPUs of an ended pod of another dialect, the slowest {longest:.1?} after its end"
        ));
        Ok(())
    }
}

/// Returns how much a pod takes of a resource on its node. Waiting pods and ended ones take nothing.
fn requested(pod: &Pod, resource: &str) -> i64 {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let spec = pod.spec.iter().filter(|spec| spec.node_name.is_some());
    let containers = spec.flat_map(|spec| &spec.containers);
    let amounts =
        containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref()?.get(resource));
    match phase {
        Some("Succeeded" | "Failed") => 0,
        _ => amounts.filter_map(|amount| amount.0.parse::<i64>().ok()).sum(),
    }
}
