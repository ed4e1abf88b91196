//! Devices that are withdrawn because pods of other dialects hold their part of a GPU, or because the GPU is cordoned.
//!
//! All dialects offer the same GPUs. Without a withdrawal a node would report 8 `nvidia.com/gpu` as
//! allocatable while a pod with `aliyun.com/gpu-mem` holds a part of one GPU. Autoscalers and quota tools
//! compute with allocatable minus requests, and that difference would be wrong.
//!
//! Only the holdings of other dialects are withdrawn. What pods of the same dialect hold is in the requests,
//! and kube-scheduler must be able to evict these pods. A pod that is bound but has not started yet takes its
//! devices from what the other dialects leave, so these devices stay offered.
//!
//! New pods do not get cordoned GPUs, so unused devices of these GPUs are no capacity. GPUs that are reserved for
//! named pods stay offered, because those pods must get their devices.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use tessera_core::{
    gpu_set::GpuSet,
    grant::Hold,
    node::{GpuRoom, NodeState},
    units::{GpuIndex, MiB, Percent},
};
use tessera_wire::{
    foreign::dialect::{Dialect, vcuda},
    kubelet::device_id::{DeviceIds, Resource},
};

use super::{
    EventTime,
    holdings::{Holding, Holdings, PodHoldings, Source},
};

/// How long a GPU must be held or cordoned before devices are withdrawn.
///
/// The kubelet writes its checkpoint with every list of devices, so pods that end soon should not cause any.
/// Devices come back at once, because a pod may need them.
pub(super) const WITHDRAWAL_DELAY: Duration = Duration::from_secs(5);

/// Devices that are published as unhealthy although their GPUs are healthy, by resource: GPU and number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Withdrawn(BTreeMap<Resource, BTreeSet<(GpuIndex, u64)>>);

/// Reasons for which devices are withdrawn.
#[derive(Clone, Copy)]
pub(super) struct Reasons {
    /// Whether what pods of other dialects hold is withdrawn.
    pub(super) held: bool,
    /// GPUs that new pods do not get.
    pub(super) cordoned: GpuSet,
}

/// Withdrawn devices, and those that are about to be withdrawn.
#[derive(Debug, Default)]
pub(super) struct Capacity {
    published: Withdrawn,
    /// Devices that are withdrawn at `due`, if their GPUs are held or cordoned until then.
    waiting: Withdrawn,
    /// When they are withdrawn. `None` if there are none.
    due: Option<Duration>,
    /// Whether pods, GPUs, cordons or the kubelet's list have changed since the last computation.
    is_stale: bool,
}

impl Withdrawn {
    pub(super) fn contains(&self, resource: Resource, gpu: GpuIndex, number: u64) -> bool {
        self.0.get(&resource).is_some_and(|devices| devices.contains(&(gpu, number)))
    }

    /// Returns how many devices of a resource on these GPUs are withdrawn.
    pub(super) fn count(&self, resource: Resource, is_counted: impl Fn(GpuIndex) -> bool) -> usize {
        let devices = self.0.get(&resource).into_iter().flatten();
        devices.filter(|(gpu, _)| is_counted(*gpu)).count()
    }

    fn is_empty(&self) -> bool {
        self.0.values().all(BTreeSet::is_empty)
    }

    /// Returns the devices that are in this one and not in the other.
    fn without(&self, other: &Self) -> Self {
        let rest = |(resource, devices): (&Resource, &BTreeSet<_>)| {
            let others = other.0.get(resource);
            let rest = devices.iter().filter(|device| others.is_none_or(|others| !others.contains(device)));
            Some((*resource, rest.copied().collect())).filter(|(_, rest): &(_, BTreeSet<_>)| !rest.is_empty())
        };
        Self(self.0.iter().filter_map(rest).collect())
    }

    /// Returns the devices that are in either.
    fn union(mut self, other: &Self) -> Self {
        for (resource, devices) in &other.0 {
            self.0.entry(*resource).or_default().extend(devices);
        }
        self
    }

