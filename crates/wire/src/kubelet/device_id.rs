//! The resources a kubelet counts, and the names of their devices.
//!
//! Every device names its GPU, so the kubelet's own books tell who holds which. Whole GPUs go by their UUID, units of
//! shares by a short name of the GPU and a number: every byte of an ID is repeated in the status of the pod that holds it.

use std::collections::BTreeMap;
use std::fmt;

use tessera_core::gpu::{Gpu, GpuUuid};
use tessera_core::units::{GpuIndex, Percent};

use crate::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda, whole};
use crate::foreign::objects::Container;
use crate::foreign::quantity::Quantity;

/// A resource whose devices a kubelet hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// `nvidia.com/gpu`
    NvidiaGpu,
    /// `aliyun.com/gpu`
    AliyunGpu,
    /// `aliyun.com/gpu-mem`
    GpuMemory,
    /// `tencent.com/vcuda-core`
    VcudaCore,
    /// `tencent.com/vcuda-memory`
    VcudaMemory,
}

/// The names of all devices of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceIds {
    cards: Vec<Card>,
    by_name: BTreeMap<String, GpuIndex>,
    unit: MemoryUnit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Card {
    uuid: GpuUuid,
    short: String,
    memory_mib: u64,
}

/// What the kubelet takes in one message, with room to spare for its own overhead: gRPC's limit is 4 MiB.
const LARGEST_LIST: u64 = 7 << 19;

/// Bytes of a device in that message beside its ID: field tags, lengths, the health, the NUMA node.
const AROUND_AN_ID: u64 = 2 + 2 + 11 + 8;

// === impl Resource ===

