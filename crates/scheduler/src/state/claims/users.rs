//! Pods that use claims, as evictions need to know them: which pods wait for claims that evictions could serve, and
//! which pods on nodes hold GPUs by claims.

use std::collections::{BTreeSet, HashMap};

use tessera_core::claim::ClaimUid;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dra::{ClaimName, ResourceSlice};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::dra::{self, DRIVER, slice_name};

use crate::state::entries::GpuPod;
use crate::state::{State, WatchEvent};

/// Pods that end together, because they use the same claims, and the claims that are free afterwards.
#[derive(Debug, Default)]
pub(crate) struct ClaimGroup {
    /// Pods on nodes, including those that hold GPUs by resources too.
    pub(crate) pods: BTreeSet<PodUid>,
    /// The claims as holders of the ledger.
    pub(crate) claims: Vec<PodUid>,
    /// True if something that is not known, or a gang, uses a claim too.
    pub(crate) is_fixed: bool,
}

impl State {
    /// Enters a slice, which says that its node offers GPUs to claims.
    pub(in crate::state) fn handle_slice(&mut self, change: WatchEvent<ResourceSlice>) {
        let offering = &mut self.claims.offering;
        match change {
            // Without slices no pod is evicted for claims.
            WatchEvent::Listing => offering.clear(),
            WatchEvent::Set(slice) if slice.spec.driver == DRIVER => {
                offering.insert(slice.metadata.name);
            }
            WatchEvent::Set(slice) | WatchEvent::Gone(slice) => {
                offering.remove(&slice.metadata.name);
            }
            WatchEvent::Listed => {}
        }
    }

    /// Returns whether a node offers GPUs to claims.
    pub(crate) fn offers_claims(&self, node: &NodeName) -> bool {
        self.claims.offering.contains(&slice_name(&node.0))
    }

    /// Enters a pod on a node that uses claims.
    pub(in crate::state) fn note_claim_user(&mut self, uid: &PodUid, pod: &Pod) {
        let uses_claims =
            !pod.spec.resource_claims.is_empty() || pod.status.extended_resource_claim_status.is_some();
        if self.settings.dra && uses_claims && !pod.spec.node_name.is_empty() {
            self.claims.users.insert(uid.clone(), Box::new(GpuPod::new(pod.clone())));
        }
    }

    pub(in crate::state) fn forget_claim_user(&mut self, uid: &PodUid) {
        self.claims.users.remove(uid);
    }

    /// Returns a pod that requests GPUs, or that is on a node and uses claims.
    pub(crate) fn tenant(&self, uid: &PodUid) -> Option<&GpuPod> {
        self.pod(uid).or_else(|| self.claims.users.get(uid).map(AsRef::as_ref))
    }

    /// Returns whether evictions of other pods can serve a waiting pod: it waits for claims alone, and any GPUs with
    /// enough room satisfy them. For other pods kube-scheduler itself looks for pods to preempt.
    pub(crate) fn waits_for_plain_claims(&self, pod: &GpuPod) -> bool {
        if !self.settings.dra || pod.node.is_some() || pod.spec.resource_claims.is_empty() {
            return false;
        }
        let object = pod.to_object(&PodUid(String::new()));
        let is_plain = |name: ClaimName<'_>| match name {
            ClaimName::Known(name) => {
                let claim = self.claims.known.get(&(pod.namespace.clone(), name.to_owned()));
                claim.is_some_and(|claim| {
                    claim.status.allocation.is_none() && dra::is_plain(claim, &self.claims.classes)
                })
            }
            ClaimName::Pending(_) => false,
        };
        !pod.spec.asks_for_gpus() && object.claim_names().all(is_plain)
    }

    /// Returns the pods that hold GPUs by claims, in groups that share claims.
    pub(crate) fn claim_groups(&self) -> Vec<ClaimGroup> {
        let mut groups: Vec<ClaimGroup> = Vec::new();
        let mut group_of: HashMap<PodUid, usize> = HashMap::new();
        for claim in self.claims.known.values() {
            let holder = ClaimUid(claim.metadata.uid.clone()).holder();
            if self.ledger().grant(&holder).is_none() {
                continue;
            }
            let users: BTreeSet<PodUid> =
                claim.consumer_pods().map(|consumer| PodUid(consumer.uid.clone())).collect();
            let is_known = |uid: &PodUid| {
                self.tenant(uid).is_some_and(|pod| pod.node.is_some()) && self.placed_gang_of(uid).is_none()
            };
            let is_fixed = users.is_empty()
                || users.len() < claim.status.reserved_for.len()
                || !users.iter().all(is_known)
                || self.claims.bookings.contains_key(&ClaimUid(claim.metadata.uid.clone()));
            let joined: BTreeSet<usize> = users.iter().filter_map(|uid| group_of.get(uid).copied()).collect();
            let mut group = ClaimGroup { pods: users, claims: vec![holder], is_fixed };
            for other in joined {
                let other = std::mem::take(&mut groups[other]);
                group.pods.extend(other.pods);
                group.claims.extend(other.claims);
                group.is_fixed |= other.is_fixed;
            }
            group_of.extend(group.pods.iter().map(|uid| (uid.clone(), groups.len())));
            groups.push(group);
        }
        groups.retain(|group| !group.pods.is_empty());
        groups.iter_mut().for_each(|group| group.claims.sort());
        groups.sort_by(|a, b| a.pods.cmp(&b.pods));
        groups
    }
}
