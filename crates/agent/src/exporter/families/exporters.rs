//! Families of two earlier exporters: pods with their GPUs, and the GPU memory of pods' processes.

use tessera_wire::foreign::pod_gpu_map::{PodGpuMap, PodOnGpu};
use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage};

use super::{MetricsOptions, PodMemoryLabels, processes::largest};
use crate::exporter::{ProcessOwner, ProcessSnapshot, Snapshot};

/// Pod names that the memory exporter uses for programs without a pod: "run directly on the server"
/// and "started by docker run".
const ON_THE_SERVER: &str = "服务器直接运行的程序";
const BY_DOCKER: &str = "docker run运行的程序";
const NO_NAMESPACE: &str = "null";

pub(super) fn map(snapshot: &Snapshot, page: &mut MetricsPage) {
    pairs(snapshot).write(page);
}

pub(super) fn nodes(snapshot: &Snapshot, page: &mut MetricsPage) {
    pairs(snapshot).write_by_node(page);
}

/// Returns the pods of the node with the GPUs they hold.
fn pairs(snapshot: &Snapshot) -> PodGpuMap {
    let mut pairs = PodGpuMap::default();
    for container in &snapshot.containers {
        let held = container.shares.iter().filter(|share| share.hold.is_some());
        for gpu in held.filter_map(|share| snapshot.gpus.get(share.gpu)) {
            pairs.insert(PodOnGpu {
                gpu_uuid: &gpu.info.uuid.0,
                gpu_model: &gpu.info.model.0,
                namespace: &container.namespace,
                node: &snapshot.node,
                pod: &container.pod,
            });
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
        let mut labels = Labels::new(&[("app_pid", pid), ("gpu_name", name)]);
        if options.pod_memory_labels != PodMemoryLabels::New {
            labels = labels.and(&[("gpu_uuid", uuid), ("pod_name", pod), ("pod_namespace", namespace)]);
        }
        if options.pod_memory_labels != PodMemoryLabels::Old {
            labels = labels.and(&[
                ("hostIP", &snapshot.host_ip),
                ("UUID", uuid),
                ("gpu", &index),
                ("pod", pod),
                ("namespace", namespace),
            ]);
        }
        labels
    };
    for process in shown {
        let (pod, namespace) = owner(snapshot, process);
        let bytes = process.bytes.map(|bytes| bytes >> 20);
        family.sample(&labels(process.gpu, &process.pid.to_string(), pod, namespace), bytes);
    }
    for (gpu, (_, bytes)) in others.iter().enumerate().filter(|(_, (count, _))| *count > 0) {
        family.sample(&labels(gpu, "other", "other", NO_NAMESPACE), bytes.map(|bytes| bytes >> 20));
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
