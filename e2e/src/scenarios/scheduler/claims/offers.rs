//! Random pods of device plugins and of claims on one real node whose agent serves both, while scheduler, kubelet and
//! agent are killed.
//!
//! No GPU ever carries more than it has. After each wave the ledger of the scheduler, podresources, annotations,
//! claims, limits and the agent's own sums agree.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    CLAIMS, Pair, Site,
    mixture::{Held, held_on, ledger},
    share_of, whole_gpus,
};
use crate::{
    harness::{Harness, add_claim},
    scenarios::{
        agent::{Container, Stage, asking, check_allocations},
        scheduler::{SOON, dialects::make_priorities, pods::with_priority, random::Dice, together::ending},
    },
};

/// Number of waves, unless the environment sets another one: one for each component that is killed, and one without.
const WAVES: usize = 4;

/// Pods of a wave that end by themselves, and pods that run until the next wave.
const ENDING: usize = 20;
const STAYING: usize = 6;

/// Memory of each GPU of the stage.
const GPU_MEMORY_MIB: u64 = 81_920;

/// Time in which all pods of a wave end. The kubelet tries to prepare a claim again only after more than a minute.
const WHOLE_WAVE: Duration = Duration::from_secs(300);

/// What the kubelet says of a pod for which it knows too few devices.
const DEVICES_UNAVAILABLE: &str = "requested number of devices unavailable";

/// Pods of a wave that may reach a busy kubelet before the agent's list of devices.
const MAX_LATE_DEVICES: usize = 1;

/// Flag of a scheduler that evicts pods.
const EVICTIONS: &str = "--evict";

const VCUDA_CORE: &str = "tencent.com/vcuda-core";
const VCUDA_MEMORY: &str = "tencent.com/vcuda-memory";

