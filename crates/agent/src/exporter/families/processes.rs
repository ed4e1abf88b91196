//! Series of single processes, written on request and limited in number.

use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage};

use crate::exporter::{ProcessOwner, ProcessSnapshot, Snapshot};

/// Returns the `limit` processes with the most memory, and the number and bytes of the others on
/// each GPU. The bytes are `None` if the driver does not report those of each process.
pub(super) fn largest(
    snapshot: &Snapshot,
    limit: usize,
) -> (Vec<&ProcessSnapshot>, Vec<(usize, Option<u64>)>) {
    let mut all: Vec<&ProcessSnapshot> = snapshot.processes.iter().collect();
    let mut others = vec![(0, Some(0u64)); snapshot.gpus.len()];
    if all.len() > limit {
        all.sort_by_key(|process| (std::cmp::Reverse(process.bytes), process.gpu, process.pid));
        for process in all.split_off(limit) {
            if let Some((count, bytes)) = others.get_mut(process.gpu) {
                *count += 1;
                *bytes = bytes.zip(process.bytes).map(|(sum, more)| sum.saturating_add(more));
            }
        }
        all.sort_by_key(|process| (process.gpu, process.pid));
    }
    (all, others)
}

pub(super) fn write(snapshot: &Snapshot, limit: usize, page: &mut MetricsPage) {
    let (shown, others) = largest(snapshot, limit);
    let on_gpu = |gpu: usize| snapshot.gpus.get(gpu).map(super::gpu_labels).unwrap_or_default();
    let labels: Vec<(Labels, &ProcessSnapshot)> = shown
        .into_iter()
        .map(|process| {
            let container = match process.owner {
                ProcessOwner::Container(place) => snapshot.containers.get(place),
                ProcessOwner::OutsideContainer | ProcessOwner::Host | ProcessOwner::Unknown => None,
            };
            let owner = container.map(|container| {
                [container.namespace.as_str(), container.pod.as_str(), container.key.container.as_str()]
            });
            let [namespace, pod, container] = owner.unwrap_or_default();
            let labels = on_gpu(process.gpu).and(&[
                ("namespace", namespace),
                ("pod", pod),
                ("container", container),
                ("pid", &process.pid.to_string()),
                ("command", &process.command),
            ]);
            (labels, process)
        })
        .collect();
    let no_owner = [("namespace", ""), ("pod", ""), ("container", ""), ("pid", "other"), ("command", "")];
    let mut memory =
        page.family("tessera_process_memory_used_bytes", Gauge, "Memory of the GPU that a process uses.");
    labels.iter().for_each(|(labels, process)| memory.sample(labels, process.bytes));
    for (gpu, (_, bytes)) in others.iter().enumerate().filter(|(_, (count, _))| *count > 0) {
        memory.sample(&on_gpu(gpu).and(&no_owner), *bytes);
    }
    let mut busy = page.family(
        "tessera_process_busy_ratio",
        Gauge,
        "Fraction of the last interval in which a process's kernels ran.",
    );
    labels.iter().for_each(|(labels, process)| busy.sample(labels, process.busy));
    let mut summed_up =
        page.family("tessera_exporter_processes_summed_up", Gauge, "Processes without series of their own.");
    for (gpu, (count, _)) in others.iter().enumerate() {
        summed_up.sample(&on_gpu(gpu), *count);
    }
}
