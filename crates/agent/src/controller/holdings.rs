//! Which container holds which GPUs.
//!
//! Three sources are consulted, in this order: the kubelet's list, our own answers to the kubelet,
//! and the pod's annotations.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tessera_core::{
    grant::{ContainerGrant, Hold, PodGrant},
    ledger::Ledger,
    node::NodeState,
    request::ContainerRole,
    units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid},
};
use tessera_node::pod_resources::{ContainerDevices, PodDevices};
use tessera_wire::{
    foreign::{
        dialect::{Dialect, vcuda},
        objects::Pod,
        pod_spec::Claim,
    },
    kubelet::device_id::Resource,
};

use super::{
    admission::Admissions,
    dra::Claims,
    inventory::NodeGpus,
    kubelet::KubeletView,
    pods::{PodGpus, Pods, has_ended, name_of},
};

/// GPUs of one container, and the source of that information.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) grant: ContainerGrant,
    pub(super) source: Source,
    /// Dialect of the request.
    pub(super) dialect: Dialect,
}

/// GPUs of the containers of one pod.
pub(super) struct PodHoldings<'a> {
    owner: Owner<'a>,
    /// Whether the pod is being deleted, or is gone from the API server.
    pub(super) is_ending: bool,
    pub(super) containers: Vec<Holding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The kubelet lists the devices.
    Listed,
    /// We answered with the devices, and the kubelet does not list them, or not yet.
    Recorded,
    /// Only the annotations grant the GPUs: the container has not been admitted yet.
    Annotated,
}

/// Owner of a booking in the agent's ledger.
enum Owner<'a> {
    Pod(&'a PodUid),
    /// A pod that only the kubelet lists, identified by its position in the list.
    Unidentified {
        entry: &'a PodDevices,
        position: usize,
    },
}

impl Owner<'_> {
    /// Returns the key of the owner's bookings. Real UIDs contain no colon.
    fn ledger_key(&self) -> PodUid {
        match self {
            Self::Pod(uid) => (*uid).clone(),
            Self::Unidentified { entry, position } => {
                PodUid(format!("unknown:{}/{}#{position}", entry.namespace, entry.name))
            }
        }
    }
}

/// Computes who holds what, from everything that is known about pods, GPUs and kubelet.
#[derive(Clone, Copy)]
pub(super) struct Holdings<'a> {
    pub(super) node: &'a NodeName,
    pub(super) gpus: Option<&'a NodeGpus>,
    pub(super) pods: &'a Pods,
    pub(super) kubelet: &'a KubeletView,
    pub(super) admissions: &'a Admissions,
    pub(super) claims: &'a Claims,
}

impl<'a> Holdings<'a> {
    /// Returns what each container of a pod holds. Containers without GPU requests are left out.
    pub(super) fn of_pod(&self, uid: &PodUid, pod: &Pod) -> Vec<Holding> {
        let Some(gpus) = self.gpus else { return Vec::new() };
        let Some(PodGpus { claims, annotated, .. }) =
            self.pods.parsed(uid).filter(|pod| !pod.claims.is_empty())
        else {
            return Vec::new();
        };
        let entry = self.entry_of(uid, pod);
        let holding = |claim: &Claim| {
            let grant = |gpus: BTreeSet<GpuIndex>| ContainerGrant {
                container: claim.container.clone(),
                role: claim.role,
                holds: self
                    .gpus
                    .map(|node| node.node.holds(claim.request, gpus.into_iter().collect()))
                    .unwrap_or_default(),
            };
            let listed = entry.and_then(|entry| entry.containers.iter().find(|c| c.name == claim.container));
            for resource in Resource::of(claim.dialect) {
                let by_kubelet = listed.and_then(|container| container.ids.get(resource.name()));
                let by_us = self.admissions.recorded(uid, &claim.container, resource);
                for (ids, source) in [(by_kubelet, Source::Listed), (by_us, Source::Recorded)] {
                    let gpus = ids.map(|ids| gpus.of_ids(resource, ids)).unwrap_or_default();
                    if !gpus.is_empty() {
                        return Some(Holding { grant: grant(gpus), source, dialect: claim.dialect });
                    }
                }
            }
            let granted = annotated.iter().find(|granted| granted.container == claim.container)?;
            let (grant, dialect) = (granted.clone(), claim.dialect);
            Some(Holding { grant, source: Source::Annotated, dialect })
        };
        claims.iter().filter_map(holding).collect()
    }

