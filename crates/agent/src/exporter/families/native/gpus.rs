//! Families of GPUs: identity, free capacity, usage, and the part of the usage that belongs to no
//! container.

use std::collections::BTreeSet;

use tessera_core::gpu::Health;
use tessera_node::gpus::MigInstance;
use tessera_wire::metrics::{
    Labels,
    MetricKind::{self, Counter, Gauge, Info},
    MetricsPage, Value,
};

use crate::exporter::{GpuReading, GpuSnapshot, Room, Snapshot, usage::mebibytes};

pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    let gpus = GpuFamilies::of(snapshot);
    gpus.facts(snapshot, page);
    gpus.free_capacity(page);
    gpus.memory(page);
    gpus.usage(page);
    gpus.errors(page);
    gpus.instances(page);
}

/// The GPUs with their labels.
struct GpuFamilies<'a>(Vec<(Labels, &'a GpuSnapshot)>);

/// Returns the granted part of the GPU by the scarcer of compute and memory. A pod with memory only takes
/// no compute and can still fill the GPU.
fn granted_ratio(gpu: &GpuSnapshot, room: Room) -> f64 {
    let part = |free: f64, all: f64| if all > 0.0 { 1.0 - (free / all).clamp(0.0, 1.0) } else { 0.0 };
    let compute = part(f64::from(room.compute.0), 100.0);
    let memory = part(mebibytes(room.memory.0 << 20), mebibytes(gpu.info.memory.0 << 20));
    compute.max(memory)
}