    /// Returns the devices that are in both.
    fn intersection(&self, other: &Self) -> Self {
        let both = |(resource, devices): (&Resource, &BTreeSet<_>)| {
            let both: BTreeSet<_> = devices.intersection(other.0.get(resource)?).copied().collect();
            (!both.is_empty()).then_some((*resource, both))
        };
        Self(self.0.iter().filter_map(both).collect())
    }
}

impl Capacity {
    pub(super) fn published(&self) -> &Withdrawn {
        &self.published
    }

    /// Notes that pods, GPUs, cordons or the kubelet's list have changed.
    pub(super) fn invalidate(&mut self) {
        self.is_stale = true;
    }

    /// Returns whether [`Self::reconcile`] could change something. New withdrawals wait for a tick.
    pub(super) fn is_due(&self, now: EventTime, is_tick: bool) -> bool {
        let is_time = self.due.is_some_and(|due| now.elapsed >= due);
        is_time || (self.is_stale && (is_tick || !self.published.is_empty()))
    }

    /// Computes which devices must be withdrawn. Returns true if the published ones changed.
    pub(super) fn reconcile(
        &mut self,
        now: EventTime,
        resources: impl Iterator<Item = Resource>,
        reasons: Reasons,
        holdings: Holdings<'_>,
    ) -> bool {
        self.is_stale = false;
        let target = target(resources, reasons, holdings);
        let is_time = self.due.is_some_and(|due| now.elapsed >= due);
        let (mut next, mut waiting) =
            (self.published.intersection(&target), self.waiting.intersection(&target));
        if is_time {
            next = next.union(&std::mem::take(&mut waiting));
        }
        if waiting.is_empty() {
            // Devices that came to be held meanwhile wait from now on.
            waiting = target.without(&next);
            self.due = (!waiting.is_empty()).then(|| now.elapsed + WITHDRAWAL_DELAY);
        }
        self.waiting = waiting;
        let has_changed = next != self.published;
        self.published = next;
        has_changed
    }
}

/// Returns the devices that the holdings and the cordons of a node withdraw.
fn target(resources: impl Iterator<Item = Resource>, reasons: Reasons, holdings: Holdings<'_>) -> Withdrawn {
    let Some(gpus) = holdings.gpus else { return Withdrawn::default() };
    let unused = NodeState::empty(Arc::new(gpus.node.clone()));
    let pods = holdings.all();
    let of = |resource: Resource| {
        let given = given_devices(resource, holdings, &gpus.ids);
        let mut devices = BTreeSet::new();
        if reasons.held {
            let others = held_by_others(resource.dialect(), holdings, &pods, unused.clone());
            devices = withdrawn_devices(resource, &gpus.ids, &others, &given);
        }
        let closed = reasons.cordoned.difference(expected(resource, &pods));
        devices.extend(unused_devices(resource, &gpus.ids, closed, &given));
        (resource, devices)
    };
    Withdrawn(resources.map(of).filter(|(_, devices)| !devices.is_empty()).collect())
}

