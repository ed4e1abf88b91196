//! HAMi's resources on a real kubelet and kube-scheduler.
//!
//! No node offers `nvidia.com/gpumem` and `nvidia.com/gpucores`. kube-scheduler ignores them as configured, and the
//! kubelet ignores resources that its node does not have. Pods that run in this scenario show both.

mod choices;
mod policies;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use serde_json::Value;
use tokio::time::sleep;

use super::{
    Replica, SOON, Site,
    front::{self, Front},
    pods::annotation,
    together::{ending, staying},
};
use crate::{
    harness::Harness,
    scenarios::agent::{HAMI, Stage, check_allocations},
};

/// Number of random pods, unless the environment sets another one: two waves for each component that is killed.
const RANDOM_PODS: usize = 200;

/// Random pods at a time. Each wave ends with a check of all allocations.
const WAVE: usize = 25;

/// Memory of each GPU of the stage.
const GPU_MEMORY_MIB: u64 = 81_920;

/// What the kubelet says of a pod for which it knows too few devices.
const DEVICES_UNAVAILABLE: &str = "requested number of devices unavailable";

/// The code with which the agent refuses a pod. A connection to an agent that was killed ends with another one.
const REFUSED_BY_AGENT: &str = "code = ResourceExhausted";

/// Pods of a wave that may reach a busy kubelet before the agent's list of devices.
const MAX_LATE_DEVICES: usize = 1;

const GPU: &str = "nvidia.com/gpu";
const MEMORY: &str = "nvidia.com/gpumem";
const PERCENTAGE: &str = "nvidia.com/gpumem-percentage";
const CORES: &str = "nvidia.com/gpucores";

/// MiB and percent of each GPU. Empty for whole GPUs.
type Limits = &'static [(u64, u32)];

/// The manifests in `examples/hami`: name, number of GPUs, limits.
const EXAMPLES: [(&str, usize, Limits); 13] = [
    ("one-share", 1, &[(3000, 30)]),
    ("two-shares", 2, &[(3000, 30), (3000, 30)]),
    ("percentage", 1, &[(GPU_MEMORY_MIB / 2, 0)]),
    ("cores-only", 1, &[(GPU_MEMORY_MIB, 40)]),
    ("memory-only", 1, &[(1000, 0)]),
    ("low-priority", 1, &[(1000, 0)]),
    ("use-models", 1, &[(3000, 0)]),
    ("avoid-models", 1, &[(3000, 0)]),
    ("one-numa-node", 3, &[(3000, 0), (3000, 0), (3000, 0)]),
    ("spread", 1, &[(3000, 0)]),
    ("whole", 1, &[]),
    ("all-memory", 1, &[]),
    ("all-cores", 1, &[]),
];

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let stage = Stage::start_with(&harness, "auto", &[HAMI.to_owned()]).await?;
    let site = Site::of(&harness, stage.cluster.clone()).await?;
    let replica = site.replica("tessera-scheduler", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;
    let scene = Scene { stage, site, replica };
    scene.every_example().await?;
    scene.parts_that_no_gpu_has_are_refused().await?;
    scene.choices().await?;
    scene.policies().await?;
    scene.random_pods().await?;
    let metrics = front::get(scene.replica.addresses.pages, "/metrics").await.unwrap_or_default();
    ensure!(metrics.contains("tessera_scheduler_gpus_overbooked 0"), "{metrics}");
    Ok(())
}

struct Scene {
    stage: Stage,
    site: Site,
    replica: Replica,
}

impl Scene {
    async fn every_example(&self) -> Result<()> {
        for (name, count, limits) in EXAMPLES {
            self.site.make(&example(name)?).await?;
            let pod = self.stage.cluster.wait_for_phase(name, "Running", SOON).await?;
            let log = self.stage.log(name, "main").await?;
            let granted = granted(&pod)?;
            ensure!(granted.len() == count, "{name} was granted {granted:?}");
            let visible = variable(&log, "NVIDIA_VISIBLE_DEVICES").unwrap_or_default();
            let visible: BTreeSet<&str> = visible.split(',').collect();
            let uuids: BTreeSet<&str> = granted.iter().map(|(uuid, ..)| uuid.as_str()).collect();
            ensure!(visible == uuids && uuids.len() == count, "{name} sees {visible:?}, granted {uuids:?}");
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let found = self.stage.limits(uid, "main").map(|found| found.gpus).unwrap_or_default();
            let found: Vec<(u64, u32)> =
                found.iter().map(|gpu| (gpu.memory.whole_mib(), gpu.compute_percent)).collect();
            ensure!(found == limits, "{name}: the limits are {found:?}, expected {limits:?}");
            for (number, (memory, _)) in limits.iter().enumerate() {
                let shown = variable(&log, &format!("CUDA_DEVICE_MEMORY_LIMIT_{number}"));
                ensure!(shown == Some(&format!("{memory}m")), "{name} shows {shown:?}");
            }
            self.stage.wait_for_kubelet_agreement(name).await?;
            self.site.harness.note(&format!("{name} runs with {found:?} of {count} GPUs"));
        }
        check_allocations(&self.stage).await?;
        self.stage.delete_all().await
    }

