//! Names of HAMi's monitor, those of today and those it had before, as far as they can be told without its library.

use tessera_wire::metrics::{
    Kind::{Gauge, Info},
    Labels, Page, Value,
};

use crate::exporter::{
    ContainerSnapshot, GpuReading, GpuSnapshot, ShareSnapshot, Snapshot, snapshot::granted,
};

/// Name, the one it had before, what it tells, and where it stands.
type GpuRow = (&'static str, Option<&'static str>, &'static str, fn(&GpuReading) -> Value);
type ShareRow = (&'static str, Option<&'static str>, &'static str, fn(&ShareSnapshot, &GpuSnapshot) -> Value);

const CARDS: [GpuRow; 3] = [
    (
        "hami_host_gpu_memory_used_bytes",
        Some("HostGPUMemoryUsage"),
        "GPU device memory usage in bytes",
        |look| look.used_bytes().into(),
    ),
    (
        "hami_host_gpu_utilization_ratio",
        Some("HostCoreUtilization"),
        "GPU core utilization ratio (0-100)",
        |look| look.sensors.utilization.into(),
    ),
    (WITHOUT_NODE, None, "GPU memory controller utilization ratio (0-100)", |look| {
        look.sensors.memory_utilization.into()
    }),
];

/// The only one of a GPU that does not name its node.
const WITHOUT_NODE: &str = "hami_host_gpu_memory_controller_utilization_ratio";

const SHARES: [ShareRow; 5] = [
    (
        "hami_vgpu_memory_used_bytes",
        Some("vGPU_device_memory_usage_in_bytes"),
        "vGPU device memory usage in bytes",
        |share, _| share.used.into(),
    ),
    (
        "hami_vgpu_memory_limit_bytes",
        Some("vGPU_device_memory_limit_in_bytes"),
        "vGPU device memory limit in bytes",
        |share, card| share.hold.map(|hold| granted(hold, card).1).into(),
    ),
    ("hami_container_device_memory_bytes", None, "Container device memory usage in bytes", |share, _| {
        share.used.into()
    }),
    (
        "hami_container_device_utilization_ratio",
        Some("Device_utilization_desc_of_container"),
        "Container device SM utilization ratio",
        |share, _| share.busy.map(|busy| (busy * 1e4).round() / 100.0).into(),
    ),
    (
        "hami_container_last_kernel_elapsed_seconds",
        Some("Device_last_kernel_of_container"),
        "Seconds since last kernel execution in container",
        |share, card| {
            let since = share.total.last_busy.zip(card.last_success);
            since.map(|(last, now)| (now - last).max(0.0).round()).into()
        },
    ),
];

const INSTANCE: (&str, &str) = ("hami_mig_device_info", "MIG runtime identity for a container allocation");
const INSTANCE_BEFORE: &str = "MigInfo";

/// What labels are called, in the same order: node, GPU's place, GPU's name, GPU's kind; namespace, pod, container, place, GPU's name.
struct Words {
    card: [&'static str; 4],
    share: [&'static str; 5],
}

const TODAY: Words = Words {
    card: ["node", "device_index", "device_uuid", "device_type"],
    share: ["namespace", "pod", "container", "vdevice_index", "device_uuid"],
};

const BEFORE: Words = Words {
    card: ["nodeid", "deviceidx", "deviceuuid", "devicetype"],
    share: ["podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid"],
};

/// Under the names of today.
pub(super) fn write(picture: &Snapshot, page: &mut Page) {
    for (name, _, help, value) in CARDS {
        cards(picture, page, &TODAY, (name, help), value);
    }
    for (name, _, help, value) in SHARES {
        shares(picture, page, &TODAY, (name, help), value);
    }
    let mut family = page.family(INSTANCE.0, Info, INSTANCE.1);
    for (container, card, part) in picture.on_instances() {
        let labels = of_part(&TODAY, container, card).and(&[
            ("mig_uuid", &part.uuid),
            ("profile", part.profile.as_deref().unwrap_or_default()),
            ("gpu_instance_id", &number(part.gpu_instance)),
            ("compute_instance_id", &number(part.compute_instance)),
            ZONE,
        ]);
        family.sample(&labels, 1u64);
    }
}

/// Under those of before.
pub(super) fn write_before(picture: &Snapshot, page: &mut Page) {
    for (_, name, help, value) in CARDS {
        name.into_iter().for_each(|name| cards(picture, page, &BEFORE, (name, help), value));
    }
    for (_, name, help, value) in SHARES {
        name.into_iter().for_each(|name| shares(picture, page, &BEFORE, (name, help), value));
    }
    let mut family = page.family(INSTANCE_BEFORE, Gauge, INSTANCE.1);
    for (container, card, part) in picture.on_instances() {
        let id = number(part.gpu_instance);
        family.sample(&of_part(&BEFORE, container, card).and(&[("instanceid", &id), ZONE]), 1u64);
    }
}

/// On every sample.
const ZONE: (&str, &str) = ("zone", "vGPU");

fn cards(
    picture: &Snapshot,
    page: &mut Page,
    words: &Words,
    (name, help): (&str, &str),
    value: fn(&GpuReading) -> Value,
) {
    let mut family = page.family(name, Gauge, help);
    for card in &picture.cards {
        let Some(look) = &card.look else { continue };
        let [node, index, uuid, kind] = words.card;
        let node = [(node, picture.node.as_str())];
        let labels = Labels::new(if name == WITHOUT_NODE { &[] } else { &node }).and(&[
            (index, &card.gpu.index.to_string()),
            (uuid, &card.gpu.uuid.0),
            (kind, &format!("NVIDIA-{}", card.gpu.model)),
            ZONE,
        ]);
        family.sample(&labels, value(look));
    }
}

fn shares(
    picture: &Snapshot,
    page: &mut Page,
    words: &Words,
    (name, help): (&str, &str),
    value: fn(&ShareSnapshot, &GpuSnapshot) -> Value,
) {
    let mut family = page.family(name, Gauge, help);
    for container in &picture.containers {
        for (place, share) in container.shares.iter().enumerate() {
            let Some(card) = picture.cards.get(share.card) else { continue };
            family.sample(&of_share(words, container, place, card).and(&[ZONE]), value(share, card));
        }
    }
}

fn of_share(words: &Words, container: &ContainerSnapshot, place: usize, card: &GpuSnapshot) -> Labels {
    let [namespace, pod, own, index, uuid] = words.share;
    Labels::new(&[
        (namespace, &container.namespace),
        (pod, &container.pod),
        (own, &container.key.container),
        (index, &place.to_string()),
        (uuid, &card.gpu.uuid.0),
    ])
}

fn of_part(words: &Words, container: &ContainerSnapshot, card: &GpuSnapshot) -> Labels {
    let index = usize::from(card.gpu.index.0);
    let place = container.shares.iter().position(|share| share.card == index);
    of_share(words, container, place.unwrap_or_default(), card)
}

fn number(number: Option<u32>) -> String {
    number.map(|number| number.to_string()).unwrap_or_default()
}
