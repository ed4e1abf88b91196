//! Families of claims: what each claim holds of each GPU, and which containers use it.
//!
//! Several containers may use a claim and share its limits, so what the library reports for them is a fact of the
//! claim.

use tessera_wire::metrics::{
    Labels,
    MetricKind::{self, Counter, Gauge, Info},
    MetricsPage, Value,
};

use crate::exporter::{GpuSnapshot, Snapshot, snapshot::ClaimSnapshot, snapshot::granted};

/// Name, kind, help text and value of a family.
type Row = (&'static str, MetricKind, &'static str, fn(&ClaimSnapshot, &GpuSnapshot) -> Value);

const ROWS: [Row; 6] = [
    ("tessera_claim_memory_granted_bytes", Gauge, "Memory of the GPU that the claim holds.", |claim, gpu| {
        granted(claim.hold, gpu).1.into()
    }),
    (
        "tessera_claim_compute_granted_ratio",
        Gauge,
        "Fraction of the GPU's compute that the claim holds.",
        |claim, gpu| (f64::from(granted(claim.hold, gpu).0.0) / 100.0).into(),
    ),
    (
        "tessera_claim_throttled_seconds_total",
        Counter,
        "Time in which containers of the claim were throttled to its share of the GPU.",
        |claim, _| claim.report.map(|report| report.throttled_seconds).into(),
    ),
    (
        "tessera_claim_throttle_waits_total",
        Counter,
        "Number of times containers of the claim were throttled to its share.",
        |claim, _| claim.report.map(|report| report.waits).into(),
    ),
    (
        "tessera_claim_memory_denied_bytes_total",
        Counter,
        "Memory requested beyond the claim's share and rejected.",
        |claim, _| claim.report.map(|report| report.denied_bytes).into(),
    ),
    (
        "tessera_claim_window_seconds_total",
        Counter,
        "Time in which a window of the claim was open.",
        |claim, _| claim.report.map(|report| report.window_seconds).into(),
    ),
];

pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    let mut claims: Vec<(Labels, &ClaimSnapshot, &GpuSnapshot)> = Vec::new();
    for claim in &snapshot.claims {
        let Some(gpu) = snapshot.gpus.get(claim.gpu) else { continue };
        let labels = Labels::new(&[
            ("namespace", &claim.namespace),
            ("claim", &claim.name),
            ("gpu", &gpu.info.index.to_string()),
            ("uuid", &gpu.info.uuid.0),
        ]);
        claims.push((labels, claim, gpu));
    }
    for (name, kind, help, value) in ROWS {
        let mut family = page.family(name, kind, help);
        claims.iter().for_each(|(labels, claim, gpu)| family.sample(labels, value(claim, gpu)));
    }
    let help = "Container that uses the claim on the GPU.";
    let mut family = page.family("tessera_claim_container_info", Info, help);
    for (labels, claim, _) in &claims {
        for (pod, container) in &claim.users {
            family.sample(&labels.and(&[("pod", pod), ("container", container)]), 1u64);
        }
    }
}
