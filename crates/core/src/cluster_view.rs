//! One view of the cluster: what the pods on each node hold, and what each namespace uses of its
//! quota.
//!
//! The scheduler's state, the kubectl plugins and the demo's audit build this view from the same
//! values, so they agree on what is free. The `wire` crate turns Kubernetes objects into [`Node`]
//! and [`PlacedPod`].
//!
//! Some pods bypass the scheduler, so no annotation names their GPUs. The view sets GPUs aside for
//! them until an agent reports the real ones. It guesses after all other pods of the node and by
//! pod UID, so the guess does not depend on the order of events.

use std::collections::{BTreeMap, HashMap};

use crate::grant::{ContainerGrant, PodGrant};
use crate::ledger::{Conflict, Ledger, LedgerChange};
use crate::node::Node;
use crate::placement::set_aside;
use crate::quota::{GpuAmount, NamespaceUsage, QuotaLabels};
use crate::request::PodRequest;
use crate::units::{MiB, MilliCpu, NodeName, PodUid};

/// The nodes, the pods on them, and what both amount to.
///
/// ```
/// use tessera_core::cluster_view::{ClusterView, PlacedPod, PodGpus};
/// use tessera_core::gpu::Gpu;
/// use tessera_core::node::Node;
/// use tessera_core::quota::QuotaLabels;
/// use tessera_core::request::{PodRequest, Request};
/// use tessera_core::topology::Topology;
/// use tessera_core::units::{GpuIndex, MiB, MilliCpu};
///
/// let gpu = Gpu::new(GpuIndex(0), "GPU-0".into(), "T4".into(), MiB(15_360));
/// let node = Node::new("n".into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768))?;
/// let mut view = ClusterView::default();
/// view.set_node(node, QuotaLabels::default());
/// view.set_pod(PlacedPod {
///     uid: "uid-1".into(),
///     namespace: "team".to_owned(),
///     node: "n".into(),
///     cpu: MilliCpu(1000),
///     memory: MiB(1024),
///     gpus: PodGpus::Unknown(PodRequest::of_mains([Request::Whole(1)])),
/// });
/// let state = view.ledger().node(&"n".into()).unwrap();
/// assert!(state.idle().is_empty(), "the view has set the GPU aside");
/// assert_eq!(view.usage().of("team").compute_percent, 100);
/// # Ok::<(), tessera_core::node::BadNode>(())
/// ```
#[derive(Debug, Default)]
pub struct ClusterView {
    ledger: Ledger,
    quota_labels: HashMap<NodeName, QuotaLabels>,
    /// The namespaces of the pods that request GPUs.
    namespaces: HashMap<PodUid, String>,
    /// The requests of pods whose GPUs are unknown, by node.
    unknown: HashMap<NodeName, BTreeMap<PodUid, PodRequest>>,
    usage: NamespaceUsage,
    charges: HashMap<PodUid, Charge>,
}

/// A pod on a node that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedPod {
    /// The UID of the pod.
    pub uid: PodUid,
    /// The namespace that is charged for the pod.
    pub namespace: String,
    /// The node of the pod.
    pub node: NodeName,
    /// The CPU that the whole pod requests.
    pub cpu: MilliCpu,
    /// The main memory that the whole pod requests.
    pub memory: MiB,
    /// The GPUs of the pod.
    pub gpus: PodGpus,
}

/// What is known about the GPUs of a pod on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodGpus {
    /// The pod requests no GPU: only its CPU and memory count.
    NotRequested,
    /// The pod's annotations name its GPUs.
    Granted(Vec<ContainerGrant>),
    /// No annotation names the GPUs of this request.
    Unknown(PodRequest),
}

/// What a namespace was charged for a pod.
#[derive(Debug)]
struct Charge {
    namespace: String,
    model: String,
    amount: GpuAmount,
}

impl ClusterView {
    /// Returns all nodes and grants.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns what each namespace uses.
    #[must_use]
    pub fn usage(&self) -> &NamespaceUsage {
        &self.usage
    }

    /// Returns the labels by which quotas limit a node.
    #[must_use]
    pub fn quota_labels(&self, node: &NodeName) -> Option<&QuotaLabels> {
        self.quota_labels.get(node)
    }

    /// Returns the pods of a node whose GPUs are unknown, with their requests, by UID.
    pub fn unknown_pods(&self, node: &NodeName) -> impl Iterator<Item = (&PodUid, &PodRequest)> {
        self.unknown.get(node).into_iter().flatten()
    }

    /// Returns whether the GPUs of this grant are only set aside, because no annotation names the
    /// real ones.
    #[must_use]
    pub fn is_set_aside(&self, grant: &PodGrant) -> bool {
        self.unknown.get(&grant.node).is_some_and(|pods| pods.contains_key(&grant.pod))
    }

    /// Adds a node or replaces its description. The pods on it stay.
    ///
    /// The GPUs and the memory unit of the node give annotations their meaning, so the caller must
    /// pass the pods of a changed node again.
    pub fn set_node(&mut self, node: Node, labels: QuotaLabels) -> LedgerChange {
        let name = node.name.clone();
        let change = self.ledger.set_node(node);
        self.quota_labels.insert(name.clone(), labels);
        self.settle(&name);
        self.charge_node(&name);
        change
    }

    /// Marks a node as changed though its GPUs are the same, so that cached verdicts about it
    /// expire.
    pub fn mark_changed(&mut self, node: &NodeName) {
        self.ledger.mark_changed(node);
    }

    /// Removes a node. Its pods stay until they are removed: the node may come back.
    pub fn remove_node(&mut self, name: &NodeName) -> LedgerChange {
        let change = self.ledger.remove_node(name);
        self.quota_labels.remove(name);
        self.charge_node(name);
        change
    }

