//! What the agent shows of itself, to its pages and metrics.

use std::collections::BTreeSet;

use tessera_core::{
    gpu::GpuUuid,
    gpu_set::GpuSet,
    grant::{ContainerGrant, Hold},
    node::NodeState,
    units::PodUid,
};
use tessera_limits::{Bytes, GpuLimit, UuidBytes};
use tessera_wire::{
    foreign::{
        dialect::Dialect,
        objects::{Pod, SUBMITTER},
    },
    tessera::inventory::Inventory,
};

use super::{Agent, Escape, NotReady, holdings::Source, pods::has_ended};

/// Annotation of a static pod's mirror with the UID that the kubelet made for the pod.
const STATIC_UID: &str = "kubernetes.io/config.hash";

/// State of the agent at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Whether the pods of the node are known.
    pub pods_known: bool,
    /// Whether the kubelet has listed its podresources.
    pub listed: bool,
    /// GPUs of the node and what is left of them.
    pub node: Option<NodeState>,
    /// GPUs as the node's annotation publishes them.
    pub inventory: Option<Inventory>,
    /// PCI addresses of the GPUs.
    pub pci: Vec<String>,
    /// Version of the driver, if there is one.
    pub driver: Option<String>,
    /// All pods of the node, with or without GPUs.
    pub pods: Vec<PodView>,
    /// Containers that hold GPUs.
    pub containers: Vec<ContainerView>,
    /// Claims that are prepared, sorted by namespace and name.
    pub claims: Vec<ClaimView>,
    /// Containers with GPUs of another device plugin: namespace, pod, container. The devices do not
    /// identify the GPUs.
    pub served_by_others: BTreeSet<(String, String, String)>,
    /// GPUs on which pods hold more than there is.
    pub overbooked: Vec<u8>,
    /// GPUs that an administrator keeps free of new pods.
    pub cordoned: Vec<u8>,
    /// Reported escapes: pod, container, kind, and how often.
    pub escapes: Vec<(PodUid, String, Escape, u64)>,
    /// Processes outside their grant now: pod, container, GPU, and how many.
    pub escaped: Vec<(PodUid, String, GpuUuid, usize)>,
}

/// A claim that is prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimView {
    /// UID of the claim.
    pub uid: PodUid,
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// What the claim holds.
    pub gpus: Vec<ClaimedGpu>,
    /// Containers that use the claim: name of the pod, name of the container, and indexes of the GPUs.
    pub users: Vec<(String, String, BTreeSet<u8>)>,
}

/// What a claim holds of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedGpu {
    /// Index of the GPU.
    pub gpu: u8,
    /// Sum of what the claim holds of the GPU.
    pub hold: Hold,
    /// Name of the grant directory in which the claim has the GPU.
    pub directory: String,
}

/// A pod, as far as it is needed to attribute processes to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// UID of the pod.
    pub uid: PodUid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID by which the kubelet knows the pod, if it differs: static pods have two.
    pub kubelet_uid: Option<String>,
    /// ID and name of each container.
    pub containers: Vec<(String, String)>,
    /// Whether the pod has ended.
    pub ended: bool,
}

/// A container that holds GPUs.
#[derive(Clone, Debug)]
pub struct ContainerView {
    /// UID of the pod.
    pub uid: PodUid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Annotation `clusterName` of the pod, which gpu-manager's metrics show.
    pub cluster: String,
    /// Variable `SUBMITTER` of the pod's first container, which gpu-manager's usage shows.
    pub user: String,
    /// Name of the container.
    pub container: String,
    /// Dialect of the container's request.
    pub dialect: Option<Dialect>,
    /// Indexes of the GPUs, and what the container holds of each.
    pub gpus: Vec<(u8, Hold)>,
    /// Memory of each GPU that the container may use now, where that is limited: what it was granted, and what it may
    /// borrow.
    pub memory_limits: Vec<(u8, Bytes)>,
    /// Whether the kubelet lists the devices.
    pub listed: bool,
}

