//! A program that the harness starts, stops, kills and restarts by name, with its output in a log.

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

/// Time in which a program must end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A program with its arguments and environment.
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

    /// Returns the program as a container of a pod runs it: the host has the pod's name, and the program is started
    /// again when it ends by itself. The shell ends with the program when the process group gets a signal.
    pub(crate) fn in_pod(self, pod: &str) -> Self {
        let script = r#"echo "$0" > /proc/sys/kernel/hostname && while :; do "$@"; sleep 0.2; done"#;
        let arguments = ["--uts", "sh", "-c", script, pod].map(OsString::from).into_iter();
        Self {
            executable: "unshare".into(),
            arguments: arguments.chain([self.executable.into_os_string()]).chain(self.arguments).collect(),
            environment: self.environment,
        }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.args(&self.arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }
}

/// A running program. Dropping it kills its process group.
#[derive(Debug)]
pub(crate) struct Component {
    shared: Arc<Shared>,
}

/// A component that ended although the scenario did not stop it.
#[derive(Debug, Clone)]
pub(crate) struct Death {
    pub(crate) name: String,
    pub(crate) status: ExitStatus,
    pub(crate) log: PathBuf,
}

/// All components of a scenario, used to detect components that died.
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

impl Components {
    /// Starts a program. Its name is also the name of its log.
    pub(crate) fn start(&self, name: &str, program: Program, logs: &Path) -> Result<Component> {
        let log = logs.join(format!("{name}.log"));
        let child = spawn(name, &program, &log)?;
        let shared =
            Arc::new(Shared { name: name.into(), program, log, state: Mutex::new(State::Running(child)) });
        lock(&self.0).push(shared.clone());
        Ok(Component { shared })
    }

    /// Returns the components that ended although the scenario did not stop them.
    pub(crate) fn deaths(&self) -> Vec<Death> {
        lock(&self.0).iter().filter_map(|shared| shared.death()).collect()
    }

    /// Returns names and logs of all components in the order of their start.
    pub(crate) fn logs(&self) -> Vec<(String, PathBuf)> {
        lock(&self.0).iter().map(|shared| (shared.name.clone(), shared.log.clone())).collect()
    }
}

impl Component {
    /// Returns the PID, or `None` if the program does not run.
    pub(crate) fn id(&self) -> Option<u32> {
        match &*lock(&self.shared.state) {
            State::Running(child) => Some(child.id()),
            State::Stopped | State::Died(_) => None,
        }
    }

    /// Sends SIGTERM, and kills the program if it does not end in time.
    pub(crate) async fn stop(&self) -> Result<()> {
        if !self.is_running() {
            return Ok(());
        }
        self.signal(Signal::TERM);
        let give_up = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < give_up {
            if self.shared.ended_as_asked() {
                return Ok(());
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.kill()
    }

    /// Kills the program on purpose: it does not count as dead.
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

    /// Stops the threads of the program until [`Self::resume`], like a machine without time for it.
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets a paused program run again.
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills the program as an accident would: it counts as dead from then on.
    pub(crate) fn crash(&self) {
        self.signal(Signal::KILL);
    }

    /// Starts the program again with the same arguments and log.
    pub(crate) fn start_again(&self) -> Result<()> {
        self.start_again_with(&[])
    }

    /// Starts the program again with additional arguments.
    pub(crate) fn start_again_with(&self, arguments: &[String]) -> Result<()> {
        let Shared { name, program, log, state } = &*self.shared;
        let child = spawn(name, &program.clone().arguments(arguments), log)?;
        *lock(state) = State::Running(child);
        Ok(())
    }

    /// Stops the program and starts it again.
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

impl Shared {
    /// Returns whether the program has ended, and counts it as stopped from now on.
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

/// Locks a mutex. A panic elsewhere leaves the value valid, because it is replaced in one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the last lines of a log.
pub(crate) fn tail(log: &Path, lines: usize) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
