//! Everything that can die is killed while two programs compute.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;

use super::{
    bench::{Bare, Bench},
    pods::GpuPod,
};
use crate::harness::Harness;

/// Seconds of each measurement.
const SECONDS: usize = 5;

/// Allowed deviation from a share.
const SHARE_POINTS: f64 = 2.0;

/// Part of its usual rate that a program reaches in every second, whatever dies beside it.
const LEAST_SECOND: f64 = 0.4;

/// Time for which a process is stopped.
const STOPPED: Duration = Duration::from_secs(3);

const PODS: [&str; 2] = ["training", "inference"];
const PERCENTS: [f64; 2] = [55.0, 30.0];

struct Running {
    bench: Bench,
    bares: [Bare; 2],
}

pub(super) async fn run(harness: &Harness) -> Result<()> {
    let bench = Bench::start(harness, &[]).await?;
    let bares = [bench.bare("large", SECONDS).await?, bench.bare("inference", SECONDS).await?];
    let python = bench.host.python.clone();
    bench.run(&GpuPod::rates("training", "large", &python)?.share(55, 180)).await?;
    bench.run(&GpuPod::rates("inference", "inference", &python)?.share(30, 120)).await?;
    let third = GpuPod::rates("third", "matmul", &python)?.share(5, 40);
    bench.run(&third).await?;
    bench.wait_until_ready(&["training", "inference", "third"]).await?;
    let running = Running { bench, bares };
    let stage = &running.bench.stage;
    running.after("before anything dies", async || Ok(())).await?;
    running
        .after("a pod's process was killed", async || {
            signal(running.bench.process("third").await?, Signal::KILL)?;
            stage.cluster.wait_for_phase("third", "Failed", Duration::from_secs(30)).await?;
            stage.delete("third").await
        })
        .await?;
    running
        .after("the agent was killed and is back", async || {
            stage.agent.kill()?;
            stage.agent.start_again()?;
            stage.wait_until_ready().await
        })
        .await?;
    running
        .after("the kubelet was killed and is back", async || {
            stage.node.kubelet.kill()?;
            stage.node.kubelet.start_again()?;
            stage.node.wait_until_ready(&stage.cluster).await?;
            stage.wait_until_ready().await
        })
        .await?;
    running
        .after("the scheduler was killed and is back", async || {
            let scheduling = running.bench.scheduling.as_ref().context("no scheduler of ours")?;
            scheduling.replica.component.kill()?;
            scheduling.replica.component.start_again()?;
            scheduling.ready().await
        })
        .await?;
    running.a_stopped_process().await?;
    let again = GpuPod::rates("again", "matmul", &python)?.share(5, 40);
    running.bench.run(&again).await?;
    running.bench.wait_until_ready(&["again"]).await?;
    harness.note("after all of this a new pod is placed and computes");
    running.bench.wait_until_empty().await?;
    let gpus = running.bench.inspect("kubectl-inspect-gpu", &[])?;
    ensure!(gpus.contains("node-1  1       0"), "GPUs are held without pods: {gpus}");
    harness
        .note("after the last pod the driver shows an empty GPU, and kubectl inspect one that nobody holds");
    Ok(())
}

impl Running {
    /// Does something, and checks the shares of both programs in the seconds afterwards and their lowest rate
    /// since the beginning.
    async fn after(&self, what: &str, act: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let mut before = Vec::new();
        for pod in PODS {
            before.push(self.bench.rates(pod).await?.len());
        }
        act().await.context(what.to_owned())?;
        let rates = self.bench.next_rates(&PODS, SECONDS).await?;
        let mut told = Vec::new();
        for (place, pod) in PODS.into_iter().enumerate() {
            let (bare, percent) = (self.bares[place], self.bares[place].percent(rates[place]));
            let seconds = self.bench.rates(pod).await?.split_off(before[place]);
            let lowest = bare.percent(seconds.into_iter().fold(f64::INFINITY, f64::min));
            told.push(format!("{pod} {percent:.1} % (lowest second {lowest:.1})"));
            ensure!(
                (percent - PERCENTS[place]).abs() <= SHARE_POINTS,
                "{what}: {pod} has {percent:.1} % instead of {}",
                PERCENTS[place]
            );
            ensure!(
                lowest >= LEAST_SECOND * PERCENTS[place],
                "{what}: {pod} had a second with {lowest:.1} %"
            );
        }
        self.bench.harness.note(&format!("{what}: {}", told.join(", ")));
        Ok(())
    }

    /// A process is stopped and continued. The other one goes on, and both have their shares afterwards.
    async fn a_stopped_process(&self) -> Result<()> {
        let pid = self.bench.process("training").await?;
        let before = self.bench.rates("inference").await?.len();
        signal(pid, Signal::STOP)?;
        sleep(STOPPED).await;
        signal(pid, Signal::CONT)?;
        let seconds = self.bench.rates("inference").await?.split_off(before);
        let lowest = self.bares[1].percent(seconds.into_iter().fold(f64::INFINITY, f64::min));
        ensure!(lowest >= LEAST_SECOND * PERCENTS[1], "inference had a second with {lowest:.1} %");
        // The second in which the process was stopped is not one of full rate.
        let resumed = self.bench.rates("training").await?.len();
        self.bench
            .harness
            .wait_for("training to compute again", Duration::from_secs(10), async || {
                Ok((self.bench.rates("training").await?.len() > resumed).then_some(()))
            })
            .await?;
        self.after("a process was stopped for 3 s", async || Ok(())).await
    }
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let process = Pid::from_raw(pid.try_into()?).context("no process 0")?;
    Ok(kill_process(process, signal)?)
}
