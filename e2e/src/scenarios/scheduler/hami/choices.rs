//! The choice of GPUs by annotations, cordoned GPUs, quotas by ResourceQuotas, and borrowed memory.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

use super::{CORES, GPU, MEMORY, SOON, Scene, granted, staying};

/// GPUs of the stage, and those of each of its two NUMA nodes.
const GPUS: u8 = 8;
const GPUS_PER_NUMA_NODE: u8 = 4;

/// A small part of one GPU.
const PART: [(&str, &str); 3] = [(GPU, "1"), (MEMORY, "3000"), (CORES, "10")];

/// A part of each of three GPUs.
const THREE: [(&str, &str); 3] = [(GPU, "3"), (MEMORY, "3000"), (CORES, "10")];

/// Annotations of a pod.
type Annotations<'a> = &'a [(&'a str, &'a str)];

impl Scene {
    pub(super) async fn choices(&self) -> Result<()> {
        self.by_uuid_and_model().await?;
        self.by_numa_node_and_policy().await?;
        self.not_on_cordoned_gpus().await?;
        self.within_a_resource_quota().await?;
        self.borrowed_memory_is_returned().await
    }

    async fn by_uuid_and_model(&self) -> Result<()> {
        let most: Vec<String> = (0..GPUS - 1).map(|gpu| self.stage.uuid(gpu)).collect();
        let fifth = self.stage.uuid(5);
        self.check("use-uuid", &PART, &[("nvidia.com/use-gpuuuid", &fifth)], |gpus| *gpus == [5].into())
            .await?;
        let avoid = most.join(",");
        self.check("avoid-uuid", &PART, &[("nvidia.com/nouse-gpuuuid", &avoid)], |gpus| {
            *gpus == [GPUS - 1].into()
        })
        .await?;
        self.check("use-model", &PART, &[("nvidia.com/use-gputype", "T4,a100")], |gpus| gpus.len() == 1)
            .await?;
        self.refuse(
            "avoid-model",
            &PART,
            &[("nvidia.com/nouse-gputype", "A100")],
            "that the annotations allow",
        )
        .await?;
        self.stage.delete_all().await
    }

    async fn by_numa_node_and_policy(&self) -> Result<()> {
        let on_one = |gpus: &BTreeSet<u8>| {
            let nodes: BTreeSet<u8> = gpus.iter().map(|gpu| gpu / GPUS_PER_NUMA_NODE).collect();
            gpus.len() == 3 && nodes.len() == 1
        };
        self.check("numa", &THREE, &[("nvidia.com/numa-bind", "true")], on_one).await?;
        let five = [(GPU, "5"), (MEMORY, "3000")];
        self.refuse("numa-of-five", &five, &[("nvidia.com/numa-bind", "true")], "no NUMA node with").await?;
        let policy = "hami.io/gpu-scheduler-policy";
        self.check("chain", &THREE, &[(policy, "numa,spread")], on_one).await?;
        let used: BTreeSet<u8> =
            [self.gpus_of("numa").await?, self.gpus_of("chain").await?].concat().into_iter().collect();
        self.check("mutex", &PART, &[(policy, "mutex")], |gpus| gpus.is_disjoint(&used)).await?;
        let weights = ("hami.io/device-scoring-weights", "slot=1,core=1,memory=3");
        self.check("binpack", &PART, &[(policy, "binpack"), weights], |gpus| gpus.is_subset(&used)).await?;
        self.refuse("fast", &PART, &[(policy, "fast")], "write binpack, spread").await?;
        self.refuse(
            "nothing",
            &PART,
            &[("hami.io/device-scoring-weights", "slot=1")],
            "slot=1,core=1,memory=3",
        )
        .await?;
        self.stage.delete_all().await
    }

    async fn not_on_cordoned_gpus(&self) -> Result<()> {
        let all_but_one: Vec<String> =
            (0..GPUS).filter(|gpu| *gpu != 6).map(|gpu| self.stage.uuid(gpu)).collect();
        let node = self.stage.node.name.clone();
        let cordon = format!("hami.io/device-cordon={}", all_but_one.join(","));
        self.stage.cluster.kubectl(&["annotate", "node", &node, &cordon]).await?;
        self.refuse("cordoned", &[(GPU, "2"), (MEMORY, "3000")], &[], "fewer than 2 GPUs").await?;
        self.check("beside-cordoned", &PART, &[], |gpus| *gpus == [6].into()).await?;
        self.stage.cluster.kubectl(&["annotate", "node", &node, "hami.io/device-cordon-"]).await?;
        self.stage.cluster.wait_for_phase("cordoned", "Running", SOON).await?;
        self.stage.delete_all().await
    }

