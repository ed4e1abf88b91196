//! Names and labels of dcgm-exporter, so that dashboards built on them keep working. A value of a
//! GPU never has the labels of a pod. Values that can be measured by container are added by
//! container on request.

use std::collections::BTreeSet;

use tessera_node::gpus::{GpuMemory, ProfilingCounters, Sensors};
use tessera_wire::metrics::{
    Labels,
    MetricKind::{self, Counter, Gauge},
    MetricsPage, Value,
};

use super::MetricsOptions;
use crate::exporter::{GpuReading, GpuSnapshot, ShareSnapshot, Snapshot};

/// Name, kind, help text and value of a family.
type Row = (&'static str, MetricKind, &'static str, fn(&GpuReading) -> Value);

const UTILIZATION: &str = "DCGM_FI_DEV_GPU_UTIL";
const MEMORY_USED: &str = "DCGM_FI_DEV_FB_USED";

/// Prefixes of the families that are also written for MIG instances.
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

pub(super) fn write(
    snapshot: &Snapshot,
    options: &MetricsOptions,
    by_container: bool,
    page: &mut MetricsPage,
) {
    let labels: Vec<Labels> = snapshot.gpus.iter().map(|gpu| labels(snapshot, gpu, options, None)).collect();
    let instances = mig_instances(snapshot, options);
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        let by_instance = name.starts_with(MEMORY) || name.starts_with(PROFILE);
        for (labels, gpu) in labels.iter().zip(&snapshot.gpus) {
            // A family with values of MIG instances has no value of the whole GPU.
            let Some(reading) =
                gpu.reading.as_ref().filter(|reading| !by_instance || reading.instances.is_empty())
            else {
                continue;
            };
            family.sample(labels, value(reading));
        }
        for (labels, instance) in instances.iter().filter(|_| by_instance) {
            family.sample(labels, value(instance));
        }
        let own: fn(&ShareSnapshot) -> Value = match name {
            UTILIZATION => |share| share.busy.map(|busy| (busy * 1e4).round() / 100.0).into(),
            MEMORY_USED => |share| share.used.map(|bytes| bytes >> 20).into(),
            _ => continue,
        };
        for container in snapshot.containers.iter().filter(|_| by_container) {
            for share in &container.shares {
                let Some(labels) = labels.get(share.gpu) else { continue };
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
    for (labels, gpu) in labels.iter().zip(&snapshot.gpus) {
        let last = gpu
            .xids
            .iter()
            .max_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b))
            .map_or(0, |(number, _)| *number);
        let message = if last == 0 { "No Error".to_owned() } else { format!("XID {last}") };
        xid.sample(&labels.and(&[("err_code", &last.to_string()), ("err_msg", &message)]), last);
    }
}

/// Returns the GPU instances of all GPUs in MIG mode, each with its own memory and counters.
/// Several compute instances may share one GPU instance, which is returned once.
fn mig_instances(snapshot: &Snapshot, options: &MetricsOptions) -> Vec<(Labels, GpuReading)> {
    let mut instances = Vec::new();
    for gpu in &snapshot.gpus {
        let mut written = BTreeSet::new();
        for part in gpu.reading.iter().flat_map(|reading| &reading.instances) {
            let Some(number) = part.gpu_instance.filter(|number| written.insert(*number)) else { continue };
            let sensors = Sensors { profile: part.counted, ..Sensors::default() };
            let cut = (part.profile.as_deref().unwrap_or_default(), number);
            let reading = GpuReading { memory: part.memory, sensors, ..GpuReading::default() };
            instances.push((labels(snapshot, gpu, options, Some(cut)), reading));
        }
    }
    instances
}

fn labels(
    snapshot: &Snapshot,
    gpu: &GpuSnapshot,
    options: &MetricsOptions,
    part: Option<(&str, u32)>,
) -> Labels {
    let mut labels = Labels::new(&[
        ("gpu", &gpu.info.index.to_string()),
        ("UUID", &gpu.info.uuid.0),
        ("pci_bus_id", &gpu.pci),
        ("device", &format!("nvidia{}", gpu.info.minor)),
        ("modelName", &gpu.info.model.0),
    ]);
    if let Some((profile, number)) = part {
        labels.push("GPU_I_PROFILE", profile);
        labels.push("GPU_I_ID", &number.to_string());
    }
    labels.push(&options.hostname_label, &snapshot.node);
    if let Some(driver) = &snapshot.driver {
        labels.push("DCGM_FI_DRIVER_VERSION", driver);
    }
    labels
}

fn memory(reading: &GpuReading, part: impl Fn(&GpuMemory) -> u64) -> Value {
    reading.memory.as_ref().map(|memory| part(memory) >> 20).into()
}

fn profile(sensors: &Sensors, value: impl Fn(&ProfilingCounters) -> Option<f64>) -> Value {
    sensors.profile.as_ref().and_then(value).into()
}
