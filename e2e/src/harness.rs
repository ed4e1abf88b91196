//! A Kubernetes of its real parts, started and driven by scenarios.

mod certificates;
mod claims;
mod cluster;
mod component;
mod effect;
mod helm;
mod image;
mod manifest;
mod node;
mod proxy;
mod scheduler;
mod shipped;

use std::{
    net::TcpListener,
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use tokio::time::sleep;

pub(crate) use self::{
    claims::{add_claim, resource, slice_of},
    cluster::{Cluster, Parts},
    component::{Component, Components, Program, tail},
    image::IMAGE,
    manifest::{pod, virtual_node},
    node::{KUBELET_ROOT, RealNode},
    scheduler::Extender,
    shipped::{deploy, repository},
};
use crate::enclosure::logs_in;

/// Interval of polling a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Tools of a scenario.
#[derive(Debug, Clone)]
pub(crate) struct Harness {
    directory: PathBuf,
    programs: PathBuf,
    components: Components,
    started: Instant,
    /// True if golden files are written again.
    pub(crate) record: bool,
}

impl Harness {
    pub(crate) fn new(directory: &Path, programs: &Path, record: bool) -> Self {
        Self {
            directory: directory.to_owned(),
            programs: programs.to_owned(),
            components: Components::default(),
            started: Instant::now(),
            record,
        }
    }

    /// Returns a directory for files of the scenario and creates it if it is missing. It is removed
    /// with the scenario.
    pub(crate) fn state(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.join("state").join(name);
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }

    /// Returns the directory of the Kubernetes programs.
    pub(crate) fn programs(&self) -> &Path {
        &self.programs
    }

    /// Returns the path of a tool: beside the Kubernetes programs, where a bundle has it, or as installed.
    pub(crate) fn tool(&self, name: &str, installed: &str) -> PathBuf {
        let bundled = self.programs.join(name);
        if bundled.exists() { bundled } else { installed.into() }
    }

    /// Returns all started components.
    pub(crate) fn components(&self) -> &Components {
        &self.components
    }

    /// Starts a program under a name. Its output goes to the log of that name.
    pub(crate) fn start(&self, name: &str, program: Program) -> Result<Component> {
        self.components.start(name, program, &logs_in(&self.directory))
    }

    /// Returns one part of the multi-call Kubernetes program.
    pub(crate) fn kubernetes(&self, part: &str) -> Program {
        Program::new(self.programs.join("kubernetes")).argument(part)
    }

    /// Returns the program under test: the one that `e2e/run` builds beside this one, or the one in
    /// `TESSERA_E2E_BINARY`, such as a release build for measurements.
    pub(crate) fn tessera(&self) -> Result<Program> {
        if let Some(named) = std::env::var_os("TESSERA_E2E_BINARY") {
            return Ok(Program::new(named));
        }
        let own = std::env::current_exe().context("cannot find the directory of this program")?;
        let beside = own.with_file_name("tessera");
        if !beside.exists() {
            bail!("{} is missing: start this through e2e/run, which builds it", beside.display());
        }
        Ok(Program::new(beside))
    }

    /// Returns a file built for containers with the release profile: the library or the simulated
    /// driver.
    pub(crate) fn for_containers(&self, file: &str) -> Result<PathBuf> {
        let own = std::env::current_exe().context("cannot find the directory of this program")?;
        let target = own.parent().and_then(Path::parent).context("no folder of built things")?;
        let path = target.join("under-test/interpose").join(file);
        if !path.exists() {
            bail!("{} is missing: start this through e2e/run, which builds it", path.display());
        }
        Ok(path)
    }

    /// Prints the progress of the scenario.
    pub(crate) fn note(&self, what: &str) {
        println!("  {:>6.1} s  {what}", self.started.elapsed().as_secs_f64());
    }

    /// Waits until `probe` returns a value. An error of `probe` means "not yet" and is reported
    /// after the timeout. Fails at once if a component has died.
    pub(crate) async fn wait_for<T>(
        &self,
        what: &str,
        within: Duration,
        mut probe: impl AsyncFnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let give_up = Instant::now() + within;
        loop {
            let outcome = probe().await;
            if let Ok(Some(value)) = outcome {
                return Ok(value);
            }
            if let Some(death) = self.components.deaths().first() {
                bail!("{death} while waiting for {what}");
            }
            if Instant::now() >= give_up {
                let waited = within.as_secs();
                return match outcome {
                    Err(error) => Err(error.context(format!("waited {waited} s for {what}"))),
                    Ok(_) => bail!("waited {waited} s for {what}"),
                };
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits for a future until the timeout. Fails at once if a component has died.
    pub(crate) async fn complete<T>(
        &self,
        what: &str,
        within: Duration,
        future: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let never = async || Ok(None::<()>);
        tokio::select! {
            outcome = future => outcome,
            Err(given_up) = self.wait_for(what, within, never) => Err(given_up),
        }
    }
}

/// The ports of [`free_port`]. They are below those that the kernel gives to connections, which would otherwise take
/// a port before its server listens.
const SERVER_PORTS: Range<u16> = 20_000..30_000;

/// Returns a free port, another one for each call. The enclosure has its own network, so no other program takes the
/// port meanwhile.
pub(crate) fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(SERVER_PORTS.start);
    loop {
        let port = NEXT.fetch_add(1, Ordering::Relaxed);
        ensure!(SERVER_PORTS.contains(&port), "no free port");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
}
