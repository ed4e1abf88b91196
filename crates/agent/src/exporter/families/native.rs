//! Our own families: base units, one family per fact, sums that mean something.
//!
//! What containers use of a GPU, and the remainder, add up to what the GPU uses:
//! `sum by (uuid) (tessera_container_memory_used_bytes) + sum by (uuid) (tessera_gpu_memory_remainder_bytes) = tessera_gpu_memory_used_bytes`,
//! and likewise for the rates of busy seconds and joules.

mod cards;
mod containers;
mod sensors;

use tessera_wire::metrics::{
    Kind::{Counter, Gauge, Info},
    Labels, Page,
};

use super::{MetricsOptions, processes};
use crate::exporter::Snapshot;

pub(super) fn write(picture: &Snapshot, wanted: &MetricsOptions, page: &mut Page) {
    about(picture, wanted, page);
    cards::write(picture, page);
    sensors::write(picture, page);
    containers::write(picture, page);
    if wanted.processes {
        processes::write(picture, wanted.most_processes, page);
    }
}

/// The exporter itself: what it is, what it can see.
fn about(picture: &Snapshot, wanted: &MetricsOptions, page: &mut Page) {
    page.family("tessera_agent_build_info", Info, "The agent that writes this.")
        .sample(&Labels::new(&[("version", wanted.version), ("node", &picture.node)]), 1u64);
    let sources = &picture.sources;
    let mut up = page.family(
        "tessera_exporter_source_up",
        Gauge,
        "Whether a source answers: without it, what only it knows is missing.",
    );
    for (source, answers) in [
        ("gpus", sources.gpus),
        ("kubelet", sources.kubelet),
        ("pods", sources.pods),
        ("processes", sources.processes),
    ] {
        up.sample(&Labels::new(&[("source", source)]), answers);
    }
    let labels: Vec<Labels> = picture.cards.iter().map(super::gpu_labels).collect();
    let cards = || labels.iter().zip(&picture.cards);
    let mut success = page.family(
        "tessera_gpu_sample_success",
        Gauge,
        "Whether the GPU answered at the last look; its other gauges are missing where it did not.",
    );
    cards().for_each(|(labels, card)| success.sample(labels, card.look.is_some()));
    let mut at = page.family(
        "tessera_gpu_sample_timestamp_seconds",
        Gauge,
        "When the GPU last answered, in seconds since 1970.",
    );
    cards().for_each(|(labels, card)| at.sample(labels, card.last_success));
    let mut took = page.family("tessera_gpu_sample_duration_seconds", Gauge, "How long the last look took.");
    cards().for_each(|(labels, card)| took.sample(labels, card.look.as_ref().map(|look| look.took)));
    let mut passes = page.family("tessera_gpu_samples_total", Counter, "Looks at the GPU.");
    cards().for_each(|(labels, card)| passes.sample(labels, card.passes));
    let mut failures = page.family("tessera_gpu_sample_failures_total", Counter, "Looks that failed.");
    cards().for_each(|(labels, card)| failures.sample(labels, card.failures));
}
