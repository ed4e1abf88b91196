//! Pods that are gone.
//!
//! An answer about a pod may have been on its way while the watch told of its end, or a list did not show it any more; and the watch may
//! be behind an answer that told of its end. Such a pod must not come back to life: nobody might tell of its end again, and its GPUs
//! would stay taken.

use std::collections::HashSet;

use tessera_core::units::PodUid;

/// How many are remembered at least: far more than end while an answer is on its way.
const FEWEST: usize = 4096;

/// The pods that ended last.
#[derive(Debug, Default)]
pub(super) struct Departed {
    latest: HashSet<PodUid>,
    earlier: HashSet<PodUid>,
}

impl Departed {
    pub(super) fn add(&mut self, uid: PodUid) {
        if self.latest.len() >= FEWEST {
            self.earlier = std::mem::take(&mut self.latest);
        }
        self.latest.insert(uid);
    }

    /// The watch shows it: it is there, and its end will be told.
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
    fn the_last_ones_are_remembered_and_not_all() {
        let mut departed = Departed::default();
        let uid = |number: usize| PodUid(number.to_string());
        for number in 0..5 * FEWEST {
            departed.add(uid(number));
            assert!(
                departed.contains(&uid(number)) && departed.contains(&uid(number.saturating_sub(FEWEST - 1)))
            );
        }
        assert!(!departed.contains(&uid(0)));
        assert!(departed.latest.len() + departed.earlier.len() <= 2 * FEWEST);
    }
}
