//! Guarantees: the part of a cluster that a namespace gets back whenever it needs it.
//!
//! A namespace may use more than its guarantee while no other one needs it. A guarantee has one or two amounts. A pod is
//! within the guarantee if the namespace then exceeds none of them. An eviction never leaves a namespace below its
//! guarantee: one of the amounts, of which the pods hold a part, is still in use as a whole. So an evicted pod that is
//! created again is not within the guarantee, and has no other pod evicted in return.

use std::collections::BTreeMap;

use super::{GpuAmount, NamespaceCap};
use crate::units::MiB;

/// Time in which past use loses half its weight.
pub const HALF_LIFE_SECONDS: f64 = 3600.0;

/// The guaranteed part of a namespace. An absent amount is not guaranteed and does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guarantee {
    /// The guaranteed sum of GPU memory.
    pub memory: Option<MiB>,
    /// The guaranteed sum of compute; 100 is one GPU.
    pub compute_percent: Option<u64>,
}

/// The guarantee of a namespace, and what its pods use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuaranteedUse {
    /// What the namespace gets back from others.
    pub guarantee: Guarantee,
    /// The use of all pods that are not ending.
    pub used: GpuAmount,
}

/// GPU time in percent-seconds and MiB-seconds, of which half is forgotten in each half-life.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecayedUse {
    percent_seconds: f64,
    mib_seconds: f64,
}

/// The decayed use of pods that have ended, by namespace.
#[derive(Clone, Debug, Default)]
pub struct PastUse(BTreeMap<String, (DecayedUse, i64)>);

// === impl Guarantee ===

impl Guarantee {
    /// Returns whether the amount stays within the guarantee.
    #[must_use]
    pub fn covers(self, amount: GpuAmount) -> bool {
        self.compute_percent.is_none_or(|most| amount.compute_percent <= most)
            && self.memory.is_none_or(|most| amount.memory <= most)
    }

    /// Returns whether a namespace that uses `used` may lose `lost`, and is not below its guarantee afterwards.
    #[must_use]
    pub fn may_lose(self, used: GpuAmount, lost: GpuAmount) -> bool {
        let left = used.minus(lost);
        let is_full =
            |most: Option<u64>, left: u64, lost: u64| most.is_some_and(|most| lost > 0 && left >= most);
        is_full(self.compute_percent, left.compute_percent, lost.compute_percent)
            || is_full(self.memory.map(|most| most.0), left.memory.0, lost.memory.0)
    }

    /// Returns by how much the use exceeds each guaranteed amount.
    #[must_use]
    pub fn borrowed(self, used: GpuAmount) -> GpuAmount {
        GpuAmount {
            compute_percent: self.compute_percent.map_or(0, |most| used.compute_percent.saturating_sub(most)),
            memory: self.memory.map_or(MiB::ZERO, |most| used.memory.saturating_sub(most)),
        }
    }

    /// Returns the guarantee as a limit, which pods within the guarantee meet.
    #[must_use]
    pub fn as_limit(self) -> NamespaceCap {
        NamespaceCap { memory: self.memory, compute_percent: self.compute_percent }
    }
}

// === impl GuaranteedUse ===

impl GuaranteedUse {
    /// Returns whether the namespace uses more than its guarantee.
    #[must_use]
    pub fn is_above(self) -> bool {
        self.guarantee.borrowed(self.used) != GpuAmount::default()
    }

    /// Returns whether the namespace may lose this amount.
    #[must_use]
    pub fn may_lose(self, lost: GpuAmount) -> bool {
        self.guarantee.may_lose(self.used, lost)
    }
}

// === impl DecayedUse ===

impl DecayedUse {
    /// Returns the decayed use of a pod that has held this amount since it started.
    #[must_use]
    pub fn of_pod(amount: GpuAmount, age_seconds: i64) -> Self {
        let half_lives = seconds(age_seconds) / HALF_LIFE_SECONDS;
        // The integral of 2^(-t / half-life) over the age of the pod.
        let weight = HALF_LIFE_SECONDS / std::f64::consts::LN_2 * (1.0 - (-half_lives).exp2());
        Self {
            percent_seconds: float(amount.compute_percent) * weight,
            mib_seconds: float(amount.memory.0) * weight,
        }
    }

