//! Pages in JSON: what is used right now, in our form and in gpu-manager's.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use tessera_wire::tessera::node_use::{ContainerUse, GpuUse, NodeUse, ShareUse};

use super::{ContainerSnapshot, ShareSnapshot, Snapshot, snapshot::granted};

/// What is used on the node, GPU by GPU and container by container.
#[must_use]
pub fn node_use(picture: &Snapshot) -> NodeUse {
    let gpus = picture.cards.iter().map(|card| GpuUse {
        uuid: card.gpu.uuid.to_string(),
        index: card.gpu.index.0,
        memory_used_mib: card.look.as_ref().and_then(|look| look.used_bytes()).map(|bytes| bytes >> 20),
        busy_percent: card
            .look
            .as_ref()
            .and_then(|look| look.busy.as_ref())
            .map(|split| percent(split.whole)),
    });
    let share = |share: &ShareSnapshot| {
        let card = picture.cards.get(share.card)?;
        let granted = share.hold.map(|hold| granted(hold, card));
        Some(ShareUse {
            uuid: card.gpu.uuid.to_string(),
            index: card.gpu.index.0,
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
    NodeUse { gpus: gpus.collect(), containers: picture.containers.iter().map(container).collect() }
}

/// With one digit behind the point: nobody measures finer.
fn percent(part: f64) -> f64 {
    (part * 1000.0).round() / 10.0
}

/// What gpu-manager answers to `/usage`, in its words. Zeros are left out, as there.
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

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

/// `81920`, not `81920.0`.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
#[allow(clippy::cast_possible_truncation, reason = "it is whole, and a cast from float saturates")]
fn shortest<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if number.fract() == 0.0 {
        serializer.serialize_i64(*number as i64)
    } else {
        serializer.serialize_f64(*number)
    }
}

/// Who holds and uses what: percent of the time, and MiB.
#[must_use]
pub fn usage(picture: &Snapshot) -> GpuManagerUsage {
    let mut usage = GpuManagerUsage::default();
    for container in picture.containers.iter().filter(|c| c.shares.iter().any(|share| share.hold.is_some())) {
        let pod = usage.usage.entry(container.key.uid.to_string()).or_default();
        pod.project.clone_from(&container.namespace);
        pod.cluster.clone_from(&container.cluster);
        let device = |share: &ShareSnapshot| {
            let card = picture.cards.get(share.card)?;
            Some(DeviceUsage {
                id: card.pci.clone(),
                card_idx: card.gpu.index.to_string(),
                gpu: share.busy.map_or(0.0, percent),
                mem: mebibytes(share.used.unwrap_or(0)),
                pids: share.pids.clone(),
                device_mem: mebibytes(card.gpu.memory.0 << 20),
            })
        };
        let devices = Devices { dev: container.shares.iter().filter_map(device).collect() };
        let (gpu, mem) = request(picture, container);
        pod.stat.insert(container.key.container.clone(), devices);
        pod.spec.insert(container.key.container.clone(), Spec { gpu, mem });
    }
    usage
}

/// What a container holds, as gpu-manager counts it: GPUs, and MiB.
#[must_use]
pub(super) fn request(picture: &Snapshot, container: &ContainerSnapshot) -> (f64, f64) {
    let held = container
        .shares
        .iter()
        .filter_map(|share| Some(granted(share.hold?, picture.cards.get(share.card)?)));
    let (compute_percent, bytes) = held
        .fold((0, 0), |(compute_percent, bytes), (more, memory)| (compute_percent + more.0, bytes + memory));
    (f64::from(compute_percent) / 100.0, mebibytes(bytes))
}

/// No GPU has more MiB than fit into 32 bits.
pub(super) fn mebibytes(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 20).unwrap_or(u32::MAX))
}