    /// Adds a pod or replaces what the view knows of it, and sets GPUs aside again where that is
    /// necessary.
    pub fn set_pod(&mut self, pod: PlacedPod) {
        let node = pod.node.clone();
        let earlier = self.ledger.grant(&pod.uid).map(|grant| grant.node.clone());
        self.note_pod(pod);
        self.settle(&node);
        earlier.iter().filter(|earlier| **earlier != node).for_each(|earlier| self.settle(earlier));
    }

    /// Adds a pod as [`ClusterView::set_pod`] does, but leaves it to the caller to
    /// [settle](ClusterView::settle) the node: callers that add many pods of one node settle it
    /// once.
    pub fn note_pod(&mut self, pod: PlacedPod) {
        let PlacedPod { uid, namespace, node, cpu, memory, gpus } = pod;
        self.forget_unknown(&uid);
        if gpus != PodGpus::NotRequested {
            self.namespaces.insert(uid.clone(), namespace);
        }
        let containers = match gpus {
            PodGpus::NotRequested => Vec::new(),
            PodGpus::Granted(containers) => containers,
            PodGpus::Unknown(request) => {
                self.unknown.entry(node.clone()).or_default().insert(uid.clone(), request);
                Vec::new()
            }
        };
        self.enter(PodGrant { pod: uid, node, cpu, memory, containers });
    }

    /// Removes a pod. Its GPUs may be the ones that were set aside for others, so the node is
    /// settled again.
    pub fn remove_pod(&mut self, uid: &PodUid) {
        let node = self.ledger.grant(uid).map(|grant| grant.node.clone());
        self.forget_unknown(uid);
        self.release(uid);
        self.namespaces.remove(uid);
        node.iter().for_each(|node| self.settle(node));
    }

    /// Books a decision of the scheduler and charges the namespace for it.
    pub fn book(&mut self, grant: PodGrant, namespace: &str) -> Result<LedgerChange, Conflict> {
        let uid = grant.pod.clone();
        let change = self.ledger.book(grant)?;
        self.namespaces.insert(uid.clone(), namespace.to_owned());
        self.charge(&uid);
        Ok(change)
    }

    /// Turns a booking into one in doubt, as [`Ledger::put_in_doubt`] does. No namespace is charged
    /// for it.
    pub fn put_in_doubt(&mut self, uid: &PodUid) {
        self.ledger.put_in_doubt(uid);
        self.charge(uid);
    }

    /// Releases a pod's booking in doubt and settles its node again.
    pub fn release_in_doubt(&mut self, uid: &PodUid) {
        let node = self.ledger.in_doubt(uid).map(|grant| grant.node.clone());
        self.ledger.release_in_doubt(uid);
        node.iter().for_each(|node| self.settle(node));
    }

    /// Sets GPUs aside for the pods of a node whose GPUs are unknown.
    pub fn settle(&mut self, node: &NodeName) {
        let Some(pods) = self.unknown.get(node).cloned() else { return };
        if self.ledger.node(node).is_none() {
            return;
        }
        let grants: Vec<PodGrant> = pods.keys().filter_map(|uid| self.ledger.grant(uid)).cloned().collect();
        grants.iter().for_each(|grant| self.release(&grant.pod));
        for grant in grants {
            let guess = self.ledger.node(node).zip(pods.get(&grant.pod));
            let containers = guess.map(|(state, request)| set_aside(state, request)).unwrap_or_default();
            self.enter(PodGrant { containers, ..grant });
        }
    }

    /// Sets GPUs aside on every node.
    pub fn settle_all(&mut self) {
        let nodes: Vec<NodeName> = self.unknown.keys().cloned().collect();
        nodes.iter().for_each(|node| self.settle(node));
    }

    fn enter(&mut self, grant: PodGrant) {
        let uid = grant.pod.clone();
        self.ledger.observe(grant);
        self.charge(&uid);
    }

    fn release(&mut self, uid: &PodUid) {
        self.ledger.release(uid);
        self.charge(uid);
    }

    fn forget_unknown(&mut self, uid: &PodUid) {
        let Some(grant) = self.ledger.grant(uid) else { return };
        if let Some(pods) = self.unknown.get_mut(&grant.node) {
            pods.remove(uid);
            if pods.is_empty() {
                self.unknown.remove(&grant.node);
            }
        }
    }

    fn charge_node(&mut self, node: &NodeName) {
        let pods: Vec<PodUid> = self.ledger.grants_on(node).map(|grant| grant.pod.clone()).collect();
        pods.iter().for_each(|uid| self.charge(uid));
    }

    /// Replaces the charge for a pod by what its grant amounts to now.
    fn charge(&mut self, uid: &PodUid) {
        if let Some(Charge { namespace, model, amount }) = self.charges.remove(uid) {
            self.usage.remove(&namespace, &model, amount);
        }
        if let Some(charge) = self.charge_for(uid) {
            self.usage.add(&charge.namespace, &charge.model, charge.amount);
            self.charges.insert(uid.clone(), charge);
        }
    }

    fn charge_for(&self, uid: &PodUid) -> Option<Charge> {
        let namespace = self.namespaces.get(uid)?;
        let grant = self.ledger.grant(uid)?;
        let amount = GpuAmount::of_grants(&grant.containers, self.ledger.node(&grant.node)?.node());
        let model = self.quota_labels.get(&grant.node).and_then(|labels| labels.model.clone());
        (amount != GpuAmount::default()).then(|| Charge {
            namespace: namespace.clone(),
            model: model.unwrap_or_default(),
            amount,
        })
    }
}

#[cfg(test)]
mod tests;
