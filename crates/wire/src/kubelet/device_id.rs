//! The resources that a kubelet counts, and the IDs of their devices.
//!
//! Every device ID names its GPU, so the kubelet's list of assigned devices shows which container
//! holds which GPU. The ID of a whole GPU is its UUID. The ID of a unit of a share is a short name
//! of the GPU and a number, because every byte of an ID is repeated in the status of the pod.

use std::collections::BTreeMap;
use std::fmt;

use tessera_core::gpu::{Gpu, GpuUuid};
use tessera_core::units::{GpuIndex, Percent};

use crate::foreign::dialect::{Dialect, MemoryUnit, gpushare, vcuda, whole};
use crate::foreign::objects::Container;
use crate::foreign::quantity::Quantity;

/// A resource whose devices the kubelet assigns.
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

/// The IDs of all devices of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceIds {
    gpus: Vec<GpuName>,
    by_name: BTreeMap<String, GpuIndex>,
    unit: MemoryUnit,
    /// Devices of `nvidia.com/gpu` per GPU where pods may request a part of each, else `None`.
    slots: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct GpuName {
    uuid: GpuUuid,
    short: String,
    memory_mib: u64,
    /// Blocks of `tencent.com/vcuda-memory`.
    vcuda_blocks: u64,
}

/// Largest device list in bytes, 3.5 MiB. The limit of a gRPC message is 4 MiB; the rest is a
/// margin for overhead.
const MAX_LIST_BYTES: u64 = 7 << 19;

/// Bytes of a device in the list besides its ID: field tags, lengths, the health, the NUMA node.
const DEVICE_OVERHEAD_BYTES: u64 = 2 + 2 + 11 + 8;

impl Resource {
    /// All resources.
    pub const ALL: [Self; 5] =
        [Self::NvidiaGpu, Self::AliyunGpu, Self::GpuMemory, Self::VcudaCore, Self::VcudaMemory];

    /// Returns the name of the resource in Kubernetes.
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

    /// Returns the dialect of the resource. Whole GPUs and parts of GPUs share `nvidia.com/gpu`.
    #[must_use]
    pub fn dialect(self) -> Dialect {
        match self {
            Self::NvidiaGpu => Dialect::Nvidia,
            Self::AliyunGpu => Dialect::Gputopology,
            Self::GpuMemory => Dialect::Gpushare,
            Self::VcudaCore | Self::VcudaMemory => Dialect::Vcuda,
        }
    }

    /// Returns the resource with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|resource| resource.name() == name)
    }

    /// Returns the resources of a dialect.
    pub fn of(dialect: Dialect) -> impl Iterator<Item = Self> {
        let dialect = if dialect == Dialect::Hami { Dialect::Nvidia } else { dialect };
        Self::ALL.into_iter().filter(move |resource| resource.dialect() == dialect)
    }

    /// Returns how many devices a container requests. An absent or invalid amount counts as zero.
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

impl DeviceIds {
    /// Creates the device IDs of these GPUs. `unit` is the size of one memory device.
    #[must_use]
    pub fn new(gpus: &[Gpu], unit: MemoryUnit) -> Self {
        let mut short_names: Vec<String> = gpus.iter().map(|gpu| short_name(&gpu.uuid)).collect();
        let is_ambiguous = |name: &String| short_names.iter().filter(|other| *other == name).count() > 1;
        let ambiguous: Vec<bool> = short_names.iter().map(is_ambiguous).collect();
        for ((short, gpu), _) in
            short_names.iter_mut().zip(gpus).zip(ambiguous).filter(|(_, ambiguous)| *ambiguous)
        {
            *short = hash(&gpu.uuid);
        }
        let by_name = gpus
            .iter()
            .zip(&short_names)
            .flat_map(|(gpu, short)| [(short.clone(), gpu.index), (gpu.uuid.to_string(), gpu.index)])
            .collect();
        let gpus = gpus
            .iter()
            .zip(short_names)
            .zip(vcuda_blocks(gpus))
            .map(|((gpu, short), vcuda_blocks)| GpuName {
                uuid: gpu.uuid.clone(),
                short,
                memory_mib: gpu.memory.0,
                vcuda_blocks,
            })
            .collect();
        Self { gpus, by_name, unit, slots: None }
    }

    /// Returns the device IDs with this many devices of `nvidia.com/gpu` per GPU; `None` makes each GPU one
    /// device.
    #[must_use]
    pub fn with_slots(self, slots: Option<u16>) -> Self {
        Self { slots, ..self }
    }

    /// Returns how many devices of `nvidia.com/gpu` a GPU has, or `None` if each GPU is one device.
    #[must_use]
    pub fn slots(&self) -> Option<u16> {
        self.slots
    }