pub(super) async fn run(harness: Harness) -> Result<()> {
    let waves = std::env::var("TESSERA_E2E_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(WAVES);
    let stage = Stage::start_with_both(&harness).await?;
    let site = Site::of(&harness, stage.cluster.clone()).await?;
    site.apply("dra.yaml").await?;
    // kube-scheduler would serve these resources by claims while all devices of the node are withdrawn, and the kubelet
    // by devices.
    let classes = ["tessera-nvidia-com-gpu", "tessera-aliyun-com-gpu"];
    site.cluster.kubectl(&["delete", "deviceclasses.resource.k8s.io", classes[0], classes[1]]).await?;
    site.apply("evictions.yaml").await?;
    make_priorities(&site).await?;
    let pair = Pair::start_with(&site, "offers", &[CLAIMS, EVICTIONS]).await?;
    let scene = Scene { stage, site, pair };
    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let mut rejected = 0;
    for wave in 0..waves {
        rejected += scene.wave(wave, &mut dice).await?;
    }
    scene.a_higher_priority_gets_a_claim().await?;
    scene.delete_all().await?;
    scene.agree().await?;
    scene.pair.stop().await?;
    harness.note(&format!(
        "{} random pods of device plugins and claims, {rejected} rejected by the kubelet: no GPU over, and all agree",
        waves * (ENDING + STAYING)
    ));
    Ok(())
}

struct Scene {
    stage: Stage,
    site: Site,
    pair: Pair,
}

impl Scene {
    /// Runs a wave of pods in which one component is killed. Returns the number of rejected pods.
    async fn wave(&self, wave: usize, dice: &mut Dice) -> Result<usize> {
        self.delete_all().await?;
        for number in 0..STAYING {
            let small = Amounts { percent: 1 + dice.roll(12), gib: 1 + dice.roll(8) };
            self.create(&format!("stays-{wave}-{number}"), Kind::SHARES[number % 3], small, None).await?;
        }
        for number in 0..ENDING {
            let kind = Kind::ALL[usize::try_from(dice.roll(Kind::ALL.len() as u64))?];
            let amounts = Amounts { percent: 5 + dice.roll(50), gib: 1 + dice.roll(40) };
            self.create(&format!("ends-{wave}-{number}"), kind, amounts, Some(1 + dice.roll(4))).await?;
        }
        sleep(Duration::from_millis(dice.roll(2500))).await;
        let killed = self.kill(wave)?;
        let lost = self.until_settled().await?;
        // A kubelet that starts again admits pods before it has connected to all plugins. Without such a kill, a pod is
        // rejected only if the kubelet learns too late that devices of another dialect are back.
        let is_plugin_side = matches!(killed, "the agent" | "the kubelet");
        let is_expected = |reason: &String| is_plugin_side || reason.contains(DEVICES_UNAVAILABLE);
        ensure!(
            lost.iter().all(is_expected) && (is_plugin_side || lost.len() <= MAX_LATE_DEVICES),
            "pods were rejected in wave {wave}, in which {killed} was killed: {lost:?}"
        );
        for reason in &lost {
            self.site.harness.note(&format!("rejected: {reason}"));
        }
        let gpus = self.agree().await?;
        self.site.harness.note(&format!(
            "wave {wave}: {killed} killed, {} pods rejected; all agree on {gpus} GPUs in use",
            lost.len()
        ));
        Ok(lost.len())
    }

    /// kube-scheduler evicts no pod for a claim, so the scheduler does.
    async fn a_higher_priority_gets_a_claim(&self) -> Result<()> {
        self.delete_all().await?;
        let running = async |name: &str, priority: i32, claim: Value| {
            self.site.cluster.create_resource("ResourceClaim", name, claim).await?;
            let pod = with_priority(ending(name, &[], 100_000), priority);
            self.site.make(&using(pod, Some(name), None)?).await?;
            self.site.cluster.wait_for_phase(name, "Running", SOON * 2).await
        };
        for number in 0..7 {
            running(&format!("low-{number}"), 0, whole_gpus(1)).await?;
        }
        self.site.make(&with_priority(ending("low-7", &[("nvidia.com/gpu", "1")], 100_000), 0)).await?;
        self.site.cluster.wait_for_phase("low-7", "Running", SOON).await?;
        running("urgent", 1, share_of(50, 1024)).await?;
        let left = self.site.cluster.pods().list(&ListParams::default()).await?.items;
        let left = left.iter().filter(|pod| phase(pod) == "Running").count();
        ensure!(left == 8, "{left} pods are left: more than one was evicted");
        self.agree().await?;
        self.site.harness.note("one of eight pods of lower priority was evicted for a pod with a claim");
        Ok(())
    }

    fn kill(&self, wave: usize) -> Result<&'static str> {
        let (component, name) = match wave % 4 {
            0 => return Ok("nothing"),
            1 => (&self.pair.replica.component, "the scheduler"),
            2 => (&self.stage.node.kubelet, "the kubelet"),
            _ => (&self.stage.agent, "the agent"),
        };
        component.kill()?;
        component.start_again()?;
        Ok(name)
    }

    /// Waits until all pods have ended or run as they should, and audits all GPUs meanwhile. Returns why the kubelet
    /// rejected some.
    async fn until_settled(&self) -> Result<Vec<String>> {
        self.site
            .harness
            .wait_for("a wave of random pods to end", WHOLE_WAVE, async || {
                self.held().await?;
                let pods = self.site.cluster.pods().list(&ListParams::default()).await?.items;
                let left: Vec<&str> = pods.iter().filter(|pod| !is_settled(pod)).map(name).collect();
                ensure!(left.is_empty(), "{left:?} are left: {}", super::waiting_reasons(&pods));
                let failed = pods.iter().filter(|pod| phase(pod) == "Failed");
                let reason = |pod: &Pod| pod.status.as_ref().and_then(|status| status.message.clone());
                Ok(Some(failed.map(|pod| reason(pod).unwrap_or_default()).collect()))
            })
            .await
    }

    /// Waits until everyone agrees who holds what. Returns the number of GPUs in use.
    async fn agree(&self) -> Result<usize> {
        self.stage.wait_until_ready().await?;
        check_allocations(&self.stage).await?;
        let same = async || {
            let (ours, theirs) = (ledger(&self.pair).await?, self.held().await?);
            ensure!(ours == theirs, "the ledger has {ours:?}, pods and claims have {theirs:?}");
            Ok(Some(theirs.len()))
        };
        self.site.harness.wait_for("the ledger to agree with pods and claims", SOON, same).await
    }

    /// Returns what pods and claims hold. Fails if it exceeds a GPU.
    async fn held(&self) -> Result<Held> {
        let index = |uuid: &str| (0..8).find(|gpu| self.stage.uuid(*gpu) == uuid);
        held_on(&self.site, GPU_MEMORY_MIB, index).await
    }

    /// Deletes all pods and claims as users do, and waits until they are gone.
    async fn delete_all(&self) -> Result<()> {
        let (pods, claims) = (self.site.cluster.pods(), self.site.cluster.resources("ResourceClaim"));
        let (all, how) = (ListParams::default(), DeleteParams::default());
        pods.delete_collection(&how, &all).await?;
        claims.delete_collection(&how, &all).await?;
        self.site.cluster.resources("ResourceClaimTemplate").delete_collection(&how, &all).await?;
        let gone = async || {
            let left = (pods.list_metadata(&all).await?.items.len(), claims.list_metadata(&all).await?.items);
            ensure!(left.0 == 0 && left.1.is_empty(), "{} pods and {} claims are left", left.0, left.1.len());
            Ok(Some(()))
        };
        self.site.harness.wait_for("all pods and claims to be gone", SOON * 3, gone).await
    }

    /// Creates a pod, or two that share a claim. They end after some seconds, or run until they are deleted.
    async fn create(&self, name: &str, kind: Kind, amounts: Amounts, seconds: Option<u64>) -> Result<()> {
        let (percent, gib) = (amounts.percent.to_string(), amounts.gib.to_string());
        let blocks = (amounts.gib * 4).to_string();
        let share = share_of(amounts.percent, amounts.gib * 1024);
        let vcuda: &[(&str, &str)] = &[(VCUDA_CORE, &percent), (VCUDA_MEMORY, &blocks)];
        let count = if amounts.percent.is_multiple_of(2) { "1" } else { "2" };
        let asked = match kind {
            Kind::Memory => vec![("aliyun.com/gpu-mem", gib.as_str())],
            Kind::Vcuda | Kind::BesideVcuda => vcuda.to_vec(),
            Kind::Whole => vec![("nvidia.com/gpu", count)],
            Kind::OtherWhole => vec![("aliyun.com/gpu", count)],
            _ => Vec::new(),
        };
        let mut pod = match seconds {
            Some(seconds) => ending(name, &asked, seconds),
            None => ending(name, &asked, 100_000),
        };
        if let Some(spec) = &mut pod.spec {
            // A kubelet that is killed while it starts a container loses that container.
            spec.restart_policy = Some("OnFailure".into());
            // Without a grace period the API server forgets the pod before its containers have ended.
            spec.termination_grace_period_seconds = Some(1);
        }
        let claim = match kind {
            Kind::Claim | Kind::SharedClaim | Kind::BesideVcuda => share,
            Kind::TwoShares => with_count(share, 2),
            Kind::WholeClaim => whole_gpus(1 + amounts.percent % 2),
            Kind::Template => {
                let spec = json!({ "spec": share });
                self.site.cluster.create_resource("ResourceClaimTemplate", name, spec).await?;
                return self.site.make(&using(pod, None, Some(name))?).await;
            }
            _ => return self.site.make(&pod).await,
        };
        self.site.cluster.create_resource("ResourceClaim", name, claim).await?;
        if kind == Kind::SharedClaim {
            let mut other = using(pod.clone(), Some(name), None)?;
            other.metadata.name = Some(format!("{name}-too"));
            self.site.make(&other).await?;
        }
        if kind == Kind::BesideVcuda {
            // The first container has the claim, the other one the devices.
            let own = asking(name, &[Container::main("other", &[])]);
            let spec = pod.spec.as_mut().context("no specification")?;
            let mut first = own.spec.context("no specification")?.containers.remove(0);
            first.command = spec.containers[0].command.clone();
            spec.containers.insert(0, first);
        }
        self.site.make(&using(pod, Some(name), None)?).await
    }
}

