//! Families of HAMi's scheduler about allocation, which its dashboards use beside those of its monitor. Each agent
//! serves the series of its own node.

use std::collections::BTreeMap;

use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage};

use super::{CURRENT, LEGACY, LabelNames, ZONE};
use crate::exporter::{GpuSnapshot, Snapshot, snapshot::granted};

/// Name, earlier name, help text and value of a family of GPUs.
type GpuRow = (&'static str, &'static str, &'static str, fn(&AllocatedGpu<'_>) -> Option<f64>);

/// HAMi's compute of a whole GPU.
const ALL_CORES: &str = "100";

const GPU_ROWS: [GpuRow; 7] = [
    ("hami_gpu_memory_limit_bytes", "GPUDeviceMemoryLimit", "Memory of the GPU in bytes", |gpu| {
        Some(gpu.memory())
    }),
    ("hami_gpu_core_limit_ratio", "GPUDeviceCoreLimit", "Compute of the GPU in percent", |_| Some(100.0)),
    (ALLOCATED, LEGACY_ALLOCATED, "Allocated memory of the GPU in bytes", |gpu| gpu.allocated()),
    ("hami_gpu_shared_count", "GPUDeviceSharedNum", "Containers that hold a part of the GPU", |gpu| {
        gpu.holders
    }),
    (
        "hami_gpu_core_allocated_ratio",
        "GPUDeviceCoreAllocated",
        "Allocated compute of the GPU in percent",
        |gpu| gpu.gpu.room.map(|room| 100.0 - f64::from(room.compute.0)),
    ),
    (OVERVIEW, LEGACY_OVERVIEW, "Allocated memory of the GPU in bytes, with its capacity as labels", |gpu| {
        gpu.allocated()
    }),
    (RATIO, LEGACY_RATIO, "Allocated part of the GPU's memory", |gpu| {
        gpu.allocated().map(|allocated| allocated / gpu.memory().max(1.0))
    }),
];

/// Families with more or fewer labels than the others.
const ALLOCATED: &str = "hami_gpu_memory_allocated_bytes";
const LEGACY_ALLOCATED: &str = "GPUDeviceMemoryAllocated";
const OVERVIEW: &str = "hami_node_gpu_overview";
const LEGACY_OVERVIEW: &str = "nodeGPUOverview";
const RATIO: &str = "hami_node_gpu_memory_allocated_ratio";
const LEGACY_RATIO: &str = "nodeGPUMemoryPercentage";

/// A GPU with the number of containers on it, if it is known.
struct AllocatedGpu<'a> {
    gpu: &'a GpuSnapshot,
    holders: Option<f64>,
}

impl AllocatedGpu<'_> {
    fn memory(&self) -> f64 {
        bytes(self.gpu.info.memory.0)
    }

    fn allocated(&self) -> Option<f64> {
        self.gpu.room.map(|room| bytes(self.gpu.info.memory.0.saturating_sub(room.memory.0)))
    }
}

/// Returns MiB as bytes. The MiB of a GPU fit into 32 bits, so the conversion is exact.
fn bytes(mib: u64) -> f64 {
    f64::from(u32::try_from(mib).unwrap_or(u32::MAX)) * 1_048_576.0
}

/// Writes the families under their current names.
pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    let labels = ["device_cores", "device_memory_limit"];
    for (name, _, help, value) in GPU_ROWS {
        write_gpus(snapshot, page, &CURRENT, (name, help, labels), value);
    }
    let names = ["namespace", "node", "pod", "container_index", "device_uuid"];
    write_shares(
        snapshot,
        page,
        names,
        ["hami_vgpu_memory_allocated_bytes", "hami_vgpu_core_allocated_ratio"],
    );
}

/// Writes the families under their earlier names.
pub(super) fn write_legacy(snapshot: &Snapshot, page: &mut MetricsPage) {
    let labels = ["devicecores", "devicememorylimit"];
    for (_, name, help, value) in GPU_ROWS {
        write_gpus(snapshot, page, &LEGACY, (name, help, labels), value);
    }
    let names = ["podnamespace", "nodename", "podname", "containeridx", "deviceuuid"];
    write_shares(snapshot, page, names, ["vGPUMemoryAllocated", "vGPUCoreAllocated"]);
}

fn write_gpus(
    snapshot: &Snapshot,
    page: &mut MetricsPage,
    names: &LabelNames,
    (name, help, [cores, limit]): (&str, &str, [&str; 2]),
    value: fn(&AllocatedGpu<'_>) -> Option<f64>,
) {
    let mut family = page.family(name, Gauge, help);
    for (place, gpu) in snapshot.gpus.iter().enumerate() {
        let shares = snapshot.containers.iter().flat_map(|container| &container.shares);
        let count = shares.filter(|share| share.gpu == place && share.hold.is_some()).count();
        let holders = gpu.room.map(|_| f64::from(u32::try_from(count).unwrap_or(u32::MAX)));
        let [node, index, uuid, kind] = names.gpu;
        let mut labels = Labels::new(&[
            (node, &snapshot.node),
            (index, &gpu.info.index.to_string()),
            (uuid, &gpu.info.uuid.0),
        ]);
        if [ALLOCATED, LEGACY_ALLOCATED, OVERVIEW, LEGACY_OVERVIEW].contains(&name) {
            labels = labels.and(&[(cores, ALL_CORES)]);
        }
        if [OVERVIEW, LEGACY_OVERVIEW].contains(&name) {
            labels = labels.and(&[(limit, &gpu.info.memory.0.to_string())]);
        }
        if ![RATIO, LEGACY_RATIO].contains(&name) {
            labels = labels.and(&[(kind, &format!("NVIDIA-{}", gpu.info.model))]);
        }
        family.sample(&labels.and(&[ZONE]), value(&AllocatedGpu { gpu, holders }));
    }
}

fn write_shares(
    snapshot: &Snapshot,
    page: &mut MetricsPage,
    [namespace, node, pod, index, uuid]: [&str; 5],
    [memory, cores]: [&str; 2],
) {
    // The containers of a pod are numbered in the order of their names.
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut held = Vec::new();
    for container in &snapshot.containers {
        let number = numbers.entry(&container.key.uid.0).or_default();
        for share in &container.shares {
            let (Some(hold), Some(gpu)) = (share.hold, snapshot.gpus.get(share.gpu)) else { continue };
            let labels = Labels::new(&[
                (namespace, &container.namespace),
                (node, &snapshot.node),
                (pod, &container.pod),
                (index, &number.to_string()),
                (uuid, &gpu.info.uuid.0),
                ZONE,
            ]);
            held.push((labels, granted(hold, gpu)));
        }
        *number += 1;
    }
    let mut family = page.family(memory, Gauge, "Memory of the GPU allocated to the container in bytes");
    held.iter().for_each(|(labels, (_, bytes))| family.sample(labels, *bytes));
    let mut family = page.family(cores, Gauge, "Compute of the GPU allocated to the container in percent");
    held.iter().for_each(|(labels, (percent, _))| family.sample(labels, u64::from(percent.0)));
}
