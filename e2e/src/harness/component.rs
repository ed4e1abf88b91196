//! A program that the harness runs: started, stopped, killed and restarted by name, its output in a log.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::time::{Instant, sleep};

/// How long a program may take to end when asked to.
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// What to run.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    executable: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
}

impl Program {
    pub(crate) fn new(executable: impl Into<PathBuf>) -> Self {
        Self { executable: executable.into(), arguments: Vec::new(), environment: Vec::new() }
    }

    pub(crate) fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    pub(crate) fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    pub(crate) fn environment(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }
}

/// A program under control. Dropping it kills its process group.
#[derive(Debug)]
pub(crate) struct Component {
    shared: Arc<Shared>,
}

/// A component that ended though nobody stopped it.
#[derive(Debug, Clone)]
pub(crate) struct Death {
    pub(crate) name: String,
    pub(crate) status: ExitStatus,
    pub(crate) log: PathBuf,
}

/// All components of a scenario, for asking whether one has died.
#[derive(Debug, Clone, Default)]
pub(crate) struct Components(Arc<Mutex<Vec<Arc<Shared>>>>);

#[derive(Debug)]
struct Shared {
    name: String,
    program: Program,
    log: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Running(Child),
    Stopped,
    Died(ExitStatus),
}

// === impl Components ===

impl Components {
    /// Runs a program under a name that is also its log's.
    pub(crate) fn start(&self, name: &str, program: Program, logs: &Path) -> Result<Component> {
        let log = logs.join(format!("{name}.log"));
        let child = spawn(name, &program, &log)?;
        let shared =
            Arc::new(Shared { name: name.into(), program, log, state: Mutex::new(State::Running(child)) });
        lock(&self.0).push(shared.clone());
        Ok(Component { shared })
    }

    /// Those that ended unasked.
    pub(crate) fn deaths(&self) -> Vec<Death> {
        lock(&self.0).iter().filter_map(|shared| shared.death()).collect()
    }

    /// The logs of all, in the order of their start.
    pub(crate) fn logs(&self) -> Vec<(String, PathBuf)> {
        lock(&self.0).iter().map(|shared| (shared.name.clone(), shared.log.clone())).collect()
    }
}

// === impl Component ===

impl Component {
    /// The process id; `None` unless it runs.
    pub(crate) fn id(&self) -> Option<u32> {
        match &*lock(&self.shared.state) {
            State::Running(child) => Some(child.id()),
            State::Stopped | State::Died(_) => None,
        }
    }

    /// Asks it to end, and kills it if it does not.
    pub(crate) async fn stop(&self) -> Result<()> {
        if !self.is_running() {
            return Ok(());
        }
        self.signal(Signal::TERM);
        let give_up = Instant::now() + STOP_WITHIN;
        while Instant::now() < give_up {
            if self.shared.ended_as_asked() {
                return Ok(());
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.kill()
    }

    /// Ends it at once, on purpose: it does not count as dead, unless it was before.
    pub(crate) fn kill(&self) -> Result<()> {
        if !self.is_running() {
            return Ok(());
        }
        self.signal(Signal::KILL);
        let mut state = lock(&self.shared.state);
        if let State::Running(child) = &mut *state {
            child.wait().with_context(|| format!("cannot wait for {}", self.shared.name))?;
            *state = State::Stopped;
        }
        Ok(())
    }

    /// Ends it at once as an accident would: from then on it counts as dead.
    pub(crate) fn crash(&self) {
        self.signal(Signal::KILL);
    }

    /// Runs it again, in the same way and with the same log.
    pub(crate) fn start_again(&self) -> Result<()> {
        self.start_again_with(&[])
    }

    /// The same, with more arguments this time.
    pub(crate) fn start_again_with(&self, arguments: &[String]) -> Result<()> {
        let Shared { name, program, log, state } = &*self.shared;
        let child = spawn(name, &program.clone().arguments(arguments), log)?;
        *lock(state) = State::Running(child);
        Ok(())
    }

    /// Stops it and runs it again.
    pub(crate) async fn restart(&self) -> Result<()> {
        self.stop().await?;
        self.start_again()
    }

    fn is_running(&self) -> bool {
        let died = self.shared.death().is_some();
        !died && self.id().is_some()
    }

    fn signal(&self, signal: Signal) {
        let id = self.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(group) = id {
            let _ended_already = kill_process_group(group, signal);
        }
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        let _reported_elsewhere = self.kill();
    }
}

// === impl Shared ===

impl Shared {
    /// Whether it has ended, which from now on counts as stopped.
    fn ended_as_asked(&self) -> bool {
        let mut state = lock(&self.state);
        if let State::Running(child) = &mut *state
            && let Ok(Some(_)) = child.try_wait()
        {
            *state = State::Stopped;
        }
        matches!(*state, State::Stopped)
    }

    fn death(&self) -> Option<Death> {
        let mut state = lock(&self.state);
        if let State::Running(child) = &mut *state
            && let Ok(Some(status)) = child.try_wait()
        {
            *state = State::Died(status);
        }
        match &*state {
            State::Died(status) => {
                Some(Death { name: self.name.clone(), status: *status, log: self.log.clone() })
            }
            State::Running(_) | State::Stopped => None,
        }
    }
}

// === impl Death ===

impl std::fmt::Display for Death {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.status.code(), self.status.signal()) {
            (Some(code), _) => write!(f, "{} ended by itself with status {code}", self.name),
            (None, Some(signal)) => write!(f, "{} was killed by signal {signal}", self.name),
            (None, None) => write!(f, "{} ended", self.name),
        }
    }
}

fn spawn(name: &str, program: &Program, log: &Path) -> Result<Child> {
    let output = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let errors = output.try_clone()?;
    let mut command = program.command();
    command.stdout(output).stderr(errors).process_group(0);
    command.spawn().with_context(|| format!("cannot start {name}"))
}

/// A panic elsewhere leaves these values whole: each is replaced in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last lines of a log.
pub(crate) fn tail(log: &Path, lines: usize) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
