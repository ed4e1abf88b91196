//! Pod events: enters what each pod holds into the ledger.

use tessera_core::grant::PodGrant;
use tessera_core::placement::set_aside;
use tessera_core::quota::GpuAmount;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::objects::{Pod, PodSpec};
use tessera_wire::tessera::grant;

use super::entries::{Charge, GpuPod, PodEntry};
use super::{NodeEntry, State};

/// The number of pod lists begun before a pod was read from the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListGeneration(u64);

impl State {
    pub(super) fn set_pod(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        // An ended pod holds nothing, though its object may stay for days.
        if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
            return self.end_pod(uid);
        }
        match (pod.spec.asks_for_gpus(), pod.spec.node_name.is_empty()) {
            (true, true) => self.set_waiting(uid, pod),
            (true, false) => self.set_placed(uid, pod),
            (false, true) => {}
            (false, false) => self.set_plain(uid, &pod),
        }
    }

    /// Returns the current list generation, to be passed to [`State::apply_read`] after a read of a pod.
    #[must_use]
    pub fn list_generation(&self) -> ListGeneration {
        ListGeneration(self.listings)
    }

    /// Applies a pod that was read from the API server. The watch may be ahead of the read and know the pod's
    /// node or end. The read is ignored if a list did not contain the pod, or if a list has begun since the read
    /// and the pod is unknown. Otherwise no event might ever report the pod's end.
    pub fn apply_read(&mut self, pod: Pod, read_at: ListGeneration) {
        let uid = PodUid(pod.metadata.uid.clone());
        let is_new = !self.pods.contains_key(&uid);
        if self.is_missed(&uid) || (is_new && read_at != self.list_generation()) {
            return;
        }
        self.apply_newest_read(pod);
        if is_new && self.is_listing_pods && self.pods.contains_key(&uid) {
            self.unlisted_pods.insert(uid);
        }
    }

    /// Applies a read that is newer than every list so far.
    pub(super) fn apply_newest_read(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        let is_placed = self.pod(&uid).is_some_and(|known| known.node.is_some());
        if !is_placed && !self.ended.contains(&uid) {
            self.set_pod(pod);
        }
    }

    /// Stores a pod without a node. A pod that is being bound stays booked, because the watch lags behind.
    fn set_waiting(&mut self, uid: PodUid, pod: Pod) {
        match self.pods.get_mut(&uid) {
            // The event is outdated, because a pod never loses its node.
            Some(PodEntry::Gpu(known)) if known.node.is_some() => {}
            Some(record) => *record = PodEntry::Gpu(Box::new(GpuPod::new(pod))),
            None => {
                self.learn_from(&pod.spec);
                self.pods.insert(uid, PodEntry::Gpu(Box::new(GpuPod::new(pod))));
            }
        }
    }

    fn set_placed(&mut self, uid: PodUid, pod: Pod) {
        self.confirm(&uid);
        let fresh = GpuPod::new(pod);
        let Some(node) = fresh.node.clone() else { return };
        match self.pods.get(&uid) {
            Some(PodEntry::Gpu(known)) if **known == fresh => return,
            Some(_) => {}
            None => self.learn_from(&fresh.spec),
        }
        let booked = self.ledger.grant(&uid).map(|grant| grant.node.clone()).filter(|booked| *booked != node);
        self.pods.insert(uid.clone(), PodEntry::Gpu(Box::new(fresh)));
        self.on_node.entry(node.clone()).or_default().insert(uid.clone());
        self.read_grant(&uid, &node);
        self.reassign_unknown_holders(&node);
        // Another scheduler has bound the pod to a different node.
        booked.iter().for_each(|booked| self.reassign_unknown_holders(booked));
    }

    fn set_plain(&mut self, uid: PodUid, pod: &Pod) {
        let (cpu, memory) = pod.spec.host_needs();
        self.pods.insert(uid.clone(), PodEntry::Plain);
        let node = NodeName(pod.spec.node_name.clone());
        self.ledger.observe(PodGrant { pod: uid, node, cpu, memory, containers: Vec::new() });
    }

    /// Removes a pod that has ended for good.
    pub(super) fn end_pod(&mut self, uid: PodUid) {
        self.forget_pod(&uid);
        self.ended.add(uid);
    }

    /// Removes a pod that a list did not contain. If the pod exists, the watch will show it.
    pub(super) fn drop_missing_pod(&mut self, uid: PodUid) {
        self.forget_pod(&uid);
        self.missing.add(uid);
    }

    fn forget_pod(&mut self, uid: &PodUid) {
        self.unlisted_pods.remove(uid);
        self.confirm(uid);
        if let Some(PodEntry::Gpu(pod)) = self.pods.remove(uid)
            && let Some(node) = pod.node
        {
            for index in [&mut self.on_node, &mut self.unknown_holders] {
                if let Some(pods) = index.get_mut(&node) {
                    pods.remove(uid);
                    if pods.is_empty() {
                        index.remove(&node);
                    }
                }
            }
        }
        self.release_and_reassign(uid);
    }

    /// Reads the grants of a node's pods again after the node has changed its GPUs or its memory unit.
    pub(super) fn reread_pods(&mut self, node: &NodeName) {
        for uid in self.on_node.get(node).cloned().unwrap_or_default() {
            self.read_grant(&uid, node);
        }
        self.reassign_unknown_holders(node);
        // Bookings stay, and their namespaces are charged by the labels of the changed node.
        let booked: Vec<PodUid> = self.ledger.grants_on(node).map(|grant| grant.pod.clone()).collect();
        booked.iter().for_each(|uid| self.charge(uid));
    }

    /// Enters the grant from a pod's annotations, or marks the pod as one whose GPUs are unknown.
    fn read_grant(&mut self, uid: &PodUid, node: &NodeName) {
        let Some(pod) = self.pod(uid) else { return };
        let containers = match self.entry(node) {
            Some(NodeEntry { spec: Ok(spec), .. }) => {
                grant::complete(&pod.spec, &pod.annotations, &spec.node, spec.unit)
            }
            // No pod can be placed on an unknown node. The grants are read when the node comes back.
            _ => None,
        };
        let known = containers.is_some();
        let (cpu, memory) = pod.spec.host_needs();
        let grant = PodGrant {
            pod: uid.clone(),
            node: node.clone(),
            cpu,
            memory,
            containers: containers.unwrap_or_default(),
        };
        let unknown_holders = self.unknown_holders.entry(node.clone()).or_default();
        if known {
            unknown_holders.remove(uid);
        } else {
            unknown_holders.insert(uid.clone());
        }
        if unknown_holders.is_empty() {
            self.unknown_holders.remove(node);
        }
        self.enter(grant);
    }

    /// Sets GPUs aside for pods that bypassed this scheduler, after all other pods and in the order of UIDs, so
    /// that any history leads to the same result. No other pod gets these GPUs until the agent reports the grant.
    pub(super) fn reassign_unknown_holders(&mut self, node: &NodeName) {
        let Some(unknown_holders) = self.unknown_holders.get(node).cloned() else { return };
        let Some(NodeEntry { spec: Ok(spec), .. }) = self.entry(node) else { return };
        let unit = spec.unit;
        unknown_holders.iter().for_each(|uid| self.leave(uid));
        for uid in unknown_holders {
            let Some(pod) = self.pod(&uid) else { continue };
            let (cpu, memory) = pod.spec.host_needs();
            let request = pod.spec.request(unit).ok();
            let guess =
                self.ledger.node(node).zip(request).map(|(state, request)| set_aside(state, &request));
            let containers = guess.unwrap_or_default();
            self.enter(PodGrant { pod: uid, node: node.clone(), cpu, memory, containers });
        }
    }

    /// Enters a grant that exists on the node and charges its namespace.
    pub(super) fn enter(&mut self, grant: PodGrant) {
        let uid = grant.pod.clone();
        self.ledger.observe(grant);
        self.charge(&uid);
    }

    /// Releases the grant of a pod. Pods with unknown GPUs may then be assigned to the released GPUs.
    pub(super) fn release_and_reassign(&mut self, uid: &PodUid) {
        let node = self.ledger.grant(uid).map(|grant| grant.node.clone());
        self.leave(uid);
        node.iter().for_each(|node| self.reassign_unknown_holders(node));
    }

    /// Releases the booking in doubt of a pod. Pods with unknown GPUs may then be assigned to the released GPUs.
    pub(super) fn release_in_doubt(&mut self, uid: &PodUid) {
        let node = self.ledger.in_doubt(uid).map(|grant| grant.node.clone());
        self.ledger.release_in_doubt(uid);
        node.iter().for_each(|node| self.reassign_unknown_holders(node));
    }

    /// Releases the grant of a pod and its charge.
    pub(super) fn leave(&mut self, uid: &PodUid) {
        self.ledger.release(uid);
        self.charge(uid);
    }

    /// Charges the pod's namespace for the pod's current grant.
    pub(super) fn charge(&mut self, uid: &PodUid) {
        if let Some(old) = self.charges.remove(uid) {
            self.usage.remove(&old.namespace, &old.model, old.taken);
        }
        let charge = || {
            let grant = self.ledger.grant(uid)?;
            let entry = self.entry(&grant.node)?;
            let taken = GpuAmount::of_grants(&grant.containers, &entry.spec.as_ref().ok()?.node);
            let model = entry.quota_labels.model.clone().unwrap_or_default();
            let namespace = self.pod(uid)?.namespace.clone();
            (taken != GpuAmount::default()).then_some(Charge { namespace, model, taken })
        };
        if let Some(charge) = charge() {
            self.usage.add(&charge.namespace, &charge.model, charge.taken);
            self.charges.insert(uid.clone(), charge);
        }
    }

    fn learn_from(&mut self, spec: &PodSpec) {
        if let Ok(request) = spec.request(self.settings.memory_unit) {
            self.learner.see(&request);
        }
    }
}
