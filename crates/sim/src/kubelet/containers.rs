//! Containers that are no more than what can be seen of them from outside: a process in `/proc`, its use of the GPUs.
//!
//! Each uses the GPUs it was given, and stays a little below what its pod asked for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};

use serde_json::json;
use tessera_core::gpu::Gpu;
use tessera_core::grant::Hold;
use tessera_wire::kubelet::device_plugin::ContainerAllocateResponse;

use super::lock;
use crate::scatter::{of_text, scatter};

/// The containers of a node.
#[derive(Debug)]
pub(super) struct Containers {
    /// What uses the GPUs: a line for each process and GPU.
    processes: PathBuf,
    proc_root: PathBuf,
    gpus: Vec<Gpu>,
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

/// How a container learns which GPUs it has.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// The first process; below it are those of the machine itself.
const FIRST_PID: u32 = 1000;

impl Containers {
    /// On these GPUs, which a file describes.
    pub(super) fn new(gpu_file: &Path, proc_root: PathBuf, gpus: Vec<Gpu>) -> Self {
        let mut processes = gpu_file.to_owned().into_os_string();
        processes.push(".processes");
        let running = Mutex::new(Running { next_pid: FIRST_PID, by_pod: BTreeMap::new() });
        Self { processes: processes.into(), proc_root, gpus, running }
    }

    /// Starts one that asked for so much of each of its GPUs, and was handed this.
    pub(super) fn start(
        &self,
        pod: &str,
        container: &str,
        id: &str,
        hold: Hold,
        given: &ContainerAllocateResponse,
    ) -> io::Result<()> {
        let visible = given.envs.get(VISIBLE).map(String::as_str).unwrap_or_default();
        let visible: Vec<&Gpu> =
            self.gpus.iter().filter(|gpu| visible.split(',').any(|uuid| *uuid == *gpu.uuid.0)).collect();
        let mut running = lock(&self.running);
        let pid = running.next_pid;
        running.next_pid += 1;
        let directory = self.proc_root.join(pid.to_string());
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("cgroup"), format!("0::/kubepods/burstable/pod{pod}/{id}\n"))?;
        fs::write(directory.join("comm"), "python3\n")?;
        fs::write(directory.join("stat"), stat(pid))?;
        let seed = of_text(pod) ^ of_text(container);
        let lines = visible.iter().map(|gpu| line(pid, gpu, hold, seed)).collect();
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
}

fn line(pid: u32, gpu: &Gpu, hold: Hold, seed: u64) -> String {
    let (compute_percent, memory) = match hold {
        Hold::Whole => (100, gpu.memory.0),
        Hold::Share { compute_percent, memory } => (compute_percent.0, memory.0),
    };
    // Between 55 and 95 % of what it may have; a container without compute of its own idles along.
    let part = 55 + scatter(seed ^ u64::from(gpu.index.0)) % 41;
    let busy = if compute_percent == 0 { 3 } else { u64::from(compute_percent) * part / 100 };
    let line =
        json!({ "pid": pid, "gpu": gpu.index.0, "memoryMiB": memory * part / 100, "busyPercent": busy });
    format!("{line}\n")
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