    /// Returns the kubelet's entry of exactly this pod.
    ///
    /// An entry of the same name with devices may belong to an earlier pod that still terminates.
    /// It belongs to this pod if this pod has been admitted, or if the devices match our answers or
    /// the pod's annotations.
    pub(super) fn entry_of(&self, uid: &PodUid, pod: &Pod) -> Option<&'a PodDevices> {
        let has_devices =
            |entry: &&PodDevices| entry.containers.iter().any(|container| !container.ids.is_empty());
        let mut entries: Vec<&PodDevices> = self.kubelet.entries_named(pod).filter(has_devices).collect();
        if entries.len() == 1 && pod.status.start_time.is_some() {
            return entries.pop();
        }
        let gpus = self.gpus?;
        // If one of two entries of this name has no devices yet, that one is being admitted.
        let is_arriving = self.kubelet.entries_named(pod).count() > entries.len();
        let annotated = if is_arriving { &[] } else { self.pods.annotated(uid) };
        let matches = |entry: &&PodDevices| {
            entry.containers.iter().any(|container| {
                let mut ids =
                    container.ids.iter().filter_map(|(name, ids)| Some((Resource::named(name)?, ids)));
                let granted = annotated.iter().find(|granted| granted.container == container.name);
                ids.any(|(resource, ids)| match self.admissions.recorded(uid, &container.name, resource) {
                    Some(recorded) => recorded == ids,
                    None => granted.is_some_and(|granted| {
                        let granted: BTreeSet<GpuIndex> = granted.holds.iter().map(|(gpu, _)| *gpu).collect();
                        granted == gpus.of_ids(resource, ids)
                    }),
                })
            })
        };
        entries.into_iter().find(matches)
    }

    /// Returns what is left of the node for one container, from a ledger of all pods.
    ///
    /// Other pods' holdings count, and those of containers that run beside it in its own pod. What
    /// an init container holds is free again for the containers after it.
    pub(super) fn beside(
        &self,
        mut ledger: Ledger,
        uid: &PodUid,
        container: &str,
        role: ContainerRole,
    ) -> Option<NodeState> {
        ledger.release(uid);
        let gpus = self.gpus?;
        let mut state = match ledger.node(self.node) {
            Some(state) => state.clone(),
            None => NodeState::empty(Arc::new(gpus.node.clone())),
        };
        let pod = self.pods.get(uid)?;
        let runs_beside = |held: &Holding| {
            let is_beside = match role {
                ContainerRole::Main => held.grant.role != ContainerRole::Init,
                ContainerRole::Init | ContainerRole::Sidecar => held.grant.role == ContainerRole::Sidecar,
            };
            is_beside && held.grant.container != container && held.source != Source::Annotated
        };
        let own: Vec<ContainerGrant> =
            self.of_pod(uid, pod).into_iter().filter(runs_beside).map(|held| held.grant).collect();
        state.add(&self.pod_grant(&Owner::Pod(uid), own));
        Some(state)
    }

    /// Sums up the holdings of all pods.
    pub(super) fn ledger(&self) -> Ledger {
        self.sum(|_| true)
    }

    /// Returns the GPUs that carry more than they have, given the sum of all holdings.
    ///
    /// A slot of a pod that only the kubelet lists counts as a whole GPU, because its share is unknown. That keeps other
    /// pods away, but does not show that the GPU carries too much.
    pub(super) fn overbooked(&self, sum: &Ledger) -> Vec<u8> {
        let gpus = |ledger: &Ledger| ledger.overbooked().into_values().flatten().map(|gpu| gpu.0).collect();
        let all: Vec<u8> = gpus(sum);
        if all.is_empty() { all } else { gpus(&self.sum(|pod| self.is_share_known(pod))) }
    }

    fn is_share_known(&self, pod: &PodHoldings<'_>) -> bool {
        let Owner::Unidentified { entry, .. } = pod.owner else { return true };
        let has_slots = self.gpus.is_some_and(|gpus| gpus.ids.slots().is_some());
        let mut names = entry.containers.iter().flat_map(|container| container.ids.keys());
        !(has_slots && names.any(|name| Resource::named(name) == Some(Resource::NvidiaGpu)))
    }

    fn sum(&self, is_counted: impl Fn(&PodHoldings<'_>) -> bool) -> Ledger {
        let mut ledger = Ledger::default();
        let Some(gpus) = self.gpus else { return ledger };
        ledger.set_node(gpus.node.clone());
        for pod in self.all().iter().filter(|pod| is_counted(pod)) {
            ledger.observe(self.grant_of(pod, |_| true));
        }
        for claim in self.claims.grants(self.node, gpus) {
            ledger.observe(claim);
        }
        ledger
    }

    /// Returns what every pod holds, including pods that only the kubelet lists.
    pub(super) fn all(&self) -> Vec<PodHoldings<'a>> {
        let Some(gpus) = self.gpus else { return Vec::new() };
        let mut all = Vec::new();
        let mut owned: BTreeSet<*const PodDevices> = BTreeSet::new();
        let mut ended: BTreeSet<(&str, &str)> = BTreeSet::new();
        for (uid, pod) in self.pods.iter() {
            if has_ended(pod) {
                ended.insert(name_of(pod));
                continue;
            }
            owned.extend(self.entry_of(uid, pod).map(std::ptr::from_ref));
            let is_ending = pod.metadata.deletion_timestamp.is_some();
            let containers = self.of_pod(uid, pod);
            all.push(PodHoldings { owner: Owner::Pod(uid), is_ending, containers });
        }
        // Devices of pods that the API server does not know, or no longer knows, are in use too.
        // Older kubelets also list ended pods, whose devices are free.
        for (position, entry) in self.kubelet.listed().iter().enumerate() {
            let name = (entry.namespace.as_str(), entry.name.as_str());
            if owned.contains(&std::ptr::from_ref(entry)) || ended.contains(&name) {
                continue;
            }
            let (owner, containers) = (Owner::Unidentified { entry, position }, held_by_devices(gpus, entry));
            all.push(PodHoldings { owner, is_ending: true, containers });
        }
        all.retain(|pod| !pod.containers.is_empty());
        all
    }

    /// Returns the grant of a pod, with only the containers for which `is_counted` returns true.
    pub(super) fn grant_of(&self, pod: &PodHoldings<'_>, is_counted: impl Fn(&Holding) -> bool) -> PodGrant {
        let counted = pod.containers.iter().filter(|held| is_counted(held));
        self.pod_grant(&pod.owner, counted.map(|held| held.grant.clone()).collect())
    }

    fn pod_grant(&self, owner: &Owner<'_>, containers: Vec<ContainerGrant>) -> PodGrant {
        let (pod, node) = (owner.ledger_key(), self.node.clone());
        PodGrant { pod, node, cpu: MilliCpu::ZERO, memory: MiB::ZERO, containers }
    }
}

