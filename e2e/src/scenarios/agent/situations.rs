//! The situations of `tessera_sim::kubelet::situations` on a real kubelet.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use tessera_sim::kubelet::situations::{
    self, ContainerObservation, ExpectedLimit, PodOutcome, SituationContainer, SituationPod, SituationRole,
};
use tessera_wire::{foreign::dialect::MemoryUnit, tessera::grant};

use super::{
    allocations,
    pods::{Container, asking as manifest},
    stage::{SOON, Stage, core_node},
};

pub(super) async fn play_all(stage: &Stage) -> Result<()> {
    for situation in situations::all()? {
        situation.run(stage).await.map_err(|error| anyhow!("{}: {error}", situation.name))?;
        stage.harness.note(&situation.name);
    }
    Ok(())
}

fn container(asked: &SituationContainer) -> Container {
    let resources: Vec<(&str, &str)> =
        asked.resources.iter().map(|(name, amount)| (name.as_str(), amount.as_str())).collect();
    match asked.role {
        SituationRole::Init => Container::init(&asked.name, &resources),
        SituationRole::Sidecar => Container::sidecar(&asked.name, &resources),
        SituationRole::Main => Container::main(&asked.name, &resources),
    }
}

impl Stage {
    async fn became(&self, asking: &SituationPod) -> Result<PodOutcome> {
        let phase = if asking.refused.is_some() { "Failed" } else { "Running" };
        let pod = self.cluster.wait_for_phase(&asking.name, phase, SOON).await?;
        if phase == "Failed" {
            return Ok(PodOutcome::Refused(pod.status.and_then(|status| status.message).unwrap_or_default()));
        }
        self.wait_for_kubelet_agreement(&asking.name).await?;
        self.wait_until_confirmed(&asking.name).await?;
        let pod = self.pod(&asking.name).await?;
        let in_annotations =
            grant::parse(&pod.spec, &pod.metadata.annotations, &core_node()?, MemoryUnit::GiB)?;
        let in_annotations = in_annotations.context("no grant")?;
        let mut containers = BTreeMap::new();
        for asked in &asking.containers {
            let limits = self.limits_by_gpu(&pod.metadata.uid, &asked.name);
            let mut env = BTreeMap::new();
            if asked.role != SituationRole::Init {
                let log = self.log(&asking.name, &asked.name).await?;
                let has_library = log.contains("control\n") && log.contains("/usr/lib/tessera/libtessera.so");
                ensure!(
                    has_library == limits.is_some(),
                    "the limits are {limits:?}, but the container finds {log}"
                );
                let pairs = log.lines().filter_map(|line| line.split_once('='));
                env = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            }
            let grant = in_annotations.iter().find(|grant| grant.container == asked.name);
            let seen = ContainerObservation {
                env,
                limits,
                annotated: grant.iter().flat_map(|grant| &grant.holds).map(|(gpu, _)| gpu.0).collect(),
            };
            containers.insert(asked.name.clone(), seen);
        }
        Ok(PodOutcome::Running(containers))
    }

    fn limits_by_gpu(&self, uid: &str, container: &str) -> Option<BTreeMap<u8, ExpectedLimit>> {
        let gpus = self.limits(uid, container).ok()?.gpus;
        let limit = |gpu: &tessera_limits::GpuLimit| {
            Some((
                self.gpu(&gpu.uuid)?.0,
                ExpectedLimit { mib: gpu.memory.whole_mib(), percent: gpu.compute_percent },
            ))
        };
        gpus.iter().map(limit).collect()
    }
}

impl situations::NodeUnderTest for Stage {
    type Error = anyhow::Error;

    fn uuid(&self, gpu: u8) -> String {
        self.uuid(gpu)
    }

    async fn create_pod(&self, asking: &SituationPod) -> Result<()> {
        let containers: Vec<Container> = asking.containers.iter().map(container).collect();
        let mut pod = manifest(&asking.name, &containers);
        if let Some(spec) = pod.spec.as_mut().filter(|_| asking.is_unplaced()) {
            // The pod bypasses the scheduler.
            spec.node_name = Some(self.node.name.clone());
        }
        self.create(pod).await.map(drop)
    }

    async fn bind_pod(&self, asking: &SituationPod) -> Result<()> {
        if asking.is_unplaced() {
            return Ok(());
        }
        let granted: Vec<(&str, &[u8])> =
            asking.containers.iter().map(|asked| (asked.name.as_str(), asked.granted.as_slice())).collect();
        self.bind(&asking.name, &granted).await
    }

    async fn outcome(&self, asking: &SituationPod) -> Result<PodOutcome> {
        self.became(asking).await
    }

    async fn check_and_clear(&self) -> Result<()> {
        allocations::check(self).await?;
        self.delete_all().await
    }
}
