//! Processes of this host, read from `/proc`. Tests use another directory of the same form.

mod mapped_files;

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use tessera_wire::foreign::cgroup::{self, CgroupOwner};

pub use self::mapped_files::{FileId, Mapping};

/// Name of the initial PID namespace, which is the same on every kernel.
const INITIAL_NAMESPACE: &str = "pid:[4026531836]";

/// Reads processes from `/proc` or a directory of the same form.
#[derive(Clone, Debug)]
pub struct Processes {
    root: PathBuf,
}

/// State of a process that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// The process runs or sleeps.
    Alive,
    /// A signal or a debugger has stopped the process, or its cgroup is frozen.
    Stopped,
}

/// A signal that the process cannot handle or block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSignal {
    /// Ends the process.
    Kill,
    /// Stops all threads of the process.
    Stop,
    /// Lets a stopped process run again.
    Continue,
}

/// Identity of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Start time in ticks since the host booted. Together with the PID it identifies the process.
    pub started: u64,
    /// Command name, which the process can choose freely.
    pub command: String,
    /// Pod, container or host that owns the process.
    pub owner: CgroupOwner,
}

impl Processes {
    /// Returns a reader for the directory `root`.
    #[must_use]
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// Returns the start time of a process, or `None` if it does not exist.
    #[must_use]
    pub fn started(&self, pid: u32) -> Option<u64> {
        started(&text(&self.root.join(format!("{pid}/stat")))?)
    }

    /// Returns the state of the process with this PID and start time, or `None` if it has ended.
    #[must_use]
    pub fn run_state(&self, pid: u32, started: u64) -> Option<RunState> {
        let own = self.root.join(pid.to_string());
        let state_of = |folder: &Path| run_state(&text(&folder.join("stat"))?);
        if self.started(pid) != Some(started) {
            return None;
        }
        // The first thread of a process may end before the others, and is a zombie then.
        let state = state_of(&own).or_else(|| {
            let threads = fs::read_dir(own.join("task")).ok()?;
            threads.flatten().find_map(|thread| state_of(&thread.path()))
        });
        match state {
            Some(RunState::Alive) if is_halted(&own) => Some(RunState::Stopped),
            state => state,
        }
    }

    /// Returns the identity of a process, or `None` if it does not exist.
    #[must_use]
    pub fn read(&self, pid: u32) -> Option<ProcessInfo> {
        let file = |name: &str| text(&self.root.join(format!("{pid}/{name}")));
        let process = ProcessInfo {
            started: started(&file("stat")?)?,
            command: file("comm").unwrap_or_default().trim_end_matches('\n').to_owned(),
            owner: cgroup::owner(&file("cgroup")?),
        };
        // If the PID was reused while its files were read, the values belong to two processes.
        (self.started(pid) == Some(process.started)).then_some(process)
    }

    /// Sends a signal to the process with this PID and start time. Succeeds if the process no longer
    /// exists.
    pub fn signal(&self, pid: u32, started: u64, signal: ProcessSignal) -> io::Result<()> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let process = match pidfd_open(number, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(Errno::SRCH) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        // The file descriptor refers to one process, even if its PID is reused.
        if self.started(pid) != Some(started) {
            return Ok(());
        }
        let signal = match signal {
            ProcessSignal::Kill => Signal::KILL,
            ProcessSignal::Stop => Signal::STOP,
            ProcessSignal::Continue => Signal::CONT,
        };
        match pidfd_send_signal(process, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the PID of a process in its own PID namespace, or `None` if the process does not
    /// exist.
    #[must_use]
    pub fn pid_in_namespace(&self, pid: u32) -> Option<u32> {
        let status = text(&self.root.join(format!("{pid}/status")))?;
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        pids.split_whitespace().last()?.parse().ok()
    }

    /// Returns whether this is the host's own PID namespace, in which the driver reports PIDs.
    /// Returns `None` if that cannot be determined.
    #[must_use]
    pub fn is_host_namespace(&self) -> Option<bool> {
        if let Ok(namespace) = fs::read_link(self.root.join("self/ns/pid"))
            && namespace.as_os_str() == INITIAL_NAMESPACE
        {
            return Some(true);
        }
        // The kernel thread `kthreadd` has PID 2 only in the host's namespace.
        let second = fs::read_to_string(self.root.join("2/comm")).ok();
        if second.is_some_and(|name| name.trim_end() == "kthreadd") {
            return Some(true);
        }
        self.root.join("self/ns/pid").is_symlink().then_some(false)
    }
}

/// Caches the identities of processes while they are looked up repeatedly. A process that has just
/// ended is still known.
#[derive(Debug)]
pub struct ProcessCache {
    processes: Processes,
    known: HashMap<u32, ProcessInfo>,
}

impl ProcessCache {
    /// Returns an empty cache.
    #[must_use]
    pub fn new(processes: Processes) -> Self {
        Self { processes, known: HashMap::new() }
    }

    /// Returns the identities of these processes and forgets all others. A reused PID returns the
    /// new process. A process that cannot be read any more returns its last identity.
    pub fn lookup(&mut self, pids: impl IntoIterator<Item = u32>) -> BTreeMap<u32, ProcessInfo> {
        let mut before = std::mem::take(&mut self.known);
        for pid in pids {
            if self.known.contains_key(&pid) {
                continue;
            }
            let known = before.remove(&pid);
            let now = match (self.processes.started(pid), known) {
                (Some(started), Some(known)) if known.started == started => Some(known),
                (Some(_), _) => self.processes.read(pid),
                (None, known) => known,
            };
            self.known.extend(now.map(|process| (pid, process)));
        }
        self.known.iter().map(|(pid, process)| (*pid, process.clone())).collect()
    }
}

/// Returns the text of a file, or `None` if it cannot be read. A process may have any bytes in its name.
fn text(file: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read(file).ok()?).into_owned())
}

