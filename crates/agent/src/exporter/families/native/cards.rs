//! GPUs: what they are, what is left of them, and how much of what they use is no container's.

use tessera_core::gpu::Health;
use tessera_node::gpus::MigInstance;
use tessera_wire::metrics::{
    Kind::{self, Counter, Gauge, Info},
    Labels, Page, Value,
};

use crate::exporter::{GpuReading, GpuSnapshot, Snapshot};

pub(super) fn write(picture: &Snapshot, page: &mut Page) {
    let cards = Cards::of(picture);
    cards.facts(picture, page);
    cards.books(page);
    cards.memory(page);
    cards.spent(page);
    cards.troubles(page);
    cards.instances(page);
}

/// The GPUs, each with its labels.
struct Cards<'a>(Vec<(Labels, &'a GpuSnapshot)>);

impl<'a> Cards<'a> {
    fn of(picture: &'a Snapshot) -> Self {
        Self(picture.cards.iter().map(|card| (super::super::gpu_labels(card), card)).collect())
    }

    fn gauge<V: Into<Value>>(
        &self,
        page: &mut Page,
        name: &str,
        help: &str,
        value: impl Fn(&GpuSnapshot) -> V,
    ) {
        let mut family = page.family(name, Gauge, help);
        self.0.iter().for_each(|(labels, card)| family.sample(labels, value(card)));
    }

    /// A gauge of what the last look showed.
    fn seen<V: Into<Value>>(
        &self,
        page: &mut Page,
        name: &str,
        help: &str,
        value: impl Fn(&GpuReading) -> Option<V>,
    ) {
        self.gauge(page, name, help, |card| card.look.as_ref().and_then(&value));
    }

    fn facts(&self, picture: &Snapshot, page: &mut Page) {
        let driver = picture.driver.as_deref().unwrap_or_default();
        let mut info = page.family("tessera_gpu_info", Info, "What the GPU is.");
        for (labels, card) in &self.0 {
            let numa = card.gpu.numa.map(|node| node.to_string()).unwrap_or_default();
            let facts = labels.and(&[
                ("model", &card.gpu.model.0),
                ("minor", &card.gpu.minor.to_string()),
                ("pci_bus_id", &card.pci),
                ("numa_node", &numa),
                ("driver", driver),
            ]);
            info.sample(&facts, 1u64);
        }
        self.gauge(page, "tessera_gpu_healthy", "Whether the GPU may be granted.", |card| {
            card.gpu.health == Health::Healthy
        });
    }

    fn books(&self, page: &mut Page) {
        self.gauge(
            page,
            "tessera_gpu_allocatable_compute_ratio",
            "Compute of the GPU that nobody holds.",
            |card| f64::from(card.free_cores.0) / 100.0,
        );
        self.gauge(
            page,
            "tessera_gpu_allocatable_memory_bytes",
            "Memory of the GPU that nobody holds.",
            |card| card.free_memory.0 << 20,
        );
        self.gauge(
            page,
            "tessera_gpu_overbooked",
            "Whether more of the GPU was granted than it has.",
            |card| card.overbooked,
        );
    }

    fn memory(&self, page: &mut Page) {
        self.gauge(page, "tessera_gpu_memory_bytes", "Memory of the GPU.", |card| {
            let seen = card.look.as_ref().and_then(|look| look.memory).map(|memory| memory.total);
            seen.unwrap_or(card.gpu.memory.0 << 20)
        });
        self.seen(
            page,
            "tessera_gpu_memory_used_bytes",
            "Memory in use: of containers, and the remainder.",
            |look| look.used_bytes(),
        );
        self.seen(page, "tessera_gpu_memory_free_bytes", "Memory not in use.", |look| {
            look.memory.map(|memory| memory.free)
        });
        self.seen(page, "tessera_gpu_memory_reserved_bytes", "Memory the driver keeps for itself.", |look| {
            look.memory.map(|memory| memory.reserved)
        });
        let mut remainder = page.family(
            "tessera_gpu_memory_remainder_bytes",
            Gauge,
            "Memory in use that is no container's: of processes of the host, of processes nobody knows, of the driver for all of them.",
        );
        for (labels, card) in &self.0 {
            let Some(split) = card.look.as_ref().and_then(|look| look.used.as_ref()) else { continue };
            for (part, bytes) in [("host", split.host), ("unknown", split.unknown), ("driver", split.rest)] {
                remainder.sample(&labels.and(&[("part", part)]), bytes);
            }
        }
        self.seen(page, "tessera_gpu_processes", "Processes on the GPU.", |look| Some(look.pids.len()));
    }

