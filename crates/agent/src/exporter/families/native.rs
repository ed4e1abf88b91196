//! Tessera's own families: base units, one family per fact, and values that can be summed.
//!
//! The usage of containers plus the remainder is the usage of the GPU: `sum by (uuid)
//! (tessera_container_memory_used_bytes) + sum by (uuid) (tessera_gpu_memory_remainder_bytes) =
//! tessera_gpu_memory_used_bytes`, and the same for the rates of busy seconds and joules.

mod claims;
mod containers;
mod gpus;
mod sensors;

use tessera_wire::metrics::{
    Labels,
    MetricKind::{Counter, Gauge, Info},
    MetricsPage,
};
use tessera_wire::tessera::certificate_expiry;

use super::{MetricsOptions, processes};
use crate::exporter::Snapshot;

pub(super) fn write(snapshot: &Snapshot, options: &MetricsOptions, page: &mut MetricsPage) {
    about(snapshot, options, page);
    gpus::write(snapshot, page);
    sensors::write(snapshot, page);
    containers::write(snapshot, page);
    claims::write(snapshot, page);
    if options.processes {
        processes::write(snapshot, options.max_processes, page);
    }
}

/// Writes the families about the exporter itself and its data sources.
fn about(snapshot: &Snapshot, options: &MetricsOptions, page: &mut MetricsPage) {
    page.family("tessera_agent_build_info", Info, "Version and node of the agent.")
        .sample(&Labels::new(&[("version", options.version), ("node", &snapshot.node)]), 1u64);
    let ends: Vec<(String, u64)> =
        snapshot.certificates.iter().map(|end| (end.role.to_string(), end.unix_seconds)).collect();
    let labels = Labels::new(&[("node", &snapshot.node)]);
    certificate_expiry::write(page, ends.iter().map(|(role, end)| (&labels, role.as_str(), *end)));
    let sources = &snapshot.sources;
    let mut up = page.family(
        "tessera_exporter_source_up",
        Gauge,
        "1 if the data source answers; metrics that need it are missing otherwise.",
    );
    for (source, answers) in [
        ("gpus", sources.gpus),
        ("kubelet", sources.kubelet),
        ("pods", sources.pods),
        ("processes", sources.processes),
    ] {
        up.sample(&Labels::new(&[("source", source)]), answers);
    }
    let labels: Vec<Labels> = snapshot.gpus.iter().map(super::gpu_labels).collect();
    let gpus = || labels.iter().zip(&snapshot.gpus);
    let mut success = page.family(
        "tessera_gpu_sample_success",
        Gauge,
        "1 if the last sample of the GPU succeeded; its other gauges are missing otherwise.",
    );
    gpus().for_each(|(labels, gpu)| success.sample(labels, gpu.reading.is_some()));
    let mut at = page.family(
        "tessera_gpu_sample_timestamp_seconds",
        Gauge,
        "Time of the last successful sample of the GPU, in seconds since 1970.",
    );
    gpus().for_each(|(labels, gpu)| at.sample(labels, gpu.last_success));
    let mut duration =
        page.family("tessera_gpu_sample_duration_seconds", Gauge, "Duration of the last sample.");
    gpus().for_each(|(labels, gpu)| {
        duration.sample(labels, gpu.reading.as_ref().map(|reading| reading.duration_seconds))
    });
    let mut samples = page.family("tessera_gpu_samples_total", Counter, "Samples of the GPU.");
    gpus().for_each(|(labels, gpu)| samples.sample(labels, gpu.samples));
    let mut failures =
        page.family("tessera_gpu_sample_failures_total", Counter, "Failed samples of the GPU.");
    gpus().for_each(|(labels, gpu)| failures.sample(labels, gpu.failures));
}