    /// Returns whether one device of a resource is one whole GPU.
    #[must_use]
    pub fn is_whole(&self, resource: Resource) -> bool {
        match resource {
            Resource::NvidiaGpu => self.slots.is_none(),
            Resource::AliyunGpu => true,
            Resource::GpuMemory | Resource::VcudaCore | Resource::VcudaMemory => false,
        }
    }

    /// Returns `unit`, or the next larger unit whose device list a kubelet accepts.
    #[must_use]
    pub fn unit_that_fits(gpus: &[Gpu], unit: MemoryUnit) -> MemoryUnit {
        let fits = |unit: MemoryUnit| Self::new(gpus, unit).list_size(Resource::GpuMemory) <= MAX_LIST_BYTES;
        let larger = (0..20).map(|doublings| unit.mib() << doublings);
        let mut units = larger.filter_map(|mib| format!("{mib}MiB").parse::<MemoryUnit>().ok());
        units.find(|unit| fits(*unit)).unwrap_or(unit)
    }

    /// Returns the size of one unit of `aliyun.com/gpu-mem`.
    #[must_use]
    pub fn unit(&self) -> MemoryUnit {
        self.unit
    }

    /// Returns how many devices of a resource a GPU provides.
    #[must_use]
    pub fn per_gpu(&self, resource: Resource, gpu: GpuIndex) -> u64 {
        let Some(name) = self.gpus.get(gpu.position()) else { return 0 };
        match resource {
            Resource::NvidiaGpu => u64::from(self.slots.unwrap_or(1)),
            Resource::AliyunGpu => 1,
            Resource::GpuMemory => name.memory_mib / self.unit.mib(),
            Resource::VcudaCore => u64::from(Percent::WHOLE.0),
            Resource::VcudaMemory => name.vcuda_blocks,
        }
    }

    /// Returns all device IDs of a resource with their GPUs and their numbers on the GPU, in this order.
    pub fn all(&self, resource: Resource) -> impl Iterator<Item = (String, GpuIndex, u64)> {
        let gpus = (0u8..).map(GpuIndex).zip(&self.gpus);
        gpus.flat_map(move |(gpu, name)| {
            (0..self.per_gpu(resource, gpu)).map(move |number| {
                let id = if self.is_whole(resource) {
                    name.uuid.to_string()
                } else {
                    format!("{}-{number}", name.short)
                };
                (id, gpu, number)
            })
        })
    }

    /// Parses a device ID into its GPU and its number on the GPU. Returns `None` for an unknown ID.
    #[must_use]
    pub fn read(&self, resource: Resource, id: &str) -> Option<(GpuIndex, u64)> {
        if self.is_whole(resource) {
            return self.by_name.get(id).map(|gpu| (*gpu, 0));
        }
        let (short, number) = id.rsplit_once('-')?;
        let gpu = *self.by_name.get(short)?;
        let number: u64 = number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())??;
        (number < self.per_gpu(resource, gpu)).then_some((gpu, number))
    }

    /// Returns an upper bound for the size in bytes of a resource's device list.
    fn list_size(&self, resource: Resource) -> u64 {
        let gpus = (0u8..).map(GpuIndex).zip(&self.gpus);
        gpus.map(|(gpu, name)| {
            let count = self.per_gpu(resource, gpu);
            let id = name.short.len() as u64 + 1 + u64::from(count.max(1).ilog10()) + 1;
            count * (id + DEVICE_OVERHEAD_BYTES)
        })
        .sum()
    }
}

/// Returns the blocks of `tencent.com/vcuda-memory` of each GPU. gpu-manager rounds the sum of a node, not each
/// GPU, so a remainder counts for the next GPU. A GPU can get one block more than it has memory for; no set of
/// shares that fits the GPU uses that one.
fn vcuda_blocks(gpus: &[Gpu]) -> impl Iterator<Item = u64> {
    gpus.iter().scan(0, |remainder, gpu| {
        let memory = *remainder + gpu.memory.0;
        *remainder = memory % vcuda::BLOCK.0;
        Some(memory / vcuda::BLOCK.0)
    })
}

/// Returns the first group of a UUID, which is rarely the same for two GPUs of a host.
fn short_name(uuid: &GpuUuid) -> String {
    let group = uuid.0.strip_prefix("GPU-").unwrap_or(&uuid.0).split('-').next().unwrap_or_default();
    if group.len() == 8 && group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return group.to_owned();
    }
    hash(uuid)
}