    /// Returns the sum.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            percent_seconds: self.percent_seconds + other.percent_seconds,
            mib_seconds: self.mib_seconds + other.mib_seconds,
        }
    }

    /// Returns what is left of the use after a time.
    #[must_use]
    pub fn after(self, elapsed_seconds: i64) -> Self {
        let left = (-seconds(elapsed_seconds) / HALF_LIFE_SECONDS).exp2();
        Self { percent_seconds: self.percent_seconds * left, mib_seconds: self.mib_seconds * left }
    }

    /// Returns the use in proportion to the guarantee, by the amount that is used most. It is infinite if nothing is
    /// guaranteed.
    #[must_use]
    pub fn in_proportion_to(self, guarantee: Guarantee) -> f64 {
        let ratio = |used: f64, most: Option<u64>| match most {
            Some(0) if used > 0.0 => f64::INFINITY,
            Some(most @ 1..) => used / float(most),
            _ => 0.0,
        };
        let by_compute = ratio(self.percent_seconds, guarantee.compute_percent);
        by_compute.max(ratio(self.mib_seconds, guarantee.memory.map(|most| most.0)))
    }
}

// === impl PastUse ===

impl PastUse {
    /// Adds the use of a pod that ends now.
    pub fn add(&mut self, namespace: &str, used: DecayedUse, now_seconds: i64) {
        let sum = self.of(namespace, now_seconds).plus(used);
        self.0.insert(namespace.to_owned(), (sum, now_seconds));
    }

    /// Returns the decayed use of the pods of a namespace that have ended.
    #[must_use]
    pub fn of(&self, namespace: &str, now_seconds: i64) -> DecayedUse {
        let known = self.0.get(namespace);
        known.map_or_else(DecayedUse::default, |(used, at)| used.after(now_seconds.saturating_sub(*at)))
    }
}

fn seconds(seconds: i64) -> f64 {
    float(u64::try_from(seconds).unwrap_or(0))
}

#[expect(clippy::cast_precision_loss, reason = "amounts and times are far below 2^53")]
fn float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn amount(compute_percent: u64, memory: u64) -> GpuAmount {
        GpuAmount { compute_percent, memory: MiB(memory) }
    }

    fn guarantee(compute_percent: Option<u64>, memory: Option<u64>) -> Guarantee {
        Guarantee { compute_percent, memory: memory.map(MiB) }
    }

    #[test]
    fn only_stated_amounts_count() {
        let compute = guarantee(Some(400), None);
        assert!(compute.covers(amount(400, 1_000_000)) && !compute.covers(amount(401, 0)));
        assert!(compute.may_lose(amount(500, 10), amount(100, 10)));
        assert!(!compute.may_lose(amount(499, 10), amount(100, 0)));
        assert!(
            !compute.may_lose(amount(900, 10), amount(0, 10)),
            "the eviction returns nothing of the amount"
        );
        assert_eq!(compute.borrowed(amount(450, 10)), amount(50, 0));
        let both = guarantee(Some(400), Some(100));
        assert!(both.may_lose(amount(500, 10), amount(100, 10)), "compute is still in use as a whole");
        assert!(!both.may_lose(amount(400, 100), amount(100, 10)));
    }

    #[test]
    fn use_decays_by_half_in_each_half_life() {
        let one_gpu = amount(100, 0);
        let hour = DecayedUse::of_pod(one_gpu, 3600);
        let two_hours = DecayedUse::of_pod(one_gpu, 7200);
        let apart = hour.after(3600).plus(hour);
        assert!((two_hours.percent_seconds - apart.percent_seconds).abs() < 1e-6, "{two_hours:?} {apart:?}");
        let mut past = PastUse::default();
        past.add("team", hour, 10_000);
        assert_eq!(past.of("team", 10_000), hour);
        assert_eq!(past.of("team", 13_600), hour.after(3600));
        assert_eq!(past.of("other", 0), DecayedUse::default());
        assert!(
            hour.in_proportion_to(guarantee(Some(100), None))
                > hour.in_proportion_to(guarantee(Some(200), None))
        );
        assert_eq!(hour.in_proportion_to(guarantee(Some(0), None)), f64::INFINITY);
    }

    proptest! {
        /// An evicted pod that is created again is not within the guarantee of its namespace.
        #[test]
        fn an_evicted_pod_never_evicts_back(
            (used_percent, used_memory) in (0..1000u64, 0..1000u64),
            (percent, memory) in (0..1000u64, 0..1000u64),
            compute in prop::option::of(0..1000u64),
            guaranteed_memory in prop::option::of(0..1000u64),
        ) {
            let (used, pod) = (amount(used_percent, used_memory), amount(percent, memory));
            let guarantee = guarantee(compute, guaranteed_memory);
            if guarantee.may_lose(used, pod) {
                prop_assert!(!guarantee.covers(used.minus(pod).plus(pod)));
            }
        }
    }
}
