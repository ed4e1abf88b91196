//! JSON pages of current usage, in Tessera's form and in gpu-manager's.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use tessera_wire::kubelet::gpu_manager_display as display;
use tessera_wire::tessera::node_use::{ContainerUse, GpuUse, NodeUse, ShareUse};

use super::{ContainerSnapshot, ShareSnapshot, Snapshot, snapshot::granted};

/// Returns the current usage of the node by GPU and by container.
#[must_use]
pub fn node_use(snapshot: &Snapshot) -> NodeUse {
    let gpus = snapshot.gpus.iter().map(|gpu| GpuUse {
        uuid: gpu.info.uuid.to_string(),
        index: gpu.info.index.0,
        memory_used_mib: gpu
            .reading
            .as_ref()
            .and_then(|reading| reading.used_bytes())
            .map(|bytes| bytes >> 20),
        busy_percent: gpu
            .reading
            .as_ref()
            .and_then(|reading| reading.busy.as_ref())
            .map(|split| percent(split.all.whole)),
    });
    let share = |share: &ShareSnapshot| {
        let gpu = snapshot.gpus.get(share.gpu)?;
        let granted = share.hold.map(|hold| granted(hold, gpu));
        Some(ShareUse {
            uuid: gpu.info.uuid.to_string(),
            index: gpu.info.index.0,
            granted_percent: granted.map(|(compute_percent, _)| compute_percent.0),
            granted_mib: granted.map(|(_, bytes)| bytes >> 20),
            memory_used_mib: share.used.map(|bytes| bytes >> 20),
            busy_percent: share.busy.map(percent),
            throttled_percent: share.throttled.map(percent),
        })
    };
    let container = |container: &ContainerSnapshot| ContainerUse {
        namespace: container.namespace.clone(),
        pod: container.pod.clone(),
        uid: container.key.uid.to_string(),
        container: container.key.container.clone(),
        gpus: container.shares.iter().filter_map(share).collect(),
    };
    NodeUse { gpus: gpus.collect(), containers: snapshot.containers.iter().map(container).collect() }
}

/// Returns a ratio as a percentage with one decimal, which is as fine as the driver measures.
fn percent(part: f64) -> f64 {
    (part * 1000.0).round() / 10.0
}

/// The answer of gpu-manager to `/usage`, with its keys. As in the original, zeros are left out.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct GpuManagerUsage {
    usage: BTreeMap<String, PodUsage>,
}

#[derive(Debug, Default, PartialEq, Serialize)]
struct PodUsage {
    stat: BTreeMap<String, Devices>,
    #[serde(skip_serializing_if = "String::is_empty")]
    project: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    user: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    cluster: String,
    spec: BTreeMap<String, Spec>,
}

#[derive(Debug, Default, PartialEq, Serialize)]
struct Devices {
    dev: Vec<DeviceUsage>,
}

#[derive(Debug, Default, PartialEq, Serialize)]
struct DeviceUsage {
    #[serde(skip_serializing_if = "String::is_empty")]
    id: String,
    card_idx: String,
    #[serde(skip_serializing_if = "is_zero", serialize_with = "shortest")]
    gpu: f64,
    #[serde(skip_serializing_if = "is_zero", serialize_with = "shortest")]
    mem: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pids: Vec<u32>,
    #[serde(skip_serializing_if = "is_zero", serialize_with = "shortest")]
    device_mem: f64,
}

#[derive(Debug, Default, PartialEq, Serialize)]
struct Spec {
    #[serde(skip_serializing_if = "is_zero", serialize_with = "shortest")]
    gpu: f64,
    #[serde(skip_serializing_if = "is_zero", serialize_with = "shortest")]
    mem: f64,
}

impl From<GpuManagerUsage> for display::UsageResponse {
    fn from(usage: GpuManagerUsage) -> Self {
        let pod = |pod: PodUsage| display::ContainerStat {
            stat: pod.stat.into_iter().map(|(name, devices)| (name, devices.into())).collect(),
            project: pod.project,
            user: pod.user,
            cluster: pod.cluster,
            spec: pod.spec.into_iter().map(|(name, spec)| (name, spec.into())).collect(),
        };
        Self { usage: usage.usage.into_iter().map(|(uid, usage)| (uid, pod(usage))).collect() }
    }
}

impl From<Devices> for display::Devices {
    fn from(devices: Devices) -> Self {
        let device = |device: DeviceUsage| display::DeviceInfo {
            id: device.id,
            card_idx: device.card_idx,
            gpu: single(device.gpu),
            mem: single(device.mem),
            pids: device.pids.into_iter().filter_map(|pid| pid.try_into().ok()).collect(),
            device_mem: single(device.device_mem),
        };
        Self { dev: devices.dev.into_iter().map(device).collect() }
    }
}

impl From<Spec> for display::Spec {
    fn from(spec: Spec) -> Self {
        Self { gpu: single(spec.gpu), mem: single(spec.mem) }
    }
}

/// Returns a number as gpu-manager's interface sends it.
#[allow(clippy::cast_possible_truncation, reason = "a few digits are enough for percents and MiB")]
fn single(number: f64) -> f32 {
    number as f32
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

/// Writes whole numbers without a decimal point: `81920`, not `81920.0`.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
#[allow(clippy::cast_possible_truncation, reason = "it is whole, and a cast from float saturates")]
fn shortest<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if number.fract() == 0.0 {
        serializer.serialize_i64(*number as i64)
    } else {
        serializer.serialize_f64(*number)
    }
}

/// Returns what each container holds and uses, in percent of the time and in MiB.
#[must_use]
pub fn gpu_manager_usage(snapshot: &Snapshot) -> GpuManagerUsage {
    let mut usage = GpuManagerUsage::default();
    for container in snapshot.containers.iter().filter(|c| c.shares.iter().any(|share| share.hold.is_some()))
    {
        let pod = usage.usage.entry(container.key.uid.to_string()).or_default();
        pod.project.clone_from(&container.namespace);
        pod.user.clone_from(&container.user);
        pod.cluster.clone_from(&container.cluster);
        let device = |share: &ShareSnapshot| {
            let gpu = snapshot.gpus.get(share.gpu)?;
            Some(DeviceUsage {
                id: gpu.pci.clone(),
                card_idx: gpu.info.index.to_string(),
                gpu: share.busy.map_or(0.0, percent),
                mem: mebibytes(share.used.unwrap_or(0)),
                pids: share.pids.clone().unwrap_or_default(),
                device_mem: mebibytes(gpu.info.memory.0 << 20),
            })
        };
        let devices = Devices { dev: container.shares.iter().filter_map(device).collect() };
        let (gpu, mem) = request(snapshot, container);
        pod.stat.insert(container.key.container.clone(), devices);
        pod.spec.insert(container.key.container.clone(), Spec { gpu, mem });
    }
    usage
}

/// Returns what a container holds in gpu-manager's units: number of GPUs, and MiB.
#[must_use]
pub(super) fn request(snapshot: &Snapshot, container: &ContainerSnapshot) -> (f64, f64) {
    let held =
        container.shares.iter().filter_map(|share| Some(granted(share.hold?, snapshot.gpus.get(share.gpu)?)));
    let (compute_percent, bytes) = held
        .fold((0, 0), |(compute_percent, bytes), (more, memory)| (compute_percent + more.0, bytes + memory));
    (f64::from(compute_percent) / 100.0, mebibytes(bytes))
}

/// Returns bytes as MiB. The MiB of a GPU fit into 32 bits, so the conversion is exact.
pub(super) fn mebibytes(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 20).unwrap_or(u32::MAX))
}
