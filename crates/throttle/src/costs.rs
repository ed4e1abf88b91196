//! How long each kind of work takes on the GPU, as measured.
//!
//! The table has no lock. When two threads write at once either value is a usable estimate.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::nanos::{AtomicNanos, Nanos};

/// Kinds of work that the table holds at a time. Each kind has two possible places; a kind that
/// finds both taken replaces the first one and is measured anew.
const KINDS: usize = 4_096;

/// Known work is measured again once in this many launches. A power of two, because every launch
/// tests it.
const LAUNCHES_PER_MEASUREMENT: u32 = 256;

/// Short work is measured less often, because a measurement costs as much as some launches. A power
/// of two as well.
const SHORT_LAUNCHES_PER_MEASUREMENT: u32 = 2_048;

/// Work below this cost counts as short.
const SHORT_WORK: Nanos = Nanos::from_micros(20);

/// Cost assumed for work that was never measured.
pub(crate) const UNMEASURED_COST: Nanos = Nanos::from_micros(500);

/// Measured costs of all kinds of work of a process.
#[derive(Debug)]
pub struct CostTable(Box<[CostEntry]>);

/// What is known of one kind of work. Aligned so that an entry is in one cache line.
#[derive(Debug)]
#[repr(align(32))]
struct CostEntry {
    /// The key of the kind, or 0 in a free place.
    key: AtomicU64,
    cost: AtomicNanos,
    launches: AtomicU32,
    /// A launch is measured when the count of launches has none of these bits.
    measurement_mask: AtomicU32,
}

/// What is known about work that is about to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Estimated time on the GPU.
    pub cost: Nanos,
    /// True if this launch should be measured.
    pub must_measure: bool,
    /// True if the table did not know this kind of work: the driver may have to load its code first.
    pub is_new: bool,
}

impl Default for CostTable {
    fn default() -> Self {
        Self(std::iter::repeat_with(CostEntry::free).take(KINDS).collect())
    }
}

impl CostTable {
    /// Counts a launch of the kind `key` and returns what it is expected to cost.
    #[inline]
    #[must_use]
    pub fn expect(&self, key: u64) -> Expected {
        let first = &self.0[first_place(key)];
        if first.is(key) { first.expect(false) } else { self.expect_elsewhere(key) }
    }

    /// Counts a launch of a kind that is not in its first place.
    #[cold]
    fn expect_elsewhere(&self, key: u64) -> Expected {
        let entry = self.entry(key);
        let is_new = !entry.is(key);
        if is_new {
            entry.launches.store(0, Ordering::Relaxed);
            entry.set_cost(UNMEASURED_COST);
            entry.key.store(key, Ordering::Relaxed);
        }
        entry.expect(is_new)
    }

