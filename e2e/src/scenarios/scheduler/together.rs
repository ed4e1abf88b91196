//! All components together: a pod passes the API server, kube-scheduler, our scheduler, a real
//! kubelet and our agent.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::{
    SOON, Scheduling, Site, front,
    pods::{annotation, with_priority},
};
use crate::{
    harness::Harness,
    scenarios::agent::{Container, Stage, asking},
};

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let stage = Stage::start(&harness, "auto").await?;
    let scheduling = Scheduling::start(&harness, stage.cluster.clone()).await?;
    let together = Together { stage, site: &scheduling.site };
    together.every_dialect().await?;
    together.the_pair_is_the_linked_one().await?;
    together.a_finished_pod_leaves_its_gpus().await?;
    together.a_higher_priority_gets_a_fraction().await?;
    together.a_bypass_is_counted().await?;
    let metrics = front::get(scheduling.replica.addresses.pages, "/metrics").await.unwrap_or_default();
    ensure!(metrics.contains("tessera_scheduler_gpus_overbooked 0"), "{metrics}");
    Ok(())
}

struct Together<'a> {
    stage: Stage,
    site: &'a Site,
}

impl Together<'_> {
    /// Creates a pod that keeps running, and returns it with its log when it runs.
    async fn start(&self, name: &str, asked: &[(&str, &str)]) -> Result<(Pod, String)> {
        self.site.make(&staying(name, asked)).await?;
        let pod = self.stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        Ok((pod, self.stage.log(name, "main").await?))
    }

    /// Returns the GPUs that the container sees, after comparing them with the grant.
    fn visible(&self, pod: &Pod, log: &str) -> Result<BTreeSet<String>> {
        let line = log.lines().find_map(|line| line.strip_prefix("NVIDIA_VISIBLE_DEVICES="));
        let seen: BTreeSet<String> = line.unwrap_or_default().split(',').map(str::to_owned).collect();
        let grant: Value = serde_json::from_str(annotation(pod, "tessera.dev/grant"))?;
        let gpus = grant["main"].as_array().cloned().unwrap_or_default();
        let granted: BTreeSet<String> =
            gpus.iter().filter_map(|gpu| Some(gpu["uuid"].as_str()?.to_owned())).collect();
        ensure!(seen == granted, "{:?} sees {seen:?} but was granted {granted:?}", pod.metadata.name);
        Ok(seen)
    }

    /// Returns the index of a GPU by its UUID.
    fn index(&self, uuid: &str) -> Option<u8> {
        (0..8).find(|gpu| self.stage.uuid(*gpu) == uuid)
    }

    async fn every_dialect(&self) -> Result<()> {
        type Asked = &'static [(&'static str, &'static str)];
        /// Limit of a container as MiB and percent. Absent for whole GPUs.
        type Limit = Option<(u64, u32)>;
        let kinds: [(&str, Asked, Limit); 5] = [
            ("nvidia", &[("nvidia.com/gpu", "1")], None),
            ("gputopology", &[("aliyun.com/gpu", "1")], None),
            ("gpushare", &[("aliyun.com/gpu-mem", "8")], Some((8192, 0))),
            (
                "vcuda",
                &[("tencent.com/vcuda-core", "30"), ("tencent.com/vcuda-memory", "40")],
                Some((10_240, 30)),
            ),
            ("vcuda-whole", &[("tencent.com/vcuda-core", "200")], None),
        ];
        for (name, asked, limits) in kinds {
            let (pod, log) = self.start(name, asked).await?;
            let seen = self.visible(&pod, &log)?;
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let found = self.stage.limits(uid, "main").ok().and_then(|found| found.gpus.first().copied());
            let found = found.map(|gpu| (gpu.memory.whole_mib(), gpu.compute_percent));
            ensure!(found == limits, "{name}: the limits are {found:?}, expected {limits:?}");
            self.stage.wait_for_kubelet_agreement(name).await?;
            self.site.harness.note(&format!("{name} runs with {seen:?}"));
        }
        let chosen = self.site.event_about("vcuda-whole", "GpusChosen").await?.message.unwrap_or_default();
        self.site.harness.note(&format!("vcuda-whole: {chosen}"));
        self.stage.delete_all().await
    }

    /// Verifies that a pair of linked GPUs is chosen. GPUs 0 and 1, 2 and 3, and so on share a
    /// switch. One GPU is taken, so the lowest two free ones are not a pair.
    async fn the_pair_is_the_linked_one(&self) -> Result<()> {
        let (single, log) = self.start("single", &[("nvidia.com/gpu", "1")]).await?;
        let taken = self.visible(&single, &log)?;
        let (pair, log) = self.start("pair", &[("aliyun.com/gpu", "2")]).await?;
        let seen = self.visible(&pair, &log)?;
        let mut gpus: Vec<u8> = seen.iter().filter_map(|uuid| self.index(uuid)).collect();
        gpus.sort_unstable();
        ensure!(gpus.len() == 2 && gpus[0] / 2 == gpus[1] / 2, "{gpus:?} share no switch; taken {taken:?}");
        self.site.harness.note(&format!("inside the container: GPUs {gpus:?}, which share a switch"));
        self.stage.delete_all().await
    }

    async fn a_finished_pod_leaves_its_gpus(&self) -> Result<()> {
        self.site.make(&ending("all", &[("nvidia.com/gpu", "8")], 0)).await?;
        self.stage.cluster.wait_for_phase("all", "Succeeded", SOON).await?;
        // The pod still exists but holds nothing.
        let (again, log) = self.start("all-again", &[("aliyun.com/gpu", "8")]).await?;
        ensure!(self.visible(&again, &log)?.len() == 8, "not all GPUs were released");
        self.site.harness.note("all GPUs of a finished pod are reused by a pod of another dialect");
        self.stage.delete_all().await
    }

    async fn a_higher_priority_gets_a_fraction(&self) -> Result<()> {
        // Two shares fill each GPU completely. kube-scheduler evicts no pod if the units fit in
        // sum.
        let share = [("tencent.com/vcuda-core", "50"), ("tencent.com/vcuda-memory", "160")];
        let names: Vec<String> = (0..16).map(|number| format!("low-{number}")).collect();
        for name in &names {
            self.site.make(&with_priority(staying(name, &share), 0)).await?;
        }
        for name in &names {
            self.stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        }
        self.site.make(&with_priority(staying("urgent", &share), 1)).await?;
        let urgent = self.stage.cluster.wait_for_phase("urgent", "Running", SOON).await?;
        self.visible(&urgent, &self.stage.log("urgent", "main").await?)?;
        let left = self.stage.cluster.pods().list(&kube::api::ListParams::default()).await?.items;
        let running = left.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).count();
        ensure!(running == 16, "{running} pods are left: more than one was evicted");
        self.site.harness.note("a pod of higher priority replaced one share");
        self.stage.delete_all().await
    }

    async fn a_bypass_is_counted(&self) -> Result<()> {
        let mut sneaked = staying("sneaked", &[("aliyun.com/gpu", "1")]);
        if let Some(spec) = &mut sneaked.spec {
            spec.node_name = Some(self.stage.node.name.clone());
        }
        self.site.make(&sneaked).await?;
        self.stage.cluster.wait_for_phase("sneaked", "Running", SOON).await?;
        self.stage.wait_for_kubelet_agreement("sneaked").await?;
        // The agent withdraws the other dialects' devices of that GPU, so kube-scheduler itself refuses the pod.
        self.stage.wait_for_allocatable("nvidia.com/gpu", "7").await?;
        self.site.make(&staying("rest", &[("nvidia.com/gpu", "8")])).await?;
        self.site.refused("rest", "Insufficient nvidia.com/gpu").await?;
        let (rest, log) = self.start("seven", &[("aliyun.com/gpu", "7")]).await?;
        let sneaked = self.stage.cluster.pods().get("sneaked").await?;
        let theirs = self.visible(&sneaked, &self.stage.log("sneaked", "main").await?)?;
        ensure!(self.visible(&rest, &log)?.is_disjoint(&theirs), "a GPU is held twice");
        // Only pods that a scheduler placed are marked, so that the others can be told apart.
        self.site
            .harness
            .wait_for("the mark of the pod that a scheduler placed", SOON, async || {
                let pod = self.stage.cluster.pods().get("seven").await?;
                Ok((annotation(&pod, "ALIYUN_COM_GPU_ASSIGNED") == "true").then_some(()))
            })
            .await?;
        let sneaked = self.stage.cluster.pods().get("sneaked").await?;
        let mark = annotation(&sneaked, "ALIYUN_COM_GPU_ASSIGNED");
        ensure!(mark.is_empty(), "a pod that bypassed the scheduler has the mark {mark:?}");
        self.site
            .harness
            .note("a pod that bypassed the scheduler is served, and its GPU is not granted to other pods");
        self.stage.delete_all().await
    }
}

/// Returns a pod for kube-scheduler that prints what it sees and keeps running.
pub(super) fn staying(name: &str, asked: &[(&str, &str)]) -> Pod {
    let mut pod = asking(name, &[Container::main("main", asked)]);
    if let Some(spec) = &mut pod.spec {
        spec.scheduler_name = None;
    }
    pod
}

/// Returns a pod for kube-scheduler that ends after some seconds.
pub(super) fn ending(name: &str, asked: &[(&str, &str)], seconds: u64) -> Pod {
    let mut pod = staying(name, asked);
    for container in pod.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
        container.command = Some(vec!["sleep".to_owned(), seconds.to_string()]);
    }
    pod
}