    /// HAMi drops such requests silently.
    async fn parts_that_no_gpu_has_are_refused(&self) -> Result<()> {
        self.site.make(&staying("too-much", &[(GPU, "1"), (PERCENTAGE, "101")])).await?;
        self.site.refused("too-much", "nvidia.com/gpumem-percentage: 101 is out of range").await?;
        self.site.make(&staying("no-gpu", &[(MEMORY, "1000")])).await?;
        self.site.refused("no-gpu", "add nvidia.com/gpu: 1").await?;
        self.stage.delete_all().await
    }

    /// Runs random pods of all dialects while agent, scheduler and kubelet are killed. No GPU ever carries more than
    /// it has, and every pod ends as it should or is rejected because of a killed agent or kubelet.
    async fn random_pods(&self) -> Result<()> {
        let pods = std::env::var("TESSERA_E2E_PODS").ok().and_then(|text| text.parse().ok());
        let pods: usize = pods.unwrap_or(RANDOM_PODS);
        let mut dice = Dice(20_261_116);
        let mut rejected = 0;
        for (wave, first) in (0..pods).step_by(WAVE).enumerate() {
            let names: Vec<String> =
                (first..pods.min(first + WAVE)).map(|pod| format!("random-{pod}")).collect();
            for name in &names {
                let asked = random_request(&mut dice);
                let asked: Vec<(&str, &str)> =
                    asked.iter().map(|(name, amount)| (*name, amount.as_str())).collect();
                let mut pod = ending(name, &asked, 1 + dice.roll(4));
                if let Some(spec) = &mut pod.spec {
                    // A kubelet that is killed while it starts a container loses that container.
                    spec.restart_policy = Some("OnFailure".into());
                }
                self.site.make(&pod).await?;
            }
            sleep(Duration::from_millis(dice.roll(1500))).await;
            let killed = match wave % 4 {
                0 => "nothing",
                1 => {
                    self.replica.component.kill()?;
                    self.replica.component.start_again()?;
                    "the scheduler"
                }
                2 => {
                    self.stage.node.kubelet.kill()?;
                    self.stage.node.kubelet.start_again()?;
                    "the kubelet"
                }
                _ => {
                    self.stage.agent.kill()?;
                    self.stage.agent.start_again()?;
                    "the agent"
                }
            };
            let lost = self.until_ended(&names).await?;
            // A kubelet that starts again admits pods before it has connected to all plugins. Without such a kill, a
            // pod is rejected only if the kubelet learns too late that devices of another dialect are back.
            let is_expected =
                |reason: &String| is_plugin_side(killed) || reason.contains(DEVICES_UNAVAILABLE);
            ensure!(
                lost.iter().all(is_expected) && (is_plugin_side(killed) || lost.len() <= MAX_LATE_DEVICES),
                "pods were rejected in wave {wave}, in which {killed} was killed: {lost:?}"
            );
            // Every grant is right, so the agent has no reason to refuse a pod, whatever was killed.
            ensure!(
                !lost.iter().any(|reason| reason.contains(REFUSED_BY_AGENT)),
                "the agent refused pods in wave {wave}, in which {killed} was killed: {lost:?}"
            );
            for reason in &lost {
                self.site.harness.note(&format!("rejected: {reason}"));
            }
            let lost = lost.len();
            rejected += lost;
            self.stage.wait_until_ready().await?;
            check_allocations(&self.stage).await?;
            self.site.harness.note(&format!("wave {wave}: {killed} killed, {lost} pods rejected"));
            for name in &names {
                self.stage.cluster.pods().delete(name, &DeleteParams::default()).await?;
            }
        }
        self.site
            .harness
            .note(&format!("{pods} random pods of five dialects, {rejected} rejected by the kubelet"));
        Ok(())
    }

