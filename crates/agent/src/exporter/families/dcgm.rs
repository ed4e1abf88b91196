//! Names and labels of dcgm-exporter, so that what was built on them goes on working. A GPU's value never carries a pod's name:
//! what can be told by container is, on request, told by container.

use std::collections::BTreeSet;

use tessera_node::gpus::{GpuMemory, ProfilingCounters, Sensors};
use tessera_wire::metrics::{
    Kind::{self, Counter, Gauge},
    Labels, Page, Value,
};

use super::MetricsOptions;
use crate::exporter::{GpuReading, GpuSnapshot, ShareSnapshot, Snapshot};

/// A family: its name, what it is, what it tells, and where that stands.
type Row = (&'static str, Kind, &'static str, fn(&GpuReading) -> Value);

const UTILIZATION: &str = "DCGM_FI_DEV_GPU_UTIL";
const MEMORY_USED: &str = "DCGM_FI_DEV_FB_USED";

/// What is told of the parts of a GPU that is cut up, too.
const MEMORY: &str = "DCGM_FI_DEV_FB_";
const PROFILE: &str = "DCGM_FI_PROF_";

const ROWS: [Row; 33] = [
    ("DCGM_FI_DEV_SM_CLOCK", Gauge, "SM clock frequency (in MHz).", |l| l.sensors.sm_clock.into()),
    ("DCGM_FI_DEV_MEM_CLOCK", Gauge, "Memory clock frequency (in MHz).", |l| l.sensors.memory_clock.into()),
    ("DCGM_FI_DEV_MEMORY_TEMP", Gauge, "Memory temperature (in C).", |l| l.sensors.memory_temperature.into()),
    ("DCGM_FI_DEV_GPU_TEMP", Gauge, "GPU temperature (in C).", |l| l.sensors.temperature.into()),
    ("DCGM_FI_DEV_POWER_USAGE", Gauge, "Power draw (in W).", |l| {
        l.sensors.power.map(|milliwatts| f64::from(milliwatts) / 1e3).into()
    }),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", Counter, "Total energy consumption since boot (in mJ).", |l| {
        l.energy.into()
    }),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", Counter, "Total number of PCIe retries.", |l| {
        l.sensors.pcie_replays.into()
    }),
    (UTILIZATION, Gauge, "GPU utilization (in %).", |l| l.sensors.utilization.into()),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", Gauge, "Memory utilization (in %).", |l| {
        l.sensors.memory_utilization.into()
    }),
    ("DCGM_FI_DEV_ENC_UTIL", Gauge, "Encoder utilization (in %).", |l| l.sensors.encoder.into()),
    ("DCGM_FI_DEV_DEC_UTIL", Gauge, "Decoder utilization (in %).", |l| l.sensors.decoder.into()),
    ("DCGM_FI_DEV_FB_FREE", Gauge, "Framebuffer memory free (in MiB).", |l| memory(l, |m| m.free)),
    (MEMORY_USED, Gauge, "Framebuffer memory used (in MiB).", |l| memory(l, |m| m.used)),
    ("DCGM_FI_DEV_FB_RESERVED", Gauge, "Framebuffer memory reserved (in MiB).", |l| {
        memory(l, |m| m.reserved)
    }),
    (
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        Counter,
        "Total number of NVLink bandwidth counters for all lanes.",
        |l| l.sensors.nvlink.into(),
    ),
    ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", Gauge, "vGPU License status", |_| Value::Whole(0)),
    (
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        Counter,
        "Number of remapped rows for uncorrectable errors",
        |l| l.sensors.remapped_rows.map(|rows| rows.uncorrectable).into(),
    ),
    (
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        Counter,
        "Number of remapped rows for correctable errors",
        |l| l.sensors.remapped_rows.map(|rows| rows.correctable).into(),
    ),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", Gauge, "Whether remapping of rows has failed", |l| {
        l.sensors.remapped_rows.map(|rows| rows.failed).into()
    }),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", Counter, "Total number of double-bit volatile ECC errors.", |l| {
        l.sensors.uncorrected_errors.into()
    }),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", Counter, "Total number of single-bit volatile ECC errors.", |l| {
        l.sensors.corrected_errors.into()
    }),
    ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", Counter, "Total number of double-bit persistent ECC errors.", |l| {
        l.sensors.uncorrected_errors_ever.into()
    }),
    ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", Counter, "Total number of single-bit persistent ECC errors.", |l| {
        l.sensors.corrected_errors_ever.into()
    }),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", Gauge, "Ratio of time the graphics engine is active.", |l| {
        profile(&l.sensors, |p| p.graphics)
    }),
    ("DCGM_FI_PROF_SM_ACTIVE", Gauge, "Ratio of cycles an SM has at least 1 warp assigned.", |l| {
        profile(&l.sensors, |p| p.sm)
    }),
    ("DCGM_FI_PROF_SM_OCCUPANCY", Gauge, "Ratio of number of warps resident on an SM.", |l| {
        profile(&l.sensors, |p| p.occupancy)
    }),
    ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", Gauge, "Ratio of cycles the fp64 pipes are active.", |l| {
        profile(&l.sensors, |p| p.fp64)
    }),
    ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", Gauge, "Ratio of cycles the fp32 pipes are active.", |l| {
        profile(&l.sensors, |p| p.fp32)
    }),
    ("DCGM_FI_PROF_PIPE_FP16_ACTIVE", Gauge, "Ratio of cycles the fp16 pipes are active.", |l| {
        profile(&l.sensors, |p| p.fp16)
    }),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", Gauge, "Ratio of cycles the tensor (HMMA) pipe is active.", |l| {
        profile(&l.sensors, |p| p.tensor)
    }),
    (
        "DCGM_FI_PROF_DRAM_ACTIVE",
        Gauge,
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        |l| profile(&l.sensors, |p| p.dram),
    ),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", Gauge, "Bytes per second sent over PCIe, headers and payload.", |l| {
        profile(&l.sensors, |p| p.pcie_sent)
    }),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", Gauge, "Bytes per second received over PCIe, headers and payload.", |l| {
        profile(&l.sensors, |p| p.pcie_received)
    }),
];

