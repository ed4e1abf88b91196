//! The harness itself: failures are shown and leave nothing behind.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::{enclosure, runner::Settings};

const SOON: Duration = Duration::from_secs(120);

pub(crate) async fn run(settings: Settings) -> Result<()> {
    a_dead_component_is_shown(&settings).await?;
    a_panic_is_a_failure(&settings).await?;
    an_interrupted_runner_cleans_up(&settings).await?;
    a_killed_runner_takes_everything_along(&settings).await
}

async fn a_dead_component_is_shown(settings: &Settings) -> Result<()> {
    let (status, output) = run_to_end(settings, "broken-component").await?;
    ensure!(status.code() == Some(1), "the runner ended with {status}:\n{output}");
    for expected in [
        "failed: the pod's last status was",
        "kube-scheduler was killed by signal 9 while waiting for pod second to be Succeeded",
        "---- kube-scheduler was killed by signal 9; end of its log",
        // This line is in that log only.
        "Starting Kubernetes Scheduler",
        "all logs: ",
        "0 passed, 1 failed",
    ] {
        ensure!(output.contains(expected), "{expected:?} is missing in the output:\n{output}");
    }
    let others = output.matches("  ---- ").count() - 1;
    ensure!(others == 0, "{others} logs of components that did not die are shown:\n{output}");
    let logs = kept_logs(&output)?;
    ensure!(logs.join("kube-scheduler.log").is_file(), "no log of kube-scheduler in {}", logs.display());
    remove_logs(&logs)?;
    note("a component that died is shown with its log");
    Ok(())
}

async fn a_panic_is_a_failure(settings: &Settings) -> Result<()> {
    let (status, output) = run_to_end(settings, "broken-panic").await?;
    ensure!(status.code() == Some(1), "the runner ended with {status}:\n{output}");
    for expected in ["panicked: on purpose", "end of the log of kube-apiserver", "0 passed, 1 failed"] {
        ensure!(output.contains(expected), "{expected:?} is missing in the output:\n{output}");
    }
    remove_logs(&kept_logs(&output)?)?;
    note("a panic is reported as a failure");
    Ok(())
}

async fn an_interrupted_runner_cleans_up(settings: &Settings) -> Result<()> {
    let mut runner = start_and_wait_for(settings, "broken-hang", "hanging").await?;
    let id = signal(&runner, Signal::INT)?;
    let status = timeout(SOON, runner.wait()).await.context("the interrupted runner does not end")??;
    ensure!(status.code() == Some(130), "the interrupted runner ended with {status}");
    ensure!(enclosure::remains_of(id)?.is_empty(), "left behind: {:?}", enclosure::remains_of(id)?);
    note("an interrupted runner cleans up");
    Ok(())
}

async fn a_killed_runner_takes_everything_along(settings: &Settings) -> Result<()> {
    let mut runner = start_and_wait_for(settings, "broken-hang", "hanging").await?;
    let id = runner.id().context("the runner has ended")?;
    let started = enclosure::processes_of(id)?;
    // These include etcd, API server, controller manager, scheduler, containerd, its shim, kubelet
    // and the pod.
    ensure!(started.len() >= 8, "only {} processes run", started.len());
    signal(&runner, Signal::KILL)?;
    runner.wait().await?;
    let give_up = Instant::now() + SOON;
    while !enclosure::processes_of(id)?.is_empty() {
        ensure!(Instant::now() < give_up, "outlived the killed runner: {:?}", enclosure::processes_of(id)?);
        sleep(Duration::from_millis(50)).await;
    }
    enclosure::sweep()?;
    ensure!(enclosure::remains_of(id)?.is_empty(), "left behind: {:?}", enclosure::remains_of(id)?);
    note(&format!(
        "{} processes ended with their killed runner; the next runner removed the rest",
        started.len()
    ));
    Ok(())
}

/// Returns a command that starts another runner for one scenario.
fn runner(settings: &Settings, scenario: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(settings.arguments(&[scenario.to_owned()])).stdin(Stdio::null()).stdout(Stdio::piped());
    command.kill_on_drop(true);
    Ok(command)
}

async fn run_to_end(settings: &Settings, scenario: &str) -> Result<(ExitStatus, String)> {
    let child = runner(settings, scenario)?.stderr(Stdio::piped()).spawn()?;
    let id = child.id().context("the runner has ended")?;
    let output = timeout(SOON, child.wait_with_output()).await.context("the runner does not end")??;
    let remains = enclosure::remains_of(id)?;
    ensure!(remains.is_empty(), "left behind by {scenario}: {remains:?}");
    Ok((output.status, String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Returns the directory of the logs that a runner has printed.
fn kept_logs(output: &str) -> Result<PathBuf> {
    let path = output.lines().find_map(|line| line.trim().strip_prefix("all logs: "));
    path.map(PathBuf::from).with_context(|| format!("no logs were kept:\n{output}"))
}

/// Removes the logs. These failures were intended, so their logs are not needed.
fn remove_logs(logs: &Path) -> Result<()> {
    fs::remove_dir_all(logs)?;
    if let Some(parent) = logs.parent() {
        let _others_are_in_there = fs::remove_dir(parent);
    }
    Ok(())
}

async fn start_and_wait_for(settings: &Settings, scenario: &str, line_end: &str) -> Result<Child> {
    let mut child = runner(settings, scenario)?.spawn()?;
    let output = child.stdout.take().context("the runner has no output")?;
    let mut lines = BufReader::new(output).lines();
    let seen = async {
        let mut before = Vec::new();
        while let Some(line) = lines.next_line().await? {
            if line.ends_with(line_end) {
                return Ok(());
            }
            before.push(line);
        }
        bail!("{scenario} ended early:\n{}", before.join("\n"))
    };
    timeout(SOON, seen).await.with_context(|| format!("{scenario} does not reach this point"))??;
    // The runner blocks if its output is not read.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok(child)
}

fn signal(runner: &Child, signal: Signal) -> Result<u32> {
    let id = runner.id().context("the runner has ended")?;
    let pid = Pid::from_raw(i32::try_from(id)?).context("the runner has no process id")?;
    kill_process(pid, signal)?;
    Ok(id)
}

fn note(what: &str) {
    println!("            {what}");
}
