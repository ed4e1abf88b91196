//! Containers that are no more than what can be seen of them from outside: a process in `/proc`, its use of the cards.
//!
//! Each reads the limits it was handed, as the library in a real one does, and stays a little below them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};

use serde_json::json;
use tessera_core::grant::Hold;
use tessera_wire::kubelet::device_plugin::ContainerAllocateResponse;
use tessera_wire::limits::{self, CardLimits};

use super::lock;
use crate::scatter::{of_text, scatter};

/// The containers of a node.
#[derive(Debug)]
pub(super) struct Containers {
    /// What uses the cards: a line for each process and card.
    processes: PathBuf,
    proc_root: PathBuf,
    /// MiB of each card.
    memory: Vec<u64>,
    running: Mutex<Running>,
}

#[derive(Debug)]
struct Running {
    next_pid: u32,
    by_pod: BTreeMap<String, Vec<Process>>,
}

#[derive(Debug)]
struct Process {
    pid: u32,
    lines: String,
}

/// The first process; below it are those of the machine itself.
const FIRST_PID: u32 = 1000;

impl Containers {
    /// On cards that a file describes, each with so much memory.
    pub(super) fn new(gpus: &Path, proc_root: PathBuf, memory: Vec<u64>) -> Self {
        let mut processes = gpus.to_owned().into_os_string();
        processes.push(".processes");
        let running = Mutex::new(Running { next_pid: FIRST_PID, by_pod: BTreeMap::new() });
        Self { processes: processes.into(), proc_root, memory, running }
    }

    /// Starts one that was handed this.
    pub(super) fn start(
        &self,
        pod: &str,
        container: &str,
        id: &str,
        given: &ContainerAllocateResponse,
    ) -> io::Result<()> {
        let mut mounts = given.mounts.iter();
        let granted = mounts.find(|mount| mount.container_path == limits::DIRECTORY_IN_CONTAINER);
        let Some(granted) = granted else { return Ok(()) };
        let text = fs::read_to_string(Path::new(&granted.host_path).join(limits::FILE))?;
        let limits = limits::parse(&text).map_err(io::Error::other)?;
        let mut running = lock(&self.running);
        let pid = running.next_pid;
        running.next_pid += 1;
        let directory = self.proc_root.join(pid.to_string());
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("cgroup"), format!("0::/kubepods/burstable/pod{pod}/{id}\n"))?;
        fs::write(directory.join("comm"), "python3\n")?;
        fs::write(directory.join("stat"), stat(pid))?;
        let seed = of_text(pod) ^ of_text(container);
        let lines = limits.cards.iter().map(|card| self.line(pid, card, seed)).collect();
        running.by_pod.entry(pod.to_owned()).or_default().push(Process { pid, lines });
        self.write(&running)
    }

    /// Ends all of a pod.
    pub(super) fn end(&self, pod: &str) -> io::Result<()> {
        let mut running = lock(&self.running);
        for process in running.by_pod.remove(pod).into_iter().flatten() {
            fs::remove_dir_all(self.proc_root.join(process.pid.to_string()))?;
        }
        self.write(&running)
    }

    /// Whole or not at all: an agent may be reading it.
    fn write(&self, running: &Running) -> io::Result<()> {
        let text: String = running.by_pod.values().flatten().map(|process| process.lines.as_str()).collect();
        let temporary = self.processes.with_extension("new");
        fs::write(&temporary, text)?;
        fs::rename(temporary, &self.processes)
    }

    fn line(&self, pid: u32, card: &CardLimits, seed: u64) -> String {
        let (cores, memory) = match card.hold {
            Hold::Whole => (100, self.memory.get(card.index.position()).copied().unwrap_or_default()),
            Hold::Part { cores, memory } => (cores.0, memory.0),
        };
        // Between 55 and 95 % of what it may have; a container without compute of its own idles along.
        let part = 55 + scatter(seed ^ u64::from(card.index.0)) % 41;
        let busy = if cores == 0 { 3 } else { u64::from(cores) * part / 100 };
        let line =
            json!({ "pid": pid, "gpu": card.index.0, "memoryMiB": memory * part / 100, "busyPercent": busy });
        format!("{line}\n")
    }
}

/// `/proc/<pid>/stat`: 52 fields, of which the 22nd, the start, tells processes of one number apart.
fn stat(pid: u32) -> String {
    let rest = ["0"; 30].join(" ");
    let before_start = ["0"; 18].join(" ");
    format!("{pid} (python3) S {before_start} {pid} {rest}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_is_the_twenty_second_field() {
        let text = stat(1234);
        let fields: Vec<&str> = text.split_whitespace().collect();
        assert_eq!((fields[0], fields[21]), ("1234", "1234"));
    }
}
