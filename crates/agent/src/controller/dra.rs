//! Claims of dynamic resource allocation: the slice in which this node offers its GPUs, and the claims that are
//! prepared on it.

mod error;
mod files;
mod prepare;
mod publish;

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    grant::{ContainerGrant, GpuUsage, Hold, PodGrant},
    request::ContainerRole,
    units::{GpuIndex, MiB, MilliCpu, NodeName, PodUid},
};
use tessera_wire::{
    foreign::objects::Pod,
    tessera::dra::{PreparedClaim, PreparedGpu, request_directory},
};

pub use self::error::ClaimError;
pub use self::files::ClaimFiles;
use self::{prepare::Preparing, publish::SlicePublication};
use super::{
    CallId,
    inventory::NodeGpus,
    view::{ClaimView, ClaimedGpu},
};

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

    /// Returns what a container of a pod holds by its claims, each GPU once. Shares of one GPU add up, also those of
    /// requests of the same claim that the container does not use: the requests have one grant.
    pub(super) fn of_container(&self, gpus: &NodeGpus, pod: &Pod, container: &str) -> Vec<(GpuIndex, Hold)> {
        let mut held: BTreeMap<GpuIndex, GpuUsage> = BTreeMap::new();
        for (uid, _, used) in self.used_by(gpus, pod).into_iter().filter(|(_, user, _)| *user == container) {
            let claim = self.prepared.get(uid);
            for (gpu, usage) in claim.into_iter().flat_map(|claim| usage_of(claim, gpus)) {
                if used.contains(&gpu.0) {
                    let sum = held.entry(gpu).or_default();
                    *sum = sum.plus(usage);
                }
            }
        }
        held.into_iter().map(|(gpu, usage)| (gpu, hold_of(usage))).collect()
    }

    /// Returns the claims that a pod uses: UID, container, and the GPUs of which the container's requests hold a part.
    pub(super) fn used_by<'a>(
        &'a self,
        gpus: &NodeGpus,
        pod: &'a Pod,
    ) -> Vec<(&'a str, &'a str, BTreeSet<u8>)> {
        let mut used: BTreeMap<(&str, &str), BTreeSet<u8>> = BTreeMap::new();
        for request in pod.claimed_requests() {
            let is_claim = |claim: &&PreparedClaim| {
                claim.namespace == pod.metadata.namespace && claim.name == request.claim
            };
            let is_used = |device: &&PreparedGpu| {
                device.hold.is_some() && request.request.is_none_or(|name| main_request(device) == name)
            };
            for claim in self.prepared.values().filter(is_claim) {
                let devices = claim.devices.iter().filter(is_used);
                let indexes = devices.filter_map(|device| Some(index_of(gpus, device)?.0));
                used.entry((&claim.uid, request.container)).or_default().extend(indexes);
            }
        }
        used.retain(|_, gpus| !gpus.is_empty());
        used.into_iter().map(|((claim, container), gpus)| (claim, container, gpus)).collect()
    }

    /// Returns all claims with what they hold, sorted by namespace and name.
    pub(super) fn views(&self, gpus: &NodeGpus) -> Vec<ClaimView> {
        let view = |claim: &PreparedClaim| {
            let directory = |gpu: GpuIndex| {
                let is_on =
                    |device: &&PreparedGpu| device.hold.is_some() && index_of(gpus, device) == Some(gpu);
                let device = claim.devices.iter().find(is_on);
                device.map(|device| request_directory(claim.grant_of(&device.request))).unwrap_or_default()
            };
            let held = usage_of(claim, gpus).into_iter();
            let gpus = held.map(|(gpu, usage)| ClaimedGpu {
                gpu: gpu.0,
                hold: hold_of(usage),
                directory: directory(gpu),
            });
            ClaimView {
                uid: PodUid(claim.uid.clone()),
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                gpus: gpus.collect(),
                users: Vec::new(),
            }
        };
        let mut views: Vec<ClaimView> = self.prepared.values().map(view).collect();
        views.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        views
    }
}

/// Returns what a claim holds of each GPU.
fn usage_of(claim: &PreparedClaim, gpus: &NodeGpus) -> BTreeMap<GpuIndex, GpuUsage> {
    let mut held: BTreeMap<GpuIndex, GpuUsage> = BTreeMap::new();
    for device in &claim.devices {
        if let (Some(index), Some(hold)) = (index_of(gpus, device), device.hold) {
            let usage = held.entry(index).or_default();
            *usage = usage.plus(GpuUsage::of(hold));
        }
    }
    held
}

fn hold_of(usage: GpuUsage) -> Hold {
    match usage.whole {
        true => Hold::Whole,
        false => Hold::Share { compute_percent: usage.compute_percent, memory: usage.memory },
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
