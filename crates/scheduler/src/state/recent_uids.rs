//! A bounded set of pod UIDs, used for pods that have ended.
//!
//! A GET of a pod may be under way while the watch reports the pod's end, and the watch may lag behind a GET.
//! A late answer must not bring an ended pod back: no later event would report its end, and its GPUs would
//! stay booked.

use std::collections::HashSet;

use tessera_core::units::PodUid;

/// Number of UIDs kept at least: far more pods than end while one answer is under way.
const MIN_KEPT: usize = 4096;

/// The most recently added UIDs, between [`MIN_KEPT`] and twice as many.
#[derive(Debug, Default)]
pub(super) struct RecentUids {
    latest: HashSet<PodUid>,
    earlier: HashSet<PodUid>,
}

impl RecentUids {
    pub(super) fn add(&mut self, uid: PodUid) {
        if self.latest.len() >= MIN_KEPT {
            self.earlier = std::mem::take(&mut self.latest);
        }
        self.latest.insert(uid);
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.latest.remove(uid);
        self.earlier.remove(uid);
    }

    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.latest.contains(uid) || self.earlier.contains(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_most_recent_uids_only() {
        let mut recent = RecentUids::default();
        let uid = |number: usize| PodUid(number.to_string());
        for number in 0..5 * MIN_KEPT {
            recent.add(uid(number));
            let oldest_kept = number.saturating_sub(MIN_KEPT - 1);
            assert!(recent.contains(&uid(number)) && recent.contains(&uid(oldest_kept)));
        }
        assert!(!recent.contains(&uid(0)));
        assert!(recent.latest.len() + recent.earlier.len() <= 2 * MIN_KEPT);
    }
}
