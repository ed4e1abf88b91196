//! Reads a node's GPUs from its Kubernetes object: from the agent's inventory annotation, or else
//! from the capacities, labels and annotations of other projects.

use std::sync::Arc;

use tessera_core::admission::Service;
use tessera_core::gpu::{Gpu, Health};
use tessera_core::gpu_set::GpuSet;
use tessera_core::node::{BadNode, Node};
use tessera_core::topology::Topology;
use tessera_core::units::{GpuIndex, MiB, MilliCpu, NodeName};

use crate::foreign::dialect::{Dialect, DialectSet, MemoryUnit, gpushare, hami, vcuda, whole};
use crate::foreign::gpu_topology::{self, BadAnnotation};
use crate::foreign::objects::{self, Amount};
use crate::foreign::quantity::Quantity;
use crate::kubelet::device_id::Resource;
use crate::tessera::agent_address;
use crate::tessera::gpu_cordon;
use crate::tessera::inventory::{self, BadInventory};

/// gputopology's node annotation that holds the instance type.
pub const TYPE_KEY: &str = "NODE_TYPE";

/// Node annotation in which HAMi's device plugin lists the GPUs.
const HAMI_REGISTER_KEY: &str = "hami.io/node-nvidia-register";

/// Kubernetes' node label that holds the instance type.
const TYPE_LABEL: &str = "node.kubernetes.io/instance-type";

/// Node labels of NVIDIA's GPU feature discovery.
const PRODUCT_LABEL: &str = "nvidia.com/gpu.product";
const MEMORY_LABEL: &str = "nvidia.com/gpu.memory";

/// A node parsed from its Kubernetes object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedNode {
    /// GPUs, links and host resources. Reference-counted because several owners keep it.
    pub node: Arc<Node>,
    /// Size of one unit of `aliyun.com/gpu-mem` on the node.
    pub unit: MemoryUnit,
    /// Dialects that the node serves.
    pub dialects: ServedDialects,
    /// Amount of `aliyun.com/gpu-mem` that the node offers. It is known even if the number of GPUs is not:
    /// a kubelet that lost its checkpoint removes `aliyun.com/gpu-count`.
    pub shared_memory: MiB,
    /// True if the node's agent has announced that it does not serve pods now.
    pub is_agent_unavailable: bool,
}

/// The dialects that a node serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ServedDialects {
    /// Dialects with a capacity on a node with Tessera's agent, which withdraws the devices of GPUs that pods hold: the
    /// allocatable amount of a full node is 0. When a device plugin has ended, the kubelet keeps its capacity for five
    /// minutes and sets it to 0 then. On other nodes, the dialects with an allocatable amount.
    pub offered: DialectSet,
    /// Dialects of which the kubelet offers something now.
    pub allocatable: DialectSet,
}

impl ServedDialects {
    /// Returns the dialects of a node that also serves these.
    #[must_use]
    pub fn union(self, more: DialectSet) -> Self {
        Self { offered: self.offered.union(more), allocatable: self.allocatable.union(more) }
    }

    /// Returns the service of the node for a pod that requests GPUs in the dialects `wanted`.
    #[must_use]
    pub fn service(self, wanted: DialectSet, is_agent_unavailable: bool) -> Service {
        Service::new(is_agent_unavailable, self.offered.covers(wanted), self.allocatable.covers(wanted))
    }
}

