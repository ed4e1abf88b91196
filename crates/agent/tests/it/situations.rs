//! Runs the shared situations of agent and kubelet on the embedded kubelet.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;

use tessera_core::request::ContainerRole;
use tessera_limits::{UuidBytes, files};
use tessera_sim::kubelet::situations::{
    self, ContainerObservation, ExpectedLimit, NodeUnderTest, PodOutcome, SituationPod, SituationRole,
};
use tessera_sim::kubelet::{Admitted, KubeletError};
use tessera_wire::{
    foreign::{dialect::MemoryUnit, objects::Pod},
    tessera::grant,
};

use crate::common::{
    Api, RegistrationWay, World, core_node,
    fixtures::{self, ContainerFixture, uuid},
};

struct Embedded {
    world: World,
    /// Pods that are bound and not yet admitted, in order.
    bound: Mutex<Vec<Pod>>,
    admitted: Mutex<BTreeMap<String, Result<Admitted, KubeletError>>>,
}

fn pod(asking: &SituationPod) -> Pod {
    fn container(asked: &situations::SituationContainer) -> ContainerFixture<'_> {
        let role = match asked.role {
            SituationRole::Init => ContainerRole::Init,
            SituationRole::Sidecar => ContainerRole::Sidecar,
            SituationRole::Main => ContainerRole::Main,
        };
        let limits = asked.resources.iter().map(|(name, amount)| (name.as_str(), amount.to_string()));
        (asked.name.as_str(), role, limits.collect())
    }
    fixtures::pod(&asking.name, &uid(asking), &asking.containers.iter().map(container).collect::<Vec<_>>())
}

fn uid(asking: &SituationPod) -> String {
    format!("uid-{}", asking.name)
}

impl Embedded {
    fn limits(&self, asking: &SituationPod, container: &str) -> Option<BTreeMap<u8, ExpectedLimit>> {
        let folder = self.world.grants().join(uid(asking)).join(container);
        let gpus = files::open_control(&folder).ok()?.read().unwrap().gpus;
        let gpu = |bytes| (0..8).find(|gpu| UuidBytes::parse(&uuid(*gpu)) == Some(bytes)).unwrap();
        let limit = |gpu: &tessera_limits::GpuLimit| ExpectedLimit {
            mib: gpu.memory.whole_mib(),
            percent: gpu.compute_percent,
        };
        Some(gpus.iter().map(|limited| (gpu(limited.uuid), limit(limited))).collect())
    }
}

impl NodeUnderTest for Embedded {
    type Error = Infallible;

    fn uuid(&self, gpu: u8) -> String {
        uuid(gpu)
    }

    async fn create_pod(&self, _: &SituationPod) -> Result<(), Infallible> {
        // The agent sees only pods that are bound to its node.
        Ok(())
    }

    async fn bind_pod(&self, asking: &SituationPod) -> Result<(), Infallible> {
        let mut pod = pod(asking);
        if !asking.is_unplaced() {
            let gpus_of = |name: &str| {
                let asked = asking.containers.iter().find(|asked| asked.name == name)?;
                Some(asked.granted.clone())
            };
            fixtures::annotate(&mut pod, &core_node(), gpus_of);
        }
        self.world.api.apply(pod.clone());
        self.bound.lock().unwrap().push(pod);
        Ok(())
    }

    async fn outcome(&self, asking: &SituationPod) -> Result<PodOutcome, Infallible> {
        let bound = std::mem::take(&mut *self.bound.lock().unwrap());
        for pod in bound {
            let given = self.world.run(&pod).await;
            self.admitted.lock().unwrap().insert(pod.metadata.uid, given);
        }
        let given = match self.admitted.lock().unwrap().remove(&uid(asking)).unwrap() {
            Ok(given) => given,
            Err(refused) => return Ok(PodOutcome::Refused(refused.to_string())),
        };
        let spec = pod(asking).spec;
        let annotations = || self.world.api.pod(&uid(asking)).metadata.annotations;
        let is_annotated = |_: &Api| {
            let annotations = annotations();
            let assigned = grant::assigned(&spec, &annotations, MemoryUnit::GiB).unwrap();
            let is_assigned = assigned.iter().all(|(key, value)| annotations.get(key) == Some(value));
            annotations.contains_key(grant::KEY) && is_assigned
        };
        self.world.api.until("the annotations of the pod", is_annotated).await;
        let grants = grant::parse(&spec, &annotations(), &core_node(), MemoryUnit::GiB).unwrap().unwrap();
        let seen = |asked: &situations::SituationContainer| {
            let grant = grants.iter().find(|grant| grant.container == asked.name);
            ContainerObservation {
                env: given[&asked.name].envs.clone().into_iter().collect(),
                limits: self.limits(asking, &asked.name),
                annotated: grant.iter().flat_map(|grant| &grant.holds).map(|(gpu, _)| gpu.0).collect(),
            }
        };
        Ok(PodOutcome::Running(
            asking.containers.iter().map(|asked| (asked.name.clone(), seen(asked))).collect(),
        ))
    }

    async fn check_and_clear(&self) -> Result<(), Infallible> {
        let held: Vec<String> =
            self.world.kubelet().held_devices().into_iter().map(|held| held.pod).collect();
        for uid in held {
            self.world.kubelet().remove(&uid);
        }
        for uid in self.world.api.uids() {
            self.world.api.delete(&uid);
        }
        self.world.until_handled().await;
        for entry in std::fs::read_dir(self.world.grants()).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(name.to_string_lossy().starts_with('.'), "the grants of {name:?} are not removed");
        }
        Ok(())
    }
}

async fn play_all(way: RegistrationWay) {
    let stage =
        Embedded { world: World::new(way).await, bound: Mutex::default(), admitted: Mutex::default() };
    for situation in situations::all().unwrap() {
        situation.run(&stage).await.unwrap_or_else(|wrong| panic!("{}: {wrong}", situation.name));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn passes_all_situations_with_the_plugins_registry() {
    play_all(RegistrationWay::Registry).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn passes_all_situations_with_kubelet_sock() {
    play_all(RegistrationWay::Socket).await;
}
