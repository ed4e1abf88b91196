//! Names of HAMi's monitor, as far as they can be told without its library.

use tessera_wire::metrics::{Kind::Gauge, Labels, Page, Value};

use crate::exporter::{CardPicture, Look, Picture, SharePicture, picture::granted};

/// Name, what it tells, whether the node is named with it, and where it stands.
type CardRow = (&'static str, &'static str, bool, fn(&Look) -> Value);
type ShareRow = (&'static str, &'static str, fn(&SharePicture, &CardPicture) -> Value);

const CARDS: [CardRow; 3] = [
    ("hami_host_gpu_memory_used_bytes", "GPU device memory usage in bytes", true, |look| {
        look.used_bytes().into()
    }),
    ("hami_host_gpu_utilization_ratio", "GPU core utilization ratio (0-100)", true, |look| {
        look.sensors.utilization.into()
    }),
    (
        "hami_host_gpu_memory_controller_utilization_ratio",
        "GPU memory controller utilization ratio (0-100)",
        false,
        |look| look.sensors.memory_utilization.into(),
    ),
];

const SHARES: [ShareRow; 4] = [
    ("hami_vgpu_memory_used_bytes", "vGPU device memory usage in bytes", |share, _| share.used.into()),
    ("hami_vgpu_memory_limit_bytes", "vGPU device memory limit in bytes", |share, card| {
        share.hold.map(|hold| granted(hold, card).1).into()
    }),
    ("hami_container_device_memory_bytes", "Container device memory usage in bytes", |share, _| {
        share.used.into()
    }),
    ("hami_container_device_utilization_ratio", "Container device SM utilization ratio", |share, _| {
        share.busy.map(|busy| (busy * 1e4).round() / 100.0).into()
    }),
];

pub(super) fn write(picture: &Picture, page: &mut Page) {
    for (name, help, with_node, value) in CARDS {
        let mut family = page.family(name, Gauge, help);
        for card in &picture.cards {
            let node = [("node", picture.node.as_str())];
            let labels = Labels::new(if with_node { &node } else { &[] }).and(&[
                ("device_index", &card.gpu.index.to_string()),
                ("device_uuid", &card.gpu.uuid.0),
                ("device_type", &format!("NVIDIA-{}", card.gpu.model)),
                ("zone", "vGPU"),
            ]);
            if let Some(look) = &card.look {
                family.sample(&labels, value(look));
            }
        }
    }
    for (name, help, value) in SHARES {
        let mut family = page.family(name, Gauge, help);
        for container in &picture.containers {
            for (place, share) in container.shares.iter().enumerate() {
                let Some(card) = picture.cards.get(share.card) else { continue };
                let labels = Labels::new(&[
                    ("namespace", &container.namespace),
                    ("pod", &container.pod),
                    ("container", &container.key.container),
                    ("vdevice_index", &place.to_string()),
                    ("device_uuid", &card.gpu.uuid.0),
                    ("zone", "vGPU"),
                ]);
                family.sample(&labels, value(share, card));
            }
        }
    }
}
