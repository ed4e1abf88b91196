//! Devices that the kubelet offers, and devices that it chose.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{gpu_set::GpuSet, units::GpuIndex};
use tessera_node::device_plugin::PreferenceRequest;
use tessera_wire::kubelet::device_id::Resource;

use super::{CallError, allocate::ContainerRequest, error::DeviceMismatch, inventory::NodeGpus};

/// Devices that the kubelet offers for a preference.
pub(super) struct OfferedDevices {
    /// Devices by GPU. Required ones come first, then lower numbers.
    on_gpu: BTreeMap<GpuIndex, Vec<OfferedDevice>>,
    required: GpuSet,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct OfferedDevice {
    /// Whether the kubelet leaves the choice open. `false` sorts first.
    is_optional: bool,
    number: u64,
    id: String,
}

impl OfferedDevices {
    pub(super) fn new(
        gpus: &NodeGpus,
        resource: Resource,
        wish: &PreferenceRequest,
    ) -> Result<Self, CallError> {
        let required: BTreeSet<&String> = wish.required.iter().collect();
        let mut offered = Self { on_gpu: BTreeMap::new(), required: GpuSet::EMPTY };
        let all: BTreeSet<&String> = wish.available.iter().chain(&wish.required).collect();
        for id in all {
            let (gpu, number) = read(gpus, resource, id)?;
            let is_required = required.contains(id);
            if is_required {
                offered.required = offered.required.with(gpu);
            }
            let device = OfferedDevice { is_optional: !is_required, number, id: id.clone() };
            offered.on_gpu.entry(gpu).or_default().push(device);
        }
        offered.on_gpu.values_mut().for_each(|devices| devices.sort_unstable());
        Ok(offered)
    }

    /// Returns the GPUs of devices that the kubelet has already decided on.
    pub(super) fn required(&self) -> GpuSet {
        self.required
    }

    /// Returns whether a GPU has at least `count` devices.
    pub(super) fn has(&self, gpu: GpuIndex, count: usize) -> bool {
        self.on_gpu.get(&gpu).is_some_and(|devices| devices.len() >= count)
    }

    /// Picks `count` devices of these GPUs, `per_gpu` of each if that is given.
    ///
    /// Returns `None` if there are too few, or if a required device would be missing.
    pub(super) fn pick(&self, gpus: GpuSet, count: usize, per_gpu: Option<usize>) -> Option<Vec<String>> {
        let of = |gpu: GpuIndex| self.on_gpu.get(&gpu).into_iter().flatten();
        let mut picked: Vec<&OfferedDevice> = match per_gpu {
            Some(devices) => gpus.iter().flat_map(|gpu| of(gpu).take(devices)).collect(),
            None => gpus.iter().flat_map(of).collect(),
        };
        picked.sort_by_key(|device| device.is_optional);
        picked.truncate(count);
        let required = self.on_gpu.values().flatten().filter(|device| !device.is_optional).count();
        let included = picked.iter().filter(|device| !device.is_optional).count();
        (picked.len() == count && included == required)
            .then(|| picked.into_iter().map(|device| device.id.clone()).collect())
    }
}

/// Returns the GPUs of devices that the kubelet chose, if they form what the container requests.
pub(super) fn check_devices(
    gpus: &NodeGpus,
    request: &ContainerRequest,
    resource: Resource,
    ids: &BTreeSet<String>,
) -> Result<GpuSet, CallError> {
    let mut on_gpu: BTreeMap<GpuIndex, usize> = BTreeMap::new();
    for id in ids {
        let (gpu, _) = read(gpus, resource, id)?;
        *on_gpu.entry(gpu).or_default() += 1;
    }
    let chosen: GpuSet = on_gpu.keys().copied().collect();
    let count = request.gpu_count();
    let mismatch = match (request.fixed, request.per_gpu(resource, ids.len())) {
        (Some(fixed), _) if !fixed.is_superset(chosen) => Some(DeviceMismatch::OtherGpus(fixed)),
        (None, None) if chosen.len() > count => Some(DeviceMismatch::TooManyGpus(count)),
        (_, Some(devices)) if chosen.len() != count || on_gpu.values().any(|count| *count != devices) => {
            Some(DeviceMismatch::WrongCount(count))
        }
        _ if !chosen.is_superset(request.partly_fixed) && resource != Resource::VcudaMemory => {
            Some(DeviceMismatch::MemoryElsewhere(request.partly_fixed))
        }
        _ => None,
    };
    match mismatch {
        Some(mismatch) => Err(CallError::WrongDevices {
            pod: request.pod_name.clone(),
            container: request.claim.container.clone(),
            resource,
            gpus: chosen,
            mismatch,
        }),
        None => Ok(request.fixed.unwrap_or(chosen)),
    }
}

fn read(gpus: &NodeGpus, resource: Resource, id: &str) -> Result<(GpuIndex, u64), CallError> {
    let known = gpus.ids.read(resource, id);
    known.ok_or_else(|| CallError::UnknownDevice { resource, id: id.to_owned() })
}