impl Resource {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::NvidiaGpu, Self::AliyunGpu, Self::GpuMemory, Self::VcudaCore, Self::VcudaMemory];

    /// As Kubernetes knows it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NvidiaGpu => whole::NVIDIA.resource,
            Self::AliyunGpu => whole::GPUTOPOLOGY.resource,
            Self::GpuMemory => gpushare::MEMORY,
            Self::VcudaCore => vcuda::CORE,
            Self::VcudaMemory => vcuda::MEMORY,
        }
    }

    /// The vocabulary it belongs to.
    #[must_use]
    pub fn dialect(self) -> Dialect {
        match self {
            Self::NvidiaGpu => Dialect::Nvidia,
            Self::AliyunGpu => Dialect::Gputopology,
            Self::GpuMemory => Dialect::Gpushare,
            Self::VcudaCore | Self::VcudaMemory => Dialect::Vcuda,
        }
    }

    /// The resource of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| resource.name() == name)
    }

    /// The resources of a vocabulary.
    pub fn of(dialect: Dialect) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |resource| resource.dialect() == dialect)
    }

    /// Whether one device is one GPU.
    fn is_whole(self) -> bool {
        matches!(self, Self::NvidiaGpu | Self::AliyunGpu)
    }

    /// How many a container asks for; zero where it does not say, or not in a way that can be read.
    #[must_use]
    pub fn asked_by(self, container: &Container) -> usize {
        let resources = &container.resources;
        let amount = resources.limits.get(self.name()).or_else(|| resources.requests.get(self.name()));
        let quantity = amount.and_then(|amount| amount.0.parse::<Quantity>().ok());
        quantity.and_then(Quantity::whole).and_then(|count| usize::try_from(count).ok()).unwrap_or_default()
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

// === impl DeviceIds ===

impl DeviceIds {
    /// Names for the devices of these GPUs, memory being counted in `unit`.
    #[must_use]
    pub fn new(gpus: &[Gpu], unit: MemoryUnit) -> Self {
        let mut shorts: Vec<String> = gpus.iter().map(|gpu| short_name(&gpu.uuid)).collect();
        let alike = |name: &String| shorts.iter().filter(|other| *other == name).count() > 1;
        let unclear: Vec<bool> = shorts.iter().map(alike).collect();
        for ((short, gpu), _) in shorts.iter_mut().zip(gpus).zip(unclear).filter(|(_, unclear)| *unclear) {
            *short = hash(&gpu.uuid);
        }
        let by_name = gpus
            .iter()
            .zip(&shorts)
            .flat_map(|(gpu, short)| [(short.clone(), gpu.index), (gpu.uuid.to_string(), gpu.index)])
            .collect();
        let cards = gpus
            .iter()
            .zip(shorts)
            .map(|(gpu, short)| Card { uuid: gpu.uuid.clone(), short, memory_mib: gpu.memory.0 })
            .collect();
        Self { cards, by_name, unit }
    }

    /// The unit asked for, or the next larger one that gives no more devices than a kubelet takes.
    #[must_use]
    pub fn unit_that_fits(gpus: &[Gpu], unit: MemoryUnit) -> MemoryUnit {
        let fits = |unit: MemoryUnit| Self::new(gpus, unit).list_size(Resource::GpuMemory) <= LARGEST_LIST;
        let larger = (0..20).map(|doublings| unit.mib() << doublings);
        let mut units = larger.filter_map(|mib| format!("{mib}MiB").parse::<MemoryUnit>().ok());
        units.find(|unit| fits(*unit)).unwrap_or(unit)
    }

    /// What one unit of `aliyun.com/gpu-mem` is.
    #[must_use]
    pub fn unit(&self) -> MemoryUnit {
        self.unit
    }

    /// How many devices of a resource a GPU makes.
    #[must_use]
    pub fn per_gpu(&self, resource: Resource, gpu: GpuIndex) -> u64 {
        let memory = self.cards.get(gpu.position()).map_or(0, |card| card.memory_mib);
        match resource {
            Resource::NvidiaGpu | Resource::AliyunGpu => 1,
            Resource::GpuMemory => memory / self.unit.mib(),
            Resource::VcudaCore => u64::from(Percent::WHOLE.0),
            Resource::VcudaMemory => memory / vcuda::BLOCK.0,
        }
    }

    /// All devices of a resource with their GPUs, GPU by GPU.
    pub fn all(&self, resource: Resource) -> impl Iterator<Item = (String, GpuIndex)> {
        let cards = (0u8..).map(GpuIndex).zip(&self.cards);
        cards.flat_map(move |(gpu, card)| {
            (0..self.per_gpu(resource, gpu)).map(move |number| {
                let id = if resource.is_whole() {
                    card.uuid.to_string()
                } else {
                    format!("{}-{number}", card.short)
                };
                (id, gpu)
            })
        })
    }

    /// The GPU of a device and the device's number on it; `None` for a name that is no device's.
    #[must_use]
    pub fn read(&self, resource: Resource, id: &str) -> Option<(GpuIndex, u64)> {
        if resource.is_whole() {
            return self.by_name.get(id).map(|gpu| (*gpu, 0));
        }
        let (short, number) = id.rsplit_once('-')?;
        let gpu = *self.by_name.get(short)?;
        let number: u64 = number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())??;
        (number < self.per_gpu(resource, gpu)).then_some((gpu, number))
    }

    /// How large the kubelet's list of a resource's devices is, at most.
    fn list_size(&self, resource: Resource) -> u64 {
        let cards = (0u8..).map(GpuIndex).zip(&self.cards);
        cards
            .map(|(gpu, card)| {
                let count = self.per_gpu(resource, gpu);
                let id = card.short.len() as u64 + 1 + u64::from(count.max(1).ilog10()) + 1;
                count * (id + AROUND_AN_ID)
            })
            .sum()
    }
}

/// The first group of a UUID, which no two GPUs of a machine are likely to share.
fn short_name(uuid: &GpuUuid) -> String {
    let group = uuid.0.strip_prefix("GPU-").unwrap_or(&uuid.0).split('-').next().unwrap_or_default();
    if group.len() == 8 && group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return group.to_owned();
    }
    hash(uuid)
}

/// FNV-1a over the UUID: the same on every day and machine.
fn hash(uuid: &GpuUuid) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", uuid.0.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

#[cfg(test)]
mod tests {
    use tessera_core::gpu::Health;
    use tessera_core::units::MiB;

    use super::*;

