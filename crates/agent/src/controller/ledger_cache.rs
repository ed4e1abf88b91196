//! Keeps the sum of all holdings, so that an admission does not sum them up for every call.

use tessera_core::{ledger::Ledger, units::PodUid};

use super::holdings::Holdings;

/// Sum of all holdings, kept until something changes.
#[derive(Debug, Default)]
pub(super) struct LedgerCache {
    ledger: Option<Ledger>,
    /// The only pod whose latest answers the ledger lacks: the pod that is being admitted.
    stale_pod: Option<PodUid>,
}

impl LedgerCache {
    /// Drops the ledger because pods, GPUs or the kubelet's list have changed.
    pub(super) fn invalidate(&mut self) {
        self.ledger = None;
    }

    /// Notes that the answers for one pod have changed.
    pub(super) fn pod_changed(&mut self, uid: &PodUid) {
        match &self.stale_pod {
            Some(other) if other != uid => (self.ledger, self.stale_pod) = (None, None),
            _ => self.stale_pod = Some(uid.clone()),
        }
    }

    /// Returns the sum of all holdings.
    pub(super) fn current(&mut self, holdings: Holdings<'_>) -> Ledger {
        if self.stale_pod.is_some() {
            self.ledger = None;
        }
        self.computed(None, holdings).clone()
    }

    /// Returns the sum of all holdings, in which those of `uid` may be out of date.
    pub(super) fn except(&mut self, uid: &PodUid, holdings: Holdings<'_>) -> Ledger {
        self.computed(Some(uid), holdings).clone()
    }

    fn computed(&mut self, uid: Option<&PodUid>, holdings: Holdings<'_>) -> &Ledger {
        let is_usable = self.stale_pod.is_none() || self.stale_pod.as_ref() == uid;
        let known = self.ledger.take().filter(|_| is_usable);
        let ledger = known.unwrap_or_else(|| {
            self.stale_pod = None;
            holdings.ledger()
        });
        self.ledger.insert(ledger)
    }
}