/// Returns the state in field 3 of `/proc/PID/stat`, or `None` of a thread that has ended.
fn run_state(stat: &str) -> Option<RunState> {
    match state_letter(stat)? {
        "Z" | "X" | "x" => None,
        "T" => Some(RunState::Stopped),
        _ => Some(RunState::Alive),
    }
}

fn state_letter(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().next()
}

/// Kernel functions in which a thread of a frozen cgroup sleeps. The first one contains the second one if the compiler
/// has inlined it; the last one is that of the first version of cgroups.
const FREEZER_FUNCTIONS: [&str; 3] = ["get_signal", "do_freezer_trap", "__refrigerator"];

/// Returns whether a debugger has stopped or the freezer has frozen all threads of a process that have not ended. A
/// frozen thread looks asleep in `/proc/PID/stat`, and the files of its cgroup may not be mounted here, so the function
/// in which it sleeps tells. Some threads alone do not count: the others may go on.
fn is_halted(own: &Path) -> bool {
    let state =
        |folder: &Path| text(&folder.join("stat")).and_then(|stat| state_letter(&stat).map(str::to_owned));
    let is_frozen = |folder: &Path| {
        text(&folder.join("wchan")).is_some_and(|function| FREEZER_FUNCTIONS.contains(&function.trim_end()))
    };
    let is_halted = |folder: &Path| match state(folder).as_deref() {
        Some("t") => true,
        Some("Z" | "X" | "x") | None => folder != own,
        Some(_) => is_frozen(folder),
    };
    let mut threads =
        fs::read_dir(own.join("task")).into_iter().flatten().flatten().map(|thread| thread.path());
    is_halted(own) && threads.all(|thread| is_halted(&thread))
}