    fn gpus(uuids: &[&str], memory: u64) -> Vec<Gpu> {
        let gpu = |(index, uuid): (u8, &&str)| Gpu {
            index: GpuIndex(index),
            uuid: (*uuid).into(),
            minor: 0,
            model: "T4".into(),
            memory: MiB(memory),
            numa: None,
            health: Health::Healthy,
        };
        (0..).zip(uuids).map(gpu).collect()
    }

    const FIRST: &str = "GPU-8f2a61c0-0d31-4ecc-9fcd-0a6bd3a1c4a7";
    const SECOND: &str = "GPU-11d3b1a2-0d31-4ecc-9fcd-0a6bd3a1c4a7";

    #[test]
    fn every_device_names_its_gpu() {
        let ids = DeviceIds::new(&gpus(&[FIRST, SECOND], 16_276), MemoryUnit::GiB);
        let count = |resource| ids.all(resource).count();
        assert_eq!(Resource::ALL.map(count), [2, 2, 30, 200, 126]);
        for resource in Resource::ALL {
            for (id, gpu) in ids.all(resource) {
                assert_eq!(ids.read(resource, &id).map(|(card, _)| card), Some(gpu), "{id}");
                assert!(id.len() <= 63);
            }
        }
        assert_eq!(ids.read(Resource::VcudaCore, "11d3b1a2-99"), Some((GpuIndex(1), 99)));
        for id in ["11d3b1a2-100", "11d3b1a2-+1", "11d3b1a2", "x-1", "", FIRST] {
            assert_eq!(ids.read(Resource::VcudaCore, id), None, "{id}");
        }
        assert_eq!(ids.read(Resource::NvidiaGpu, SECOND), Some((GpuIndex(1), 0)));
    }

    #[test]
    fn names_are_unique_whatever_the_uuids() {
        let alike = [FIRST, "GPU-8f2a61c0-ffff-4ecc-9fcd-0a6bd3a1c4a7", "MIG-3", "lost-2"];
        let ids = DeviceIds::new(&gpus(&alike, 1024), MemoryUnit::GiB);
        let names: std::collections::BTreeSet<String> =
            ids.all(Resource::VcudaCore).map(|(id, _)| id).collect();
        assert_eq!(names.len(), 400);
    }

    #[test]
    fn sixteen_large_gpus_fit_into_one_message_in_any_unit() {
        let uuids: Vec<String> =
            (0..16).map(|card| format!("GPU-8f2a61{card:02x}-0d31-4ecc-9fcd-0a6bd3a1c4a7")).collect();
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        let cards = gpus(&uuids, 275_040);
        let fitting = |unit| DeviceIds::unit_that_fits(&cards, unit);
        assert_eq!(fitting(MemoryUnit::GiB), MemoryUnit::GiB);
        assert_eq!(fitting(MemoryUnit::MiB), MemoryUnit::Blocks(64));
        let ids = DeviceIds::new(&cards, fitting(MemoryUnit::MiB));
        for resource in Resource::ALL {
            assert!(ids.list_size(resource) <= LARGEST_LIST, "{resource}");
        }
        // One GPU of this size alone is too much for units of 1 MiB, and a T4 is not.
        assert_eq!(DeviceIds::unit_that_fits(&cards[..1], MemoryUnit::MiB), MemoryUnit::Blocks(4));
        assert_eq!(DeviceIds::unit_that_fits(&gpus(&[FIRST], 16_276), MemoryUnit::MiB), MemoryUnit::MiB);
    }

    #[cfg(feature = "grpc")]
    #[test]
    fn the_estimate_of_a_message_is_not_too_small() {
        use prost::Message as _;

        use crate::kubelet::device_plugin::{Device, ListAndWatchResponse, NumaNode, TopologyInfo};
        let ids = DeviceIds::new(&gpus(&[FIRST, SECOND], 143_771), MemoryUnit::Blocks(16));
        let device = |(id, _): (String, GpuIndex)| Device {
            id,
            health: crate::kubelet::UNHEALTHY.into(),
            topology: Some(TopologyInfo { nodes: vec![NumaNode { id: 1 }] }),
        };
        let message = ListAndWatchResponse { devices: ids.all(Resource::GpuMemory).map(device).collect() };
        assert!(message.encoded_len() as u64 <= ids.list_size(Resource::GpuMemory));
    }
}
