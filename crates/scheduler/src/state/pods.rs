//! Pods as the watch tells them: what they hold goes into the book.

use tessera_core::grant::PodGrant;
use tessera_core::placement::set_aside;
use tessera_core::quota::GpuAmount;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::objects::{Pod, PodSpec};
use tessera_wire::tessera::grant;

use super::entries::{Charge, GpuPod, PodEntry};
use super::{NodeEntry, State};

/// When the API server was asked: before which list of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListGeneration(u64);

impl State {
    pub(super) fn set_pod(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        // Containers that have ended hold nothing, though the object may stay for days.
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

    /// To be kept while the API server is asked about a pod.
    #[must_use]
    pub fn list_generation(&self) -> ListGeneration {
        ListGeneration(self.listings)
    }

    /// Takes in what the API server answered about a pod. The watch may have told more by now: that the pod is on its node, or has
    /// ended. Of one that a list has missed, or that nobody has shown though a list was begun since the question, the answer may be older
    /// than that list. Nobody might ever tell of its end.
    pub fn apply_read(&mut self, pod: Pod, asked: ListGeneration) {
        let uid = PodUid(pod.metadata.uid.clone());
        let is_new = !self.pods.contains_key(&uid);
        if self.is_missed(&uid) || (is_new && asked != self.list_generation()) {
            return;
        }
        self.apply_newest_read(pod);
        if is_new && self.is_listing_pods && self.pods.contains_key(&uid) {
            self.unlisted_pods.insert(uid);
        }
    }

    /// Takes in an answer that is newer than every list so far.
    pub(super) fn apply_newest_read(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        let is_placed = self.pod(&uid).is_some_and(|known| known.node.is_some());
        if !is_placed && !self.ended.contains(&uid) {
            self.set_pod(pod);
        }
    }

    /// A pod without a node. One that is being bound right now stays booked: the watch lags behind.
    fn set_waiting(&mut self, uid: PodUid, pod: Pod) {
        match self.pods.get_mut(&uid) {
            // Old news: no pod ever loses its node.
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
        // Somebody else has placed it.
        booked.iter().for_each(|booked| self.reassign_unknown_holders(booked));
    }

    fn set_plain(&mut self, uid: PodUid, pod: &Pod) {
        let (cpu, memory) = pod.spec.host_needs();
        self.pods.insert(uid.clone(), PodEntry::Plain);
        let node = NodeName(pod.spec.node_name.clone());
        self.ledger.observe(PodGrant { pod: uid, node, cpu, memory, containers: Vec::new() });
    }

    /// A pod holds nothing any more, and never will again.
    pub(super) fn end_pod(&mut self, uid: PodUid) {
        self.forget_pod(&uid);
        self.ended.add(uid);
    }

    /// A pod is not there, as far as a list tells. If it is, the watch will show it.
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
            for index in [&mut self.on_node, &mut self.unsure] {
                if let Some(pods) = index.get_mut(&node) {
                    pods.remove(uid);
                    if pods.is_empty() {
                        index.remove(&node);
                    }
                }
            }
        }
        self.make_room(uid);
    }

    /// The node is another one than before: grants name its GPUs, and its unit gives requests their meaning.
    pub(super) fn reread_pods(&mut self, node: &NodeName) {
        for uid in self.on_node.get(node).cloned().unwrap_or_default() {
            self.read_grant(&uid, node);
        }
        self.reassign_unknown_holders(node);
        // Bookings too: they carry on, and their namespaces are charged for the new node.
        let booked: Vec<PodUid> = self.ledger.grants_on(node).map(|grant| grant.pod.clone()).collect();
        booked.iter().for_each(|uid| self.charge(uid));
    }

    /// Enters what a pod's annotations say it holds, or marks it as one of whom nobody knows.
    fn read_grant(&mut self, uid: &PodUid, node: &NodeName) {
        let Some(pod) = self.pod(uid) else { return };
        let containers = match self.record(node) {
            Some(NodeEntry { spec: Ok(spec), .. }) => {
                grant::complete(&pod.spec, &pod.annotations, &spec.node, spec.unit)
            }
            // Nobody can be placed there; what its pods hold is read when it comes back.
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
        let unsure = self.unsure.entry(node.clone()).or_default();
        if known {
            unsure.remove(uid);
        } else {
            unsure.insert(uid.clone());
        }
        if unsure.is_empty() {
            self.unsure.remove(node);
        }
        self.enter(grant);
    }

    /// Finds GPUs for the pods that bypassed us: after all others, by UID, so that any history leads to the same guess.
    /// Until their agent tells, nobody else gets those GPUs.
    pub(super) fn reassign_unknown_holders(&mut self, node: &NodeName) {
        let Some(unsure) = self.unsure.get(node).cloned() else { return };
        let Some(NodeEntry { spec: Ok(spec), .. }) = self.record(node) else { return };
        let unit = spec.unit;
        unsure.iter().for_each(|uid| self.leave(uid));
        for uid in unsure {
            let Some(pod) = self.pod(&uid) else { continue };
            let (cpu, memory) = pod.spec.host_needs();
            let request = pod.spec.request(unit).ok();
            let guess =
                self.ledger.node(node).zip(request).map(|(state, request)| set_aside(state, &request));
            let containers = guess.unwrap_or_default();
            self.enter(PodGrant { pod: uid, node: node.clone(), cpu, memory, containers });
        }
    }

    /// Enters a fact, and charges for it.
    pub(super) fn enter(&mut self, grant: PodGrant) {
        let uid = grant.pod.clone();
        self.ledger.observe(grant);
        self.charge(&uid);
    }

    /// Takes a pod out of the book for good. What it leaves may be where those sit who bypassed us.
    pub(super) fn make_room(&mut self, uid: &PodUid) {
        let node = self.ledger.grant(uid).map(|grant| grant.node.clone());
        self.leave(uid);
        node.iter().for_each(|node| self.reassign_unknown_holders(node));
    }

    /// Takes a pod out of the book, and its charge back.
    pub(super) fn leave(&mut self, uid: &PodUid) {
        self.ledger.release(uid);
        self.charge(uid);
    }

    /// Charges the pod's namespace for what the book says now.
    pub(super) fn charge(&mut self, uid: &PodUid) {
        if let Some(old) = self.charges.remove(uid) {
            self.accounts.remove(&old.namespace, &old.model, old.taken);
        }
        let charge = || {
            let grant = self.ledger.grant(uid)?;
            let record = self.record(&grant.node)?;
            let taken = GpuAmount::of_grants(&grant.containers, &record.spec.as_ref().ok()?.node);
            let model = record.place.model.clone().unwrap_or_default();
            let namespace = self.pod(uid)?.namespace.clone();
            (taken != GpuAmount::default()).then_some(Charge { namespace, model, taken })
        };
        if let Some(charge) = charge() {
            self.accounts.add(&charge.namespace, &charge.model, charge.taken);
            self.charges.insert(uid.clone(), charge);
        }
    }

    fn learn_from(&mut self, spec: &PodSpec) {
        if let Ok(request) = spec.request(self.settings.memory_unit) {
            self.learner.see(&request);
        }
    }
}
