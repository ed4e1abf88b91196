//! Runs scenarios from outside of their enclosures, several at a time.

use std::{
    fs::{self, File},
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, stream};
use tokio::{
    process::Command,
    signal::unix::{Signal, SignalKind, signal},
    time::timeout,
};

use crate::{
    enclosure::{self, Enclosure, HostState},
    scenarios::{Body, Scenario},
};

/// Time after which a scenario counts as hanging. The environment variable `TESSERA_E2E_WITHIN`
/// sets another one, in seconds.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(900);

/// Time in which the kernel must end all processes of an enclosure.
const EMPTY_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of all scenarios of a run.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Directory of the Kubernetes programs.
    pub(crate) programs: PathBuf,
    /// True if golden files are written again.
    pub(crate) record: bool,
    /// Number of scenarios that run at the same time. The output of a single one is not held back until it ends.
    pub(crate) jobs: NonZeroUsize,
}

impl Settings {
    /// Returns the settings as arguments of this program for the next stage.
    pub(crate) fn arguments(&self, scenarios: &[String]) -> Vec<String> {
        let mut arguments = vec!["--programs".to_owned(), self.programs.display().to_string()];
        arguments.extend(self.record.then(|| "--record".to_owned()));
        arguments.extend_from_slice(scenarios);
        arguments
    }
}

/// Runs the scenarios and prints a summary.
pub(crate) fn run(scenarios: &[&Scenario], settings: &Settings) -> Result<ExitCode> {
    ensure!(rustix::process::geteuid().is_root(), "a kubelet needs root; run this program as root");
    enclosure::sweep()?;
    // The runtime uses this thread only, because processes started by it must die with it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run_all(scenarios, settings))
}

async fn run_all(scenarios: &[&Scenario], settings: &Settings) -> Result<ExitCode> {
    let mut interruption = Interruption::listen()?;
    let (alone, together): (Vec<_>, Vec<_>) = scenarios.iter().partition(|scenario| scenario.runs_alone());
    let results = stream::iter(together)
        .map(|scenario| run_and_report(scenario, settings))
        .buffer_unordered(settings.jobs.get())
        .chain(stream::iter(alone).then(|scenario| run_and_report(scenario, settings)));
    let counts = results.fold((0, 0), |(passed, failed), result| async move {
        if result { (passed + 1, failed) } else { (passed, failed + 1) }
    });
    let (passed, failed) = tokio::select! {
        counts = counts => counts,
        () = interruption.wait() => {
            // The scenarios were dropped and have ended. Runners that they started may have left
            // directories and cgroups.
            enclosure::sweep()?;
            println!("interrupted; everything that was started has ended");
            return Ok(ExitCode::from(130));
        }
    };
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a scenario and prints how it ended. Returns true if it passed.
async fn run_and_report(scenario: &Scenario, settings: &Settings) -> bool {
    println!("{}: {}", scenario.name, scenario.about);
    let start = Instant::now();
    let outcome = run_one(scenario, settings).await;
    let seconds = start.elapsed().as_secs_f64();
    match &outcome {
        Ok(()) => println!("ok      {:<20} {seconds:6.1} s", scenario.name),
        Err(error) => println!("FAILED  {:<20} {seconds:6.1} s  {error:#}", scenario.name),
    }
    outcome.is_ok()
}

/// The signals that interrupt a run.
struct Interruption {
    signals: [Signal; 3],
}

impl Interruption {
    fn listen() -> Result<Self> {
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Self { signals: [interrupt?, terminate?, hangup?] })
    }

    async fn wait(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

async fn run_one(scenario: &Scenario, settings: &Settings) -> Result<()> {
    let before = HostState::now()?;
    match scenario.body {
        Body::Outside(body) => body(settings.clone()).await?,
        Body::Enclosed(_) => run_enclosed(scenario.name, settings).await?,
    }
    let added = HostState::now()?.added_since(&before);
    ensure!(added.is_empty(), "left behind: {}", added.join(", "));
    Ok(())
}

async fn run_enclosed(name: &str, settings: &Settings) -> Result<()> {
    let enclosure = Enclosure::create()?;
    let outcome = wait_for_inside(&enclosure, name, settings).await;
    if outcome.is_err() {
        match keep_logs(&format!("{}-{name}", enclosure.id()), &enclosure.logs()) {
            Ok(kept) => println!("  all logs: {}", kept.display()),
            Err(error) => println!("  the logs are lost: {error:#}"),
        }
    }
    let emptied = wait_until_empty(&enclosure).await;
    let id = enclosure.id().to_owned();
    drop(enclosure);
    outcome.and(emptied)?;
    let remains = enclosure::remains(|name| name == id)?;
    ensure!(remains.is_empty(), "left behind: {}", remains.join(", "));
    Ok(())
}

async fn wait_for_inside(enclosure: &Enclosure, name: &str, settings: &Settings) -> Result<()> {
    let mut command = Command::from(enclosure.command(&settings.arguments(&[name.to_owned()]))?);
    let output = enclosure.logs().join("scenario.txt");
    if settings.jobs > NonZeroUsize::MIN {
        let file = File::create(&output)?;
        command.stdout(file.try_clone()?).stderr(file);
    }
    let mut child = command
        .kill_on_drop(true)
        .spawn()
        .context("cannot start the enclosure (setpriv and unshare from util-linux)")?;
    let allowed = std::env::var("TESSERA_E2E_WITHIN").ok().and_then(|text| text.parse().ok());
    let within = allowed.map_or(SCENARIO_TIMEOUT, Duration::from_secs);
    let status = timeout(within, child.wait()).await;
    if settings.jobs > NonZeroUsize::MIN {
        print!("{}", fs::read_to_string(&output)?);
    }
    let Ok(status) = status else {
        bail!("took longer than {} s", within.as_secs());
    };
    ensure!(status?.success(), "see above");
    Ok(())
}

async fn wait_until_empty(enclosure: &Enclosure) -> Result<()> {
    let give_up = Instant::now() + EMPTY_TIMEOUT;
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

/// Moves the logs to a directory that outlives the enclosure.
fn keep_logs(directory: &str, logs: &Path) -> Result<PathBuf> {
    let kept = std::env::temp_dir().join("tessera-e2e-logs").join(directory);
    fs::create_dir_all(kept.parent().context("no place for logs")?)?;
    fs::rename(logs, &kept).with_context(|| format!("cannot move the logs to {}", kept.display()))?;
    Ok(kept)
}
