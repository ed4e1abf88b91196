//! What simulated GPUs do: the processes of a file, turned into what a driver would tell.

use std::collections::BTreeMap;

use serde::Deserialize;
use tessera_core::gpu::Gpu;

use crate::gpus::{
    BusyTime, GpuMemory, GpuSample, ProcessMemory, ProfilingCounters, RemappedRows, SampleInterval, Sensors,
};

/// Memory the driver needs for a GPU that is in use, and for itself in any case.
const CONTEXTS: u64 = 64 << 20;
const RESERVED: u64 = 512 << 20;

/// What a GPU draws when idle, and at its limit.
const IDLE_WATTS: f64 = 60.0;
const FULL_WATTS: f64 = 400.0;

/// A line of the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Process {
    /// Its number.
    pid: u32,
    /// The GPU it is on.
    gpu: u8,
    /// What it holds; without it the driver does not tell.
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<u64>,
    /// How much of the time its kernels run.
    #[serde(default)]
    busy_percent: u32,
}

/// When a GPU was last looked at, and the millijoules it had used by then.
pub(super) type Meters = BTreeMap<u8, (u64, f64)>;

/// The lines that can be read; half a line, as somebody is just writing it, is nothing yet.
pub(super) fn parse(text: &str) -> Vec<Process> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// What a look at `gpu` tells.
pub(super) fn sample(gpu: &Gpu, all: &[Process], window: SampleInterval, meters: &mut Meters) -> GpuSample {
    let on_gpu: Vec<&Process> = all.iter().filter(|process| process.gpu == gpu.index.0).collect();
    let total = gpu.memory.0 << 20;
    let held: u64 = on_gpu.iter().filter_map(|process| process.memory_mib).map(|mib| mib << 20).sum();
    let used = if on_gpu.is_empty() { 0 } else { held + CONTEXTS };
    let memory = GpuMemory {
        total,
        used,
        free: total.saturating_sub(used + RESERVED),
        reserved: RESERVED.min(total.saturating_sub(used)),
    };
    let busy = on_gpu.iter().map(|process| process.busy_percent).sum::<u32>().min(100);
    let samples = [(window.now, f64::from(busy))];
    let each: Vec<(u32, u64, u32)> = on_gpu
        .iter()
        .filter(|process| process.busy_percent > 0)
        .map(|process| (process.pid, window.now, process.busy_percent))
        .collect();
    let watts = IDLE_WATTS + (FULL_WATTS - IDLE_WATTS) * f64::from(busy) / 100.0;
    let (last, spent) = meters.entry(gpu.index.0).or_insert((window.now, 0.0));
    let passed = u32::try_from(window.now.saturating_sub(*last)).unwrap_or(u32::MAX);
    *spent += watts * f64::from(passed) / 1e3;
    *last = window.now;
    let mut processes: Vec<ProcessMemory> = on_gpu
        .iter()
        .map(|process| ProcessMemory {
            pid: process.pid,
            bytes: process.memory_mib.map(|mib| mib << 20),
            instance: None,
        })
        .collect();
    processes.sort_by_key(|process| process.pid);
    GpuSample {
        memory: Some(memory),
        processes: Some(processes),
        work: BusyTime::of(window, Some(&samples), None, Some(&each)),
        energy: Some(rounded(*spent)),
        sensors: Sensors {
            utilization: Some(busy),
            memory_utilization: Some(busy / 2),
            encoder: Some(0),
            decoder: Some(0),
            temperature: Some(35 + busy / 2),
            memory_temperature: Some(40 + busy / 2),
            power: u32::try_from(rounded(watts * 1e3)).ok(),
            sm_clock: Some(if busy > 0 { 1410 } else { 210 }),
            memory_clock: Some(1593),
            pcie_replays: Some(0),
            uncorrected_errors: Some(0),
            uncorrected_errors_ever: Some(0),
            corrected_errors: Some(0),
            corrected_errors_ever: Some(0),
            clock_events: Some(u64::from(busy == 0)),
            remapped_rows: Some(RemappedRows::default()),
            nvlink: Some(0),
            profile: Some(profile(f64::from(busy) / 100.0)),
        },
        instances: Vec::new(),
    }
}

/// Half of the work goes to tensor cores, and a quarter of the bandwidth.
fn profile(busy: f64) -> ProfilingCounters {
    ProfilingCounters {
        graphics: Some(busy),
        sm: Some(busy * 0.75),
        occupancy: Some(busy / 2.0),
        tensor: Some(busy / 2.0),
        fp64: Some(0.0),
        fp32: Some(busy / 8.0),
        fp16: Some(0.0),
        dram: Some(busy / 4.0),
        pcie_sent: Some(busy * 1e9),
        pcie_received: Some(busy * 2e9),
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "never negative, and a cast from float saturates"
)]
fn rounded(value: f64) -> u64 {
    value.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_core::{gpu::Health, units::GpuIndex, units::MiB};

    fn card(index: u8) -> Gpu {
        Gpu {
            index: GpuIndex(index),
            uuid: "GPU-a".into(),
            minor: 0,
            model: "m".into(),
            memory: MiB(8192),
            numa: None,
            health: Health::Healthy,
        }
    }

    #[test]
    fn lines_become_processes_and_broken_ones_nothing() {
        let text = r#"{"pid":123,"gpu":0,"memoryMiB":1024,"busyPercent":40}
{"pid":124,"gpu":1}
{"pid":125,"gpu":0,"memo"#;
        let all = parse(text);
        assert_eq!(all.len(), 2);
        let mut meters = Meters::new();
        let look =
            |since, now, meters: &mut Meters| sample(&card(0), &all, SampleInterval { since, now }, meters);
        look(0, 1_000_000, &mut meters);
        let seen = look(1_000_000, 3_000_000, &mut meters);
        assert_eq!(
            seen.processes,
            Some(vec![ProcessMemory { pid: 123, bytes: Some(1 << 30), instance: None }])
        );
        assert_eq!(seen.memory.map(|memory| memory.used), Some((1 << 30) + CONTEXTS));
        assert_eq!((seen.work.card, seen.work.seconds()), (Some(0.4), 2.0));
        assert_eq!(seen.energy, Some(2 * (60_000 + 136_000)));
    }

    #[test]
    fn an_idle_gpu_uses_nothing_and_a_process_may_hide_what_it_holds() {
        let mut meters = Meters::new();
        let idle = sample(&card(3), &[], SampleInterval::default(), &mut meters);
        assert_eq!(idle.memory.map(|memory| memory.used), Some(0));
        let hiding =
            sample(&card(1), &parse(r#"{"pid":124,"gpu":1}"#), SampleInterval::default(), &mut meters);
        assert_eq!(hiding.processes.unwrap()[0].bytes, None);
    }
}