impl Agent {
    /// Returns whether pods can be served, or else what the agent waits for.
    pub fn readiness(&self) -> Result<(), NotReady> {
        match (self.inventory.gpus(), self.inventory.discovery_error()) {
            (None, Some(error)) => return Err(NotReady::NoGpus(error.clone())),
            (None, None) => return Err(NotReady::GpusPending),
            (Some(_), _) => {}
        }
        if self.diagnostics.is_node_missing() {
            return Err(NotReady::NoNode(self.settings.node.clone()));
        }
        if !self.pods.is_complete() {
            return Err(NotReady::PodsPending);
        }
        if !self.kubelet.has_listed() {
            return Err(NotReady::ListPending);
        }
        match self.closed_streams().into_iter().next() {
            Some(resource) => Err(NotReady::StreamPending(resource)),
            None => Ok(()),
        }
    }

    /// Returns the resources, also those of MIG instances, whose device streams the kubelet has not opened.
    pub(super) fn closed_streams(&self) -> Vec<String> {
        let resources = self.settings.resources().map(|resource| resource.name().to_owned());
        let offered = resources.chain(self.inventory.instance_resources());
        offered.filter(|resource| !self.kubelet.has_stream(resource)).collect()
    }

    /// Returns the memory of each GPU that a container may use now, as its limits say.
    fn memory_limits(&self, uid: &PodUid, grant: &ContainerGrant) -> Vec<(u8, Bytes)> {
        let Some(limits) = self.grants.limits_of(&(uid.clone(), grant.container.clone())) else {
            return Vec::new();
        };
        let gpus = self.inventory.gpus().map(|gpus| gpus.node.gpus()).unwrap_or_default();
        let index = |uuid: UuidBytes| gpus.iter().find(|gpu| UuidBytes::parse(&gpu.uuid.0) == Some(uuid));
        let memory = |limit: &GpuLimit| Some((index(limit.uuid)?.index.0, limit.memory));
        limits.gpus.iter().filter_map(memory).collect()
    }

    /// Returns the agent's state, for its pages and metrics.
    #[must_use]
    pub fn view(&mut self) -> View {
        let ledger = self.ledger();
        let gpus = self.inventory.gpus();
        let unit = gpus.map(|gpus| gpus.ids.unit()).unwrap_or_default();
        let mut containers = Vec::new();
        for (uid, pod) in self.pods.active() {
            let claims = pod.spec.claims(unit).unwrap_or_default();
            for held in self.holdings().of_pod(uid, pod) {
                let claim = claims.iter().find(|claim| claim.container == held.grant.container);
                containers.push(ContainerView {
                    uid: uid.clone(),
                    namespace: pod.metadata.namespace.clone(),
                    pod: pod.metadata.name.clone(),
                    cluster: pod.metadata.annotations.get("clusterName").cloned().unwrap_or_default(),
                    user: submitter(pod),
                    container: held.grant.container.clone(),
                    dialect: claim.map(|claim| claim.dialect),
                    gpus: held.grant.holds.iter().map(|(gpu, hold)| (gpu.0, *hold)).collect(),
                    memory_limits: self.memory_limits(uid, &held.grant),
                    listed: held.source == Source::Listed,
                });
            }
        }
        for (uid, pod) in self.pods.active() {
            containers.extend(self.claim_views(uid, pod));
        }
        let escapes = self.usage.escapes().iter();
        // Processes of a pod that is ending lose their grant before they end.
        let is_ending = |uid: &PodUid| {
            self.pods.get(uid).is_none_or(|pod| pod.metadata.deletion_timestamp.is_some() || has_ended(pod))
        };
        let escaped = self.usage.escaped().iter().filter(|(((uid, _), _), _)| !is_ending(uid));
        View {
            pods_known: self.pods.is_complete(),
            listed: self.kubelet.has_listed(),
            node: ledger.node(&self.settings.node).cloned(),
            inventory: gpus.map(|gpus| gpus.inventory()),
            driver: gpus.and_then(|gpus| gpus.found.driver.clone()),
            pods: self.pods.iter().map(|(uid, pod)| pod_view(uid, pod)).collect(),
            pci: gpus.map(|gpus| gpus.found.pci.clone()).unwrap_or_default(),
            containers,
            claims: self.claim_list(),
            served_by_others: self.kubelet.served_by_others(gpus),
            overbooked: self.holdings().overbooked(&ledger),
            cordoned: self.cordoned().iter().map(|gpu| gpu.0).collect(),
            escapes: escapes
                .map(|(((uid, container), escape), count)| (uid.clone(), container.clone(), *escape, *count))
                .collect(),
            escaped: escaped
                .map(|(((uid, container), gpu), pids)| {
                    (uid.clone(), container.clone(), gpu.clone(), pids.len())
                })
                .collect(),
        }
    }
}

