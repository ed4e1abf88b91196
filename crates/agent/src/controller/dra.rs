//! Claims of dynamic resource allocation: the slice in which this node offers its GPUs, and the claims that are
//! prepared on it.

mod error;
mod files;
mod prepare;
mod publish;

use std::collections::BTreeMap;

use tessera_core::{
    grant::{ContainerGrant, GpuUsage, Hold, PodGrant},
    request::ContainerRole,
    units::{GpuIndex, MiB, MilliCpu, NodeName, PodUid},
};
use tessera_wire::{
    foreign::objects::Pod,
    tessera::dra::{PreparedClaim, PreparedGpu},
};

pub use self::error::ClaimError;
pub use self::files::ClaimFiles;
use self::{prepare::Preparing, publish::SlicePublication};
use super::{CallId, inventory::NodeGpus};

/// Claims on this node, and what was published about its GPUs.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Whether claims are served.
    is_offered: bool,
    /// Claims whose GPUs are held, including those whose files are being written.
    prepared: BTreeMap<String, PreparedClaim>,
    /// Calls of the kubelet to prepare a claim, by the claim's UID.
    preparing: BTreeMap<String, Preparing>,
    /// Calls of the kubelet to release a claim whose files are being removed.
    removing: BTreeMap<CallId, String>,
    /// Whether the files of claims of an earlier agent have been written again.
    are_restored: bool,
    slice: SlicePublication,
}

impl Claims {
    pub(super) fn new(is_offered: bool) -> Self {
        Self { is_offered, ..Self::default() }
    }

    /// Returns the UIDs of all prepared claims. Their grant directories must stay.
    pub(super) fn uids(&self) -> impl Iterator<Item = PodUid> {
        self.prepared.keys().map(|uid| PodUid(uid.clone()))
    }

    /// Returns what each claim holds, as if it were a pod.
    pub(super) fn grants(&self, node: &NodeName, gpus: &NodeGpus) -> impl Iterator<Item = PodGrant> {
        self.prepared.values().map(|claim| claim_grant(claim, node, gpus))
    }

    /// Returns what a container of a pod holds by its claims, each GPU once. Shares of one GPU add up.
    pub(super) fn of_container(&self, gpus: &NodeGpus, pod: &Pod, container: &str) -> Vec<(GpuIndex, Hold)> {
        let mut held: BTreeMap<GpuIndex, GpuUsage> = BTreeMap::new();
        for used in pod.claimed_requests().filter(|used| used.container == container) {
            let is_claim = |claim: &&PreparedClaim| {
                claim.namespace == pod.metadata.namespace && claim.name == used.claim
            };
            let devices = self.prepared.values().filter(is_claim).flat_map(|claim| &claim.devices);
            for device in
                devices.filter(|device| used.request.is_none_or(|name| main_request(device) == name))
            {
                if let (Some(index), Some(hold)) = (index_of(gpus, device), device.hold) {
                    let usage = held.entry(index).or_default();
                    *usage = usage.plus(GpuUsage::of(hold));
                }
            }
        }
        let hold = |usage: GpuUsage| match usage.whole {
            true => Hold::Whole,
            false => Hold::Share { compute_percent: usage.compute_percent, memory: usage.memory },
        };
        held.into_iter().map(|(gpu, usage)| (gpu, hold(usage))).collect()
    }
}

/// Returns the index that a device's GPU has now, or `None` if the GPU is gone.
fn index_of(gpus: &NodeGpus, device: &PreparedGpu) -> Option<GpuIndex> {
    gpus.node.gpus().iter().find(|gpu| gpu.uuid == device.gpu).map(|gpu| gpu.index)
}

/// Returns the name of a device's request, without the alternative.
fn main_request(device: &PreparedGpu) -> &str {
    device.request.split_once('/').map_or(&device.request, |(main, _)| main)
}

/// Returns what a claim holds, as if it were a pod with one container for each device.
fn claim_grant(claim: &PreparedClaim, node: &NodeName, gpus: &NodeGpus) -> PodGrant {
    let container = |device: &PreparedGpu| {
        Some(ContainerGrant {
            container: device.request.clone(),
            role: ContainerRole::Main,
            holds: vec![(index_of(gpus, device)?, device.hold?)],
        })
    };
    PodGrant {
        // UIDs of pods contain no colon.
        pod: PodUid(format!("claim:{}", claim.uid)),
        node: node.clone(),
        cpu: MilliCpu::ZERO,
        memory: MiB::ZERO,
        containers: claim.devices.iter().filter_map(container).collect(),
    }
}
