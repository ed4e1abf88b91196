//! The processes of this machine, by `/proc`. Its simulated twin is another directory of the same form.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::PathBuf,
};

use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use tessera_wire::foreign::cgroup::{self, CgroupOwner};

/// The first process namespace of a kernel has this number, always.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// `/proc`, or what stands for it.
#[derive(Clone, Debug)]
pub struct Processes {
    root: PathBuf,
}

/// Who a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessInfo {
    /// When it started, in ticks since the machine did: with its number, this names it for all time.
    pub started: u64,
    /// Its name, as it chose itself: anything may stand there.
    pub command: String,
    /// Whose it is.
    pub owner: CgroupOwner,
}

impl Processes {
    /// Those below `root`.
    #[must_use]
    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// When the process of this number started; `None` where there is none.
    #[must_use]
    pub fn started(&self, pid: u32) -> Option<u64> {
        let stat = fs::read(self.root.join(format!("{pid}/stat"))).ok()?;
        started(&String::from_utf8_lossy(&stat))
    }

    /// Who the process of this number is; `None` where there is none.
    #[must_use]
    pub fn read(&self, pid: u32) -> Option<ProcessInfo> {
        let file = |name: &str| {
            let bytes = fs::read(self.root.join(format!("{pid}/{name}"))).ok()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        let process = ProcessInfo {
            started: started(&file("stat")?)?,
            command: file("comm").unwrap_or_default().trim_end_matches('\n').to_owned(),
            owner: cgroup::owner(&file("cgroup")?),
        };
        // What was read of two processes that had the number one after the other belongs to neither.
        (self.started(pid) == Some(process.started)).then_some(process)
    }

    /// Ends the process of this number, if it is the one that started then. One that is gone is no error.
    pub fn kill(&self, pid: u32, started: u64) -> io::Result<()> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let process = match pidfd_open(number, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(Errno::SRCH) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        // The handle stands for one process, whatever becomes of its number.
        if self.started(pid) != Some(started) {
            return Ok(());
        }
        match pidfd_send_signal(process, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The number a process has in its own container; `None` where there is none.
    #[must_use]
    pub fn own_number(&self, pid: u32) -> Option<u32> {
        let status = fs::read_to_string(self.root.join(format!("{pid}/status"))).ok()?;
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        numbers.split_whitespace().last()?.parse().ok()
    }

    /// Whether the machine itself is seen, and not only a process namespace of a container: only there do the driver's numbers mean
    /// the same processes. `None` where nothing tells.
    #[must_use]
    pub fn see_the_machine(&self) -> Option<bool> {
        if let Ok(namespace) = fs::read_link(self.root.join("self/ns/pid"))
            && namespace.as_os_str() == FIRST_NAMESPACE
        {
            return Some(true);
        }
        // The kernel's own process has this number there and nowhere else.
        let second = fs::read_to_string(self.root.join("2/comm")).ok();
        if second.is_some_and(|name| name.trim_end() == "kthreadd") {
            return Some(true);
        }
        self.root.join("self/ns/pid").is_symlink().then_some(false)
    }
}

/// Remembers who processes are, for as long as they are asked for: little is read again, and whoever has just ended is still known.
#[derive(Debug)]
pub struct ProcessCache {
    processes: Processes,
    known: HashMap<u32, ProcessInfo>,
}

impl ProcessCache {
    /// Knows nobody yet.
    #[must_use]
    pub fn of(processes: Processes) -> Self {
        Self { processes, known: HashMap::new() }
    }

    /// Who these are. A number that was given to another process since tells of the new one; one whose process cannot be read
    /// any more, of the one it last was.
    pub fn who(&mut self, pids: impl IntoIterator<Item = u32>) -> BTreeMap<u32, ProcessInfo> {
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

/// The 22nd field, counted behind the name: that may hold blanks and parentheses.
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
    fn a_process_is_read_whatever_its_name() {
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
    fn a_number_given_again_is_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let own = directory.path().join("7");
        let write = |command: &str, started| {
            fs::create_dir_all(&own).unwrap();
            fs::write(own.join("stat"), stat(command, started)).unwrap();
            fs::write(own.join("comm"), command).unwrap();
            fs::write(own.join("cgroup"), "0::/\n").unwrap();
        };
        write("first", 1);
        let mut memory = ProcessCache::of(Processes::at(directory.path().into()));
        let mut command = |pids: &[u32]| {
            let who = memory.who(pids.iter().copied());
            who.get(&7).map(|process| process.command.clone())
        };
        assert_eq!(command(&[7, 7, 8]).as_deref(), Some("first"));
        write("renamed itself", 1);
        assert_eq!(command(&[7]).as_deref(), Some("first"), "the same process is not read again");
        fs::remove_dir_all(&own).unwrap();
        assert_eq!(command(&[7]).as_deref(), Some("first"), "it has just ended");
        write("second", 2);
        assert_eq!(command(&[7]).as_deref(), Some("second"));
        assert_eq!(command(&[]), None);
        fs::remove_dir_all(&own).unwrap();
        assert_eq!(command(&[7]), None, "nobody asked for it meanwhile");
    }

    #[test]
    fn a_process_has_another_number_in_its_container() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("4711")).unwrap();
        let processes = Processes::at(directory.path().into());
        for (status, number) in [
            ("Name:\tx\nNSpid:\t4711\t7\t1\n", Some(1)),
            ("NSpid:\t4711\n", Some(4711)),
            ("Name:\tx\n", None),
        ] {
            fs::write(directory.path().join("4711/status"), status).unwrap();
            assert_eq!(processes.own_number(4711), number);
        }
    }

    #[test]
    fn what_is_not_there_is_none() {
        let processes = Processes::at("/nowhere".into());
        assert_eq!(
            (processes.read(1), processes.started(1), processes.see_the_machine()),
            (None, None, None)
        );
    }

    #[test]
    fn only_the_process_that_is_meant_is_killed() {
        let processes = Processes::at("/proc".into());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let started = processes.started(child.id()).unwrap();
        processes.kill(child.id(), started + 1).unwrap();
        assert!(child.try_wait().unwrap().is_none(), "another process once had this number");
        processes.kill(child.id(), started).unwrap();
        assert!(!child.wait().unwrap().success());
        processes.kill(child.id(), started).unwrap();
    }

    #[test]
    fn this_process_is_found() {
        let own = Processes::at("/proc".into()).read(std::process::id()).unwrap();
        assert!(own.started > 0 && !own.command.is_empty());
    }
}