/// Returns the state of the node with the holdings of all other dialects.
///
/// A pod that ends does not count: the devices come back meanwhile, so that the kubelet knows them when a pod
/// arrives that was waiting for the GPU. The requests of a pod that only the kubelet lists do not count either.
fn held_by_others(
    dialect: Dialect,
    holdings: Holdings<'_>,
    pods: &[PodHoldings<'_>],
    mut state: NodeState,
) -> NodeState {
    let is_split = holdings.gpus.is_some_and(|gpus| gpus.ids.slots().is_some());
    let is_own = |held: &Holding| match (held.dialect, dialect) {
        // A container with a whole GPU has one of the GPU's devices, and the others are of no use.
        (Dialect::Nvidia | Dialect::Hami, Dialect::Nvidia) if is_split => {
            held.grant.holds.iter().all(|(_, hold)| *hold != Hold::Whole)
        }
        (held, own) => held == own,
    };
    for pod in pods.iter().filter(|pod| !pod.is_ending) {
        state.add(&holdings.grant_of(pod, |held| !is_own(held)));
    }
    for claim in holdings.gpus.into_iter().flat_map(|gpus| holdings.claims.grants(holdings.node, gpus)) {
        state.add(&claim);
    }
    state
}

/// Returns the GPUs from which pods that are bound take devices of this resource when they are admitted.
fn expected(resource: Resource, pods: &[PodHoldings<'_>]) -> GpuSet {
    let containers = pods.iter().filter(|pod| !pod.is_ending).flat_map(|pod| &pod.containers);
    let takes = |held: &Holding| Resource::of(held.dialect).any(|of| of == resource);
    let is_expected = |held: &&Holding| held.source == Source::Annotated && takes(held);
    containers.filter(is_expected).flat_map(|held| held.grant.holds.iter().map(|(gpu, _)| *gpu)).collect()
}

/// Returns all devices of these GPUs except the `given` ones.
fn unused_devices(
    resource: Resource,
    ids: &DeviceIds,
    gpus: GpuSet,
    given: &HashSet<(GpuIndex, u64)>,
) -> impl Iterator<Item = (GpuIndex, u64)> {
    let all =
        gpus.iter().flat_map(move |gpu| (0..ids.per_gpu(resource, gpu)).map(move |number| (gpu, number)));
    all.filter(|device| !given.contains(device))
}

/// Returns the devices that the kubelet has given to containers, by its list and by our records.
fn given_devices(resource: Resource, holdings: Holdings<'_>, ids: &DeviceIds) -> HashSet<(GpuIndex, u64)> {
    let listed = holdings.kubelet.listed().iter().flat_map(|pod| &pod.containers);
    let listed = listed.filter_map(|container| container.ids.get(resource.name())).flatten();
    let given = listed.chain(holdings.admissions.all_recorded(resource));
    given.filter_map(|id| ids.read(resource, id)).collect()
}

/// Returns the devices of a resource that stand for what other dialects hold.
///
/// `given` devices stay, whatever else holds their GPU. Of the others, those with the highest numbers are
/// withdrawn: containers get the lowest free ones.
pub(super) fn withdrawn_devices(
    resource: Resource,
    ids: &DeviceIds,
    others: &NodeState,
    given: &HashSet<(GpuIndex, u64)>,
) -> BTreeSet<(GpuIndex, u64)> {
    let gpus = others.node().gpus().iter().map(|gpu| gpu.index);
    let of = |gpu: GpuIndex| {
        let all = ids.per_gpu(resource, gpu);
        let excess = all - units_left(resource, all, ids, others, gpu);
        let free = (0..all).rev().map(move |number| (gpu, number)).filter(|device| !given.contains(device));
        free.take(usize::try_from(excess).unwrap_or(usize::MAX))
    };
    gpus.flat_map(of).collect()
}

/// Returns how many of the `all` devices of a GPU are left beside the holdings of `others`.
fn units_left(resource: Resource, all: u64, ids: &DeviceIds, others: &NodeState, gpu: GpuIndex) -> u64 {
    let (used, GpuRoom { compute_percent, memory }) = (others.used(gpu), others.room(gpu));
    if used.is_none() {
        return all;
    }
    let left = match resource {
        _ if used.whole => 0,
        // A device for a part of a GPU needs memory. Its compute may be what others leave.
        Resource::NvidiaGpu if ids.slots().is_some() => {
            if memory > MiB::ZERO {
                all
            } else {
                0
            }
        }
        Resource::NvidiaGpu | Resource::AliyunGpu => 0,
        Resource::GpuMemory => memory.0 / ids.unit().mib(),
        // A share needs compute and at least one block of memory.
        Resource::VcudaCore if memory < vcuda::BLOCK => 0,
        Resource::VcudaMemory if compute_percent == Percent::ZERO => 0,
        Resource::VcudaCore => u64::from(compute_percent.0),
        // The GPU may have a block that belongs in part to the GPU before it.
        Resource::VcudaMemory => all.saturating_sub(blocks(used.memory)),
    };
    left.min(all)
}

/// Returns how many blocks of `tencent.com/vcuda-memory` an amount of memory touches.
fn blocks(memory: MiB) -> u64 {
    memory.0.div_ceil(vcuda::BLOCK.0)
}
