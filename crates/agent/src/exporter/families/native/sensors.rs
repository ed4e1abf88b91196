//! What is measured on GPUs.

use tessera_node::gpus::{ProfilingCounters, Sensors};
use tessera_wire::metrics::{
    Kind::{self, Counter, Gauge},
    Labels, Page, Value,
};

use crate::exporter::Snapshot;

/// Why clocks are not higher, by bit.
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

/// A family: its name, what it is, what it tells, and where that stands.
type Row = (&'static str, Kind, &'static str, fn(&Sensors) -> Value);

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
        "Part of the time in which memory was read or written.",
        |s| s.memory_utilization.map(ratio).into(),
    ),
    ("tessera_gpu_encoder_busy_ratio", Gauge, "Part of the time in which video was encoded.", |s| {
        s.encoder.map(ratio).into()
    }),
    ("tessera_gpu_decoder_busy_ratio", Gauge, "Part of the time in which video was decoded.", |s| {
        s.decoder.map(ratio).into()
    }),
    ("tessera_gpu_pcie_replays_total", Counter, "PCIe packets sent again.", |s| s.pcie_replays.into()),
    (
        "tessera_gpu_memory_uncorrected_errors_total",
        Counter,
        "Memory errors beyond correction since the driver was loaded.",
        |s| s.uncorrected_errors.into(),
    ),
    (
        "tessera_gpu_row_remap_pending",
        Gauge,
        "Whether rows of memory wait for a reset to be replaced.",
        |s| s.remapped_rows.map(|rows| rows.pending).into(),
    ),
    ("tessera_gpu_row_remap_failed", Gauge, "Whether a row of memory could not be replaced.", |s| {
        s.remapped_rows.map(|rows| rows.failed).into()
    }),
    ("tessera_gpu_nvlink_bytes_total", Counter, "Bytes over all NVLinks, both ways.", |s| {
        s.nvlink.map(|kib| kib << 10).into()
    }),
    (
        "tessera_gpu_graphics_active_ratio",
        Gauge,
        "Part of the time in which the graphics engine was active.",
        |s| profile(s, |p| p.graphics),
    ),
    ("tessera_gpu_tensor_active_ratio", Gauge, "Part of the time in which tensor cores were active.", |s| {
        profile(s, |p| p.tensor)
    }),
    ("tessera_gpu_dram_active_ratio", Gauge, "Part of the memory bandwidth in use.", |s| {
        profile(s, |p| p.dram)
    }),
    ("tessera_gpu_pcie_sent_bytes_per_second", Gauge, "Rate at which the GPU sends over PCIe.", |s| {
        profile(s, |p| p.pcie_sent)
    }),
    ("tessera_gpu_pcie_received_bytes_per_second", Gauge, "Rate at which the GPU receives over PCIe.", |s| {
        profile(s, |p| p.pcie_received)
    }),
];

pub(super) fn write(picture: &Snapshot, page: &mut Page) {
    let cards: Vec<(Labels, &Sensors)> = picture
        .cards
        .iter()
        .filter_map(|card| Some((super::super::gpu_labels(card), &card.look.as_ref()?.sensors)))
        .collect();
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        cards.iter().for_each(|(labels, sensors)| family.sample(labels, value(sensors)));
    }
    let mut rows = page.family(
        "tessera_gpu_remapped_rows_total",
        Counter,
        "Rows of memory replaced, by the errors they had.",
    );
    for (labels, sensors) in &cards {
        let Some(remapped) = sensors.remapped_rows else { continue };
        rows.sample(&labels.and(&[("errors", "correctable")]), remapped.correctable);
        rows.sample(&labels.and(&[("errors", "uncorrectable")]), remapped.uncorrectable);
    }
    let mut limited = page.family(
        "tessera_gpu_clock_limited",
        Gauge,
        "Why the clocks are not higher: 1 for each reason that holds.",
    );
    for (labels, sensors) in &cards {
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
