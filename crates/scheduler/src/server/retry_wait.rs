//! A short wait before a pod that fits nowhere is refused again.
//!
//! kube-scheduler retries such a pod at once when the cluster changes, and after that not for
//! minutes. kube-scheduler and this scheduler learn of a change at about the same time. If
//! kube-scheduler is faster, the retry would be refused on stale data. So the answer to a retry
//! waits until a change arrives, unless one has arrived since the last refusal.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Longest wait of one call. Two watches of one API server deliver a change less than this apart.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// Waits that may end without a change in a row. kube-scheduler is blocked during a wait, and a
/// busy cluster retries pods that fit nowhere all the time.
const WAIT_BURST: u32 = 5;

/// Time after which one more wait is allowed.
const WAIT_REFILL_INTERVAL: Duration = Duration::from_secs(2);

/// Refusals remembered. At this number all are forgotten, which costs each pod one wait.
const MAX_REFUSALS: usize = 10_000;

/// Counts the changes of the state and remembers at which change each pod was last refused.
#[derive(Debug)]
pub struct RetryWait {
    /// Number of changes that may alter a verdict.
    changes: watch::Sender<u64>,
    budget: Mutex<WaitBudget>,
    /// The change count at the last refusal, by pod UID.
    refused_at: Mutex<HashMap<String, u64>>,
}

impl Default for RetryWait {
    fn default() -> Self {
        let budget = Mutex::new(WaitBudget { waits: WAIT_BURST, refilled: Instant::now() });
        Self { changes: watch::channel(0).0, budget, refused_at: Mutex::default() }
    }
}

/// Token bucket for waits that end without a change.
#[derive(Debug)]
struct WaitBudget {
    waits: u32,
    refilled: Instant,
}

impl WaitBudget {
    /// Takes one wait from the budget. Returns `false` if none is left.
    fn take(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.refilled);
        let refills = elapsed.as_nanos() / WAIT_REFILL_INTERVAL.as_nanos();
        if refills > 0 {
            let refills = u32::try_from(refills).unwrap_or(u32::MAX);
            self.waits = self.waits.saturating_add(refills).min(WAIT_BURST);
            self.refilled = now;
        }
        let may_wait = self.waits > 0;
        self.waits -= u32::from(may_wait);
        may_wait
    }

    /// Returns a wait that ended with a change.
    fn refund(&mut self) {
        self.waits = (self.waits + 1).min(WAIT_BURST);
    }
}

impl RetryWait {
    /// Records that the state has changed in a way that may alter a verdict.
    pub fn record_change(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Returns the number of recorded changes.
    #[must_use]
    pub fn changes(&self) -> u64 {
        *self.changes.borrow()
    }

    /// Waits for a change if the pod was already refused at the current state. Returns whether a
    /// change arrived, so that the pod must be judged again.
    pub(super) async fn wait_for_change(&self, uid: &str) -> bool {
        let current = self.changes();
        if self.record_refusal(uid, current) != Some(current) || !self.budget().take(Instant::now()) {
            return false;
        }
        let mut changes = self.changes.subscribe();
        let waited = tokio::time::timeout(MAX_WAIT, changes.wait_for(|changes| *changes > current)).await;
        let Ok(Ok(newer)) = waited.map(|newer| newer.map(|newer| *newer)) else { return false };
        self.budget().refund();
        self.record_refusal(uid, newer);
        true
    }

    fn budget(&self) -> MutexGuard<'_, WaitBudget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the change count of a refusal. Returns the count of the refusal before, if it is
    /// known.
    fn record_refusal(&self, uid: &str, changes: u64) -> Option<u64> {
        let mut refused_at = self.refused_at.lock().unwrap_or_else(PoisonError::into_inner);
        if refused_at.len() >= MAX_REFUSALS {
            refused_at.clear();
        }
        refused_at.insert(uid.to_owned(), changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waits_only_for_a_retry_without_a_change_in_between() {
        let wait = RetryWait::default();
        assert!(!wait.wait_for_change("a").await, "the first refusal");
        wait.record_change();
        assert!(!wait.wait_for_change("a").await, "a change arrived before the retry");
        assert!(!wait.wait_for_change("a").await, "no change arrived during the wait");
        let change = async {
            tokio::task::yield_now().await;
            wait.record_change();
        };
        let (changed, ()) = tokio::join!(wait.wait_for_change("a"), change);
        assert!(changed, "a change arrived during the wait");
    }

    #[test]
    fn limits_the_waits_that_end_without_a_change() {
        let begin = Instant::now();
        let mut budget = WaitBudget { waits: WAIT_BURST, refilled: begin };
        let taken = |budget: &mut WaitBudget, at| (0..100).filter(|_| budget.take(at)).count();
        assert_eq!(taken(&mut budget, begin), 5);
        assert_eq!(taken(&mut budget, begin + WAIT_REFILL_INTERVAL / 2), 0);
        assert_eq!(taken(&mut budget, begin + WAIT_REFILL_INTERVAL), 1);
        assert_eq!(taken(&mut budget, begin + WAIT_REFILL_INTERVAL * 4), 3);
        assert_eq!(taken(&mut budget, begin + WAIT_REFILL_INTERVAL * 1_000), 5);
        budget.refund();
        assert_eq!(taken(&mut budget, begin + WAIT_REFILL_INTERVAL * 1_000), 1, "a refunded wait is free");
    }
}
