//! One view of the cluster: what the pods on each node hold, and what each namespace uses of its
//! quota.
//!
//! The scheduler's state, the kubectl plugins and the demo's audit build this view from the same
//! values, so they agree on what is free. The `wire` crate turns Kubernetes objects into [`Node`]
//! and [`PlacedPod`]. The plugins build the view once; the scheduler and the audit update it with
//! every event.
//!
//! Some pods bypass the scheduler, so no annotation names their GPUs. The view sets GPUs aside for
//! them until an agent reports the real ones. It guesses after all other pods of the node and by
//! pod UID, so the guess does not depend on the order of events.

use std::collections::{BTreeMap, HashMap};

use crate::grant::{ContainerGrant, PodGrant};
use crate::ledger::{Conflict, Ledger, NodeGrant, NodePosition, Reservation, ReservationName};
use crate::node::{Node, NodeState};
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
/// view.set_node(node, QuotaLabels::default(), []);
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
    /// The labels by which quotas limit the nodes, at each node's position in the ledger.
    quota_labels: Vec<QuotaLabels>,
    /// The requests of pods whose GPUs are unknown, by node.
    unknown: HashMap<NodeName, BTreeMap<PodUid, PodRequest>>,
    usage: NamespaceUsage,
    /// The accounts of the pods that request GPUs.
    accounts: HashMap<PodUid, Account>,
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

/// The namespace that is charged for a pod, and the charge at present.
#[derive(Debug)]
struct Account {
    namespace: String,
    charge: Option<Charge>,
}

/// An amount of GPUs of one model.
#[derive(Debug)]
struct Charge {
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

    /// Returns what the namespaces use without the charge of one pod.
    #[must_use]
    pub fn usage_without(&self, pod: &PodUid) -> NamespaceUsage {
        let mut usage = self.usage.clone();
        if let Some(Account { namespace, charge: Some(charge) }) = self.accounts.get(pod) {
            usage.remove(namespace, &charge.model, charge.amount);
        }
        usage
    }

