//! How much idle time in its windows a tenant may claim.

/// Longest idle time in nanoseconds that is believed in one window.
///
/// The GPU is idle between the opening of a window and its first kernel, and between its last
/// kernel and the arbiter's next step. Each takes two wake-ups. Measured on an H200: 0.3 to 0.4 ms.
/// On one host the shares were short as if a switch took 1.3 ms.
const MAX_WINDOW_NS: u64 = 2_000_000;

/// Time in nanoseconds whose allowance is saved up.
const SAVED_NS: u64 = 1_000_000_000;

/// Part of all time, in thousandths, that is believed to be idle however small the ceiling is. A tenant
/// with short requests switches more often than its ceiling suggests.
const BASE_THOUSANDTHS: u64 = 10;

/// The idle time that a tenant may still claim.
///
/// Only the tenant knows when its kernels began and ended, so its report cannot be checked. It is bounded
/// instead: in each window by [`MAX_WINDOW_NS`] and by half of the window, and over time by a tenth of
/// the ceiling plus one percentage point. A tenth is what full windows with the longest switch need.
#[derive(Debug)]
pub(super) struct IdleAllowance {
    available_ns: u64,
    refilled_at: u64,
}

/// A new tenant has saved up as much as possible.
impl Default for IdleAllowance {
    fn default() -> Self {
        Self { available_ns: SAVED_NS, refilled_at: 0 }
    }
}

impl IdleAllowance {
    /// Adds the idle time of switches that another tenant has caused and paid for.
    pub(super) fn add(&mut self, idle_ns: u64) {
        self.available_ns += idle_ns;
    }

    /// Returns how much of the `reported_ns` of idle time in a window is believed, if the window has been
    /// open for `open_ns`. `before_ns` is what this function returned for the same window before.
    pub(super) fn believe(
        &mut self,
        now: u64,
        ceiling_percent: u32,
        open_ns: u64,
        reported_ns: u64,
        before_ns: u64,
    ) -> u64 {
        let thousandths = u64::from(ceiling_percent.min(100)) + BASE_THOUSANDTHS;
        let passed = now.saturating_sub(self.refilled_at).min(SAVED_NS);
        let most = SAVED_NS / 1_000 * thousandths;
        self.refilled_at = now;
        // What was believed before is available again: a late report may have made it smaller.
        let available = (self.available_ns + passed * thousandths / 1_000).min(most) + before_ns;
        let believed = reported_ns.min(MAX_WINDOW_NS).min(open_ns / 2).min(available);
        self.available_ns = available - believed;
        believed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_window_is_believed_to_be_idle_for_two_milliseconds_and_half_of_its_length() {
        let believe = |open, reported| IdleAllowance::default().believe(5_000 * MS, 50, open, reported, 0);
        assert_eq!(believe(20 * MS, 5 * MS), 2 * MS);
        assert_eq!(believe(20 * MS, MS), MS);
        assert_eq!(believe(MS, 5 * MS), MS / 2);
        assert_eq!(believe(u64::MAX, u64::MAX), 2 * MS);
    }

    #[test]
    fn a_second_is_believed_to_be_idle_for_a_tenth_of_the_ceiling_and_a_point() {
        for ceiling in [0, 10, 50, 100] {
            let mut allowance = IdleAllowance::default();
            // A thousand windows of 1 ms in each of ten seconds; one second is saved up.
            let claims = (1_000..11_000).map(|now| allowance.believe(now * MS, ceiling, MS, MS, 0));
            let most = 11 * MS * (u64::from(ceiling) + 10);
            let believed: u64 = claims.sum();
            assert!(
                believed <= most + MS && believed + most / 50 >= most,
                "{believed} of {most} at {ceiling}"
            );
        }
    }

    #[test]
    fn a_late_report_gives_back_what_was_believed() {
        let mut allowance = IdleAllowance::default();
        let first = allowance.believe(5_000 * MS, 50, 10 * MS, 2 * MS, 0);
        let left = allowance.available_ns;
        assert_eq!(allowance.believe(5_000 * MS, 50, 10 * MS, 0, first), 0);
        assert_eq!(allowance.available_ns, left + first);
    }
}