pub(super) fn write(picture: &Snapshot, wanted: &MetricsOptions, by_container: bool, page: &mut Page) {
    let labels: Vec<Labels> = picture.cards.iter().map(|card| labels(picture, card, wanted, None)).collect();
    let parts = parts(picture, wanted);
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        let of_parts = name.starts_with(MEMORY) || name.starts_with(PROFILE);
        for (labels, card) in labels.iter().zip(&picture.cards) {
            // What is told of the parts is not told of the whole once more.
            let Some(look) = card.look.as_ref().filter(|look| !of_parts || look.instances.is_empty()) else {
                continue;
            };
            family.sample(labels, value(look));
        }
        for (labels, part) in parts.iter().filter(|_| of_parts) {
            family.sample(labels, value(part));
        }
        let own: fn(&ShareSnapshot) -> Value = match name {
            UTILIZATION => |share| share.busy.map(|busy| (busy * 1e4).round() / 100.0).into(),
            MEMORY_USED => |share| share.used.map(|bytes| bytes >> 20).into(),
            _ => continue,
        };
        for container in picture.containers.iter().filter(|_| by_container) {
            for share in &container.shares {
                let Some(labels) = labels.get(share.card) else { continue };
                let labels = labels.and(&[
                    ("container", &container.key.container),
                    ("namespace", &container.namespace),
                    ("pod", &container.pod),
                    ("pod_uid", &container.key.uid.0),
                ]);
                family.sample(&labels, own(share));
            }
        }
    }
    let mut xid = page.family("DCGM_FI_DEV_XID_ERRORS", Gauge, "Value of the last XID error encountered.");
    for (labels, card) in labels.iter().zip(&picture.cards) {
        let last = card
            .xids
            .iter()
            .max_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b))
            .map_or(0, |(number, _)| *number);
        let message = if last == 0 { "No Error".to_owned() } else { format!("XID {last}") };
        xid.sample(&labels.and(&[("err_code", &last.to_string()), ("err_msg", &message)]), last);
    }
}

/// The parts of GPUs that are cut up, each as if it were a GPU: its memory and its counters are its own. Several may compute on one
/// part of the memory, which is told once.
fn parts(picture: &Snapshot, wanted: &MetricsOptions) -> Vec<(Labels, GpuReading)> {
    let mut parts = Vec::new();
    for card in &picture.cards {
        let mut told = BTreeSet::new();
        for part in card.look.iter().flat_map(|look| &look.instances) {
            let Some(number) = part.gpu_instance.filter(|number| told.insert(*number)) else { continue };
            let sensors = Sensors { profile: part.counted, ..Sensors::default() };
            let cut = (part.profile.as_deref().unwrap_or_default(), number);
            let look = GpuReading { memory: part.memory, sensors, ..GpuReading::default() };
            parts.push((labels(picture, card, wanted, Some(cut)), look));
        }
    }
    parts
}

fn labels(
    picture: &Snapshot,
    card: &GpuSnapshot,
    wanted: &MetricsOptions,
    part: Option<(&str, u32)>,
) -> Labels {
    let mut labels = Labels::new(&[
        ("gpu", &card.gpu.index.to_string()),
        ("UUID", &card.gpu.uuid.0),
        ("pci_bus_id", &card.pci),
        ("device", &format!("nvidia{}", card.gpu.minor)),
        ("modelName", &card.gpu.model.0),
    ]);
    if let Some((profile, number)) = part {
        labels.push("GPU_I_PROFILE", profile);
        labels.push("GPU_I_ID", &number.to_string());
    }
    labels.push(&wanted.hostname_label, &picture.node);
    if let Some(driver) = &picture.driver {
        labels.push("DCGM_FI_DRIVER_VERSION", driver);
    }
    labels
}

fn memory(look: &GpuReading, part: impl Fn(&GpuMemory) -> u64) -> Value {
    look.memory.as_ref().map(|memory| part(memory) >> 20).into()
}

fn profile(sensors: &Sensors, value: impl Fn(&ProfilingCounters) -> Option<f64>) -> Value {
    sensors.profile.as_ref().and_then(value).into()
}
