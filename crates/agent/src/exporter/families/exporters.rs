//! Families of two earlier exporters: pods with their GPUs, and the GPU memory of pods' processes.

use std::collections::BTreeSet;

use tessera_wire::metrics::{
    Labels,
    MetricKind::{Gauge, Info},
    MetricsPage, legal_name,
};

use super::{MetricsOptions, processes::largest};
use crate::exporter::{ProcessOwner, ProcessSnapshot, Snapshot};

/// Pod names that the memory exporter uses for programs without a pod: "run directly on the server"
/// and "started by docker run".
const ON_THE_SERVER: &str = "服务器直接运行的程序";
const BY_DOCKER: &str = "docker run运行的程序";
const NO_NAMESPACE: &str = "null";

pub(super) fn map(snapshot: &Snapshot, page: &mut MetricsPage) {
    let mut family =
        page.family("pod_and_gpu_map_info", Info, "Provide a mapping relationship between pod and gpu");
    pairs(snapshot).iter().for_each(|labels| family.sample(labels, 1u64));
}

/// Writes the family named after the node. Illegal characters of the name are replaced.
pub(super) fn nodes(snapshot: &Snapshot, page: &mut MetricsPage) {
    let name = format!("{}_info", legal_name(&snapshot.node));
    let mut family = page.family(&name, Info, "Provide every node's pod and gpu mapping relationship");
    pairs(snapshot).iter().for_each(|labels| family.sample(labels, 1u64));
}

/// Returns the pods with the GPUs they hold. Each pair occurs once, even if several containers
/// share it.
fn pairs(snapshot: &Snapshot) -> BTreeSet<Labels> {
    let mut pairs = BTreeSet::new();
    for container in &snapshot.containers {
        let held = container.shares.iter().filter(|share| share.hold.is_some());
        for gpu in held.filter_map(|share| snapshot.gpus.get(share.gpu)) {
            pairs.insert(Labels::new(&[
                ("gpu_id", &gpu.info.index.to_string()),
                ("gpu_model", &gpu.info.model.0),
                ("namespace", &container.namespace),
                ("node", &snapshot.node),
                ("pod_name", &container.pod),
            ]));
        }
    }
    pairs
}

pub(super) fn pod_memory(snapshot: &Snapshot, options: &MetricsOptions, page: &mut MetricsPage) {
    let (shown, others) = largest(snapshot, options.max_processes);
    let mut family = page.family("pod_used_gpu_mem_MB", Gauge, ". Pod使用的GPU显存大小");
    let labels = |gpu: usize, pid: &str, pod: &str, namespace: &str| {
        let gpu = snapshot.gpus.get(gpu);
        let (name, uuid, index) = gpu
            .map(|gpu| (gpu.info.model.0.as_ref(), gpu.info.uuid.0.as_ref(), gpu.info.index.to_string()))
            .unwrap_or_default();
        if options.old_pod_memory_labels {
            Labels::new(&[
                ("app_pid", pid),
                ("gpu_name", name),
                ("gpu_uuid", uuid),
                ("pod_name", pod),
                ("pod_namespace", namespace),
            ])
        } else {
            Labels::new(&[
                ("hostIP", &snapshot.host_ip),
                ("app_pid", pid),
                ("gpu_name", name),
                ("UUID", uuid),
                ("gpu", &index),
                ("pod", pod),
                ("namespace", namespace),
            ])
        }
    };
    for process in shown {
        let (pod, namespace) = owner(snapshot, process);
        let bytes = process.bytes.map(|bytes| bytes >> 20);
        family.sample(&labels(process.gpu, &process.pid.to_string(), pod, namespace), bytes);
    }
    for (gpu, (_, bytes)) in others.iter().enumerate().filter(|(_, (count, _))| *count > 0) {
        family.sample(&labels(gpu, "other", "other", NO_NAMESPACE), bytes >> 20);
    }
}

fn owner<'a>(snapshot: &'a Snapshot, process: &ProcessSnapshot) -> (&'a str, &'a str) {
    match process.owner {
        ProcessOwner::Container(place) => snapshot
            .containers
            .get(place)
            .map_or(("unknown", NO_NAMESPACE), |container| (&container.pod, &container.namespace)),
        ProcessOwner::OutsideContainer => (BY_DOCKER, NO_NAMESPACE),
        ProcessOwner::Host => (ON_THE_SERVER, NO_NAMESPACE),
        ProcessOwner::Unknown => ("unknown", NO_NAMESPACE),
    }
}
