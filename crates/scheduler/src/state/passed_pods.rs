//! GPUs of pods that filter has passed, and that kube-scheduler is about to bind.
//!
//! kube-scheduler filters the next pod before it binds this one. It counts what this one requests, but a device of
//! `nvidia.com/gpu` does not tell how much of a GPU a pod takes where a GPU has several devices: the memory and the
//! compute that HAMi's pods request are amounts per GPU, which cannot be summed up. So the next pods would be passed to
//! nodes that are full by the time of their Bindings. Filter therefore passes such a pod to its best node alone and
//! reserves GPUs for it there. Bind chooses the GPUs anew and books them in the step that ends the reservation.
//!
//! kube-scheduler may have a reason of its own to keep the pod from the node, such as another extender or a volume. So
//! the reservation ends after a short time or with the next attempt of the pod, which is passed to all of its best
//! nodes. Namespaces are not charged for it: bind applies the quota.

use std::time::Duration;

use tessera_core::grant::PodGrant;
use tessera_core::ledger::{Reservation, ReservationName};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::dialect::{Dialect, DialectSet};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::parsed_pod::ParsedPod;

use super::{State, Timestamp};

/// Time for which the GPUs of a passed pod stay reserved. kube-scheduler calls bind within milliseconds, or within tenths
/// of a second if it has many pods to bind; it waits longer only for volumes and for plugins that delay pods.
const PASSED_PERIOD: Duration = Duration::from_secs(5);

/// The beginning of the names of these reservations.
const PREFIX: &str = "passed/";

impl State {
    /// Returns whether kube-scheduler cannot tell what the pod takes of the node before it is bound, and the pod may be
    /// passed to that node alone.
    pub(crate) fn is_uncounted(&self, pod: &ParsedPod<'_>, node: &str) -> bool {
        let names_devices = [Dialect::Nvidia, Dialect::Hami]
            .iter()
            .any(|dialect| pod.shape.dialects.covers(DialectSet::default().with(*dialect)));
        names_devices
            && self
                .readable_node(node)
                .is_ok_and(|node| node.spec.node.slots_per_gpu.is_some_and(|slots| slots > 1))
    }

    /// Reserves GPUs on the node that filter is going to pass, until bind is called. Returns whether filter may pass
    /// this node alone. That happens once for a pod: if the attempt fails, kube-scheduler may need another node.
    pub fn reserve_passed(&mut self, pod: &Pod, node: &str, now: Timestamp) -> bool {
        let uid = PodUid(pod.metadata.uid.clone());
        let is_known = self.passed_pods.contains(&uid) || self.ended.contains(&uid);
        let has_gpus = self.ledger().grant(&uid).is_some() || self.ledger().place(&uid).is_some();
        if is_known || has_gpus || self.gang_key_of(&uid).is_some() || !pod.spec.resource_claims.is_empty() {
            return false;
        }
        let Some(place) = self.place_of_passed(&uid, pod, node) else { return false };
        let reservation = Reservation {
            name: name(&uid),
            owner: format!(
                "pod {}/{}, which kube-scheduler is binding",
                pod.metadata.namespace, pod.metadata.name
            ),
            until: now.steady.saturating_add(PASSED_PERIOD),
            places: vec![place],
        };
        let is_reserved = self.view.reserve(reservation, None).is_ok();
        if is_reserved {
            self.passed_pods.add(uid);
        }
        is_reserved
    }

    fn place_of_passed(&self, uid: &PodUid, pod: &Pod, node: &str) -> Option<PodGrant> {
        self.check_scheduler(uid, &pod.spec).ok()?;
        let parsed = ParsedPod::of(self, pod).ok()?;
        let readable = self.readable_node(node).ok()?;
        let request = parsed.request(readable.spec.unit);
        let containers = self
            .admission(&readable, &parsed, &request)
            .place()
            .ok()?
            .grants(readable.state.node(), &request);
        let (cpu, memory) = (request.cpu, request.memory);
        Some(PodGrant { pod: holder(uid), node: NodeName(node.to_owned()), cpu, memory, containers })
    }

    /// Returns whether GPUs are reserved for a pod that filter has passed.
    #[must_use]
    pub fn is_passed(&self, uid: &PodUid) -> bool {
        self.ledger().reservations().next().is_some() && self.ledger().has_reservation(&name(uid))
    }

    /// Ends the reservation for a pod that kube-scheduler filters again. What becomes free is kept for those that
    /// wait for it.
    pub fn release_passed(&mut self, uid: &PodUid) {
        if self.cancel_passed(uid) {
            self.keep_what_is_free();
        }
    }

    /// Ends the reservation of a passed pod without giving its GPUs to others. Returns whether there was one.
    pub(super) fn cancel_passed(&mut self, uid: &PodUid) -> bool {
        self.is_passed(uid) && self.view.cancel_reservation(&name(uid)).is_some()
    }
}

/// Returns whether a reservation is that of a passed pod.
pub(super) fn is_of_passed_pod(name: &ReservationName) -> bool {
    name.0.starts_with(PREFIX)
}

fn name(uid: &PodUid) -> ReservationName {
    ReservationName(format!("{PREFIX}{uid}"))
}

/// Returns the UID that holds the GPUs of a passed pod. No pod has such a UID, because UIDs have no spaces. The pod itself
/// has no place: it may be bound to any node.
fn holder(uid: &PodUid) -> PodUid {
    PodUid(format!("passed {uid}"))
}
