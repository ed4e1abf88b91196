//! A cluster on a host with a real GPU, and what its pods print.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Event;
use kube::{
    Api,
    api::{ListParams, LogParams},
};

use super::{host::Host, pods::GpuPod};
use crate::{
    harness::Harness,
    scenarios::{
        agent::{Stage, offered},
        scheduler::Scheduling,
    },
};

/// Time in which a program loads PyTorch and starts.
pub(super) const START: Duration = Duration::from_secs(90);

/// Memory that the driver may keep of an empty GPU.
const EMPTY_MIB: u64 = 700;

pub(super) struct Bench {
    pub(super) harness: Harness,
    pub(super) host: Host,
    pub(super) stage: Stage,
    /// Our scheduler; `None` where kube-scheduler alone places claims.
    pub(super) scheduling: Option<Scheduling>,
}

/// What a program reaches with a whole GPU, without the library.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bare {
    /// Steps per second.
    pub(super) rate: f64,
    /// Percentage of the GPU's time that one step per second needs.
    pub(super) percent_of_step: f64,
}

impl Bare {
    /// Returns the percentage of the GPU's time that a rate needs.
    pub(super) fn percent(&self, rate: f64) -> f64 {
        rate * self.percent_of_step
    }
}

impl Bench {
    /// Starts the cluster, with more flags for the agent.
    pub(super) async fn start(harness: &Harness, flags: &[&str]) -> Result<Self> {
        let host = Host::find()?;
        let offered = offered(1, host.memory_mib);
        Self::start_offering(harness, host, offered, flags).await
    }

