//! Two exporters of old: which pod has which GPU, and the memory of pods' processes.

use std::collections::BTreeSet;

use tessera_wire::metrics::{
    Kind::{Gauge, Info},
    Labels, Page, legal_name,
};

use super::{MetricsOptions, processes::largest};
use crate::exporter::{ProcessOwner, ProcessSnapshot, Snapshot};

/// What the memory exporter calls programs that belong to no pod: "run directly on the server", and "started by docker run".
const ON_THE_SERVER: &str = "服务器直接运行的程序";
const BY_DOCKER: &str = "docker run运行的程序";
const NO_NAMESPACE: &str = "null";

pub(super) fn map(picture: &Snapshot, page: &mut Page) {
    let mut family =
        page.family("pod_and_gpu_map_info", Info, "Provide a mapping relationship between pod and gpu");
    pairs(picture).iter().for_each(|labels| family.sample(labels, 1u64));
}

/// A family named after the node, which makes a legal name of any.
pub(super) fn nodes(picture: &Snapshot, page: &mut Page) {
    let name = format!("{}_info", legal_name(&picture.node));
    let mut family = page.family(&name, Info, "Provide every node's pod and gpu mapping relationship");
    pairs(picture).iter().for_each(|labels| family.sample(labels, 1u64));
}

/// Pods and the GPUs they hold; each pair once, however many containers share it.
fn pairs(picture: &Snapshot) -> BTreeSet<Labels> {
    let mut pairs = BTreeSet::new();
    for container in &picture.containers {
        let held = container.shares.iter().filter(|share| share.hold.is_some());
        for card in held.filter_map(|share| picture.cards.get(share.card)) {
            pairs.insert(Labels::new(&[
                ("gpu_id", &card.gpu.index.to_string()),
                ("gpu_model", &card.gpu.model.0),
                ("namespace", &container.namespace),
                ("node", &picture.node),
                ("pod_name", &container.pod),
            ]));
        }
    }
    pairs
}

pub(super) fn pod_memory(picture: &Snapshot, wanted: &MetricsOptions, page: &mut Page) {
    let (shown, others) = largest(picture, wanted.most_processes);
    let mut family = page.family("pod_used_gpu_mem_MB", Gauge, ". Pod使用的GPU显存大小");
    let labels = |card: usize, pid: &str, pod: &str, namespace: &str| {
        let card = picture.cards.get(card);
        let (name, uuid, index) = card
            .map(|card| (card.gpu.model.0.as_ref(), card.gpu.uuid.0.as_ref(), card.gpu.index.to_string()))
            .unwrap_or_default();
        if wanted.old_pod_memory_labels {
            Labels::new(&[
                ("app_pid", pid),
                ("gpu_name", name),
                ("gpu_uuid", uuid),
                ("pod_name", pod),
                ("pod_namespace", namespace),
            ])
        } else {
            Labels::new(&[
                ("hostIP", &picture.host_ip),
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
        let (pod, namespace) = owner(picture, process);
        let bytes = process.bytes.map(|bytes| bytes >> 20);
        family.sample(&labels(process.card, &process.pid.to_string(), pod, namespace), bytes);
    }
    for (card, (_, bytes)) in others.iter().enumerate().filter(|(_, (count, _))| *count > 0) {
        family.sample(&labels(card, "other", "other", NO_NAMESPACE), bytes >> 20);
    }
}

fn owner<'a>(picture: &'a Snapshot, process: &ProcessSnapshot) -> (&'a str, &'a str) {
    match process.owner {
        ProcessOwner::Container(place) => picture
            .containers
            .get(place)
            .map_or(("unknown", NO_NAMESPACE), |container| (&container.pod, &container.namespace)),
        ProcessOwner::OutsideContainer => (BY_DOCKER, NO_NAMESPACE),
        ProcessOwner::Host => (ON_THE_SERVER, NO_NAMESPACE),
        ProcessOwner::Unknown => ("unknown", NO_NAMESPACE),
    }
}
