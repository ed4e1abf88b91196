//! Turns the processes in a file into the values that a driver would report.

use std::collections::BTreeMap;

use serde::Deserialize;
use tessera_core::gpu::Gpu;

use crate::gpus::{
    BusyTime, GpuMemory, GpuSample, ProcessMemory, ProfilingCounters, RemappedRows, SampleInterval, Sensors,
};

/// Memory in bytes that the driver needs for the contexts of a GPU in use.
const CONTEXT_BYTES: u64 = 64 << 20;
/// Memory in bytes that the driver always reserves.
const RESERVED_BYTES: u64 = 512 << 20;

/// Power draw of an idle GPU.
const IDLE_WATTS: f64 = 60.0;
/// Power draw of a fully busy GPU.
const FULL_WATTS: f64 = 400.0;

/// Busy time from which a GPU draws as much power as it may.
const POWER_LIMIT_PERCENT: u32 = 97;

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Process {
    pid: u32,
    /// Index of the GPU.
    gpu: u8,
    /// Memory in use. Without it, the driver reports no size.
    #[serde(rename = "memoryMiB")]
    memory_mib: Option<u64>,
    /// Percentage of the time in which the process's kernels run.
    #[serde(default)]
    busy_percent: u32,
}

/// Time of the last sample of each GPU, and the energy in millijoules up to then.
pub(super) type Meters = BTreeMap<u8, (u64, f64)>;

/// Parses the lines. A line that is incomplete, because it is being written, is ignored.
pub(super) fn parse(text: &str) -> Vec<Process> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Returns a sample of `gpu`.
pub(super) fn sample(gpu: &Gpu, all: &[Process], interval: SampleInterval, meters: &mut Meters) -> GpuSample {
    let on_gpu: Vec<&Process> = all.iter().filter(|process| process.gpu == gpu.index.0).collect();
    let total = gpu.memory.0 << 20;
    let held: u64 = on_gpu.iter().filter_map(|process| process.memory_mib).map(|mib| mib << 20).sum();
    let used = if on_gpu.is_empty() { 0 } else { held + CONTEXT_BYTES };
    let memory = GpuMemory {
        total,
        used,
        free: total.saturating_sub(used + RESERVED_BYTES),
        reserved: RESERVED_BYTES.min(total.saturating_sub(used)),
    };
    let busy = on_gpu.iter().map(|process| process.busy_percent).sum::<u32>().min(100);
    let samples = [(interval.now, f64::from(busy))];
    let each: Vec<(u32, u64, u32)> = on_gpu
        .iter()
        .filter(|process| process.busy_percent > 0)
        .map(|process| (process.pid, interval.now, process.busy_percent))
        .collect();
    let watts = IDLE_WATTS + (FULL_WATTS - IDLE_WATTS) * f64::from(busy) / 100.0;
    let (last, spent) = meters.entry(gpu.index.0).or_insert((interval.now, 0.0));
    let passed = u32::try_from(interval.now.saturating_sub(*last)).unwrap_or(u32::MAX);
    *spent += watts * f64::from(passed) / 1e3;
    *last = interval.now;
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
        work: BusyTime::of(interval, Some(&samples), None, Some(&each)),
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
            clock_events: Some(clock_events(busy)),
            remapped_rows: Some(RemappedRows::default()),
            nvlink: Some(0),
            profile: Some(profile(f64::from(busy) / 100.0)),
        },
        instances: Vec::new(),
    }
}

/// Returns the reasons that limit the clocks, in the bits of NVML. A GPU without work is idle, and one that is busy
/// for nearly all of the time reaches its power limit.
fn clock_events(busy_percent: u32) -> u64 {
    match busy_percent {
        0 => 0x1,
        1..POWER_LIMIT_PERCENT => 0,
        _ => 0x4,
    }
}

/// Returns profiling counters for a busy fraction. Half of the work uses tensor cores.
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

    fn gpu(index: u8) -> Gpu {
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
    fn parses_complete_lines_and_ignores_broken_ones() {
        let text = r#"{"pid":123,"gpu":0,"memoryMiB":1024,"busyPercent":40}
{"pid":124,"gpu":1}
{"pid":125,"gpu":0,"memo"#;
        let all = parse(text);
        assert_eq!(all.len(), 2);
        let mut meters = Meters::new();
        let sample_at =
            |since, now, meters: &mut Meters| sample(&gpu(0), &all, SampleInterval { since, now }, meters);
        sample_at(0, 1_000_000, &mut meters);
        let sampled = sample_at(1_000_000, 3_000_000, &mut meters);
        assert_eq!(
            sampled.processes,
            Some(vec![ProcessMemory { pid: 123, bytes: Some(1 << 30), instance: None }])
        );
        assert_eq!(sampled.memory.map(|memory| memory.used), Some((1 << 30) + CONTEXT_BYTES));
        assert_eq!((sampled.work.gpu, sampled.work.seconds()), (Some(0.4), 2.0));
        assert_eq!(sampled.energy, Some(2 * (60_000 + 136_000)));
    }

    #[test]
    fn clocks_are_limited_on_idle_and_on_fully_busy_gpus() {
        let events = |percent: u32| {
            let text = format!(r#"{{"pid":1,"gpu":0,"busyPercent":{percent}}}"#);
            let sampled = sample(&gpu(0), &parse(&text), SampleInterval::default(), &mut Meters::new());
            sampled.sensors.clock_events
        };
        assert_eq!((events(0), events(60), events(100)), (Some(1), Some(0), Some(4)));
    }

    #[test]
    fn an_idle_gpu_uses_no_memory_and_a_process_may_have_no_size() {
        let mut meters = Meters::new();
        let idle = sample(&gpu(3), &[], SampleInterval::default(), &mut meters);
        assert_eq!(idle.memory.map(|memory| memory.used), Some(0));
        let without_size =
            sample(&gpu(1), &parse(r#"{"pid":124,"gpu":1}"#), SampleInterval::default(), &mut meters);
        assert_eq!(without_size.processes.unwrap()[0].bytes, None);
    }
}