/// What a random pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Memory,
    Vcuda,
    Whole,
    OtherWhole,
    Claim,
    TwoShares,
    WholeClaim,
    /// A claim that two pods use.
    SharedClaim,
    /// A claim that is made for the pod.
    Template,
    /// A claim in one container, and devices in another one.
    BesideVcuda,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Memory,
        Self::Vcuda,
        Self::Whole,
        Self::OtherWhole,
        Self::Claim,
        Self::TwoShares,
        Self::WholeClaim,
        Self::SharedClaim,
        Self::Template,
        Self::BesideVcuda,
    ];
    /// Kinds that leave room for all others.
    const SHARES: [Self; 3] = [Self::Vcuda, Self::Claim, Self::BesideVcuda];
}

/// Amounts of a share. Memory is in whole GiB, the unit of the ledger's page.
#[derive(Clone, Copy)]
struct Amounts {
    percent: u64,
    gib: u64,
}

/// Returns whether a pod has ended, or runs until it is deleted.
fn is_settled(pod: &Pod) -> bool {
    match phase(pod) {
        "Succeeded" | "Failed" => true,
        "Running" => name(pod).starts_with("stays"),
        _ => false,
    }
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Returns the pod with a claim in its first container: an existing one, or one from a template.
fn using(mut pod: Pod, claim: Option<&str>, template: Option<&str>) -> Result<Pod> {
    let used = PodResourceClaim {
        name: "gpu".to_owned(),
        resource_claim_name: claim.map(str::to_owned),
        resource_claim_template_name: template.map(str::to_owned),
    };
    add_claim(&mut pod, used)?;
    Ok(pod)
}

/// Returns the claim with so many GPUs.
fn with_count(mut claim: Value, count: u64) -> Value {
    claim["devices"]["requests"][0]["exactly"]["count"] = count.into();
    claim
}