impl Agent {
    /// Returns the GPUs that an administrator keeps free of new pods.
    pub(super) fn cordoned(&self) -> GpuSet {
        let uuids = self.publication.cordoned();
        let gpus = self.inventory.gpus().map(|gpus| gpus.node.gpus()).unwrap_or_default();
        gpus.iter().filter(|gpu| uuids.contains(&*gpu.uuid.0)).map(|gpu| gpu.index).collect()
    }

    /// Returns all prepared claims with the containers that use them.
    fn claim_list(&self) -> Vec<ClaimView> {
        let Some(gpus) = self.inventory.gpus() else { return Vec::new() };
        let mut claims = self.claims.views(gpus);
        for (_, pod) in self.pods.active() {
            for (claim, container, used) in self.claims.used_by(gpus, pod) {
                let is_claim = |view: &&mut ClaimView| view.uid.0 == claim;
                if let Some(view) = claims.iter_mut().find(is_claim) {
                    view.users.push((pod.metadata.name.clone(), container.to_owned(), used));
                }
            }
        }
        claims
    }

    /// Returns the containers of a pod that hold GPUs by claims.
    fn claim_views(&self, uid: &PodUid, pod: &Pod) -> Vec<ContainerView> {
        let Some(gpus) = self.inventory.gpus() else { return Vec::new() };
        let containers: BTreeSet<&str> = pod.claimed_requests().map(|used| used.container).collect();
        let view = |container: &str| {
            let held = self.claims.of_container(gpus, pod, container);
            (!held.is_empty()).then(|| ContainerView {
                uid: uid.clone(),
                namespace: pod.metadata.namespace.clone(),
                pod: pod.metadata.name.clone(),
                cluster: pod.metadata.annotations.get("clusterName").cloned().unwrap_or_default(),
                user: submitter(pod),
                container: container.to_owned(),
                dialect: None,
                gpus: held.iter().map(|(gpu, hold)| (gpu.0, *hold)).collect(),
                memory_limits: held
                    .iter()
                    .filter_map(|(gpu, hold)| Some((gpu.0, claimed_memory(*hold)?)))
                    .collect(),
                listed: true,
            })
        };
        containers.into_iter().filter_map(view).collect()
    }
}

/// Returns the memory that a container may use of a GPU which it holds by a claim, where that is limited.
fn claimed_memory(hold: Hold) -> Option<Bytes> {
    match hold {
        Hold::Share { memory, .. } => Some(Bytes(memory.0 << 20)),
        Hold::Whole => None,
    }
}

fn pod_view(uid: &PodUid, pod: &Pod) -> PodView {
    let ids = pod.status.container_ids();
    PodView {
        uid: uid.clone(),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        kubelet_uid: pod.metadata.annotations.get(STATIC_UID).cloned(),
        containers: ids.map(|(id, name)| (id.to_owned(), name.to_owned())).collect(),
        ended: has_ended(pod),
    }
}

/// Returns the person who submitted a pod, as its first container says.
fn submitter(pod: &Pod) -> String {
    let variables = pod.spec.containers.first().map(|container| &*container.env).unwrap_or_default();
    variables
        .iter()
        .find(|variable| variable.name == SUBMITTER)
        .map(|variable| variable.value.clone())
        .unwrap_or_default()
}
