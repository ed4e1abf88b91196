//! The families that kubelets of old had from cAdvisor, with values of the container instead of the GPU's.

use tessera_wire::metrics::{Kind::Gauge, Labels, Page, Value};

use crate::exporter::{GpuSnapshot, ShareSnapshot, Snapshot, snapshot::granted};

/// A family: its name, what it tells, and where that stands.
type Row = (&'static str, &'static str, fn(&ShareSnapshot, &GpuSnapshot) -> Value);

const ROWS: [Row; 3] = [
    (
        "container_accelerator_duty_cycle",
        "Percent of time over the past sample period during which the accelerator was actively processing.",
        |share, _| share.busy.map(|busy| (busy * 1e4).round() / 100.0).into(),
    ),
    ("container_accelerator_memory_total_bytes", "Total accelerator memory.", |share, card| {
        share.hold.map_or(card.gpu.memory.0 << 20, |hold| granted(hold, card).1).into()
    }),
    ("container_accelerator_memory_used_bytes", "Total accelerator memory allocated.", |share, _| {
        share.used.into()
    }),
];

pub(super) fn write(picture: &Snapshot, page: &mut Page) {
    for (name, help, value) in ROWS {
        let mut family = page.family(name, Gauge, help);
        for container in &picture.containers {
            for share in &container.shares {
                let Some(card) = picture.cards.get(share.card) else { continue };
                let labels = Labels::new(&[
                    ("acc_id", &card.gpu.uuid.0),
                    ("make", "nvidia"),
                    ("model", &card.gpu.model.0),
                    ("namespace", &container.namespace),
                    ("pod", &container.pod),
                    ("container", &container.key.container),
                ]);
                family.sample(&labels, value(share, card));
            }
        }
    }
}