/// Returns whether the kubelet lists everything that a pod requests outside its init containers.
///
/// The kubelet does not list init containers. If only those request GPUs, our own records decide.
pub(super) fn is_settled(holdings: &[Holding]) -> bool {
    let (inits, lasting): (Vec<_>, Vec<_>) =
        holdings.iter().partition(|held| held.grant.role == ContainerRole::Init);
    if lasting.is_empty() {
        return !inits.is_empty() && inits.iter().all(|held| held.source == Source::Recorded);
    }
    lasting.iter().all(|held| held.source == Source::Listed)
}

/// Returns what an unidentified pod holds, counted by its devices.
fn held_by_devices(gpus: &NodeGpus, entry: &PodDevices) -> Vec<Holding> {
    let of = |container: &ContainerDevices| {
        let dialect = container.ids.keys().find_map(|name| Resource::named(name))?.dialect();
        let mut held: BTreeMap<GpuIndex, Hold> = BTreeMap::new();
        for (name, ids) in &container.ids {
            let Some(resource) = Resource::named(name) else { continue };
            for (gpu, _) in ids.iter().filter_map(|id| gpus.ids.read(resource, id)) {
                let (more_percent, more_mib) = match resource {
                    Resource::NvidiaGpu | Resource::AliyunGpu => {
                        held.insert(gpu, Hold::Whole);
                        continue;
                    }
                    Resource::GpuMemory => (0, gpus.ids.unit().mib()),
                    Resource::VcudaCore => (1, 0),
                    Resource::VcudaMemory => (0, vcuda::BLOCK.0),
                };
                let nothing = Hold::Share { compute_percent: Percent::ZERO, memory: MiB::ZERO };
                if let Hold::Share { compute_percent, memory } = held.entry(gpu).or_insert(nothing) {
                    *compute_percent += Percent(more_percent);
                    *memory += MiB(more_mib);
                }
            }
        }
        let container = container.name.clone();
        let grant =
            ContainerGrant { container, role: ContainerRole::Main, holds: held.into_iter().collect() };
        (!grant.holds.is_empty()).then_some(Holding { grant, source: Source::Listed, dialect })
    };
    entry.containers.iter().filter_map(of).collect()
}
