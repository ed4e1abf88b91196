//! Families of HAMi's monitor and scheduler under their current and their earlier names. Values that only
//! HAMi's own library knows are left out.

mod allocation;

use tessera_wire::metrics::{
    Labels,
    MetricKind::{Gauge, Info},
    MetricsPage, Value,
};

use crate::exporter::{
    ContainerSnapshot, GpuReading, GpuSnapshot, ShareSnapshot, Snapshot, snapshot::granted,
};

/// Name, earlier name, help text and value of a family.
type GpuRow = (&'static str, Option<&'static str>, &'static str, fn(&GpuReading) -> Value);
type ShareRow = (&'static str, Option<&'static str>, &'static str, fn(&ShareSnapshot, &GpuSnapshot) -> Value);

const GPU_ROWS: [GpuRow; 3] = [
    (
        "hami_host_gpu_memory_used_bytes",
        Some("HostGPUMemoryUsage"),
        "GPU device memory usage in bytes",
        |reading| reading.used_bytes().into(),
    ),
    (
        "hami_host_gpu_utilization_ratio",
        Some("HostCoreUtilization"),
        "GPU core utilization ratio (0-100)",
        |reading| reading.sensors.utilization.into(),
    ),
    (WITHOUT_NODE, None, "GPU memory controller utilization ratio (0-100)", |reading| {
        reading.sensors.memory_utilization.into()
    }),
];

/// The only family of a GPU without a node label.
const WITHOUT_NODE: &str = "hami_host_gpu_memory_controller_utilization_ratio";

const SHARE_ROWS: [ShareRow; 5] = [
    (
        "hami_vgpu_memory_used_bytes",
        Some("vGPU_device_memory_usage_in_bytes"),
        "vGPU device memory usage in bytes",
        |share, _| share.used.into(),
    ),
    (
        "hami_vgpu_memory_limit_bytes",
        Some("vGPU_device_memory_limit_in_bytes"),
        "vGPU device memory limit in bytes",
        |share, gpu| share.memory_limit.or_else(|| share.hold.map(|hold| granted(hold, gpu).1)).into(),
    ),
    ("hami_container_device_memory_bytes", None, "Container device memory usage in bytes", |share, _| {
        share.used.into()
    }),
    (
        "hami_container_device_utilization_ratio",
        Some("Device_utilization_desc_of_container"),
        "Container device SM utilization ratio",
        |share, _| share.busy.map(|busy| (busy * 1e4).round() / 100.0).into(),
    ),
    (
        "hami_container_last_kernel_elapsed_seconds",
        Some("Device_last_kernel_of_container"),
        "Seconds since last kernel execution in container",
        |share, gpu| {
            let since = share.total.and_then(|total| total.last_busy).zip(gpu.last_success);
            since.map(|(last, now)| (now - last).max(0.0).round()).into()
        },
    ),
];

const INSTANCE: (&str, &str) = ("hami_mig_device_info", "MIG runtime identity for a container allocation");
const LEGACY_INSTANCE: &str = "MigInfo";

/// Names of the labels.
struct LabelNames {
    /// Node, index, UUID and type of the GPU.
    gpu: [&'static str; 4],
    /// Namespace, pod and container, position among the container's GPUs, and UUID of the GPU.
    share: [&'static str; 5],
}

const CURRENT: LabelNames = LabelNames {
    gpu: ["node", "device_index", "device_uuid", "device_type"],
    share: ["namespace", "pod", "container", "vdevice_index", "device_uuid"],
};

const LEGACY: LabelNames = LabelNames {
    gpu: ["nodeid", "deviceidx", "deviceuuid", "devicetype"],
    share: ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"],
};

/// Writes the families under their current names.
pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    allocation::write(snapshot, page);
    for (name, _, help, value) in GPU_ROWS {
        write_gpus(snapshot, page, &CURRENT, (name, help), value);
    }
    for (name, _, help, value) in SHARE_ROWS {
        write_shares(snapshot, page, &CURRENT, (name, help), value);
    }
    let mut family = page.family(INSTANCE.0, Info, INSTANCE.1);
    for (container, gpu, part) in snapshot.on_instances() {
        let labels = instance_labels(&CURRENT, container, gpu).and(&[
            ("mig_uuid", &part.uuid),
            ("profile", part.profile.as_deref().unwrap_or_default()),
            ("gpu_instance_id", &number(part.gpu_instance)),
            ("compute_instance_id", &number(part.compute_instance)),
            ZONE,
        ]);
        family.sample(&labels, 1u64);
    }
}

/// Writes the families under their earlier names.
pub(super) fn write_legacy(snapshot: &Snapshot, page: &mut MetricsPage) {
    allocation::write_legacy(snapshot, page);
    for (_, name, help, value) in GPU_ROWS {
        name.into_iter().for_each(|name| write_gpus(snapshot, page, &LEGACY, (name, help), value));
    }
    for (_, name, help, value) in SHARE_ROWS {
        name.into_iter().for_each(|name| write_shares(snapshot, page, &LEGACY, (name, help), value));
    }
    let mut family = page.family(LEGACY_INSTANCE, Gauge, INSTANCE.1);
    for (container, gpu, part) in snapshot.on_instances() {
        let id = number(part.gpu_instance);
        family.sample(&instance_labels(&LEGACY, container, gpu).and(&[("instanceid", &id), ZONE]), 1u64);
    }
}

/// Label on every sample.
const ZONE: (&str, &str) = ("zone", "vGPU");

fn write_gpus(
    snapshot: &Snapshot,
    page: &mut MetricsPage,
    names: &LabelNames,
    (name, help): (&str, &str),
    value: fn(&GpuReading) -> Value,
) {
    let mut family = page.family(name, Gauge, help);
    for gpu in &snapshot.gpus {
        let Some(reading) = &gpu.reading else { continue };
        let [node, index, uuid, kind] = names.gpu;
        let node = [(node, snapshot.node.as_str())];
        let labels = Labels::new(if name == WITHOUT_NODE { &[] } else { &node }).and(&[
            (index, &gpu.info.index.to_string()),
            (uuid, &gpu.info.uuid.0),
            (kind, &format!("NVIDIA-{}", gpu.info.model)),
            ZONE,
        ]);
        family.sample(&labels, value(reading));
    }
}

fn write_shares(
    snapshot: &Snapshot,
    page: &mut MetricsPage,
    names: &LabelNames,
    (name, help): (&str, &str),
    value: fn(&ShareSnapshot, &GpuSnapshot) -> Value,
) {
    let mut family = page.family(name, Gauge, help);
    for container in &snapshot.containers {
        for (place, share) in container.shares.iter().enumerate() {
            let Some(gpu) = snapshot.gpus.get(share.gpu) else { continue };
            family.sample(&share_labels(names, container, place, gpu).and(&[ZONE]), value(share, gpu));
        }
    }
}

fn share_labels(
    names: &LabelNames,
    container: &ContainerSnapshot,
    place: usize,
    gpu: &GpuSnapshot,
) -> Labels {
    let [namespace, pod, own, index, uuid] = names.share;
    Labels::new(&[
        (namespace, &container.namespace),
        (pod, &container.pod),
        (own, &container.key.container),
        (index, &place.to_string()),
        (uuid, &gpu.info.uuid.0),
    ])
}

fn instance_labels(names: &LabelNames, container: &ContainerSnapshot, gpu: &GpuSnapshot) -> Labels {
    let index = usize::from(gpu.info.index.0);
    let place = container.shares.iter().position(|share| share.gpu == index);
    share_labels(names, container, place.unwrap_or_default(), gpu)
}

fn number(number: Option<u32>) -> String {
    number.map(|number| number.to_string()).unwrap_or_default()
}
