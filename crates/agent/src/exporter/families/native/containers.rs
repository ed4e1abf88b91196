//! Containers: what each holds and uses of each GPU.

use tessera_wire::metrics::{
    Kind::{self, Counter, Gauge, Info},
    Labels, Page, Value,
};

use crate::exporter::{GpuSnapshot, ShareSnapshot, Snapshot, snapshot::granted};

/// A family: its name, what it is, what it tells, and where that stands.
type Row = (&'static str, Kind, &'static str, fn(&ShareSnapshot, &GpuSnapshot) -> Value);

const ROWS: [Row; 14] = [
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
        |share, card| share.hold.map(|hold| granted(hold, card).1).into(),
    ),
    (
        "tessera_container_compute_granted_ratio",
        Gauge,
        "Part of the GPU's compute granted to the container.",
        |share, card| share.hold.map(|hold| f64::from(granted(hold, card).0.0) / 100.0).into(),
    ),
    (
        "tessera_container_busy_ratio",
        Gauge,
        "Part of the last interval in which the container's kernels ran.",
        |share, _| share.busy.into(),
    ),
    (
        "tessera_container_busy_seconds_total",
        Counter,
        "Time in which the container's kernels ran.",
        |share, card| card.measured.then_some(share.total.busy).into(),
    ),
    (
        "tessera_container_last_busy_timestamp_seconds",
        Gauge,
        "When the container's kernels last ran, in seconds since 1970; not there before they ever did.",
        |share, _| share.total.last_busy.into(),
    ),
    (
        "tessera_container_energy_joules_total",
        Counter,
        "Energy of the GPU by the container's part of its busy time.",
        |share, card| (card.measured && card.has_energy).then_some(share.total.energy).into(),
    ),
    ("tessera_container_processes", Gauge, "The container's processes on the GPU.", |share, card| {
        card.look.is_some().then_some(share.pids.len()).into()
    }),
    (
        "tessera_container_escaped_processes",
        Gauge,
        "The container's processes on a GPU that it was not granted.",
        |share, _| share.escaped.then_some(share.pids.len()).into(),
    ),
    (
        "tessera_container_throttled_seconds_total",
        Counter,
        "Time the container waited for its share of the GPU.",
        |share, _| share.throttle.map(|throttle| throttle.seconds).into(),
    ),
    (
        "tessera_container_throttle_waits_total",
        Counter,
        "How often the container had to wait for its share.",
        |share, _| share.throttle.map(|throttle| throttle.waits).into(),
    ),
    (
        "tessera_container_memory_denied_bytes_total",
        Counter,
        "Memory the container asked for beyond its share, and was refused.",
        |share, _| share.throttle.map(|throttle| throttle.denied_bytes).into(),
    ),
    (
        "tessera_container_window_seconds_total",
        Counter,
        "Time for which the container was given the GPU.",
        |share, _| share.throttle.map(|throttle| throttle.open).into(),
    ),
    ("tessera_container_windows_total", Counter, "How often the container was given the GPU.", |share, _| {
        share.throttle.map(|throttle| throttle.windows).into()
    }),
];

pub(super) fn write(picture: &Snapshot, page: &mut Page) {
    let mut shares: Vec<(Labels, &ShareSnapshot, &GpuSnapshot)> = Vec::new();
    for container in &picture.containers {
        let labels = super::super::container_labels(container);
        for share in &container.shares {
            let Some(card) = picture.cards.get(share.card) else { continue };
            let on_gpu = labels.and(&[("gpu", &card.gpu.index.to_string()), ("uuid", &card.gpu.uuid.0)]);
            shares.push((on_gpu, share, card));
        }
    }
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        shares.iter().for_each(|(labels, share, card)| family.sample(labels, value(share, card)));
    }
    let help = "Which part of a GPU that is cut up (MIG) the container's processes are on.";
    let mut family = page.family("tessera_container_gpu_instance_info", Info, help);
    for (container, card, part) in picture.on_instances() {
        let labels = super::super::container_labels(container).and(&[
            ("gpu", &card.gpu.index.to_string()),
            ("uuid", &card.gpu.uuid.0),
            ("instance_uuid", &part.uuid),
        ]);
        family.sample(&labels, 1u64);
    }
    let help = "How often something in the container was seen to use what it was not given.";
    let mut family = page.family("tessera_container_escapes_total", Counter, help);
    for container in &picture.containers {
        let labels = super::super::container_labels(container);
        for (escape, count) in &container.escapes {
            family.sample(&labels.and(&[("kind", escape.name())]), *count);
        }
    }
}