    fn spent(&self, page: &mut Page) {
        self.seen(
            page,
            "tessera_gpu_busy_ratio",
            "Part of the last interval in which any kernel ran.",
            |look| look.busy.as_ref().map(|split| split.whole),
        );
        let mut busy =
            page.family("tessera_gpu_busy_seconds_total", Counter, "Time in which any kernel ran.");
        for (labels, card) in &self.0 {
            busy.sample(labels, card.measured.then_some(card.total.busy));
        }
        let mut remainder = page.family(
            "tessera_gpu_busy_remainder_seconds_total",
            Counter,
            "Time in which kernels ran that are no container's: of the host, or nobody knows whose.",
        );
        for (labels, card) in self.0.iter().filter(|(_, card)| card.measured) {
            for (part, tally) in [("host", card.host), ("unknown", card.unknown)] {
                remainder.sample(&labels.and(&[("part", part)]), tally.busy);
            }
        }
        let mut energy =
            page.family("tessera_gpu_energy_joules_total", Counter, "Energy used since the agent started.");
        for (labels, card) in self.0.iter().filter(|(_, card)| card.has_energy) {
            energy.sample(labels, card.total.energy);
        }
        let mut remainder = page.family(
            "tessera_gpu_energy_remainder_joules_total",
            Counter,
            "Energy that is no container's: of the host, nobody knows whose, or used while nobody computed.",
        );
        for (labels, card) in self.0.iter().filter(|(_, card)| card.has_energy) {
            let parts =
                [("host", card.host.energy), ("unknown", card.unknown.energy), ("idle", card.idle_energy)];
            parts.iter().for_each(|(part, joules)| remainder.sample(&labels.and(&[("part", part)]), *joules));
        }
    }

    fn troubles(&self, page: &mut Page) {
        let each = |card: &'a GpuSnapshot, labels: &Labels| {
            let xid =
                |(number, seen): (&u64, &(u64, f64))| (labels.and(&[("xid", &number.to_string())]), *seen);
            card.xids.iter().map(xid).collect::<Vec<_>>()
        };
        let all: Vec<(Labels, (u64, f64))> =
            self.0.iter().flat_map(|(labels, card)| each(card, labels)).collect();
        let mut count =
            page.family("tessera_gpu_xid_errors_total", Counter, "Errors the driver reported, by number.");
        all.iter().for_each(|(labels, (times, _))| count.sample(labels, *times));
        let mut last = page.family(
            "tessera_gpu_xid_last_timestamp_seconds",
            Gauge,
            "When the driver last reported the error, in seconds since 1970.",
        );
        all.iter().for_each(|(labels, (_, at))| last.sample(labels, *at));
    }

    fn instances(&self, page: &mut Page) {
        let parts: Vec<(Labels, &GpuSnapshot, &MigInstance)> = self
            .0
            .iter()
            .flat_map(|(labels, card)| {
                let parts = card.look.iter().flat_map(|look| &look.instances);
                parts.map(move |part| (labels.and(&[("instance_uuid", &part.uuid)]), *card, part))
            })
            .collect();
        let number = |number: Option<u32>| number.map(|number| number.to_string()).unwrap_or_default();
        let mut info = page.family("tessera_gpu_instance_info", Info, "Parts of a GPU that is cut up (MIG).");
        for (labels, _, part) in &parts {
            let facts = labels.and(&[
                ("gpu_instance", &number(part.gpu_instance)),
                ("compute_instance", &number(part.compute_instance)),
                ("profile", part.profile.as_deref().unwrap_or_default()),
            ]);
            info.sample(&facts, 1u64);
        }
        for (name, kind, help, value) in INSTANCES {
            let mut family = page.family(name, kind, help);
            parts.iter().for_each(|(labels, card, part)| family.sample(labels, value(card, part)));
        }
    }
}

/// A family: its name, what it is, what it tells, and where that stands.
type InstanceRow = (&'static str, Kind, &'static str, fn(&GpuSnapshot, &MigInstance) -> Value);

const INSTANCES: [InstanceRow; 4] = [
    ("tessera_gpu_instance_memory_bytes", Gauge, "Memory of a part of a GPU.", |_, part| {
        part.memory.map(|memory| memory.total).into()
    }),
    ("tessera_gpu_instance_memory_used_bytes", Gauge, "Memory of it in use.", |_, part| {
        part.memory.map(|memory| memory.used).into()
    }),
    (
        "tessera_gpu_instance_busy_ratio",
        Gauge,
        "Part of the last interval in which kernels ran on a part of a GPU.",
        |_, part| part.counted.and_then(|counted| counted.graphics).into(),
    ),
    (
        "tessera_gpu_instance_busy_seconds_total",
        Counter,
        "Time in which kernels ran on a part of a GPU.",
        |card, part| card.instances.get(&part.uuid).copied().into(),
    ),
];
