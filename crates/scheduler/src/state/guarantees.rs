//! Guarantees of namespaces: what pods use of them, and how much the namespaces have used over time.

use tessera_core::quota::{DecayedUse, GpuAmount, GuaranteedUse};
use tessera_core::units::{Count, PodUid};

use super::{Claimant, GpuPod, State, Timestamp};

impl State {
    /// Returns what a pod uses of its quota.
    pub(crate) fn amount_of(&self, uid: &PodUid) -> GpuAmount {
        let amount = self.ledger().grant(uid).and_then(|grant| {
            Some(GpuAmount::of_grants(&grant.containers, self.ledger().node(&grant.node)?.node()))
        });
        amount.unwrap_or_default()
    }

    /// Returns the decayed use of a pod since its start.
    pub(crate) fn use_of_pod(&self, uid: &PodUid, pod: &GpuPod, now_seconds: i64) -> DecayedUse {
        let started = pod.started.filter(|_| pod.node.is_some());
        let age = started.map_or(0, |started| now_seconds.saturating_sub(started));
        DecayedUse::of_pod(self.amount_of(uid), age)
    }

    /// Returns the decayed use of the pods of a namespace that have ended while this replica led.
    pub(crate) fn past_use(&self, namespace: &str, now: Timestamp) -> DecayedUse {
        self.past_use.of(namespace, now.unix_seconds())
    }

    /// Adds the use of a pod that ends to that of its namespace. Only namespaces with a guarantee are compared.
    pub(super) fn record_use(&mut self, uid: &PodUid) {
        let Some(pod) = self.pod(uid).filter(|pod| pod.node.is_some()) else { return };
        if self.quotas.in_force().guarantee(&pod.namespace).is_none() {
            return;
        }
        let (now, namespace) = (self.event_unix_seconds, pod.namespace.clone());
        let used = self.use_of_pod(uid, pod, now);
        self.past_use.add(&namespace, used, now);
    }

    /// Describes what a waiting pod has to do with the guarantee of its namespace, if there is one.
    pub(crate) fn describe_guarantee(&self, uid: &PodUid) -> Option<String> {
        // A guarantee is about GPUs, so it does not concern a pod that requests other resources.
        let pod = self.pod(uid).filter(|pod| pod.node.is_none() && pod.spec.asks_for_gpus())?;
        let (quota, usage) = self.quota();
        let guarantee = quota.guarantee(&pod.namespace)?;
        let guaranteed = GuaranteedUse { guarantee, used: usage.of(&pod.namespace) };
        let namespace = &pod.namespace;
        if let Some(left) = self.evictions_left(&Claimant::Pod(uid.clone())) {
            let pods = Count(left, "pod");
            return Some(format!(
                "namespace {namespace} gets back GPUs that it is guaranteed: {pods} still to end"
            ));
        }
        let held = quota.describe(namespace, usage)?;
        Some(match guaranteed.is_above() {
            true => format!("namespace {namespace} holds {held}; it borrows, so the pod waits for free GPUs"),
            false if self.may_evict() => format!(
                "namespace {namespace} holds {held}; pods of namespaces that borrow are evicted for it within the guarantee"
            ),
            false => format!("namespace {namespace} holds {held}; evictions are off"),
        })
    }
}