/// Returns field 22 of `/proc/PID/stat`. It counts from the end of the command name, which may
/// contain blanks and parentheses.
fn started(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(command: &str, started: u64) -> String {
        format!(
            "7 ({command}) S 1 7 7 0 -1 4194560 1 0 0 0 3 4 0 0 20 0 1 0 {started} 1000 50 18446744073709551615\n"
        )
    }

    #[test]
    fn reads_a_process_with_any_command_name() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("7");
        fs::create_dir(&own).unwrap();
        for command in ["python", "a) S 1 (b", "\"\\", "", "with blank"] {
            fs::write(own.join("stat"), stat(command, 4711)).unwrap();
            fs::write(own.join("comm"), format!("{command}\n")).unwrap();
            fs::write(own.join("cgroup"), "0::/system.slice/x.service\n").unwrap();
            let read = Processes::at(directory.path().into()).read(7).unwrap();
            assert_eq!(
                read,
                ProcessInfo { started: 4711, command: command.into(), owner: CgroupOwner::Host }
            );
        }
        fs::write(own.join("comm"), b"\xff\xfe\n").unwrap();
        assert_eq!(Processes::at(directory.path().into()).read(7).unwrap().command, "\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("7");
        let write = |command: &str, started| {
            fs::create_dir_all(&own).unwrap();
            fs::write(own.join("stat"), stat(command, started)).unwrap();
            fs::write(own.join("comm"), command).unwrap();
            fs::write(own.join("cgroup"), "0::/\n").unwrap();
        };
        write("first", 1);
        let mut cache = ProcessCache::new(Processes::at(directory.path().into()));
        let mut command = |pids: &[u32]| {
            let found = cache.lookup(pids.iter().copied());
            found.get(&7).map(|process| process.command.clone())
        };
        assert_eq!(command(&[7, 7, 8]).as_deref(), Some("first"));
        write("renamed itself", 1);
        assert_eq!(command(&[7]).as_deref(), Some("first"), "the same process is not read again");
        fs::remove_dir_all(&own).unwrap();
        assert_eq!(command(&[7]).as_deref(), Some("first"), "the process has just ended");
        write("second", 2);
        assert_eq!(command(&[7]).as_deref(), Some("second"));
        assert_eq!(command(&[]), None);
        fs::remove_dir_all(&own).unwrap();
        assert_eq!(command(&[7]), None, "the cache forgot the process");
    }

    #[test]
    fn returns_the_pid_inside_the_container() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("4711")).unwrap();
        let processes = Processes::at(directory.path().into());
        for (status, number) in [
            ("Name:\tx\nNSpid:\t4711\t7\t1\n", Some(1)),
            ("NSpid:\t4711\n", Some(4711)),
            ("Name:\tx\n", None),
        ] {
            fs::write(directory.path().join("4711/status"), status).unwrap();
            assert_eq!(processes.pid_in_namespace(4711), number);
        }
    }

    #[test]
    fn a_process_lives_as_long_as_one_of_its_threads() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("7");
        fs::create_dir_all(own.join("task/7")).unwrap();
        fs::create_dir_all(own.join("task/8")).unwrap();
        let processes = Processes::at(directory.path().into());
        let write = |path: &str, state: &str| {
            fs::write(own.join(path), stat("x", 4711).replace(") S", &format!(") {state}"))).unwrap();
        };
        for (first, other, state) in [
            ("S", "S", Some(RunState::Alive)),
            ("T", "T", Some(RunState::Stopped)),
            ("t", "t", Some(RunState::Stopped)),
            ("t", "R", Some(RunState::Alive)),
            ("Z", "R", Some(RunState::Alive)),
            ("Z", "Z", None),
        ] {
            write("stat", first);
            write("task/7/stat", first);
            write("task/8/stat", other);
            assert_eq!(processes.run_state(7, 4711), state, "{first} {other}");
            assert_eq!(processes.run_state(7, 4712), None, "another process of this number");
        }
    }

    /// A process is frozen if all of its threads are: a program may put some threads into a cgroup of their own.
    #[test]
    fn a_frozen_process_is_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("7");
        let processes = Processes::at(directory.path().into());
        for thread in ["task/7", "task/8"] {
            fs::create_dir_all(own.join(thread)).unwrap();
            fs::write(own.join(thread).join("stat"), stat("x", 4711)).unwrap();
        }
        fs::write(own.join("stat"), stat("x", 4711)).unwrap();
        assert_eq!(processes.run_state(7, 4711), Some(RunState::Alive), "the kernel shows no functions");
        for (first, other, state) in [
            ("get_signal", "get_signal", RunState::Stopped),
            ("do_freezer_trap", "do_freezer_trap", RunState::Stopped),
            ("get_signal", "futex_wait_queue", RunState::Alive),
            ("futex_wait_queue", "get_signal", RunState::Alive),
            ("0", "0", RunState::Alive),
        ] {
            for (path, function) in [("wchan", first), ("task/7/wchan", first), ("task/8/wchan", other)] {
                fs::write(own.join(path), function).unwrap();
            }
            assert_eq!(processes.run_state(7, 4711), Some(state), "{first} {other}");
        }
    }

    #[test]
    fn returns_none_for_missing_files() {
        let processes = Processes::at("/nowhere".into());
        assert_eq!(
            (processes.read(1), processes.started(1), processes.is_host_namespace()),
            (None, None, None)
        );
    }

    #[test]
    fn kills_only_the_process_with_the_given_start_time() {
        let processes = Processes::at("/proc".into());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let started = processes.started(child.id()).unwrap();
        let kill = |started| processes.signal(child.id(), started, ProcessSignal::Kill).unwrap();
        kill(started + 1);
        assert!(processes.started(child.id()).is_some(), "the start time does not match");
        kill(started);
        let pid = child.id();
        assert!(!child.wait().unwrap().success());
        processes.signal(pid, started, ProcessSignal::Kill).unwrap();
    }

    #[test]
    fn reads_this_process() {
        let own = Processes::at("/proc".into()).read(std::process::id()).unwrap();
        assert!(own.started > 0 && !own.command.is_empty());
    }
}