/// Returns the FNV-1a hash of the UUID, which is the same in every process and on every host.
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
    fn a_gpu_has_as_many_nvidia_devices_as_slots() {
        let ids = DeviceIds::new(&gpus(&[FIRST, SECOND], 1024), MemoryUnit::GiB).with_slots(Some(3));
        let all: Vec<_> = ids.all(Resource::NvidiaGpu).collect();
        assert_eq!(all.len(), 6);
        for (id, gpu, number) in &all {
            assert_eq!(ids.read(Resource::NvidiaGpu, id), Some((*gpu, *number)));
        }
        assert_eq!(ids.read(Resource::NvidiaGpu, FIRST), None, "a UUID is no slot");
        assert_eq!(Resource::of(Dialect::Hami).collect::<Vec<_>>(), [Resource::NvidiaGpu]);
    }

    #[test]
    fn parses_every_device_id_into_its_gpu() {
        let ids = DeviceIds::new(&gpus(&[FIRST, SECOND], 16_276), MemoryUnit::GiB);
        let count = |resource| ids.all(resource).count();
        assert_eq!(Resource::ALL.map(count), [2, 2, 30, 200, 127]);
        for resource in Resource::ALL {
            for (id, gpu, number) in ids.all(resource) {
                assert_eq!(ids.read(resource, &id), Some((gpu, number)), "{id}");
                assert!(id.len() <= 63);
            }
        }
        assert_eq!(ids.read(Resource::VcudaCore, "11d3b1a2-99"), Some((GpuIndex(1), 99)));
        for id in ["11d3b1a2-100", "11d3b1a2-+1", "11d3b1a2", "x-1", "", FIRST] {
            assert_eq!(ids.read(Resource::VcudaCore, id), None, "{id}");
        }
        assert_eq!(ids.read(Resource::NvidiaGpu, SECOND), Some((GpuIndex(1), 0)));
    }

    /// gpu-manager's documents show 668 blocks for seven P40.
    #[test]
    fn memory_of_a_node_is_summed_up_before_it_is_rounded_to_blocks() {
        let uuids: Vec<String> = (0..7).map(|index| format!("GPU-750f71{index:02x}-e058")).collect();
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        let ids = DeviceIds::new(&gpus(&uuids, 24_451), MemoryUnit::GiB);
        assert_eq!(ids.all(Resource::VcudaCore).count(), 700);
        assert_eq!(ids.all(Resource::VcudaMemory).count(), 668);
        let smallest = (0..7).map(|gpu| ids.per_gpu(Resource::VcudaMemory, GpuIndex(gpu))).min();
        assert_eq!(smallest, Some(24_451 / vcuda::BLOCK.0), "each GPU has all of its own whole blocks");
    }

    #[test]
    fn ids_are_unique_for_similar_uuids() {
        let similar = [FIRST, "GPU-8f2a61c0-ffff-4ecc-9fcd-0a6bd3a1c4a7", "MIG-3", "lost-2"];
        let ids = DeviceIds::new(&gpus(&similar, 1024), MemoryUnit::GiB);
        let names: std::collections::BTreeSet<String> =
            ids.all(Resource::VcudaCore).map(|(id, ..)| id).collect();
        assert_eq!(names.len(), 400);
    }

    #[test]
    fn device_lists_of_sixteen_large_gpus_fit_into_one_message() {
        let uuids: Vec<String> =
            (0..16).map(|index| format!("GPU-8f2a61{index:02x}-0d31-4ecc-9fcd-0a6bd3a1c4a7")).collect();
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        let large = gpus(&uuids, 275_040);
        let fitting = |unit| DeviceIds::unit_that_fits(&large, unit);
        assert_eq!(fitting(MemoryUnit::GiB), MemoryUnit::GiB);
        assert_eq!(fitting(MemoryUnit::MiB), MemoryUnit::Blocks(64));
        let ids = DeviceIds::new(&large, fitting(MemoryUnit::MiB));
        for resource in Resource::ALL {
            assert!(ids.list_size(resource) <= MAX_LIST_BYTES, "{resource}");
        }
        // The list of one such GPU is too large in units of 1 MiB. The list of a T4 is not.
        assert_eq!(DeviceIds::unit_that_fits(&large[..1], MemoryUnit::MiB), MemoryUnit::Blocks(4));
        assert_eq!(DeviceIds::unit_that_fits(&gpus(&[FIRST], 16_276), MemoryUnit::MiB), MemoryUnit::MiB);
    }

    #[cfg(feature = "grpc")]
    #[test]
    fn estimated_list_size_is_an_upper_bound() {
        use prost::Message as _;

        use crate::kubelet::device_plugin::{Device, ListAndWatchResponse, NumaNode, TopologyInfo};
        let ids = DeviceIds::new(&gpus(&[FIRST, SECOND], 143_771), MemoryUnit::Blocks(16));
        let device = |(id, ..): (String, GpuIndex, u64)| Device {
            id,
            health: crate::kubelet::UNHEALTHY.into(),
            topology: Some(TopologyInfo { nodes: vec![NumaNode { id: 1 }] }),
        };
        let message = ListAndWatchResponse { devices: ids.all(Resource::GpuMemory).map(device).collect() };
        assert!(message.encoded_len() as u64 <= ids.list_size(Resource::GpuMemory));
    }
}