    async fn within_a_resource_quota(&self) -> Result<()> {
        let quotas: Api<ResourceQuota> = Api::default_namespaced(self.stage.cluster.client());
        let hard = json!({ "limits.nvidia.com/gpumem": "5000", "limits.nvidia.com/gpucores": "100" });
        let quota =
            serde_json::from_value(json!({ "metadata": { "name": "gpus" }, "spec": { "hard": hard } }))?;
        quotas.create(&PostParams::default(), &quota).await?;
        self.check("within-quota", &PART, &[], |gpus| gpus.len() == 1).await?;
        self.refuse("over-quota", &PART, &[], "ExceedsGPUQuota: GPU memory").await?;
        self.stage.cluster.pods().delete("within-quota", &DeleteParams::default()).await?;
        self.stage.cluster.wait_for_phase("over-quota", "Running", SOON * 2).await?;
        quotas.delete("gpus", &DeleteParams::default()).await?;
        self.stage.delete_all().await
    }

    /// A pod grows beyond what it was granted, until another pod is granted the memory.
    async fn borrowed_memory_is_returned(&self) -> Result<()> {
        let third = self.stage.uuid(3);
        let here = ("tessera.dev/use-gpu-uuids", third.as_str());
        let limit = ("tessera.dev/gpu-memory-limit", "16Gi");
        let own: [(&str, &str); 2] = [(GPU, "1"), (MEMORY, "8192")];
        self.check("borrower", &own, &[here, limit], |gpus| *gpus == [3].into()).await?;
        self.memory_limit("borrower", 16_384).await?;
        let most: [(&str, &str); 2] = [(GPU, "1"), (MEMORY, "73000")];
        self.check("owner", &most, &[here], |gpus| *gpus == [3].into()).await?;
        self.memory_limit("borrower", 8192).await?;
        self.memory_limit("owner", 73_000).await?;
        self.stage.cluster.pods().delete("owner", &DeleteParams::default()).await?;
        self.memory_limit("borrower", 16_384).await?;
        self.refuse("too-low", &own, &[("tessera.dev/gpu-memory-limit", "4Gi")], "write at least").await?;
        self.stage.delete_all().await
    }

    /// Waits until a pod may use this many MiB of its GPU.
    async fn memory_limit(&self, name: &str, mib: u64) -> Result<()> {
        let pod = self.stage.cluster.pods().get(name).await?;
        let uid = pod.metadata.uid.unwrap_or_default();
        self.site
            .harness
            .wait_for(&format!("{name} to have a limit of {mib} MiB"), SOON, async || {
                let limits = self.stage.limits(&uid, "main")?;
                Ok((limits.gpus.len() == 1 && limits.gpus[0].memory.whole_mib() == mib).then_some(()))
            })
            .await?;
        self.site.harness.note(&format!("{name} may use {mib} MiB"));
        Ok(())
    }

    /// Runs a pod and checks the indexes of its GPUs.
    async fn check(
        &self,
        name: &str,
        asked: &[(&str, &str)],
        annotations: Annotations<'_>,
        is_expected: impl Fn(&BTreeSet<u8>) -> bool,
    ) -> Result<()> {
        self.site.make(&annotated(name, asked, annotations)).await?;
        self.stage.cluster.wait_for_phase(name, "Running", SOON).await?;
        let gpus: BTreeSet<u8> = self.gpus_of(name).await?.into_iter().collect();
        ensure!(is_expected(&gpus), "{name} with {annotations:?} got GPU {gpus:?}");
        self.site.harness.note(&format!("{name} got GPU {gpus:?}"));
        Ok(())
    }

    async fn refuse(
        &self,
        name: &str,
        asked: &[(&str, &str)],
        annotations: Annotations<'_>,
        text: &str,
    ) -> Result<()> {
        self.site.make(&annotated(name, asked, annotations)).await?;
        self.site.refused(name, text).await
    }

    async fn gpus_of(&self, name: &str) -> Result<Vec<u8>> {
        let pod = self.stage.cluster.pods().get(name).await?;
        let index =
            |uuid: &str| (0..GPUS).find(|gpu| self.stage.uuid(*gpu) == uuid).context("an unknown GPU");
        granted(&pod)?.iter().map(|(uuid, ..)| index(uuid)).collect()
    }
}

pub(super) fn annotated(name: &str, asked: &[(&str, &str)], annotations: Annotations<'_>) -> Pod {
    let mut pod = staying(name, asked);
    let all = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    pod.metadata.annotations.get_or_insert_default().extend(all);
    pod
}