impl<'a> GpuFamilies<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        Self(snapshot.gpus.iter().map(|gpu| (super::super::gpu_labels(gpu), gpu)).collect())
    }

    fn gauge<V: Into<Value>>(
        &self,
        page: &mut MetricsPage,
        name: &str,
        help: &str,
        value: impl Fn(&GpuSnapshot) -> V,
    ) {
        let mut family = page.family(name, Gauge, help);
        self.0.iter().for_each(|(labels, gpu)| family.sample(labels, value(gpu)));
    }

    /// Writes a gauge with a value of the last sample.
    fn measured<V: Into<Value>>(
        &self,
        page: &mut MetricsPage,
        name: &str,
        help: &str,
        value: impl Fn(&GpuReading) -> Option<V>,
    ) {
        self.gauge(page, name, help, |gpu| gpu.reading.as_ref().and_then(&value));
    }

    fn facts(&self, snapshot: &Snapshot, page: &mut MetricsPage) {
        let driver = snapshot.driver.as_deref().unwrap_or_default();
        let mut info = page.family("tessera_gpu_info", Info, "Model, PCI address and driver of the GPU.");
        for (labels, gpu) in &self.0 {
            let numa = gpu.info.numa.map(|node| node.to_string()).unwrap_or_default();
            let facts = labels.and(&[
                ("model", &gpu.info.model.0),
                ("minor", &gpu.info.minor.to_string()),
                ("pci_bus_id", &gpu.pci),
                ("numa_node", &numa),
                ("driver", driver),
            ]);
            info.sample(&facts, 1u64);
        }
        self.gauge(
            page,
            "tessera_gpu_healthy",
            "1 if the GPU works as a GPU: it is neither broken nor in MIG mode. A cordoned GPU works.",
            |gpu| matches!(gpu.info.health, Health::Healthy | Health::Cordoned),
        );
        if self.0.iter().any(|(_, gpu)| !gpu.info.health.is_healthy()) {
            let help = "1 for a GPU that may not be granted, with the reason.";
            let mut family = page.family("tessera_gpu_withdrawn", Gauge, help);
            for (labels, gpu) in &self.0 {
                if let Some(reason) = gpu.info.health.problem() {
                    family.sample(&labels.and(&[("reason", reason)]), 1u64);
                }
            }
        }
    }

    /// Writes a gauge that follows from the grants on the GPU.
    fn granted<V: Into<Value>>(
        &self,
        page: &mut MetricsPage,
        name: &str,
        help: &str,
        value: impl Fn(&GpuSnapshot, Room) -> V,
    ) {
        self.gauge(page, name, help, |gpu| gpu.room.map(|room| value(gpu, room)));
    }

    fn free_capacity(&self, page: &mut MetricsPage) {
        self.granted(
            page,
            "tessera_gpu_allocatable_compute_ratio",
            "Compute of the GPU that can still be granted; 0 for a GPU that may not be granted.",
            |gpu, room| if gpu.info.health.is_healthy() { f64::from(room.compute.0) / 100.0 } else { 0.0 },
        );
        self.granted(
            page,
            "tessera_gpu_allocatable_memory_bytes",
            "Memory of the GPU that can still be granted; 0 for a GPU that may not be granted.",
            |gpu, room| if gpu.info.health.is_healthy() { room.memory.0 << 20 } else { 0 },
        );
        self.granted(
            page,
            "tessera_gpu_granted_ratio",
            "Granted part of the GPU: the larger of the parts of its compute and of its memory.",
            granted_ratio,
        );
        self.granted(
            page,
            "tessera_gpu_allocatable_ratio",
            "Part of the GPU that can still be granted: the smaller of the free parts of its compute and of its memory; 0 for a GPU that may not be granted.",
            |gpu, room| if gpu.info.health.is_healthy() { 1.0 - granted_ratio(gpu, room) } else { 0.0 },
        );
        let help = "1 if grants exceed the capacity of the GPU.";
        self.granted(page, "tessera_gpu_overbooked", help, |_, room| room.overbooked);
    }

    fn memory(&self, page: &mut MetricsPage) {
        self.gauge(page, "tessera_gpu_memory_bytes", "Memory of the GPU.", |gpu| {
            let seen = gpu.reading.as_ref().and_then(|reading| reading.memory).map(|memory| memory.total);
            seen.unwrap_or(gpu.info.memory.0 << 20)
        });
        self.measured(
            page,
            "tessera_gpu_memory_used_bytes",
            "Memory in use by containers and by the remainder.",
            |reading| reading.used_bytes(),
        );
        self.measured(page, "tessera_gpu_memory_free_bytes", "Memory not in use.", |reading| {
            reading.memory.map(|memory| memory.free)
        });
        self.measured(
            page,
            "tessera_gpu_memory_reserved_bytes",
            "Memory that the driver reserves for itself.",
            |reading| reading.memory.map(|memory| memory.reserved),
        );
        let mut remainder = page.family(
            "tessera_gpu_memory_remainder_bytes",
            Gauge,
            "Memory in use outside containers: by processes of the host, by unidentified processes, and by the driver.",
        );
        for (labels, gpu) in &self.0 {
            let Some(split) = gpu.reading.as_ref().and_then(|reading| reading.used.as_ref()) else {
                continue;
            };
            for (part, bytes) in
                [("host", split.host), ("unknown", Some(split.unknown)), ("driver", split.driver)]
            {
                remainder.sample(&labels.and(&[("part", part)]), bytes);
            }
        }
        self.measured(page, "tessera_gpu_processes", "Processes on the GPU.", |reading| {
            reading.pids.as_ref().map(BTreeSet::len)
        });
    }

    fn usage(&self, page: &mut MetricsPage) {
        self.measured(
            page,
            "tessera_gpu_busy_ratio",
            "Fraction of the last interval in which any kernel ran.",
            |reading| reading.busy.as_ref().map(|split| split.all.whole),
        );
        let mut busy =
            page.family("tessera_gpu_busy_seconds_total", Counter, "Time in which any kernel ran.");
        for (labels, gpu) in &self.0 {
            busy.sample(labels, gpu.measured.then_some(gpu.total.busy));
        }
        let mut remainder = page.family(
            "tessera_gpu_busy_remainder_seconds_total",
            Counter,
            "Time in which kernels outside containers ran: of the host, or of unidentified processes.",
        );
        for (labels, gpu) in self.0.iter().filter(|(_, gpu)| gpu.measured) {
            for (part, tally) in [("host", gpu.host), ("unknown", gpu.unknown)] {
                remainder.sample(&labels.and(&[("part", part)]), tally.busy);
            }
        }
        let mut energy =
            page.family("tessera_gpu_energy_joules_total", Counter, "Energy used since the agent started.");
        for (labels, gpu) in self.0.iter().filter(|(_, gpu)| gpu.has_energy) {
            energy.sample(labels, gpu.total.energy);
        }
        let mut remainder = page.family(
            "tessera_gpu_energy_remainder_joules_total",
            Counter,
            "Energy used outside containers: by the host, by unidentified processes, or while no kernel ran.",
        );
        for (labels, gpu) in self.0.iter().filter(|(_, gpu)| gpu.has_energy) {
            let parts =
                [("host", gpu.host.energy), ("unknown", gpu.unknown.energy), ("idle", gpu.idle_energy)];
            parts.iter().for_each(|(part, joules)| remainder.sample(&labels.and(&[("part", part)]), *joules));
        }
    }

    fn errors(&self, page: &mut MetricsPage) {
        let each = |gpu: &'a GpuSnapshot, labels: &Labels| {
            let xid =
                |(number, seen): (&u64, &(u64, f64))| (labels.and(&[("xid", &number.to_string())]), *seen);
            gpu.xids.iter().map(xid).collect::<Vec<_>>()
        };
        let all: Vec<(Labels, (u64, f64))> =
            self.0.iter().flat_map(|(labels, gpu)| each(gpu, labels)).collect();
        let mut count = page.family(
            "tessera_gpu_xid_errors_total",
            Counter,
            "XID errors reported by the driver, by number.",
        );
        all.iter().for_each(|(labels, (times, _))| count.sample(labels, *times));
        let mut last = page.family(
            "tessera_gpu_xid_last_timestamp_seconds",
            Gauge,
            "Time of the last XID error of this number, in seconds since 1970.",
        );
        all.iter().for_each(|(labels, (_, at))| last.sample(labels, *at));
    }

    fn instances(&self, page: &mut MetricsPage) {
        let parts: Vec<(Labels, &GpuSnapshot, &MigInstance)> = self
            .0
            .iter()
            .flat_map(|(labels, gpu)| {
                let parts = gpu.reading.iter().flat_map(|reading| &reading.instances);
                parts.map(move |part| (labels.and(&[("instance_uuid", &part.uuid)]), *gpu, part))
            })
            .collect();
        let number = |number: Option<u32>| number.map(|number| number.to_string()).unwrap_or_default();
        let mut info = page.family("tessera_gpu_instance_info", Info, "MIG instances of the GPU.");
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
            parts.iter().for_each(|(labels, gpu, part)| family.sample(labels, value(gpu, part)));
        }
    }
}

/// Name, kind, help text and value of a family.
type InstanceRow = (&'static str, MetricKind, &'static str, fn(&GpuSnapshot, &MigInstance) -> Value);

const INSTANCES: [InstanceRow; 4] = [
    ("tessera_gpu_instance_memory_bytes", Gauge, "Memory of a MIG instance.", |_, part| {
        part.memory.map(|memory| memory.total).into()
    }),
    ("tessera_gpu_instance_memory_used_bytes", Gauge, "Memory in use on a MIG instance.", |_, part| {
        part.memory.map(|memory| memory.used).into()
    }),
    (
        "tessera_gpu_instance_busy_ratio",
        Gauge,
        "Fraction of the last interval in which kernels ran on a MIG instance.",
        |_, part| part.counted.and_then(|counted| counted.graphics).into(),
    ),
    (
        "tessera_gpu_instance_busy_seconds_total",
        Counter,
        "Time in which kernels ran on a MIG instance.",
        |gpu, part| gpu.instances.get(&part.uuid).copied().into(),
    ),
];
