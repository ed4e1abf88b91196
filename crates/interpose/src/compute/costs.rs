//! What kinds of work cost. A table without a lock: what two threads write at once is an estimate either way.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many kinds are known at a time; one that falls on another's place takes it and is learned anew.
const KINDS: usize = 4_096;

/// Known work is measured again once in so many launches (powers of two: this is asked at every launch),
const MEASURE_EVERY: u32 = 256;

/// or if it is short, for a measurement takes as long as some launches, in so many.
const MEASURE_SHORT_EVERY: u32 = 2_048;
const SHORT: u64 = 20_000;

/// What is assumed of work never measured.
const UNKNOWN: u64 = 500_000;

/// All kinds of work of a process.
pub struct Costs(Box<[Kind]>);

#[derive(Default)]
struct Kind {
    key: AtomicU64,
    nanoseconds: AtomicU64,
    launches: AtomicU32,
}

/// What is known of work about to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
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

    fn kind(&self, key: u64) -> &Kind {
        // The keys are mixed well above.
        &self.0[(key >> 40) as usize % KINDS]
    }
}
