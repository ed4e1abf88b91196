//! Pods that wait for a node: those to try now, those to try again later, and those for which something must change first.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// The waiting pods, by UID. Time is told by the caller.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: HashMap<String, Waiting>,
    /// Higher priority first, then who came first.
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
    /// Not before this time, whatever happens.
    BackingOff(Duration),
    /// When something has changed, but not before this time; and [`STUCK_LIMIT`] after it in any case.
    Stuck(Duration),
}

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(3);

/// How long a pod waits in vain for a change: the extender may have heard of the last one a moment after it was asked.
/// kube-scheduler waits five minutes, and has the events of a real cluster to wake it earlier.
const STUCK_LIMIT: Duration = Duration::from_secs(1);

impl Queue {
    /// A pod is there. One that is known stays where it is.
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

    /// The pod to try now. It stays known until it is removed, and is not tried again before [`Queue::later`] or
    /// [`Queue::stuck`] say when.
    pub(super) fn next(&mut self, now: Duration) -> Option<String> {
        for (uid, waiting) in &mut self.waiting {
            if waiting.due().is_some_and(|due| due <= now) {
                waiting.state = WaitState::Active;
                self.active.insert(waiting.order, uid.clone());
            }
        }
        self.active.pop_first().map(|(_, uid)| uid)
    }

    /// When [`Queue::next`] may have one, if nothing happens.
    pub(super) fn due(&self) -> Option<Duration> {
        self.waiting.values().filter_map(Waiting::due).min()
    }

    /// It did not work; it is tried again after a pause.
    pub(super) fn later(&mut self, uid: &str, now: Duration) {
        if let Some(waiting) = self.waiting.get_mut(uid) {
            waiting.state = WaitState::BackingOff(now + waiting.next_backoff());
        }
    }

    /// It fits nowhere; it is tried again when something has changed, and after a pause.
    pub(super) fn stuck(&mut self, uid: &str, now: Duration) {
        if let Some(waiting) = self.waiting.get_mut(uid) {
            waiting.state = WaitState::Stuck(now + waiting.next_backoff());
        }
    }

    /// Something has changed that may let pods fit.
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
    /// When it is tried again if nothing happens.
    fn due(&self) -> Option<Duration> {
        match self.state {
            WaitState::Active => None,
            WaitState::BackingOff(until) => Some(until),
            WaitState::Stuck(until) => Some(until + STUCK_LIMIT),
        }
    }

    fn next_backoff(&mut self) -> Duration {
        let next_backoff = FIRST_BACKOFF * 2u32.saturating_pow(self.attempts.min(10));
        self.attempts += 1;
        next_backoff.min(MAX_BACKOFF)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn priority_then_arrival() {
        let mut queue = Queue::default();
        for (uid, priority) in [("a", 0), ("b", 5), ("c", 0), ("b", 5)] {
            queue.add(uid, priority);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.next(at(0))).collect();
        assert_eq!(order, ["b", "a", "c"]);
    }

    #[test]
    fn a_stuck_pod_waits_for_a_change_and_for_its_pause() {
        let mut queue = Queue::default();
        queue.add("a", 0);
        assert_eq!(queue.next(at(0)).as_deref(), Some("a"));
        queue.stuck("a", at(0));
        assert_eq!((queue.next(at(1099)), queue.due()), (None, Some(at(1100))), "tried again in any case");
        queue.cluster_changed();
        assert_eq!(queue.due(), Some(at(100)));
        assert_eq!(queue.next(at(99)), None);
        assert_eq!(queue.next(at(100)).as_deref(), Some("a"));
        queue.later("a", at(100));
        assert_eq!(queue.due(), Some(at(300)), "pauses grow");
        queue.remove("a");
        assert_eq!((queue.next(at(9000)), queue.due()), (None, None));
    }
}
