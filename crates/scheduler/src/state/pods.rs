//! Pod events: tracks waiting pods, and enters what each placed pod holds into the view of the cluster.

use std::collections::BTreeMap;

use tessera_core::cluster_view::{PlacedPod, PodGpus};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::{DialectSet, MemoryUnit};
use tessera_wire::foreign::objects::{Pod, PodSpec};
use tessera_wire::tessera::gang;
use tessera_wire::tessera::placed_pod::{has_ended, placed_pod};

use super::State;
use super::entries::GpuPod;

/// The number of pod lists begun before a pod was read from the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListGeneration(u64);

impl State {
    pub(super) fn set_pod(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        if has_ended(&pod) {
            let has_succeeded = pod.status.phase == "Succeeded";
            self.end_pod(uid.clone());
            // The others of a gang may be restarted after this one has done its work.
            if has_succeeded {
                self.count_in_gang(&uid, &pod);
            }
            return;
        }
        self.note_claim_user(&uid, &pod);
        // The claim that kube-scheduler made for the pod holds the GPUs.
        let is_by_claim = self.settings.dra
            && !pod.spec.node_name.is_empty()
            && pod.status.extended_resource_claim_status.is_some();
        match (pod.spec.asks_for_gpus() && !is_by_claim, pod.spec.node_name.is_empty()) {
            (true, true) => self.set_waiting(uid, pod),
            // Users ask why such a pod waits, too.
            (false, true) if !pod.spec.other_gpu_resources().is_empty() => self.set_waiting(uid, pod),
            (false, true) if self.waits_for_claims(&pod) && !is_in_gang(&pod) => {
                self.set_waiting(uid, with_claim_names(pod));
            }
            (true, false) => self.set_placed(uid, pod),
            // Users ask where such a pod runs, and which MIG instances are in use.
            (false, false) if !is_by_claim && !pod.spec.other_gpu_resources().is_empty() => {
                self.set_placed(uid, pod);
            }
            (false, true) => self.count_in_gang(&uid, &pod),
            (false, false) => self.set_plain(&uid, &pod),
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
        let is_new = !self.is_known(&uid);
        if self.is_missed(&uid) || (is_new && read_at != self.list_generation()) {
            return;
        }
        self.apply_newest_read(pod);
        if is_new && self.is_listing_pods && self.is_known(&uid) {
            self.unlisted_pods.insert(uid);
        }
    }

    /// Applies a read that is newer than every list so far.
    ///
    /// A read does not confirm a booking while a list is under way that has not shown the pod. The list may be older
    /// than the pod, and then only the booking keeps what the pod holds until the watch shows it.
    pub(super) fn apply_newest_read(&mut self, pod: Pod) {
        let uid = PodUid(pod.metadata.uid.clone());
        let is_placed = self.pod(&uid).is_some_and(|known| known.node.is_some());
        let is_kept_by_booking =
            self.is_listing_pods && self.unlisted_pods.contains(&uid) && self.bookings.has_current(&uid);
        if !is_placed && !is_kept_by_booking && !self.ended.contains(&uid) {
            self.set_pod(pod);
        }
    }

    /// Stores a pod without a node. A pod that is being bound stays booked, because the watch lags behind.
    fn set_waiting(&mut self, uid: PodUid, pod: Pod) {
        let earlier = self.pod(&uid).and_then(|known| known.unscheduled.clone());
        self.note_claim_wait(&pod, earlier.as_deref());
        match self.gpu_pods.get_mut(&uid) {
            // The event is outdated, because a pod never loses its node.
            Some(known) if known.node.is_some() => {}
            Some(known) => **known = GpuPod::new(pod),
            None => {
                self.learn_from(&pod.spec);
                self.gpu_pods.insert(uid.clone(), Box::new(GpuPod::new(pod)));
            }
        }
        self.join_gang(&uid);
    }

    fn set_placed(&mut self, uid: PodUid, pod: Pod) {
        self.confirm(&uid);
        let fresh = GpuPod::new(pod);
        let Some(node) = fresh.node.clone() else { return };
        match self.pod(&uid) {
            Some(known) if *known == fresh => return,
            Some(_) => {}
            None => self.learn_from(&fresh.spec),
        }
        let was_passed = self.cancel_passed(&uid);
        let parsed = self.entry(&node).and_then(|entry| entry.spec.as_ref().ok());
        let placed = fresh.placed(uid.clone(), node, parsed);
        self.gpu_pods.insert(uid.clone(), Box::new(fresh));
        self.view.set_pod(placed);
        self.join_gang(&uid);
        self.follow_preemption(&uid);
        if was_passed {
            self.keep_what_is_free();
        }
    }

    /// Enters a pod without GPUs. Only its CPU and memory count.
    fn set_plain(&mut self, uid: &PodUid, pod: &Pod) {
        self.gpu_pods.remove(uid);
        self.count_in_gang(uid, pod);
        if let Some(placed) = placed_pod(pod, None, MemoryUnit::default()) {
            // The claim that kube-scheduler made for a pod with GPU resources holds its GPUs.
            self.view.set_pod(PlacedPod { gpus: PodGpus::NotRequested, ..placed });
        }
    }

    /// Counts a pod for the size of its gang that needs no place.
    fn count_in_gang(&mut self, uid: &PodUid, pod: &Pod) {
        if let Ok(Some(membership)) = gang::membership(pod) {
            self.join_gang_without_place(uid, &membership);
        }
    }

    /// Returns whether the pod waits for GPUs or is on a node, and has not ended.
    fn is_known(&self, uid: &PodUid) -> bool {
        self.gpu_pods.contains_key(uid) || self.ledger().grant(uid).is_some()
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
        self.record_release(uid);
        self.follow_preemption(uid);
        self.record_use(uid);
        self.gpu_pods.remove(uid);
        self.forget_claim_user(uid);
        self.view.remove_pod(uid);
        self.leave_gang(uid);
        self.cancel_passed(uid);
        self.keep_what_is_free();
    }

    /// Keeps what has become free for those that wait for it.
    pub(super) fn keep_what_is_free(&mut self) {
        // People's reservations come before the GPUs that are kept for a gang.
        self.refresh_node_reservations();
        self.refresh_evictions();
        self.refresh_hold_back();
    }

    fn record_release(&mut self, uid: &PodUid) {
        let (Some(grant), Some(pod)) = (self.ledger().grant(uid), self.pod(uid)) else { return };
        let (node, gpus, dialects) = (grant.node.clone(), grant.gpus(), self.dialects(&pod.spec));
        self.releases.record(self.event_time, node, gpus, dialects);
    }

    /// Returns the pods on a node that hold MIG instances, with their instances by resource.
    pub(crate) fn instance_holders(
        &self,
        node: &NodeName,
    ) -> impl Iterator<Item = (&GpuPod, BTreeMap<String, u64>)> {
        let pods = self.ledger().grants_on(node).filter_map(|grant| self.pod(&grant.pod));
        pods.map(|pod| (pod, pod.spec.mig_instances())).filter(|(_, held)| !held.is_empty())
    }

    /// Returns the dialects of a pod's containers. A request that cannot be read has none.
    pub(super) fn dialects(&self, spec: &PodSpec) -> DialectSet {
        let claims = spec.claims(self.settings.memory_unit).unwrap_or_default();
        claims.iter().fold(DialectSet::default(), |set, claim| set.with(claim.dialect))
    }

    fn learn_from(&mut self, spec: &PodSpec) {
        if let Ok(request) = spec.request(self.settings.memory_unit) {
            self.learner.see(&request);
        }
    }
}

/// Returns whether the pod belongs to a gang. Gangs have no places for claims.
fn is_in_gang(pod: &Pod) -> bool {
    !matches!(gang::membership(pod), Ok(None))
}

/// Names the claims that were made from templates in the specification, because the status of a pod is not stored.
fn with_claim_names(mut pod: Pod) -> Pod {
    for made in &pod.status.resource_claim_statuses {
        for claim in pod.spec.resource_claims.iter_mut().filter(|claim| claim.name == made.name) {
            claim.resource_claim_name = made.resource_claim_name.clone();
        }
    }
    pod
}
