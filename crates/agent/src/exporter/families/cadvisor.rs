//! Families that earlier kubelets had from cAdvisor. The values are those of the container, not of
//! the GPU.

use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage, Value};

use crate::exporter::{GpuSnapshot, ShareSnapshot, Snapshot, snapshot::granted};

/// Name, help text and value of a family.
type Row = (&'static str, &'static str, fn(&ShareSnapshot, &GpuSnapshot) -> Value);

const ROWS: [Row; 3] = [
    (
        "container_accelerator_duty_cycle",
        "Percent of time over the past sample period during which the accelerator was actively processing.",
        |share, _| share.busy.map(|busy| (busy * 1e4).round() / 100.0).into(),
    ),
    ("container_accelerator_memory_total_bytes", "Total accelerator memory.", |share, gpu| {
        share.hold.map_or(gpu.info.memory.0 << 20, |hold| granted(hold, gpu).1).into()
    }),
    ("container_accelerator_memory_used_bytes", "Total accelerator memory allocated.", |share, _| {
        share.used.into()
    }),
];

pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    for (name, help, value) in ROWS {
        let mut family = page.family(name, Gauge, help);
        for container in &snapshot.containers {
            for share in &container.shares {
                let Some(gpu) = snapshot.gpus.get(share.gpu) else { continue };
                let labels = Labels::new(&[
                    ("acc_id", &gpu.info.uuid.0),
                    ("make", "nvidia"),
                    ("model", &gpu.info.model.0),
                    ("namespace", &container.namespace),
                    ("pod", &container.pod),
                    ("container", &container.key.container),
                ]);
                family.sample(&labels, value(share, gpu));
            }
        }
    }
}