/// A node object that cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum BadNodeObject {
    /// The inventory annotation is invalid.
    #[error(transparent)]
    Inventory(#[from] BadInventory),
    /// The annotation with the links is invalid.
    #[error(transparent)]
    Topology(#[from] BadAnnotation),
    /// The GPUs and links do not form a valid node.
    #[error(transparent)]
    Node(#[from] BadNode),
}

/// Parses a node object. `unit` applies if the node does not publish its memory unit.
pub fn parse(object: &objects::Node, unit: MemoryUnit) -> Result<ParsedNode, BadNodeObject> {
    let annotations = &object.metadata.annotations;
    let mut withheld = Vec::new();
    let (mut gpus, topology, unit, nvidia_slots, whole_gpus_only) = match annotations.get(inventory::KEY) {
        Some(json) => {
            let found = inventory::parse(json)?;
            withheld = found.withheld;
            (found.gpus, found.topology, found.memory_unit, found.nvidia_slots, found.whole_gpus_only)
        }
        None => {
            let unit = unit_without_inventory(object, unit);
            let gpus = gpus_without_inventory(object, unit);
            let topology = match annotations.get(gpu_topology::KEY) {
                Some(json) if !gpus.is_empty() => gpu_topology::parse(json, gpus.len())?,
                _ => Topology::unknown(gpus.len()),
            };
            (gpus, topology, unit, None, false)
        }
    };
    let cordoned = gpu_cordon::cordoned(annotations);
    for gpu in gpus.iter_mut().filter(|gpu| gpu.health.is_healthy()) {
        if cordoned.contains(&*gpu.uuid.0) {
            gpu.health = Health::Cordoned;
        }
    }
    let resources = NodeResources(object);
    let cpu = MilliCpu(resources.quantity("cpu").and_then(Quantity::milli).unwrap_or(0));
    let memory = MiB(resources.quantity("memory").and_then(Quantity::mib).unwrap_or(0));
    let mut node = Node::new(NodeName(object.metadata.name.clone()), gpus, topology, cpu, memory)?;
    node.slots_per_gpu = nvidia_slots;
    node.whole_gpus_only = whole_gpus_only;
    let labels = &object.metadata.labels;
    node.instance_type = annotations.get(TYPE_KEY).or_else(|| labels.get(TYPE_LABEL)).cloned();
    let with_amounts = |amount: &dyn Fn(&str) -> u64| {
        let is_served = |dialect: &Dialect| match dialect {
            _ if Resource::of(*dialect)
                .any(|resource| withheld.iter().any(|name| name == resource.name())) =>
            {
                false
            }
            Dialect::Hami => nvidia_slots.is_some() && amount(hami::COUNT) > 0,
            _ => amount(dialect.resource()) > 0,
        };
        Dialect::ALL.into_iter().filter(is_served).fold(DialectSet::default(), DialectSet::with)
    };
    let allocatable = with_amounts(&|resource| resources.count(resource));
    // Only Tessera's agent withdraws devices because of pods, and it publishes an inventory.
    let offered = match annotations.contains_key(inventory::KEY) {
        true => with_amounts(&|resource| resources.capacity(resource)).union(allocatable),
        false => allocatable,
    };
    Ok(ParsedNode {
        node: Arc::new(node),
        unit,
        dialects: ServedDialects { offered, allocatable },
        is_agent_unavailable: agent_address::is_agent_unavailable(object),
        shared_memory: MiB(resources.count(gpushare::MEMORY).saturating_mul(unit.mib())),
    })
}

/// Returns the unit of `aliyun.com/gpu-mem` on a node of gpushare's plugin, which publishes amounts without
/// their unit. No GPU has [`UNIT_THRESHOLD`] GiB or as few MiB, so the amount of one GPU tells the unit.
fn unit_without_inventory(object: &objects::Node, configured: MemoryUnit) -> MemoryUnit {
    /// More GiB than any GPU has, and fewer MiB.
    const UNIT_THRESHOLD: u64 = 1000;
    /// GPUs of the largest machines. It bounds the amount of one GPU where their number is unknown.
    const MAX_GPUS: u64 = 16;
    let resources = NodeResources(object);
    let units = resources.count(gpushare::MEMORY);
    match (configured, resources.count(gpushare::COUNT)) {
        // A block size is configured only where amounts are in blocks.
        (MemoryUnit::Blocks(_), _) => configured,
        _ if units == 0 => configured,
        (_, 0) if units < UNIT_THRESHOLD => MemoryUnit::GiB,
        (_, 0) if units >= UNIT_THRESHOLD * MAX_GPUS => MemoryUnit::MiB,
        (_, 0) => configured,
        (_, gpus) if units / gpus >= UNIT_THRESHOLD => MemoryUnit::MiB,
        _ => MemoryUnit::GiB,
    }
}

/// Derives the GPUs of a node without an inventory from its status. The GPUs get generated UUIDs.
///
/// The function uses `capacity` rather than `allocatable`: an unhealthy GPU is not allocatable, but
/// it keeps its index, and so do the GPUs after it.
fn gpus_without_inventory(object: &objects::Node, unit: MemoryUnit) -> Vec<Gpu> {
    let resources = NodeResources(object);
    let count = |resource: &str| resources.capacity(resource);
    // HAMi's device plugin offers several devices per GPU. It says so with this annotation.
    let is_split = object.metadata.annotations.contains_key(HAMI_REGISTER_KEY);
    let counts = [
        if is_split { 0 } else { count(whole::NVIDIA.resource) },
        count(whole::GPUTOPOLOGY.resource),
        count(gpushare::COUNT),
        count(vcuda::CORE) / 100,
    ];
    let gpu_count = counts.into_iter().max().unwrap_or(0).min(GpuSet::CAPACITY as u64);
    let labels = &object.metadata.labels;
    let memories = [
        count(vcuda::MEMORY).saturating_mul(vcuda::BLOCK.0).checked_div(gpu_count),
        count(gpushare::MEMORY).saturating_mul(unit.mib()).checked_div(gpu_count),
        labels.get(MEMORY_LABEL).and_then(|text| text.parse().ok()),
    ];
    let memory = MiB(memories.into_iter().flatten().max().unwrap_or(0)).min(inventory::MAX_GPU_MEMORY);
    let model = labels.get(PRODUCT_LABEL).map_or("GPU", String::as_str);
    (0u8..)
        .take(usize::try_from(gpu_count).unwrap_or(0))
        .map(|index| Gpu {
            index: GpuIndex(index),
            uuid: format!("{}/{index}", object.metadata.name).as_str().into(),
            minor: u32::from(index),
            model: model.into(),
            memory,
            numa: None,
            health: Health::Healthy,
        })
        .collect()
}

struct NodeResources<'a>(&'a objects::Node);

impl NodeResources<'_> {
    /// Returns the allocatable quantity, or the capacity if it is absent.
    fn quantity(&self, resource: &str) -> Option<Quantity> {
        let status = &self.0.status;
        status.allocatable.get(resource).or_else(|| status.capacity.get(resource)).and_then(read)
    }

    fn count(&self, resource: &str) -> u64 {
        whole_number(self.quantity(resource))
    }

    /// Returns the capacity, or the allocatable amount if it is absent.
    fn capacity(&self, resource: &str) -> u64 {
        let status = &self.0.status;
        let amount = status.capacity.get(resource).or_else(|| status.allocatable.get(resource));
        whole_number(amount.and_then(read))
    }
}

