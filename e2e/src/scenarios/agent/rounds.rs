//! Rounds of failures: pods start and end, and the agent or the kubelet is killed at a random time.

use std::time::Duration;

use anyhow::{Result, ensure};
use kube::api::DeleteParams;
use tokio::time::sleep;

use super::{
    allocations,
    pods::{Container, asking},
    stage::{SOON, Stage},
};

/// Number of rounds, unless the environment sets another one.
const ROUNDS: usize = 6;

const KUBELET: &str = "kubelet killed";

/// Number of pods at a time.
const PODS: usize = 8;

pub(super) async fn run(stage: &Stage) -> Result<()> {
    let rounds =
        std::env::var("TESSERA_E2E_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(ROUNDS);
    let mut dice = Dice(20_251_115);
    let mut alive: Vec<(String, u8)> = Vec::new();
    let (mut made, mut failed) = (0, 0);
    for round in 0..rounds {
        // A kubelet takes about a second to find a restarted agent and rejects pods until then.
        // Every rejection must belong to its own round.
        stage.wait_for_allocatable("tencent.com/vcuda-core", "800").await?;
        stage.wait_until_ready().await?;
        while alive.len() < PODS {
            let (name, gpu) = (format!("pod-{made}"), dice.roll(8));
            made += 1;
            create(stage, &name, gpu, dice.roll(3)).await?;
            alive.push((name, gpu));
        }
        // The delay ends between the first admission and the last start.
        sleep(Duration::from_millis(u64::from(dice.roll(250)) * 8)).await;
        let what = match dice.roll(4) {
            0 | 1 => {
                stage.agent.kill()?;
                stage.agent.start_again()?;
                "agent killed"
            }
            2 => {
                stage.node.kubelet.kill()?;
                stage.node.kubelet.start_again()?;
                KUBELET
            }
            _ => {
                stage.agent.kill()?;
                stage.node.kubelet.kill()?;
                stage.node.kubelet.start_again()?;
                stage.agent.start_again()?;
                "both killed"
            }
        };
        let lost = settle(stage, &mut alive).await?;
        ensure!(
            lost == 0 || what != KUBELET,
            "{lost} pods were rejected although only the kubelet was killed"
        );
        failed += lost;
        stage.harness.note(&format!("round {round}: {what}; {} pods hold what was granted", alive.len()));
        allocations::check(stage).await?;
        for _ in 0..=dice.roll(5) {
            if alive.is_empty() {
                break;
            }
            let victim = alive.swap_remove(usize::from(dice.roll(u8::try_from(alive.len())?))).0;
            stage.cluster.pods().delete(&victim, &DeleteParams::default()).await?;
        }
    }
    stage.harness.note(&format!(
        "{rounds} rounds, {made} pods, {failed} rejected in rounds with a killed agent, none with only a killed kubelet; all allocations agree"
    ));
    Ok(())
}

/// Creates a small pod of one of three dialects and binds it with a grant. Eight of the largest fit
/// on one GPU.
async fn create(stage: &Stage, name: &str, gpu: u8, kind: u8) -> Result<()> {
    let resources: &[(&str, &str)] = match kind {
        0 => &[("tencent.com/vcuda-core", "10"), ("tencent.com/vcuda-memory", "30")],
        1 => &[("aliyun.com/gpu-mem", "8")],
        _ => &[("tencent.com/vcuda-core", "12"), ("tencent.com/vcuda-memory", "20")],
    };
    let mut pod = asking(name, &[Container::main("main", resources)]);
    if let Some(spec) = &mut pod.spec {
        // A kubelet that is killed while it starts a container loses that container.
        spec.restart_policy = Some("Always".into());
    }
    stage.create_bound(pod, &[("main", &[gpu])]).await
}

/// Waits until every pod runs on its granted GPU or has failed. A kubelet without the plugin
/// rejects pods, which the agent cannot prevent. Returns the number of rejected pods.
async fn settle(stage: &Stage, alive: &mut Vec<(String, u8)>) -> Result<usize> {
    let mut failed = 0;
    for (name, gpu) in std::mem::take(alive) {
        let phase = stage
            .harness
            .wait_for(&format!("{name} to run or fail"), SOON, async || {
                let phase = stage.pod(&name).await?.status.phase;
                Ok((phase == "Running" || phase == "Failed").then_some(phase))
            })
            .await?;
        if phase == "Running" {
            stage.wait_for_annotations(&name, "main", &[gpu]).await?;
            alive.push((name, gpu));
        } else {
            failed += 1;
            let message = stage.pod(&name).await?.status.message;
            let away = [
                "no healthy devices",
                "Unavailable",
                "transport",
                "EOF",
                "connection is closing",
                "the agent is ending",
            ];
            ensure!(away.iter().any(|text| message.contains(text)), "{name} was rejected: {message}");
            stage.delete(&name).await?;
        }
    }
    Ok(failed)
}

/// Random numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u8) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u8::try_from((self.0 >> 33) % u64::from(sides.max(1))).unwrap_or_default()
    }
}