    /// Returns a node without the grant or the reserved place of one pod, or `None` if the pod has
    /// neither there.
    #[must_use]
    pub fn state_without(&self, node: &NodeName, pod: &PodUid) -> Option<NodeState> {
        self.ledger.grant(pod).or_else(|| self.ledger.place(pod)).filter(|grant| grant.node == *node)?;
        let mut state = NodeState::empty(self.ledger.node(node)?.shared_node());
        let is_own = |counted: &NodeGrant<'_>| match counted {
            NodeGrant::Held(grant) | NodeGrant::Reserved(grant) => grant.pod == *pod,
            NodeGrant::InDoubt(_) => false,
        };
        self.ledger
            .counted_on(node)
            .filter(|counted| !is_own(counted))
            .for_each(|counted| state.add(counted.grant()));
        Some(state)
    }

    /// Returns the labels by which quotas limit a node.
    #[must_use]
    pub fn quota_labels(&self, node: &NodeName) -> Option<&QuotaLabels> {
        self.quota_labels_at(self.ledger.position(&node.0)?)
    }

    /// Returns the labels by which quotas limit the node at a position of the ledger.
    #[must_use]
    pub fn quota_labels_at(&self, position: NodePosition) -> Option<&QuotaLabels> {
        self.quota_labels.get(position.index())
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

    /// Adds a node or replaces its description.
    ///
    /// The pods on the node stay. Their annotations may mean other GPUs or another amount of memory
    /// now, so the caller reads the pods again and passes them in `pods`.
    pub fn set_node(&mut self, node: Node, labels: QuotaLabels, pods: impl IntoIterator<Item = PlacedPod>) {
        let name = node.name.clone();
        self.ledger.set_node(node);
        if let Some(position) = self.ledger.position(&name.0) {
            self.quota_labels.resize_with(self.ledger.positions(), QuotaLabels::default);
            if let Some(place) = self.quota_labels.get_mut(position.index()) {
                *place = labels;
            }
        }
        pods.into_iter().for_each(|pod| self.note_pod(pod));
        self.settle(&name);
        self.charge_node(&name);
    }

    /// Marks a node as changed though its GPUs are the same, so that cached verdicts about it
    /// expire.
    pub fn mark_changed(&mut self, node: &NodeName) {
        self.ledger.mark_changed(node);
    }

    /// Removes a node. Its pods stay until they are removed: the node may come back.
    pub fn remove_node(&mut self, name: &NodeName) {
        if let Some(position) = self.ledger.position(&name.0)
            && let Some(labels) = self.quota_labels.get_mut(position.index())
        {
            *labels = QuotaLabels::default();
        }
        self.ledger.remove_node(name);
        self.charge_node(name);
    }

    /// Adds a pod or replaces what the view knows of it, and sets GPUs aside again where that is
    /// necessary.
    pub fn set_pod(&mut self, pod: PlacedPod) {
        let node = pod.node.clone();
        let earlier = self.ledger.grant(&pod.uid);
        let held_gpus = earlier.is_some_and(|grant| !grant.containers.is_empty());
        // A pod without GPUs does not affect what is set aside for others.
        let is_plain = pod.gpus == PodGpus::NotRequested && !held_gpus;
        let earlier = earlier.map(|grant| grant.node.clone()).filter(|earlier| *earlier != node);
        self.note_pod(pod);
        if !is_plain {
            self.settle(&node);
            earlier.iter().for_each(|earlier| self.settle(earlier));
        }
    }

    /// Adds a pod as [`ClusterView::set_pod`] does, but leaves it to the caller to
    /// [settle](ClusterView::settle) the node: callers that add many pods of one node settle it
    /// once.
    pub fn note_pod(&mut self, pod: PlacedPod) {
        let PlacedPod { uid, namespace, node, cpu, memory, gpus } = pod;
        self.forget_unknown(&uid);
        if gpus == PodGpus::NotRequested {
            self.close_account(&uid);
        } else {
            self.open_account(&uid, namespace);
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

    /// Removes a pod, with the place that is reserved for it. Its GPUs may be the ones that were set aside for others, so the node is
    /// settled again.
    pub fn remove_pod(&mut self, uid: &PodUid) {
        let grant = self.ledger.grant(uid).or_else(|| self.ledger.place(uid));
        let node = grant.map(|grant| grant.node.clone());
        self.forget_unknown(uid);
        self.ledger.release(uid);
        self.ledger.release_place(uid);
        self.close_account(uid);
        node.iter().for_each(|node| self.settle(node));
    }

    /// Books a decision of the scheduler and charges the namespace for it.
    pub fn book(&mut self, grant: PodGrant, namespace: String) -> Result<(), Conflict> {
        let uid = grant.pod.clone();
        self.ledger.book(grant)?;
        self.open_account(&uid, namespace);
        self.charge(&uid);
        Ok(())
    }

    /// Reserves places as [`Ledger::reserve`] does, and charges this namespace for them, if there is
    /// one.
    pub fn reserve(&mut self, reservation: Reservation, namespace: Option<&str>) -> Result<(), Conflict> {
        let pods: Vec<PodUid> = reservation.places.iter().map(|place| place.pod.clone()).collect();
        self.ledger.reserve(reservation)?;
        if let Some(namespace) = namespace {
            for pod in &pods {
                self.open_account(pod, namespace.to_owned());
                self.charge(pod);
            }
        }
        Ok(())
    }

    /// Cancels a reservation and settles its nodes again.
    pub fn cancel_reservation(&mut self, name: &ReservationName) -> Option<Reservation> {
        let cancelled = self.ledger.cancel_reservation(name)?;
        cancelled.places.iter().for_each(|place| self.close_account(&place.pod));
        cancelled.places.iter().for_each(|place| self.settle(&place.node));
        Some(cancelled)
    }

    /// Exchanges the places of two pods of one reservation, which request the same.
    pub fn exchange_places(&mut self, one: &PodUid, other: &PodUid) {
        self.ledger.exchange_places(one, other);
        self.charge(one);
        self.charge(other);
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

    /// Charges this namespace for the pod from now on.
    fn open_account(&mut self, uid: &PodUid, namespace: String) {
        if self.accounts.get(uid).is_none_or(|account| account.namespace != namespace) {
            self.close_account(uid);
            self.accounts.insert(uid.clone(), Account { namespace, charge: None });
        }
    }

    fn close_account(&mut self, uid: &PodUid) {
        if let Some(Account { namespace, charge: Some(charge) }) = self.accounts.remove(uid) {
            self.usage.remove(&namespace, &charge.model, charge.amount);
        }
    }

    /// Replaces the charge for a pod by what its grant amounts to now.
    fn charge(&mut self, uid: &PodUid) {
        let Some(Account { namespace, charge }) = self.accounts.get_mut(uid) else { return };
        if let Some(Charge { model, amount }) = charge.take() {
            self.usage.remove(namespace, &model, amount);
        }
        *charge = charge_for(&self.ledger, &self.quota_labels, uid);
        if let Some(Charge { model, amount }) = charge {
            self.usage.add(namespace, model, *amount);
        }
    }
}

/// Returns what the grant or the reserved place of a pod amounts to. Nothing is charged for GPUs of unknown nodes.
fn charge_for(ledger: &Ledger, quota_labels: &[QuotaLabels], uid: &PodUid) -> Option<Charge> {
    let grant = ledger.grant(uid).or_else(|| ledger.place(uid))?;
    let position = ledger.position(&grant.node.0)?;
    let amount = GpuAmount::of_grants(&grant.containers, ledger.at(position)?.node());
    let model = quota_labels.get(position.index()).and_then(|labels| labels.model.clone());
    (amount != GpuAmount::default()).then(|| Charge { model: model.unwrap_or_default(), amount })
}

#[cfg(test)]
mod tests;
