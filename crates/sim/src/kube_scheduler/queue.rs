//! The queue of pods that wait for a node.
//!
//! A pod is tried now, tried again after a backoff, or waits until the cluster changes.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// The waiting pods by UID. The caller passes the time.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: HashMap<String, Waiting>,
    /// Pods to try now, by descending priority and then by arrival.
    active: BTreeMap<(i64, u64), String>,
    arrivals: u64,
}

#[derive(Debug)]
struct Waiting {
    order: (i64, u64),
    attempts: u32,
    state: WaitState,
}

#[derive(Debug, PartialEq, Eq)]
enum WaitState {
    Active,
    /// Tried again at this time.
    BackingOff(Duration),
    /// Tried again after a change of the cluster, but not before this time, and at the latest
    /// [`STUCK_LIMIT`] after it.
    Stuck(Duration),
}

/// Shorter than kube-scheduler's (1 s and 10 s), so that demos and tests do not wait.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(3);

/// Longest time that a pod waits for a change of the cluster.
///
/// The extender may see the last change a moment after it was called. kube-scheduler waits five
/// minutes, because the events of a real cluster wake it earlier.
const STUCK_LIMIT: Duration = Duration::from_secs(1);

impl Queue {
    /// Adds a pod. A pod that is already queued stays where it is.
    pub(super) fn add(&mut self, uid: &str, priority: i32) {
        if self.waiting.contains_key(uid) {
            return;
        }
        self.arrivals += 1;
        let order = (-i64::from(priority), self.arrivals);
        self.waiting.insert(uid.to_owned(), Waiting { order, attempts: 0, state: WaitState::Active });
        self.active.insert(order, uid.to_owned());
    }

    pub(super) fn remove(&mut self, uid: &str) {
        if let Some(waiting) = self.waiting.remove(uid) {
            self.active.remove(&waiting.order);
        }
    }

    /// Returns the pod to try now. The pod stays in the queue until it is removed. It is tried
    /// again when [`Queue::later`] or [`Queue::stuck`] say so.
    pub(super) fn next(&mut self, now: Duration) -> Option<String> {
        for (uid, waiting) in &mut self.waiting {
            if waiting.due().is_some_and(|due| due <= now) {
                waiting.state = WaitState::Active;
                self.active.insert(waiting.order, uid.clone());
            }
        }
        self.active.pop_first().map(|(_, uid)| uid)
    }

    /// Returns when [`Queue::next`] has a pod if the cluster does not change.
    pub(super) fn due(&self) -> Option<Duration> {
        self.waiting.values().filter_map(Waiting::due).min()
    }

    /// Schedules another attempt after a backoff.
    pub(super) fn later(&mut self, uid: &str, now: Duration) {
        if let Some(waiting) = self.waiting.get_mut(uid) {
            waiting.state = WaitState::BackingOff(now + waiting.next_backoff());
        }
    }

    /// Schedules another attempt after a change of the cluster, and after a backoff.
    pub(super) fn stuck(&mut self, uid: &str, now: Duration) {
        if let Some(waiting) = self.waiting.get_mut(uid) {
            waiting.state = WaitState::Stuck(now + waiting.next_backoff());
        }
    }

    /// Lets stuck pods be tried again, because the cluster has changed.
    pub(super) fn cluster_changed(&mut self) {
        for waiting in self.waiting.values_mut() {
            if let WaitState::Stuck(until) = waiting.state {
                waiting.state = WaitState::BackingOff(until);
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Waiting {
    /// Returns when the pod is tried again if the cluster does not change.
    fn due(&self) -> Option<Duration> {
        match self.state {
            WaitState::Active => None,
            WaitState::BackingOff(until) => Some(until),
            WaitState::Stuck(until) => Some(until + STUCK_LIMIT),
        }
    }

    fn next_backoff(&mut self) -> Duration {
        let backoff = FIRST_BACKOFF * 2u32.saturating_pow(self.attempts.min(10));
        self.attempts += 1;
        backoff.min(MAX_BACKOFF)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn orders_pods_by_priority_and_then_by_arrival() {
        let mut queue = Queue::default();
        for (uid, priority) in [("a", 0), ("b", 5), ("c", 0), ("b", 5)] {
            queue.add(uid, priority);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.next(at(0))).collect();
        assert_eq!(order, ["b", "a", "c"]);
    }

    #[test]
    fn a_stuck_pod_waits_for_a_change_and_for_its_backoff() {
        let mut queue = Queue::default();
        queue.add("a", 0);
        assert_eq!(queue.next(at(0)).as_deref(), Some("a"));
        queue.stuck("a", at(0));
        assert_eq!(
            (queue.next(at(1099)), queue.due()),
            (None, Some(at(1100))),
            "a stuck pod is tried again without a change"
        );
        queue.cluster_changed();
        assert_eq!(queue.due(), Some(at(100)));
        assert_eq!(queue.next(at(99)), None);
        assert_eq!(queue.next(at(100)).as_deref(), Some("a"));
        queue.later("a", at(100));
        assert_eq!(queue.due(), Some(at(300)), "the backoff grows");
        queue.remove("a");
        assert_eq!((queue.next(at(9000)), queue.due()), (None, None));
    }
}
