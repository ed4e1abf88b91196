//! The GPU of the simulated driver, which programs share through a file. It has the processes and busy
//! times that a real driver reports.

use std::{
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Mutex,
};

use tessera_core::gpu::GpuUuid;
use tessera_node::gpus::{
    BusyTime, DiscoveredGpus, GpuSample, Gpus, GpusError, Incident, ProcessMemory, SampleInterval, Simulated,
};

use super::common::fixtures;

/// UUID of the simulated driver's first GPU.
const UUID: &str = "GPU-73696d75-6c61-7465-642d-636172642d30";

/// Place of the first process in the file, and the length of each, in bytes.
const PROCESSES: usize = 32;
const PROCESS: usize = 24;

pub(crate) struct SimulatedDriver {
    file: PathBuf,
    described: Simulated,
    /// Busy time of the processes in nanoseconds, as of the last sample.
    before: Mutex<BTreeMap<u32, u64>>,
}

impl SimulatedDriver {
    /// Returns the GPU in `file`. `directory` gets a description of the GPU.
    pub(crate) fn new(file: PathBuf, directory: &Path) -> Self {
        let mut host = fixtures::host(1, "simulated", 81_920);
        host["gpus"][0]["uuid"] = UUID.into();
        fs::write(directory.join("gpu.json"), host.to_string()).unwrap();
        let described = Simulated::new(directory.join("gpu.json"));
        Self { file, described, before: Mutex::default() }
    }

    /// Returns PID, bytes and busy nanoseconds of each process that has not ended.
    fn running(&self) -> Vec<(u32, u64, u64)> {
        let bytes = fs::read(&self.file).unwrap_or_default();
        let number =
            |process: &[u8], place: usize| u64::from_ne_bytes(process[place..place + 8].try_into().unwrap());
        let processes = bytes.get(PROCESSES..).unwrap_or_default().chunks_exact(PROCESS);
        processes
            .map(|process| {
                let pid = u32::from_ne_bytes(process[..4].try_into().unwrap());
                (pid, number(process, 8), number(process, 16))
            })
            .take_while(|(pid, ..)| *pid != 0)
            .filter(|(pid, ..)| Path::new(&format!("/proc/{pid}/maps")).exists())
            .collect()
    }
}

impl Gpus for SimulatedDriver {
    fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
        self.described.discover()
    }

    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError> {
        let mut sample = self.described.sample(gpu, interval)?;
        let running = self.running();
        let now: BTreeMap<u32, u64> = running.iter().map(|(pid, _, busy)| (*pid, *busy)).collect();
        let before = std::mem::replace(&mut *self.before.lock().unwrap(), now.clone());
        sample.processes = Some(self.processes(gpu)?);
        if interval.since > 0 {
            let length = (interval.now - interval.since) as f64 * 1e3;
            let part = |(pid, busy): (u32, u64)| {
                let worked = busy.saturating_sub(before.get(&pid).copied().unwrap_or(busy));
                (pid, (worked as f64 / length).min(1.0))
            };
            let parts: Vec<(u32, f64)> = now.into_iter().map(part).collect();
            let all = parts.iter().map(|(_, part)| part).sum::<f64>().min(1.0);
            let SampleInterval { since: from, now: to } = interval;
            sample.work = BusyTime { from, to, gpu: Some(all), processes: Some(parts) };
        }
        Ok(sample)
    }

    fn processes(&self, _gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
        let process = |(pid, bytes, _)| ProcessMemory { pid, bytes: Some(bytes), instance: None };
        Ok(self.running().into_iter().map(process).collect())
    }

    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError> {
        self.described.watch(report)
    }

    fn have_device_nodes(&self) -> bool {
        false
    }
}
