//! Runs the shared situations of agent and kubelet on the embedded kubelet.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;

use serde_json::{Value, json};
use tessera_core::{
    grant::{ContainerGrant, Hold},
    units::GpuIndex,
};
use tessera_limits::{UuidBytes, files};
use tessera_sim::kubelet::situations::{
    self, ContainerObservation, ExpectedLimit, NodeUnderTest, PodOutcome, SituationPod, SituationRole,
};
use tessera_wire::{
    foreign::{dialect::MemoryUnit, objects::Pod},
    tessera::grant,
};

use crate::common::{RegistrationWay, World, core_node, uuid};

struct Embedded {
    world: World,
    /// Pods that are bound and not yet admitted, in order.
    bound: Mutex<Vec<Pod>>,
    admitted: Mutex<BTreeMap<String, Result<tessera_sim::kubelet::Admitted, String>>>,
}

fn pod(asking: &SituationPod) -> Pod {
    let container = |asked: &situations::SituationContainer| {
        let mut container = json!({ "name": asked.name, "resources": { "limits": asked.resources } });
        if asked.role == SituationRole::Sidecar {
            container["restartPolicy"] = "Always".into();
        }
        container
    };
    let of = |early: bool| -> Vec<Value> {
        let asked = asking.containers.iter();
        asked.filter(|asked| (asked.role != SituationRole::Main) == early).map(container).collect()
    };
    serde_json::from_value(json!({
        "metadata": { "name": asking.name, "namespace": "team", "uid": uid(asking) },
        "spec": { "initContainers": of(true), "containers": of(false) },
        "status": { "phase": "Pending" },
    }))
    .unwrap()
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
            let claims = pod.spec.claims(MemoryUnit::GiB).unwrap();
            let granted: Vec<ContainerGrant> = claims
                .iter()
                .map(|claim| {
                    let asked = asking.containers.iter().find(|asked| asked.name == claim.container).unwrap();
                    let hold = Hold::of(claim.request);
                    let gpus = asked.granted.iter().map(|gpu| (GpuIndex(*gpu), hold)).collect();
                    ContainerGrant { container: claim.container.clone(), role: claim.role, holds: gpus }
                })
                .collect();
            pod.metadata.annotations =
                grant::annotations(&pod.spec, &granted, &core_node(), MemoryUnit::GiB, 1).unwrap();
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
            Err(words) => return Ok(PodOutcome::Refused(words)),
        };
        let spec = pod(asking).spec;
        let assigned = grant::assigned(&spec, MemoryUnit::GiB).unwrap();
        let annotations = || self.world.api.pod(&uid(asking)).metadata.annotations;
        let is_annotated = || assigned.iter().all(|(key, value)| annotations().get(key) == Some(value));
        self.world.until("the annotations of the pod", is_annotated).await;
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
        let grants = self.world.grants();
        let pods = || std::fs::read_dir(&grants).unwrap().flatten().map(|entry| entry.file_name());
        self.world
            .until("the grants to be removed", || pods().all(|name| name.to_string_lossy().starts_with('.')))
            .await;
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
