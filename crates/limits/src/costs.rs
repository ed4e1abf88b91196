//! What kinds of work cost. A table without a lock: what two threads write at once is an estimate either way.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many kinds are known at a time. Two places are looked at for each; one that finds both taken takes the first and is learned anew.
const KINDS: usize = 4_096;

/// Known work is measured again once in so many launches (powers of two: this is asked at every launch),
const MEASURE_EVERY: u32 = 256;

/// or if it is short, for a measurement takes as long as some launches, in so many.
const MEASURE_SHORT_EVERY: u32 = 2_048;
const SHORT: u64 = 20_000;

/// What is assumed of work never measured.
const UNKNOWN: u64 = 500_000;

/// All kinds of work of a process.
#[derive(Debug)]
pub struct Costs(Box<[Kind]>);

#[derive(Debug, Default)]
struct Kind {
    key: AtomicU64,
    nanoseconds: AtomicU64,
    launches: AtomicU32,
}

/// What is known of work about to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// How long it takes.
    pub nanoseconds: u64,
    /// Whether it is time to measure it (again).
    pub measures: bool,
    /// Whether such work was never seen: the driver may have to load its code first.
    pub is_new: bool,
}

impl Default for Costs {
    fn default() -> Self {
        Self(std::iter::repeat_with(Kind::default).take(KINDS).collect())
    }
}

impl Costs {
    /// What a launch will cost.
    #[must_use]
    pub fn of(&self, key: u64) -> Expected {
        let kind = self.kind(key);
        let is_new = kind.key.load(Ordering::Relaxed) != key;
        if is_new {
            kind.nanoseconds.store(0, Ordering::Relaxed);
            kind.launches.store(0, Ordering::Relaxed);
            kind.key.store(key, Ordering::Relaxed);
        }
        let launches = kind.launches.load(Ordering::Relaxed);
        kind.launches.store(launches.wrapping_add(1), Ordering::Relaxed);
        let measured = kind.nanoseconds.load(Ordering::Relaxed);
        let every = if (1..SHORT).contains(&measured) { MEASURE_SHORT_EVERY } else { MEASURE_EVERY };
        Expected {
            nanoseconds: if measured == 0 { UNKNOWN } else { measured },
            measures: launches & (every - 1) == 0,
            is_new,
        }
    }

    /// A launch has been measured.
    pub fn learn(&self, key: u64, milliseconds: f32) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "kept within a minute")]
        let measured = (milliseconds.clamp(0.001, 60_000.0) * 1e6) as u64;
        let kind = self.kind(key);
        if kind.key.load(Ordering::Relaxed) == key {
            let known = kind.nanoseconds.load(Ordering::Relaxed);
            let cost = if known == 0 { measured } else { known.midpoint(measured) };
            kind.nanoseconds.store(cost, Ordering::Relaxed);
        }
    }

    /// Such work will not come again: the next of this key is other work.
    pub fn forget(&self, key: u64) {
        // Any other key will do.
        let _ = self.kind(key).key.compare_exchange(key, !key, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The place of a kind, or the one it will have.
    fn kind(&self, key: u64) -> &Kind {
        // The keys are mixed well above.
        let place = (key >> 40) as usize % KINDS;
        let first = &self.0[place];
        if first.key.load(Ordering::Relaxed) == key { first } else { self.one_of_two(place, key) }
    }

    /// The same where it is not in its first place.
    #[inline(never)]
    fn one_of_two(&self, place: usize, key: u64) -> &Kind {
        let (first, second) = (&self.0[place], &self.0[place ^ 1]);
        let taken_by = second.key.load(Ordering::Relaxed);
        let is_second = taken_by == key || (taken_by == 0 && first.key.load(Ordering::Relaxed) != 0);
        if is_second { second } else { first }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// Kinds of the same place, whatever the others are.
    fn key(number: u64) -> u64 {
        (77 << 40) + number
    }

    #[test]
    fn work_is_measured_first_and_then_now_and_then() {
        let costs = Costs::default();
        assert_eq!(costs.of(key(1)), Expected { nanoseconds: UNKNOWN, measures: true, is_new: true });
        assert_eq!(costs.of(key(1)), Expected { nanoseconds: UNKNOWN, measures: false, is_new: false });
        costs.learn(key(1), 0.3);
        assert_eq!(costs.of(key(1)).nanoseconds, 300_000);
        let measured = |launches: u32| (0..launches).filter(|_| costs.of(key(1)).measures).count();
        assert_eq!(measured(10 * MEASURE_EVERY), 10);
        (0..16).for_each(|_| costs.learn(key(1), 0.005));
        assert_eq!(measured(10 * MEASURE_SHORT_EVERY), 10, "short work less often");
    }

    #[test]
    fn two_kinds_in_one_place_are_both_known() {
        let costs = Costs::default();
        for (number, milliseconds) in [(1, 1.0), (2, 2.0)] {
            assert!(costs.of(key(number)).is_new);
            costs.learn(key(number), milliseconds);
        }
        for _ in 0..10 {
            assert_eq!([1, 2].map(|number| costs.of(key(number)).nanoseconds), [1_000_000, 2_000_000]);
        }
        assert!(costs.of(key(3)).is_new);
        assert!(!costs.of(key(2)).is_new, "a third takes the place of one of them");
    }

    #[test]
    fn what_is_forgotten_is_measured_anew() {
        let costs = Costs::default();
        let _ = costs.of(key(1));
        costs.learn(key(1), 0.001);
        costs.forget(key(1));
        assert_eq!(costs.of(key(1)), Expected { nanoseconds: UNKNOWN, measures: true, is_new: true });
        costs.forget(key(2));
        assert!(!costs.of(key(1)).is_new, "another one was forgotten");
    }
}
