//! Families of the sensors and error counters of GPUs.

use tessera_node::gpus::{ProfilingCounters, Sensors};
use tessera_wire::metrics::{
    Labels,
    MetricKind::{self, Counter, Gauge},
    MetricsPage, Value,
};

use crate::exporter::Snapshot;

/// Reasons for reduced clocks, by bit of NVML's mask.
const CLOCK_REASONS: [(u64, &str); 9] = [
    (0x1, "idle"),
    (0x2, "application_clocks"),
    (0x4, "power_cap"),
    (0x8, "hardware_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "software_thermal"),
    (0x40, "hardware_thermal"),
    (0x80, "power_brake"),
    (0x100, "display_clocks"),
];

/// Name, kind, help text and value of a family.
type Row = (&'static str, MetricKind, &'static str, fn(&Sensors) -> Value);

const ROWS: [Row; 18] = [
    ("tessera_gpu_power_watts", Gauge, "Power drawn.", |s| s.power.map(thousandth).into()),
    ("tessera_gpu_temperature_celsius", Gauge, "Temperature of the chip.", |s| s.temperature.into()),
    ("tessera_gpu_memory_temperature_celsius", Gauge, "Temperature of the memory.", |s| {
        s.memory_temperature.into()
    }),
    ("tessera_gpu_sm_clock_hertz", Gauge, "Clock of the multiprocessors.", |s| {
        s.sm_clock.map(megahertz).into()
    }),
    ("tessera_gpu_memory_clock_hertz", Gauge, "Clock of the memory.", |s| {
        s.memory_clock.map(megahertz).into()
    }),
    (
        "tessera_gpu_memory_active_ratio",
        Gauge,
        "Fraction of the time in which memory was read or written.",
        |s| s.memory_utilization.map(ratio).into(),
    ),
    ("tessera_gpu_encoder_busy_ratio", Gauge, "Fraction of the time in which video was encoded.", |s| {
        s.encoder.map(ratio).into()
    }),
    ("tessera_gpu_decoder_busy_ratio", Gauge, "Fraction of the time in which video was decoded.", |s| {
        s.decoder.map(ratio).into()
    }),
    ("tessera_gpu_pcie_replays_total", Counter, "PCIe packets that were retransmitted.", |s| {
        s.pcie_replays.into()
    }),
    (
        "tessera_gpu_memory_uncorrected_errors_total",
        Counter,
        "Uncorrectable memory errors since the driver was loaded.",
        |s| s.uncorrected_errors.into(),
    ),
    (
        "tessera_gpu_row_remap_pending",
        Gauge,
        "1 if the remapping of memory rows waits for a reset of the GPU.",
        |s| s.remapped_rows.map(|rows| rows.pending).into(),
    ),
    ("tessera_gpu_row_remap_failed", Gauge, "1 if a memory row could not be remapped.", |s| {
        s.remapped_rows.map(|rows| rows.failed).into()
    }),
    ("tessera_gpu_nvlink_bytes_total", Counter, "Bytes over all NVLinks in both directions.", |s| {
        s.nvlink.map(|kib| kib << 10).into()
    }),
    (
        "tessera_gpu_graphics_active_ratio",
        Gauge,
        "Fraction of the time in which the graphics engine was active.",
        |s| profile(s, |p| p.graphics),
    ),
    (
        "tessera_gpu_tensor_active_ratio",
        Gauge,
        "Fraction of the time in which tensor cores were active.",
        |s| profile(s, |p| p.tensor),
    ),
    ("tessera_gpu_dram_active_ratio", Gauge, "Fraction of the memory bandwidth in use.", |s| {
        profile(s, |p| p.dram)
    }),
    ("tessera_gpu_pcie_sent_bytes_per_second", Gauge, "Rate at which the GPU sends over PCIe.", |s| {
        profile(s, |p| p.pcie_sent)
    }),
    ("tessera_gpu_pcie_received_bytes_per_second", Gauge, "Rate at which the GPU receives over PCIe.", |s| {
        profile(s, |p| p.pcie_received)
    }),
];

pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    let gpus: Vec<(Labels, &Sensors)> = snapshot
        .gpus
        .iter()
        .filter_map(|gpu| Some((super::super::gpu_labels(gpu), &gpu.reading.as_ref()?.sensors)))
        .collect();
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        gpus.iter().for_each(|(labels, sensors)| family.sample(labels, value(sensors)));
    }
    let mut rows = page.family(
        "tessera_gpu_remapped_rows_total",
        Counter,
        "Remapped memory rows, by the kind of their errors.",
    );
    for (labels, sensors) in &gpus {
        let Some(remapped) = sensors.remapped_rows else { continue };
        rows.sample(&labels.and(&[("errors", "correctable")]), remapped.correctable);
        rows.sample(&labels.and(&[("errors", "uncorrectable")]), remapped.uncorrectable);
    }
    let mut limited = page.family(
        "tessera_gpu_clock_limited",
        Gauge,
        "1 for each reason that currently limits the clocks.",
    );
    for (labels, sensors) in &gpus {
        let Some(bits) = sensors.clock_events else { continue };
        for (bit, reason) in CLOCK_REASONS {
            limited.sample(&labels.and(&[("reason", reason)]), bits & bit != 0);
        }
    }
}

fn profile(sensors: &Sensors, value: impl Fn(&ProfilingCounters) -> Option<f64>) -> Value {
    sensors.profile.as_ref().and_then(value).into()
}

fn ratio(percent: u32) -> f64 {
    f64::from(percent) / 100.0
}

fn thousandth(value: u32) -> f64 {
    f64::from(value) / 1e3
}

fn megahertz(value: u32) -> f64 {
    f64::from(value) * 1e6
}