fn read(amount: &Amount) -> Option<Quantity> {
    amount.0.parse().ok()
}

fn whole_number(quantity: Option<Quantity>) -> u64 {
    quantity.and_then(Quantity::whole).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(json: serde_json::Value) -> ParsedNode {
        parse(&serde_json::from_value(json).unwrap(), MemoryUnit::GiB).unwrap()
    }

    #[test]
    fn parses_a_node_with_an_inventory() {
        let inventory =
            r#"{"memoryUnit":"MiB","gpus":[{"uuid":"GPU-a","minor":3,"model":"T4","memoryMiB":15360}]}"#;
        let read = node(serde_json::json!({
            "metadata": {"name": "n", "annotations": {"tessera.dev/inventory": inventory, "NODE_TYPE": "big"}},
            "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "aliyun.com/gpu-mem": "15360", "aliyun.com/gpu": "0"}}
        }));
        assert_eq!(read.node.gpus()[0].minor, 3);
        assert_eq!(read.unit, MemoryUnit::MiB);
        assert_eq!((read.node.cpu, read.node.memory), (MilliCpu(4000), MiB(8192)));
        assert_eq!(read.node.instance_type.as_deref(), Some("big"));
        let gpushare = DialectSet::default().with(Dialect::Gpushare);
        assert_eq!(read.dialects, ServedDialects { offered: gpushare, allocatable: gpushare });
    }

    /// The kubelet reports 8 and 0 while an agent withdraws all devices and in the minutes after a device plugin has
    /// ended, and 0 and 0 after them.
    #[test]
    fn a_resource_is_offered_while_it_has_a_capacity() {
        let service = |has_agent: bool, capacity: &str, allocatable: &str| {
            let mut object = serde_json::json!({
                "metadata": {"name": "n"},
                "status": {"capacity": {"aliyun.com/gpu": capacity}, "allocatable": {"aliyun.com/gpu": allocatable}},
            });
            if has_agent {
                let inventory = r#"{"memoryUnit":"GiB","gpus":[{"uuid":"GPU-a","minor":0,"model":"T4","memoryMiB":15360}]}"#;
                object["metadata"]["annotations"] = serde_json::json!({ "tessera.dev/inventory": inventory });
            }
            node(object).dialects.service(DialectSet::default().with(Dialect::Gputopology), false)
        };
        assert_eq!(service(true, "8", "5"), Service::Offered);
        assert_eq!(service(true, "8", "0"), Service::Withdrawn);
        assert_eq!(service(true, "0", "0"), Service::NotOffered);
        // Other plugins withdraw nothing because of pods: theirs has ended, or no GPU is healthy.
        assert_eq!(service(false, "8", "5"), Service::Offered);
        assert_eq!(service(false, "8", "0"), Service::NotOffered);
    }

    #[test]
    fn a_withheld_resource_is_not_offered() {
        let inventory = r#"{"memoryUnit":"GiB","withheld":["nvidia.com/gpu"],"gpus":[{"uuid":"GPU-a","minor":0,"model":"T4","memoryMiB":15360}]}"#;
        let dialects = node(serde_json::json!({
            "metadata": {"name": "n", "annotations": {"tessera.dev/inventory": inventory}},
            "status": {"capacity": {"nvidia.com/gpu": "1"}, "allocatable": {"nvidia.com/gpu": "1", "aliyun.com/gpu": "1"}},
        }))
        .dialects;
        let service = |dialect| dialects.service(DialectSet::default().with(dialect), false);
        assert_eq!(service(Dialect::Nvidia), Service::NotOffered);
        assert_eq!(service(Dialect::Gputopology), Service::Offered);
    }

    #[test]
    fn derives_gpus_from_capacities_without_an_inventory() {
        let read = node(serde_json::json!({
            "metadata": {"name": "n", "annotations": {"GPU_TOPOLOGY": "{\"GPU_NV2_0_1\":\"Two NVLinks\"}"}},
            "status": {"capacity": {"tencent.com/vcuda-core": "200", "tencent.com/vcuda-memory": "120", "aliyun.com/gpu": "2"}}
        }));
        assert_eq!(read.node.gpus().len(), 2);
        assert_eq!(read.node.gpus()[1].memory, MiB(15_360));
        assert_eq!(read.node.topology().link(GpuIndex(0), GpuIndex(1)).nvlinks, 2);
        assert!(read.dialects.offered.covers(DialectSet::default().with(Dialect::Vcuda)));
        assert!(!read.dialects.offered.covers(DialectSet::default().with(Dialect::Gpushare)));
    }

    #[test]
    fn serves_parts_of_gpus_where_the_inventory_says_so() {
        let parse = |slots: &str| {
            let inventory = format!(
                r#"{{"memoryUnit":"GiB",{slots}"gpus":[{{"uuid":"GPU-a","minor":0,"model":"T4","memoryMiB":15360}}]}}"#
            );
            let read = node(serde_json::json!({
                "metadata": {"name": "n", "annotations": {"tessera.dev/inventory": inventory}},
                "status": {"allocatable": {"nvidia.com/gpu": "10"}}
            }));
            assert_eq!(read.node.gpus().len(), 1);
            read.dialects.offered.covers(DialectSet::default().with(Dialect::Hami))
        };
        assert!(parse(r#""nvidiaSlots":10,"#));
        assert!(!parse(""), "NVIDIA's whole GPUs only");
    }

    #[test]
    fn cordoned_gpus_get_no_new_pods() {
        let inventory = r#"{"memoryUnit":"GiB","gpus":[
            {"uuid":"GPU-a","minor":0,"model":"T4","memoryMiB":15360},
            {"uuid":"GPU-b","minor":1,"model":"T4","memoryMiB":15360},
            {"uuid":"GPU-c","minor":2,"model":"T4","memoryMiB":15360}]}"#;
        let read = node(serde_json::json!({
            "metadata": {"name": "n", "annotations": {
                "tessera.dev/inventory": inventory,
                "tessera.dev/gpu-cordon": "GPU-a",
                "hami.io/device-cordon": "GPU-x, GPU-c",
            }},
        }));
        let problems: Vec<_> = read.node.gpus().iter().map(|gpu| gpu.health.problem()).collect();
        assert_eq!(problems, [Some("cordoned"), None, Some("cordoned")]);
    }

    #[test]
    fn devices_of_another_plugin_are_not_taken_for_gpus() {
        let read = node(serde_json::json!({
            "metadata": {"name": "n", "annotations": {"hami.io/node-nvidia-register": "[]"}},
            "status": {"capacity": {"nvidia.com/gpu": "80"}}
        }));
        assert!(read.node.gpus().is_empty());
    }

    #[test]
    fn counts_unhealthy_gpus_without_an_inventory() {
        let read = node(serde_json::json!({
            "metadata": {"name": "n", "annotations": {"GPU_TOPOLOGY": "{\"GPU_PIX_1_2\":\"Single PCI switch\"}"}},
            "status": {
                "capacity": {"cpu": "8", "aliyun.com/gpu": "3", "aliyun.com/gpu-mem": "45", "aliyun.com/gpu-count": "3"},
                "allocatable": {"cpu": "4", "aliyun.com/gpu": "2", "aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": "3"},
            }
        }));
        assert_eq!(read.node.gpus().len(), 3);
        assert_eq!(read.node.gpus()[2].memory, MiB(15 * 1024));
        assert_eq!(read.node.cpu, MilliCpu(4000), "host resources come from allocatable");
    }

    #[test]
    fn tells_the_memory_unit_of_an_old_node_from_its_amounts() {
        let unit = |units: u64, gpus: u64, configured: MemoryUnit| {
            let mut capacity = serde_json::json!({"aliyun.com/gpu-mem": units.to_string()});
            if gpus > 0 {
                capacity["aliyun.com/gpu-count"] = gpus.to_string().into();
            }
            let object = serde_json::json!({"metadata": {"name": "n"}, "status": {"capacity": capacity}});
            let read = parse(&serde_json::from_value(object).unwrap(), configured).unwrap();
            assert_eq!(read.shared_memory, MiB(units * read.unit.mib()));
            read.unit
        };
        let (gib, mib) = (MemoryUnit::GiB, MemoryUnit::MiB);
        for configured in [gib, mib] {
            assert_eq!(unit(15, 1, configured), gib);
            assert_eq!(unit(280, 2, configured), gib, "two H200, which the original takes for MiB");
            assert_eq!(unit(2304, 8, configured), gib, "the largest GPUs of 2026");
            assert_eq!(unit(15_079, 1, configured), mib);
            assert_eq!(unit(96_528, 8, configured), mib);
            assert_eq!(unit(88, 0, configured), gib, "the number of GPUs is unknown");
            assert_eq!(unit(96_528, 0, configured), mib, "the number of GPUs is unknown");
            assert_eq!(unit(2304, 0, configured), configured, "both are possible");
        }
        assert_eq!(unit(60, 1, MemoryUnit::Blocks(256)), MemoryUnit::Blocks(256));
    }

    #[test]
    fn parses_a_node_without_gpus() {
        let read =
            node(serde_json::json!({"metadata": {"name": "n", "annotations": {"GPU_TOPOLOGY": "{}"}}}));
        assert!(read.node.gpus().is_empty());
        assert_eq!(read.dialects, ServedDialects::default());
    }
}
