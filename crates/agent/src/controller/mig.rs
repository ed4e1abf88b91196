//! MIG instances: offered as resources of their own, as GPUs, or not at all.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    gpu::{Gpu, GpuUuid, Health},
    gpu_set::GpuSet,
    topology::{Link, Topology},
    units::GpuIndex,
};
use tessera_node::{
    device_plugin::PluginDevice,
    gpus::{DiscoveredGpus, GpuInstance},
};
use tessera_wire::foreign::pod_spec::MIG_PREFIX;

/// How instances of GPUs in MIG mode are offered. The names are those of NVIDIA's device plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigStrategy {
    /// Instances are not offered.
    #[default]
    None,
    /// Instances take the place of the GPUs. All instances of the node must have one profile.
    Single,
    /// The instances of each profile are a resource `nvidia.com/mig-PROFILE`.
    Mixed,
}

/// A resource of MIG instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceOffer {
    /// Name of the resource, such as `nvidia.com/mig-1g.10gb`.
    pub resource: String,
    /// Devices of the resource. The ID of a device is the UUID of its instance.
    pub devices: Vec<PluginDevice>,
    /// Instances, in the order of the devices.
    pub instances: Vec<GpuInstance>,
}

/// Reason why the instances of a node cannot take the place of its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotAlike {
    #[error("GPU {0} is not in MIG mode; enable it with nvidia-smi -mig 1, or use --mig-strategy mixed")]
    WithoutMigMode(GpuUuid),
    #[error("GPU {0} has no instance; create some with nvidia-smi mig -cgi PROFILE -C")]
    WithoutInstance(GpuUuid),
    #[error(
        "there are instances of the profiles {0} and {1}; create one profile, or use --mig-strategy mixed"
    )]
    Profiles(String, String),
    #[error("there are {0} instances; at most {limit} are supported", limit = GpuSet::CAPACITY)]
    TooMany(usize),
}

/// Returns the node with its instances as GPUs. A GPU that does not answer is left out.
pub(super) fn instances_as_gpus(found: &DiscoveredGpus) -> Result<DiscoveredGpus, NotAlike> {
    for gpu in found.gpus.iter().filter(|gpu| gpu.health != Health::Unhealthy) {
        let has_instances = found.instances.iter().any(|instance| instance.gpu_uuid == gpu.uuid);
        match gpu.health {
            Health::InMigMode | Health::AwaitingReset if has_instances => {}
            Health::InMigMode => return Err(NotAlike::WithoutInstance(gpu.uuid.clone())),
            _ => return Err(NotAlike::WithoutMigMode(gpu.uuid.clone())),
        }
    }
    let instances = &found.instances;
    let mut profiles = instances.iter().map(|instance| &instance.profile);
    if let Some(first) = profiles.next()
        && let Some(other) = profiles.find(|profile| *profile != first)
    {
        return Err(NotAlike::Profiles(first.clone(), other.clone()));
    }
    if instances.len() > GpuSet::CAPACITY {
        return Err(NotAlike::TooMany(instances.len()));
    }
    let (gpus, pci): (Vec<Gpu>, Vec<String>) = (0u8..)
        .zip(instances)
        .filter_map(|(index, instance)| {
            let gpu = found.gpus.get(instance.gpu.position())?;
            let pci = found.pci.get(instance.gpu.position()).cloned().unwrap_or_default();
            Some((instance.as_gpu(GpuIndex(index), gpu), pci))
        })
        .unzip();
    let numa: Vec<Option<u16>> = gpus.iter().map(|gpu| gpu.numa).collect();
    // Instances cannot exchange data directly, so there are no links to choose by.
    let topology = Topology::from_pairs(gpus.len(), |_, _| Link::default()).with_numa(&numa);
    Ok(DiscoveredGpus { gpus, topology, pci, ..found.clone() })
}

/// Returns whether a GPU of the inventory is an instance.
pub(super) fn is_instance(gpu: &Gpu) -> bool {
    gpu.uuid.0.starts_with("MIG-")
}

/// Returns the resources of all instances. Instances of a GPU for which `is_usable` returns false are unhealthy.
pub(super) fn offers(found: &DiscoveredGpus, is_usable: impl Fn(&GpuUuid) -> bool) -> Vec<InstanceOffer> {
    let mut offers: BTreeMap<String, InstanceOffer> = BTreeMap::new();
    for instance in &found.instances {
        let gpu = found.gpus.get(instance.gpu.position());
        let device = PluginDevice {
            id: instance.uuid.to_string(),
            healthy: gpu.is_some_and(|gpu| gpu.health == Health::InMigMode) && is_usable(&instance.gpu_uuid),
            numa_node: gpu.and_then(|gpu| gpu.numa).map(i64::from),
        };
        let resource = resource_name(&instance.profile);
        let empty =
            || InstanceOffer { resource: resource.clone(), devices: Vec::new(), instances: Vec::new() };
        let offer = offers.entry(resource.clone()).or_insert_with(empty);
        offer.devices.push(device);
        offer.instances.push(instance.clone());
    }
    offers.into_values().collect()
}

/// Returns the names of the resources of all instances.
pub(super) fn resources(found: &DiscoveredGpus) -> BTreeSet<String> {
    found.instances.iter().map(|instance| resource_name(&instance.profile)).collect()
}

/// Returns the resource of a profile. A name in Kubernetes has no `+`, as in the profile `1g.10gb+me`.
fn resource_name(profile: &str) -> String {
    format!("{MIG_PREFIX}{}", profile.replace('+', "."))
}