    /// Waits until these pods have ended, and audits the grants of all pods meanwhile. Returns why the kubelet rejected
    /// some.
    async fn until_ended(&self, names: &[String]) -> Result<Vec<String>> {
        const WHOLE_WAVE: Duration = Duration::from_secs(240);
        self.site
            .harness
            .wait_for("a wave of random pods to end", WHOLE_WAVE, async || {
                let pods = self.stage.cluster.pods().list(&ListParams::default()).await?.items;
                audit(&pods)?;
                let phase = |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.clone());
                let of = |wanted: &str| {
                    let is_named =
                        |pod: &&Pod| pod.metadata.name.as_ref().is_some_and(|name| names.contains(name));
                    let ended = pods.iter().filter(is_named);
                    ended.filter(|pod| phase(pod).as_deref() == Some(wanted)).collect::<Vec<_>>()
                };
                let (done, failed) = (of("Succeeded").len(), of("Failed"));
                ensure!(
                    done + failed.len() == names.len(),
                    "{done} pods have ended, {} failed",
                    failed.len()
                );
                let reason = |pod: &&Pod| pod.status.as_ref().and_then(|status| status.message.clone());
                Ok(Some(failed.iter().map(|pod| reason(pod).unwrap_or_default()).collect()))
            })
            .await
    }
}

/// Returns whether the kill of a component can keep the kubelet from knowing devices.
fn is_plugin_side(killed: &str) -> bool {
    matches!(killed, "the agent" | "the kubelet")
}

/// Returns the pod of an example, with an image that this machine has.
fn example(name: &str) -> Result<Pod> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../examples/hami/{name}.yaml"));
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let written: Pod = serde_saphyr::from_str(&text).with_context(|| format!("{}", file.display()))?;
    let containers = written.spec.map(|spec| spec.containers).unwrap_or_default();
    let limits = containers.into_iter().filter_map(|container| container.resources?.limits);
    let limits: Vec<(String, String)> = limits.flatten().map(|(name, amount)| (name, amount.0)).collect();
    let asked: Vec<(&str, &str)> = limits.iter().map(|(name, amount)| (&**name, &**amount)).collect();
    let mut pod = staying(name, &asked);
    pod.metadata.annotations.get_or_insert_default().extend(written.metadata.annotations.unwrap_or_default());
    Ok(pod)
}

/// Returns a random request of one of the five dialects.
fn random_request(dice: &mut Dice) -> Vec<(&'static str, String)> {
    let mut below = |sides: u64| dice.roll(sides);
    let kind = below(8);
    match kind {
        0 => vec![(GPU, (1 + below(2)).to_string())],
        1 => vec![("aliyun.com/gpu", (1 + below(2)).to_string())],
        2 => vec![("aliyun.com/gpu-mem", (1 + below(40)).to_string())],
        3 => vec![
            ("tencent.com/vcuda-core", (5 + below(60)).to_string()),
            ("tencent.com/vcuda-memory", (1 + below(160)).to_string()),
        ],
        4 => vec![(GPU, (1 + below(3)).to_string()), (PERCENTAGE, (1 + below(80)).to_string())],
        _ => vec![
            (GPU, (1 + below(4)).to_string()),
            (MEMORY, (1 + below(40_000)).to_string()),
            (CORES, below(70).to_string()),
        ],
    }
}

/// Returns UUID, percent and MiB of each GPU of the container `main`. A whole GPU has no MiB.
fn granted(pod: &Pod) -> Result<Vec<(String, u64, Option<u64>)>> {
    let text = annotation(pod, "tessera.dev/grant");
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let grant: BTreeMap<String, Vec<Value>> = serde_json::from_str(text)?;
    let gpu = |gpu: &Value| {
        let uuid = gpu["uuid"].as_str().context("no UUID")?.to_owned();
        Ok((uuid, gpu["cores"].as_u64().unwrap_or_default(), gpu["memoryMiB"].as_u64()))
    };
    grant.values().flatten().map(gpu).collect()
}

/// Checks that no GPU carries more than it has, from the grants alone.
fn audit(pods: &[Pod]) -> Result<()> {
    let mut used: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for pod in pods {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        if matches!(phase, "Succeeded" | "Failed") {
            continue;
        }
        let mut own = BTreeSet::new();
        for (uuid, cores, memory) in granted(pod)? {
            ensure!(own.insert(uuid.clone()), "{:?} has two parts of {uuid}", pod.metadata.name);
            let total = used.entry(uuid).or_default();
            *total = (total.0 + cores, total.1 + memory.unwrap_or(GPU_MEMORY_MIB));
        }
    }
    for (uuid, (cores, memory)) in used {
        ensure!(cores <= 100 && memory <= GPU_MEMORY_MIB, "{uuid} carries {cores} % and {memory} MiB");
    }
    Ok(())
}

fn variable<'a>(log: &'a str, name: &str) -> Option<&'a str> {
    log.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

/// Random numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides.max(1)
    }
}