    /// Averages a measured launch into the cost of its kind. A cost of more than twice as much was no cost of the
    /// work alone: the GPU waited for something, and the cost is forgotten. Returns what was measured.
    pub fn learn(&self, key: u64, milliseconds: f32) -> Nanos {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "kept within a minute")]
        let measured = Nanos((milliseconds.clamp(0.001, 60_000.0) * 1e6) as u64);
        let entry = self.entry(key);
        if entry.is(key) {
            let known = entry.cost.load(Ordering::Relaxed);
            let is_outdated = known == UNMEASURED_COST || known > measured * 2;
            entry.set_cost(if is_outdated { measured } else { known.midpoint(measured) });
        }
        measured
    }

    /// Removes a kind of work: the next launch with this key is other work.
    pub fn forget(&self, key: u64) {
        // Any other key marks the place as unknown.
        let _ = self.entry(key).key.compare_exchange(key, !key, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the entry of a kind, or the place that it will get.
    fn entry(&self, key: u64) -> &CostEntry {
        let place = first_place(key);
        let (first, second) = (&self.0[place], &self.0[place ^ 1]);
        let is_second = second.is(key) || (second.is(0) && !first.is(0));
        if is_second && !first.is(key) { second } else { first }
    }
}

/// Returns the first of the two possible places of a kind.
fn first_place(key: u64) -> usize {
    // Callers mix their keys well, so the high bits are as good as a hash.
    (key >> 40) as usize % KINDS
}

impl CostEntry {
    fn free() -> Self {
        Self {
            key: AtomicU64::new(0),
            cost: AtomicNanos::new(UNMEASURED_COST),
            launches: AtomicU32::new(0),
            measurement_mask: AtomicU32::new(LAUNCHES_PER_MEASUREMENT - 1),
        }
    }

    fn is(&self, key: u64) -> bool {
        self.key.load(Ordering::Relaxed) == key
    }

    fn set_cost(&self, cost: Nanos) {
        let every = if cost < SHORT_WORK { SHORT_LAUNCHES_PER_MEASUREMENT } else { LAUNCHES_PER_MEASUREMENT };
        self.cost.store(cost, Ordering::Relaxed);
        self.measurement_mask.store(every - 1, Ordering::Relaxed);
    }

    /// Counts a launch and returns what it is expected to cost.
    #[inline]
    fn expect(&self, is_new: bool) -> Expected {
        let launches = self.launches.load(Ordering::Relaxed);
        self.launches.store(launches.wrapping_add(1), Ordering::Relaxed);
        Expected {
            cost: self.cost.load(Ordering::Relaxed),
            // The first launches of a kind are measured more often: the driver may load code at the first one.
            must_measure: launches & self.measurement_mask.load(Ordering::Relaxed) == 0
                || launches & launches.wrapping_sub(1) == 0,
            is_new,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns keys that all have the same first place.
    fn key(number: u64) -> u64 {
        (77 << 40) + number
    }

    #[test]
    fn work_is_measured_at_its_first_launch_and_now_and_then_afterwards() {
        let costs = CostTable::default();
        let unmeasured = Expected { cost: UNMEASURED_COST, must_measure: true, is_new: true };
        assert_eq!(costs.expect(key(1)), unmeasured);
        let next: Vec<bool> = (0..8).map(|_| costs.expect(key(1)).must_measure).collect();
        assert_eq!(next, [true, true, false, true, false, false, false, true], "the first ones more often");
        let _ = costs.learn(key(1), 0.3);
        assert_eq!(costs.expect(key(1)).cost, Nanos::from_micros(300));
        let measured = |launches: u32| (0..launches).filter(|_| costs.expect(key(1)).must_measure).count();
        assert_eq!(measured(1 << 16), (1 << 16) / LAUNCHES_PER_MEASUREMENT as usize + 4);
        (0..16).for_each(|_| {
            let _ = costs.learn(key(1), 0.005);
        });
        assert_eq!(measured(10 * SHORT_LAUNCHES_PER_MEASUREMENT), 10, "short work is measured less often");
    }

    #[test]
    fn two_kinds_with_the_same_first_place_are_both_known() {
        let costs = CostTable::default();
        for (number, milliseconds) in [(1, 1.0), (2, 2.0)] {
            assert!(costs.expect(key(number)).is_new);
            let _ = costs.learn(key(number), milliseconds);
        }
        for _ in 0..10 {
            assert_eq!(
                [1, 2].map(|number| costs.expect(key(number)).cost),
                [Nanos::from_millis(1), Nanos::from_millis(2)]
            );
        }
        assert!(costs.expect(key(3)).is_new);
        assert!(!costs.expect(key(2)).is_new, "a third kind replaces only one of them");
    }

    #[test]
    fn forgotten_work_is_measured_anew() {
        let costs = CostTable::default();
        let _ = costs.expect(key(1));
        let _ = costs.learn(key(1), 0.001);
        costs.forget(key(1));
        assert_eq!(
            costs.expect(key(1)),
            Expected { cost: UNMEASURED_COST, must_measure: true, is_new: true }
        );
        costs.forget(key(2));
        assert!(!costs.expect(key(1)).is_new, "another kind was forgotten");
    }

    #[test]
    fn measurements_are_kept_between_a_microsecond_and_a_minute() {
        let costs = CostTable::default();
        for (measured, kept) in [(0.0, 0.001), (1e9, 60_000.0)] {
            let _ = costs.expect(key(1));
            let _ = costs.learn(key(1), measured);
            let cost = costs.expect(key(1)).cost.0 as f64 / 1e6;
            assert!((cost / kept - 1.0).abs() < 1e-6, "{cost} ms for {measured} ms");
            costs.forget(key(1));
        }
    }
}
