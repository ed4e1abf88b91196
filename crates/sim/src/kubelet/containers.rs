//! Simulated containers: a directory in `/proc` and a line of GPU usage.
//!
//! Each container uses the GPUs it was given and stays a little below the request of its pod. Containers with the
//! names [`GREEDY`], [`IDLE`] and [`BUSY`] do not.

mod program;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::{fs, io};

use serde_json::json;
use tessera_core::gpu::Gpu;
use tessera_core::grant::Hold;
use tessera_core::request::Request;
use tessera_wire::kubelet::device_plugin::ContainerAllocateResponse;

use self::program::WaitingProgram;
use super::lock;
use crate::scatter::{of_text, scatter};

/// The containers of a node.
#[derive(Debug)]
pub(super) struct Containers {
    /// File with the GPU usage: one line for each process and GPU.
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
    /// The program of a busy container with a share, which ends with this value.
    _program: Option<WaitingProgram>,
}

/// Name of a container that uses a third more than its share.
pub const GREEDY: &str = "greedy";

/// Name of a container that holds GPUs and never computes.
pub const IDLE: &str = "idle";

/// Name of a container that always has work. It uses its whole share, and with a share of the time it waits for the
/// rest.
pub const BUSY: &str = "busy";

/// Environment variable with the GPUs of a container.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// PID of the first container. Lower PIDs belong to the host.
const FIRST_PID: u32 = 1000;

impl Containers {
    /// Creates the containers of a node whose GPUs `gpu_file` describes.
    pub(super) fn new(gpu_file: &Path, proc_root: PathBuf, gpus: Vec<Gpu>) -> Self {
        let mut processes = gpu_file.to_owned().into_os_string();
        processes.push(".processes");
        let running = Mutex::new(Running { next_pid: FIRST_PID, by_pod: BTreeMap::new() });
        Self { processes: processes.into(), proc_root, gpus, running }
    }

    /// Starts a container that holds this much of each of its GPUs. `given` is the answer of the
    /// device plugins.
    pub(super) fn start(
        &self,
        pod: &str,
        container: &str,
        id: &str,
        request: Request,
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
        let lines = visible
            .iter()
            .map(|gpu| line(pid, gpu, Hold::of(request, gpu.memory), seed, container))
            .collect();
        let program = WaitingProgram::start(container, pid, request, given)?;
        running.by_pod.entry(pod.to_owned()).or_default().push(Process { pid, lines, _program: program });
        self.write(&running)
    }

    /// Ends all containers of a pod.
    pub(super) fn end(&self, pod: &str) -> io::Result<()> {
        let mut running = lock(&self.running);
        for process in running.by_pod.remove(pod).into_iter().flatten() {
            fs::remove_dir_all(self.proc_root.join(process.pid.to_string()))?;
        }
        self.write(&running)
    }

    /// Replaces the usage file atomically, because an agent may be reading it.
    fn write(&self, running: &Running) -> io::Result<()> {
        let text: String = running.by_pod.values().flatten().map(|process| process.lines.as_str()).collect();
        let temporary = self.processes.with_extension("new");
        fs::write(&temporary, text)?;
        fs::rename(temporary, &self.processes)
    }
}

fn line(pid: u32, gpu: &Gpu, hold: Hold, seed: u64, container: &str) -> String {
    let (compute_percent, memory) = match hold {
        Hold::Whole => (100, gpu.memory.0),
        Hold::Share { compute_percent, memory } => (compute_percent.0, memory.0),
    };
    // A container uses 55 to 95 % of its limit. A container without compute of its own uses 3 %.
    let part = match container {
        GREEDY => 133,
        BUSY => 100,
        _ => 55 + scatter(seed ^ u64::from(gpu.index.0)) % 41,
    };
    let busy = match compute_percent {
        _ if container == IDLE => 0,
        0 => 3,
        _ => u64::from(compute_percent) * part / 100,
    };
    let line =
        json!({ "pid": pid, "gpu": gpu.index.0, "memoryMiB": memory * part / 100, "busyPercent": busy });
    format!("{line}\n")
}

/// Returns the content of `/proc/<pid>/stat`: 52 fields. The 22nd, the start time, distinguishes
/// processes with the same PID.
fn stat(pid: u32) -> String {
    let rest = ["0"; 30].join(" ");
    let before_start = ["0"; 18].join(" ");
    format!("{pid} (python3) S {before_start} {pid} {rest}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_the_22nd_field() {
        let text = stat(1234);
        let fields: Vec<&str> = text.split_whitespace().collect();
        assert_eq!((fields[0], fields[21]), ("1234", "1234"));
    }
}
