//! Bounds the work that one container can cause for the arbiter.

/// Time in nanoseconds whose work may be done at once.
const BURST_NS: u64 = 10_000_000;

/// A limit of work per time. Each unit of work takes a fixed time, and the work must not be further ahead of
/// real time than [`BURST_NS`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimit {
    unit_ns: u64,
    paid_until: u64,
}

impl RateLimit {
    pub(crate) fn per_second(units: u64) -> Self {
        Self { unit_ns: 1_000_000_000_u64.div_ceil(units.max(1)), paid_until: 0 }
    }

    /// Returns the time from which on work may be done.
    pub(crate) fn opens_at(&self) -> u64 {
        self.paid_until.saturating_sub(BURST_NS)
    }

    /// Returns whether work may be done now.
    pub(crate) fn is_open(&self, now: u64) -> bool {
        self.opens_at() <= now
    }

    /// Records that work was done.
    pub(crate) fn charge(&mut self, now: u64, units: u64) {
        self.paid_until = self.paid_until.max(now).saturating_add(units.saturating_mul(self.unit_ns));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    proptest! {
        /// The last charge may exceed the limit, because its size is not known before.
        #[test]
        fn work_stays_below_the_limit(
            per_second in 1..100_000u64, sizes in prop::collection::vec(0..600u64, 1..50), interval in 1..50_000_000u64,
        ) {
            let (mut limit, mut done) = (RateLimit::per_second(per_second), 0);
            let mut largest = 0;
            for (step, size) in (0..).zip(sizes.iter().cycle()).take_while(|(step, _)| step * interval < 10 * SECOND_NS) {
                let now = SECOND_NS + step * interval;
                if limit.is_open(now) {
                    limit.charge(now, *size);
                    (done, largest) = (done + size, largest.max(*size));
                }
            }
            let most = per_second * 10 + per_second / 100 + largest + 1;
            prop_assert!(done <= most, "{done} of {most}");
        }
    }

    #[test]
    fn work_below_the_limit_is_never_stopped() {
        let mut limit = RateLimit::per_second(1_000);
        for now in (0..SECOND_NS).step_by(1_000_000) {
            assert!(limit.is_open(now));
            limit.charge(now, 1);
        }
    }
}
