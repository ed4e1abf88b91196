//! Running scenarios one after the other, from outside their enclosures.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    enclosure::{self, Enclosure, MachineState},
    scenarios::{Body, Scenario},
};

/// A scenario that takes longer hangs.
const SCENARIO_WITHIN: Duration = Duration::from_secs(900);

/// How long the kernel may take to end what was in an enclosure.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// What holds for all scenarios of a run.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Where the Kubernetes programs lie.
    pub(crate) programs: PathBuf,
    /// Whether golden files are to be written anew.
    pub(crate) record: bool,
}

impl Settings {
    /// As arguments of this program, for the next stage.
    pub(crate) fn arguments(&self, scenarios: &[String]) -> Vec<String> {
        let mut arguments = vec!["--programs".to_owned(), self.programs.display().to_string()];
        arguments.extend(self.record.then(|| "--record".to_owned()));
        arguments.extend_from_slice(scenarios);
        arguments
    }
}

/// How a scenario ended, where it did not pass.
enum Unsuccessful {
    Failed(anyhow::Error),
    /// Somebody wants us to stop.
    Interrupted,
}

/// Runs them all and counts.
pub(crate) fn run(scenarios: &[&Scenario], settings: &Settings) -> Result<ExitCode> {
    ensure!(rustix::process::geteuid().is_root(), "a kubelet needs root: run this as root");
    enclosure::sweep()?;
    // One thread, this one: what it starts dies with it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut passed, mut failed) = (0, 0);
    for scenario in scenarios {
        println!("{}: {}", scenario.name, scenario.about);
        let start = Instant::now();
        let outcome = runtime.block_on(run_one(scenario, settings));
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("ok      {:<20} {seconds:6.1} s", scenario.name);
            }
            Err(Unsuccessful::Failed(error)) => {
                failed += 1;
                println!("FAILED  {:<20} {seconds:6.1} s  {error:#}", scenario.name);
            }
            Err(Unsuccessful::Interrupted) => {
                println!("interrupted in {}; everything it started has ended", scenario.name);
                return Ok(ExitCode::from(130));
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_one(scenario: &Scenario, settings: &Settings) -> Result<(), Unsuccessful> {
    let before = MachineState::now().map_err(Unsuccessful::Failed)?;
    let outcome = match scenario.body {
        Body::Outside(body) => body(settings.clone()).await.map_err(Unsuccessful::Failed),
        Body::Enclosed(_) => run_enclosed(scenario.name, settings).await,
    };
    let after = MachineState::now().map_err(Unsuccessful::Failed)?;
    let added = after.added_since(&before);
    match outcome {
        Ok(()) if !added.is_empty() => {
            Err(Unsuccessful::Failed(anyhow::anyhow!("left behind: {}", added.join(", "))))
        }
        other => other,
    }
}

async fn run_enclosed(name: &str, settings: &Settings) -> Result<(), Unsuccessful> {
    let enclosure = Enclosure::create(name).map_err(Unsuccessful::Failed)?;
    let outcome = wait_for_inside(&enclosure, name, settings).await;
    if let Err(Unsuccessful::Failed(_)) = &outcome {
        match keep_logs(name, &enclosure.logs()) {
            Ok(kept) => println!("  all logs: {}", kept.display()),
            Err(error) => println!("  the logs are lost: {error:#}"),
        }
    }
    let emptied = wait_until_empty(&enclosure).await;
    let directory = enclosure.directory().to_owned();
    drop(enclosure);
    outcome?;
    emptied.map_err(Unsuccessful::Failed)?;
    if directory.exists() {
        return Err(Unsuccessful::Failed(anyhow::anyhow!("left behind: {}", directory.display())));
    }
    Ok(())
}

async fn wait_for_inside(enclosure: &Enclosure, name: &str, settings: &Settings) -> Result<(), Unsuccessful> {
    let spawn = || -> Result<_> {
        let command = enclosure.command(&settings.arguments(&[name.to_owned()]))?;
        let child = tokio::process::Command::from(command).kill_on_drop(true).spawn();
        let stop = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok((child.context("cannot start the enclosure (setpriv and unshare from util-linux)")?, stop))
    };
    let (mut child, [interrupt, terminate, hangup]) = spawn().map_err(Unsuccessful::Failed)?;
    let listen = |signal: std::io::Result<tokio::signal::unix::Signal>| async move {
        match signal {
            Ok(mut signal) => signal.recv().await.unwrap_or_default(),
            Err(_unavailable) => std::future::pending().await,
        }
    };
    let outcome = tokio::select! {
        status = child.wait() => match status {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(Unsuccessful::Failed(anyhow::anyhow!("see above"))),
            Err(error) => Err(Unsuccessful::Failed(error.into())),
        },
        () = tokio::time::sleep(SCENARIO_WITHIN) => {
            Err(Unsuccessful::Failed(anyhow::anyhow!("took longer than {} s", SCENARIO_WITHIN.as_secs())))
        }
        () = listen(interrupt) => Err(Unsuccessful::Interrupted),
        () = listen(terminate) => Err(Unsuccessful::Interrupted),
        () = listen(hangup) => Err(Unsuccessful::Interrupted),
    };
    let _ended_already = child.kill().await;
    outcome
}

async fn wait_until_empty(enclosure: &Enclosure) -> Result<()> {
    let give_up = Instant::now() + EMPTY_WITHIN;
    loop {
        let processes = enclosure.processes();
        if processes.is_empty() {
            return Ok(());
        }
        if Instant::now() >= give_up {
            bail!("left behind: processes {processes:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Moves the logs to where they outlive the enclosure.
fn keep_logs(name: &str, logs: &Path) -> Result<PathBuf> {
    let kept = std::env::temp_dir().join("tessera-e2e-logs").join(format!("{name}-{}", process::id()));
    fs::create_dir_all(kept.parent().context("no place for logs")?)?;
    fs::rename(logs, &kept).with_context(|| format!("cannot move the logs to {}", kept.display()))?;
    Ok(kept)
}
