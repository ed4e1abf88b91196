//! Series of single processes: only where they are wanted, and never more than so many.

use tessera_wire::metrics::{Kind::Gauge, Labels, Page};

use crate::exporter::{ProcessOwner, ProcessSnapshot, Snapshot};

/// Those with the most memory, and what is left over on each GPU: how many, and how many bytes.
pub(super) fn largest(picture: &Snapshot, most: usize) -> (Vec<&ProcessSnapshot>, Vec<(usize, u64)>) {
    let mut all: Vec<&ProcessSnapshot> = picture.processes.iter().collect();
    let mut others = vec![(0, 0); picture.cards.len()];
    if all.len() > most {
        all.sort_by_key(|process| (std::cmp::Reverse(process.bytes), process.card, process.pid));
        for process in all.split_off(most) {
            if let Some((count, bytes)) = others.get_mut(process.card) {
                *count += 1;
                *bytes += process.bytes.unwrap_or(0);
            }
        }
        all.sort_by_key(|process| (process.card, process.pid));
    }
    (all, others)
}

pub(super) fn write(picture: &Snapshot, most: usize, page: &mut Page) {
    let (shown, others) = largest(picture, most);
    let on_gpu = |card: usize| picture.cards.get(card).map(super::gpu_labels).unwrap_or_default();
    let labels: Vec<(Labels, &ProcessSnapshot)> = shown
        .into_iter()
        .map(|process| {
            let container = match process.owner {
                ProcessOwner::Container(place) => picture.containers.get(place),
                ProcessOwner::OutsideContainer | ProcessOwner::Host | ProcessOwner::Unknown => None,
            };
            let owner = container.map(|container| {
                [container.namespace.as_str(), container.pod.as_str(), container.key.container.as_str()]
            });
            let [namespace, pod, container] = owner.unwrap_or_default();
            let labels = on_gpu(process.card).and(&[
                ("namespace", namespace),
                ("pod", pod),
                ("container", container),
                ("pid", &process.pid.to_string()),
                ("command", &process.command),
            ]);
            (labels, process)
        })
        .collect();
    let nobody = [("namespace", ""), ("pod", ""), ("container", ""), ("pid", "other"), ("command", "")];
    let mut memory =
        page.family("tessera_process_memory_used_bytes", Gauge, "Memory of the GPU that a process uses.");
    labels.iter().for_each(|(labels, process)| memory.sample(labels, process.bytes));
    for (card, (_, bytes)) in others.iter().enumerate().filter(|(_, (count, _))| *count > 0) {
        memory.sample(&on_gpu(card).and(&nobody), *bytes);
    }
    let mut busy = page.family(
        "tessera_process_busy_ratio",
        Gauge,
        "Part of the last interval in which a process's kernels ran.",
    );
    labels.iter().for_each(|(labels, process)| busy.sample(labels, process.busy));
    let mut dropped = page.family(
        "tessera_exporter_processes_summed_up",
        Gauge,
        "Processes that have no series of their own.",
    );
    for (card, (count, _)) in others.iter().enumerate() {
        dropped.sample(&on_gpu(card), *count);
    }
}
