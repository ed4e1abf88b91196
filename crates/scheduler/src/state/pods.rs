//! Pods as the watch tells them: what they hold goes into the book.

use tessera_core::gpu_set::GpuSet;
use tessera_core::grant::{ContainerGrant, PodGrant};
use tessera_core::placement::{Policy, place};
use tessera_core::quota::Taken;
use tessera_core::request::PodRequest;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::dialect::MemoryUnit;
use tessera_wire::grant;
use tessera_wire::objects::{Pod, PodSpec};

use super::records::{Charge, GpuPod, Record};
use super::{NodeRecord, State};

impl State {
    pub(super) fn set_pod(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        self.unlisted_pods.remove(&uid);
        // Containers that have ended hold nothing, though the object may stay for days.
        if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
            return self.forget_pod(&uid);
        }
        match (asks_for_cards(&pod.spec), pod.spec.node_name.is_empty()) {
            (true, true) => self.set_waiting(uid, pod),
            (true, false) => self.set_placed(uid, pod),
            (false, true) => {}
            (false, false) => self.set_plain(uid, &pod),
        }
    }

    /// A pod without a node. One that is being bound right now stays booked: the watch lags behind.
    fn set_waiting(&mut self, uid: PodUid, pod: Pod) {
        match self.pods.get_mut(&uid) {
            // Old news: no pod ever loses its node.
            Some(Record::Gpu(known)) if known.node.is_some() => {}
            Some(record) => *record = Record::Gpu(Box::new(GpuPod::new(pod))),
            None => {
                self.learn_from(&pod.spec);
                self.pods.insert(uid, Record::Gpu(Box::new(GpuPod::new(pod))));
            }
        }
    }

    fn set_placed(&mut self, uid: PodUid, pod: Pod) {
        self.confirm(&uid);
        let fresh = GpuPod::new(pod);
        let Some(node) = fresh.node.clone() else { return };
        match self.pods.get(&uid) {
            Some(Record::Gpu(known)) if **known == fresh => return,
            Some(_) => {}
            None => self.learn_from(&fresh.spec),
        }
        self.pods.insert(uid.clone(), Record::Gpu(Box::new(fresh)));
        self.on_node.entry(node.clone()).or_default().insert(uid.clone());
        self.read_grant(&uid, &node);
        self.guess_again(&node);
    }

    fn set_plain(&mut self, uid: PodUid, pod: &Pod) {
        let (cpu, memory) = host_needs(&pod.spec);
        self.pods.insert(uid.clone(), Record::Plain);
        let node = NodeName(pod.spec.node_name.clone());
        self.ledger.observe(PodGrant { pod: uid, node, cpu, memory, containers: Vec::new() });
    }

    pub(super) fn forget_pod(&mut self, uid: &PodUid) {
        self.unlisted_pods.remove(uid);
        self.confirm(uid);
        self.leave(uid);
        let Some(Record::Gpu(pod)) = self.pods.remove(uid) else { return };
        let Some(node) = pod.node else { return };
        for index in [&mut self.on_node, &mut self.unsure] {
            if let Some(pods) = index.get_mut(&node) {
                pods.remove(uid);
                if pods.is_empty() {
                    index.remove(&node);
                }
            }
        }
        self.guess_again(&node);
    }

    /// The node is another one than before: grants name its cards, and its unit gives requests their meaning.
    pub(super) fn reread_pods(&mut self, node: &NodeName) {
        for uid in self.on_node.get(node).cloned().unwrap_or_default() {
            self.read_grant(&uid, node);
        }
        self.guess_again(node);
        // Bookings too: they carry on, and their namespaces are charged for the new node.
        let booked: Vec<PodUid> = self.ledger.grants_on(node).map(|grant| grant.pod.clone()).collect();
        booked.iter().for_each(|uid| self.charge(uid));
    }

    /// Enters what a pod's annotations say it holds, or marks it as one of whom nobody knows.
    fn read_grant(&mut self, uid: &PodUid, node: &NodeName) {
        let Some(pod) = self.pod(uid) else { return };
        let containers = match self.record(node) {
            Some(NodeRecord { spec: Ok(spec), .. }) => {
                let read = grant::parse(&pod.spec, &pod.annotations, &spec.node, spec.unit);
                read.ok().flatten().filter(|grants| is_complete(grants, &pod.spec, spec.unit))
            }
            // Nobody can be placed there; what its pods hold is read when it comes back.
            _ => None,
        };
        let known = containers.is_some();
        let (cpu, memory) = host_needs(&pod.spec);
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

    /// Finds cards for the pods that bypassed us: after all others, by UID, so that any history leads to the same guess.
    /// Until their agent tells, nobody else gets those cards.
    pub(super) fn guess_again(&mut self, node: &NodeName) {
        let Some(unsure) = self.unsure.get(node).cloned() else { return };
        let Some(NodeRecord { spec: Ok(spec), .. }) = self.record(node) else { return };
        let unit = spec.unit;
        unsure.iter().for_each(|uid| self.leave(uid));
        for uid in unsure {
            let Some(pod) = self.pod(&uid) else { continue };
            let (cpu, memory) = host_needs(&pod.spec);
            let guess = pod.spec.request(unit).ok().and_then(|request| {
                // Its CPU is the kubelet's affair: it is there already.
                let request = PodRequest { cpu: Default::default(), memory: Default::default(), ..request };
                let placement =
                    place(self.ledger.node(node)?, &request, &Policy::Simple, GpuSet::EMPTY).ok()?;
                Some(placement.grants(&request))
            });
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
            let taken = Taken::by(&grant.containers, &record.spec.as_ref().ok()?.node);
            let model = record.place.model.clone().unwrap_or_default();
            let namespace = self.pod(uid)?.namespace.clone();
            (taken != Taken::default()).then_some(Charge { namespace, model, taken })
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

/// Whether a pod is any of our business. One that asks in a way nobody can serve is, so that it can be told.
pub(crate) fn asks_for_cards(spec: &PodSpec) -> bool {
    spec.claims(MemoryUnit::GiB).map_or(true, |claims| !claims.is_empty())
}

/// CPU and memory of the whole pod; nothing where they cannot be read, which the API server would not let happen.
pub(super) fn host_needs(spec: &PodSpec) -> (tessera_core::units::MilliCpu, tessera_core::units::MiB) {
    spec.request(MemoryUnit::GiB).map(|request| (request.cpu, request.memory)).unwrap_or_default()
}

/// Whether grants cover every container that asks, with as many cards as it asks for. Others were not written by anybody
/// who places pods.
fn is_complete(grants: &[ContainerGrant], spec: &PodSpec, unit: MemoryUnit) -> bool {
    let Ok(claims) = spec.claims(unit) else { return false };
    claims.iter().all(|claim| {
        let count = match claim.request {
            tessera_core::request::Request::Whole(count) => usize::from(count),
            _ => 1,
        };
        grants.iter().any(|grant| grant.container == claim.container && grant.cards.len() == count)
    })
}
