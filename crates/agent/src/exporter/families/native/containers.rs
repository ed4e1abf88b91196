//! Families of containers: what each container holds and uses on each GPU.

use std::collections::BTreeSet;

use tessera_wire::metrics::{
    Labels,
    MetricKind::{self, Counter, Gauge, Info},
    MetricsPage, Value,
};

use crate::exporter::{GpuSnapshot, ShareSnapshot, Snapshot, snapshot::granted};

/// Name, kind, help text and value of a family.
type Row = (&'static str, MetricKind, &'static str, fn(&ShareSnapshot, &GpuSnapshot) -> Value);

const ROWS: [Row; 17] = [
    (
        "tessera_container_memory_used_bytes",
        Gauge,
        "Memory of the GPU that the container's processes use.",
        |share, _| share.used.into(),
    ),
    (
        "tessera_container_memory_granted_bytes",
        Gauge,
        "Memory of the GPU granted to the container.",
        |share, gpu| share.hold.map(|hold| granted(hold, gpu).1).into(),
    ),
    (
        "tessera_container_memory_limit_bytes",
        Gauge,
        "Memory of the GPU that the container may use now: what it was granted, and what it may borrow.",
        |share, _| share.memory_limit.into(),
    ),
    (
        "tessera_container_memory_borrowed_bytes",
        Gauge,
        "Memory of the GPU that the container uses beyond what it was granted; absent if it may not borrow any.",
        |share, gpu| {
            let granted = share.hold.map(|hold| granted(hold, gpu).1).unwrap_or_default();
            let used = share
                .used
                .filter(|used| share.memory_limit.is_some_and(|limit| limit > granted || *used > granted));
            used.map(|used| used.saturating_sub(granted)).into()
        },
    ),
    (
        "tessera_container_compute_granted_ratio",
        Gauge,
        "Fraction of the GPU's compute granted to the container.",
        |share, gpu| share.hold.map(|hold| f64::from(granted(hold, gpu).0.0) / 100.0).into(),
    ),
    (
        "tessera_container_busy_ratio",
        Gauge,
        "Fraction of the last interval in which the container's kernels ran.",
        |share, _| share.busy.into(),
    ),
    (
        "tessera_container_busy_seconds_total",
        Counter,
        "Time in which the container's kernels ran.",
        |share, gpu| share.total.filter(|_| gpu.measured).map(|total| total.busy).into(),
    ),
    (
        "tessera_container_last_busy_timestamp_seconds",
        Gauge,
        "Time at which the container's kernels last ran, in seconds since 1970; absent before the first kernel.",
        |share, _| share.total.and_then(|total| total.last_busy).into(),
    ),
    (
        "tessera_container_energy_joules_total",
        Counter,
        "Energy of the GPU in proportion to the container's busy time.",
        |share, gpu| share.total.filter(|_| gpu.measured && gpu.has_energy).map(|total| total.energy).into(),
    ),
    ("tessera_container_processes", Gauge, "The container's processes on the GPU.", |share, _| {
        share.pids.as_ref().map(Vec::len).into()
    }),
    (
        "tessera_container_escaped_processes",
        Gauge,
        "The container's processes that use the GPU beyond what the container was granted.",
        |share, _| (share.escaped_processes > 0).then_some(share.escaped_processes).into(),
    ),
    (
        "tessera_container_throttled_seconds_total",
        Counter,
        "Time in which the container was throttled to its share of the GPU.",
        |share, _| share.report.map(|report| report.throttled_seconds).into(),
    ),
    (
        "tessera_container_throttle_waits_total",
        Counter,
        "Number of times the container was throttled to its share.",
        |share, _| share.report.map(|report| report.waits).into(),
    ),
    (
        "tessera_container_memory_denied_bytes_total",
        Counter,
        "Memory requested beyond the container's share and rejected.",
        |share, _| share.report.map(|report| report.denied_bytes).into(),
    ),
    (
        "tessera_container_window_seconds_total",
        Counter,
        "Time in which a window of the container was open.",
        |share, _| share.report.map(|report| report.window_seconds).into(),
    ),
    ("tessera_container_windows_total", Counter, "Number of windows of the container.", |share, _| {
        share.report.map(|report| report.windows).into()
    }),
    (
        "tessera_container_account_overruns_total",
        Counter,
        "Number of times the container's account file was cut, because the container had made it larger.",
        |share, _| share.report.map(|report| report.account_overruns).into(),
    ),
];

pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    let mut shares: Vec<(Labels, &ShareSnapshot, &GpuSnapshot)> = Vec::new();
    for container in &snapshot.containers {
        let labels = super::super::container_labels(container);
        for share in &container.shares {
            let Some(gpu) = snapshot.gpus.get(share.gpu) else { continue };
            let on_gpu = labels.and(&[("gpu", &gpu.info.index.to_string()), ("uuid", &gpu.info.uuid.0)]);
            shares.push((on_gpu, share, gpu));
        }
    }
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        shares.iter().for_each(|(labels, share, gpu)| family.sample(labels, value(share, gpu)));
    }
    let help = "1 if the use of the GPU by the container, or a part of it, is unknown for this reason; the families concerned are absent.";
    let mut family = page.family("tessera_container_usage_unknown", Gauge, help);
    for (labels, share, _) in &shares {
        let reasons = BTreeSet::from([share.unknown_memory, share.unknown_time]);
        for unknown in reasons.into_iter().flatten() {
            family.sample(&labels.and(&[("reason", unknown.name())]), 1u64);
        }
    }
    let help = "MIG instance on which the container's processes run.";
    let mut family = page.family("tessera_container_gpu_instance_info", Info, help);
    for (container, gpu, part) in snapshot.on_instances() {
        let labels = super::super::container_labels(container).and(&[
            ("gpu", &gpu.info.index.to_string()),
            ("uuid", &gpu.info.uuid.0),
            ("instance_uuid", &part.uuid),
        ]);
        family.sample(&labels, 1u64);
    }
    let help = "Detected uses of a GPU beyond the container's grant.";
    let mut family = page.family("tessera_container_escapes_total", Counter, help);
    for container in &snapshot.containers {
        let labels = super::super::container_labels(container);
        for (escape, count) in &container.escapes {
            family.sample(&labels.and(&[("kind", escape.name())]), *count);
        }
    }
}