    pub(super) async fn start_offering(
        harness: &Harness,
        host: Host,
        offered: Vec<(&'static str, String)>,
        flags: &[&str],
    ) -> Result<Self> {
        let stage = Stage::start_on_host(harness, offered, &agent_flags(harness, flags)?).await?;
        let scheduling = Scheduling::start(harness, stage.cluster.clone()).await?;
        harness.note("the schedulers are ready");
        Ok(Self { harness: harness.clone(), host, stage, scheduling: Some(scheduling) })
    }

    /// Starts a cluster whose agent serves claims only.
    pub(super) async fn start_with_claims(harness: &Harness) -> Result<Self> {
        let host = Host::find()?;
        let stage = Stage::start_with_claims_on_host(harness, &agent_flags(harness, &[])?).await?;
        Ok(Self { harness: harness.clone(), host, stage, scheduling: None })
    }

    /// Creates a pod and waits until it runs.
    pub(super) async fn run(&self, pod: &GpuPod) -> Result<()> {
        self.stage.create(pod.object()?).await?;
        let running = self.stage.cluster.wait_for_phase(pod.name(), "Running", START).await;
        running.map(drop).with_context(|| format!("pod {}", pod.name()))
    }

    /// Returns all lines that a pod has printed.
    pub(super) async fn lines(&self, pod: &str) -> Result<Vec<String>> {
        // A kubelet that has just restarted is ready before it serves logs.
        let read = async || Ok(Some(self.stage.cluster.pods().logs(pod, &LogParams::default()).await?));
        let log = self.harness.wait_for(&format!("the log of {pod}"), Duration::from_secs(20), read).await?;
        Ok(log.lines().map(str::to_owned).collect())
    }

    /// Waits until a pod has printed a line for which `found` returns a value. Fails at once if its program fails.
    pub(super) async fn wait_for_line<T>(
        &self,
        pod: &str,
        what: &str,
        within: Duration,
        found: impl Fn(&str) -> Option<T>,
    ) -> Result<T> {
        let mut last = Vec::new();
        let waited = self
            .harness
            .wait_for(&format!("{pod} to print {what}"), within, async || {
                last = self.lines(pod).await?;
                let failed = last.iter().any(|line| is_failure(line));
                Ok(last.iter().find_map(|line| found(line)).map(Ok).or(failed.then_some(Err(()))))
            })
            .await;
        let found = waited.and_then(|found| found.map_err(|()| anyhow::anyhow!("{pod} failed")));
        found.with_context(|| format!("{pod} printed {:?}", &last[last.len().saturating_sub(12)..]))
    }

    /// Waits until programs compute.
    pub(super) async fn wait_until_ready(&self, pods: &[&str]) -> Result<()> {
        for pod in pods {
            self.wait_for_line(pod, "that it is ready", START, |line| (line == "ready").then_some(()))
                .await?;
        }
        Ok(())
    }

    /// Runs a program alone on a whole GPU, and deletes its pod.
    pub(super) async fn bare(&self, kind: &str, seconds: usize) -> Result<Bare> {
        let pod =
            GpuPod::program(&format!("bare-{kind}"), kind, &self.host.python)?.asking("nvidia.com/gpu", 1);
        self.run(&pod).await?;
        self.wait_until_ready(&[pod.name()]).await?;
        let number = |line: &str| line.parse::<f64>().ok();
        let need = self.wait_for_line(pod.name(), "the need of a step", START, number).await?;
        let rate = self.next_rates(&[pod.name()], seconds).await?[0];
        self.stage.delete(pod.name()).await?;
        let bare = Bare { rate, percent_of_step: 100.0 * need };
        self.harness.note(&format!(
            "{kind} alone: {rate:.1} steps per second, which need {:.1} % of the GPU's time",
            bare.percent(rate)
        ));
        Ok(bare)
    }

    /// Returns the means of the rates that programs reach in the next seconds.
    pub(super) async fn next_rates(&self, pods: &[&str], seconds: usize) -> Result<Vec<f64>> {
        let mut before = Vec::new();
        for pod in pods {
            before.push(self.rates(pod).await?.len());
        }
        // The second that has begun does not count.
        let what = format!("{seconds} s of {}", pods.join(", "));
        self.harness
            .wait_for(&what, Duration::from_secs(60) + START, async || {
                let mut means = Vec::new();
                for (pod, before) in pods.iter().zip(&before) {
                    let rates = self.rates(pod).await?;
                    let Some(next) = rates.get(before + 1..before + 1 + seconds) else { return Ok(None) };
                    #[expect(clippy::cast_precision_loss, reason = "a small count")]
                    means.push(next.iter().sum::<f64>() / seconds as f64);
                }
                Ok(Some(means))
            })
            .await
    }

    /// Returns the rate of each second since a program is ready.
    pub(super) async fn rates(&self, pod: &str) -> Result<Vec<f64>> {
        let lines = self.lines(pod).await?;
        Ok(lines.iter().filter_map(|line| line.parse().ok()).collect())
    }

    /// Returns what nvidia-smi printed last in a pod: total and used memory in MiB.
    pub(super) async fn memory_inside(&self, pod: &str) -> Result<(u64, u64)> {
        let lines = self.lines(pod).await?;
        let line = lines.iter().rev().find_map(|line| line.strip_prefix("smi ")).context("no nvidia-smi")?;
        let (total, used) = line.split_once(", ").with_context(|| format!("{pod} printed {line:?}"))?;
        Ok((total.parse()?, used.parse()?))
    }

    /// Returns the processes of a pod that are on the GPU, with their memory in MiB by the driver's count.
    pub(super) async fn on_gpu(&self, pod: &str) -> Result<Vec<(u32, u64)>> {
        let uid = self.stage.pod(pod).await?.metadata.uid;
        let written = [uid.clone(), uid.replace('-', "_")];
        let is_of_pod = |pid: u32| {
            let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            written.iter().any(|uid| cgroups.contains(uid))
        };
        Ok(self.host.processes()?.into_iter().filter(|(pid, _)| is_of_pod(*pid)).collect())
    }

    /// Returns the only process of a pod on the GPU.
    pub(super) async fn process(&self, pod: &str) -> Result<u32> {
        let processes = self.on_gpu(pod).await?;
        let [(pid, _)] = processes.as_slice() else { bail!("{pod} has {processes:?} on the GPU") };
        Ok(*pid)
    }

    /// Waits for an event about a pod and returns its message.
    pub(super) async fn event(&self, pod: &str, reason: &str, within: Duration) -> Result<String> {
        let events: Api<Event> = Api::default_namespaced(self.stage.cluster.client());
        let about = ListParams::default().fields(&format!("involvedObject.name={pod},reason={reason}"));
        self.harness
            .wait_for(&format!("the event {reason} about {pod}"), within, async || {
                Ok(events.list(&about).await?.items.into_iter().find_map(|event| event.message))
            })
            .await
    }

    /// Deletes all pods and waits until the driver shows an empty GPU.
    pub(super) async fn wait_until_empty(&self) -> Result<()> {
        self.stage.delete_all().await?;
        self.harness
            .wait_for("the GPU to be empty", START, async || {
                let (processes, used_mib) = (self.host.processes()?, self.host.used_mib()?);
                ensure!(processes.is_empty(), "the driver shows processes {processes:?}");
                ensure!(used_mib < EMPTY_MIB, "the driver shows {used_mib} MiB in use");
                Ok(Some(()))
            })
            .await
    }

    /// Runs a plugin of kubectl and returns what it prints.
    pub(super) fn inspect(&self, plugin: &str, arguments: &[&str]) -> Result<String> {
        let program = std::env::current_exe()?.with_file_name(plugin);
        let kubeconfig = self.stage.cluster.kubeconfig("admin", "system:masters")?;
        super::host::output(std::process::Command::new(program).args(arguments).env("KUBECONFIG", kubeconfig))
    }
}

/// Returns the flags of an agent on this host.
fn agent_flags(harness: &Harness, more: &[&str]) -> Result<Vec<String>> {
    let driver = harness.state("driver")?.join("nvidia");
    let mut flags = vec![
        "--driver-root=/".to_owned(),
        format!("--driver-directory={}", driver.display()),
        "--sample-every=1".to_owned(),
    ];
    flags.extend(more.iter().map(|flag| (*flag).to_owned()));
    Ok(flags)
}

/// Returns whether a line is the end of a Python program's error, or that of a program which does not start.
fn is_failure(line: &str) -> bool {
    line.contains("Error: ") || line.contains("error while loading")
}
