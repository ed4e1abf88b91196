//! How long the GPU was busy for a process between two polls.
//!
//! A fence that was in its stream at the last poll and has not been reached shows that the GPU was busy all the
//! time. Otherwise it may have been idle now and then, because the program was slower than the GPU. Then the
//! estimated cost of the work that has ended tells how long it was busy. Of the work that has not ended, the GPU can
//! have done no more than the time since its first launch: a pause before that launch was not busy.

use crate::back_pressure::QUEUE_LIMIT;
use crate::nanos::Nanos;

/// Longest time that is carried from one poll to the next. A fence covers the work of several launches, so their
/// end is noticed later than it was.
const MAX_CARRIED: Nanos = QUEUE_LIMIT.times(2);

/// What is carried from one poll to the next.
#[derive(Debug, Default)]
pub(crate) struct BusyTime {
    /// Number of the last fence at the last poll.
    last_fence: u64,
    /// True if launches were blocked at the last poll, or one was in a call of the driver all the time.
    was_held: bool,
    /// Estimated work that had ended and was not measured as busy time.
    unpaid: Nanos,
    /// Busy time beyond the estimated work that had ended.
    prepaid: Nanos,
    /// Time that was not busy, since it last was all the time.
    idle: Nanos,
}

impl BusyTime {
    /// Returns true if the GPU was busy all the time since the last poll. `oldest_fence` is the oldest one that has
    /// not been reached, and `last_fence` the last one. `is_held` is true if launches are blocked because the
    /// queue is full, or one is in a call of the driver since the last poll.
    pub(crate) fn was_always_busy(
        &mut self,
        oldest_fence: Option<u64>,
        last_fence: u64,
        is_held: bool,
    ) -> bool {
        let is_old = oldest_fence.is_some_and(|oldest| oldest <= self.last_fence);
        let was_held = std::mem::replace(&mut self.was_held, is_held);
        self.last_fence = last_fence;
        is_old || (was_held && is_held)
    }

    /// Returns the time before this poll that was not busy: work whose end is seen now may have run in it.
    pub(crate) fn idle(&self) -> Nanos {
        self.idle
    }

    /// Returns how long the GPU was busy in a stretch of time of this length. `ended` is the estimated cost of the
    /// work that was found to have ended. `begun` is the most that the GPU can have done of the rest.
    pub(crate) fn measure(
        &mut self,
        length: Nanos,
        ended: Nanos,
        begun: Nanos,
        is_always_busy: bool,
    ) -> Nanos {
        let due = self.unpaid + (ended - self.prepaid);
        let most = self.unpaid + ((ended + begun) - self.prepaid);
        self.prepaid = self.prepaid - ended;
        let busy = if is_always_busy { length } else { most.min(length + self.idle) };
        self.idle = if is_always_busy { Nanos::ZERO } else { (self.idle + length - busy).min(MAX_CARRIED) };
        // Where all time was busy, a difference is an error of the estimates.
        self.unpaid = if is_always_busy { Nanos::ZERO } else { (due - busy).min(MAX_CARRIED) };
        self.prepaid = (self.prepaid + (busy - due)).min(MAX_CARRIED);
        busy
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MICROS: fn(u64) -> Nanos = Nanos::from_micros;

    #[test]
    fn an_old_fence_or_launches_that_still_wait_show_that_the_gpu_was_busy() {
        let mut busy = BusyTime::default();
        assert!(!busy.was_always_busy(Some(1), 3, false), "the fence was not there at the last poll");
        assert!(busy.was_always_busy(Some(3), 5, false));
        assert!(!busy.was_always_busy(Some(6), 7, true));
        assert!(busy.was_always_busy(Some(8), 9, true), "launches waited at both polls");
        assert!(!busy.was_always_busy(None, 9, false));
    }

    #[test]
    fn work_whose_end_is_seen_late_is_counted_in_the_time_before() {
        let mut busy = BusyTime::default();
        let mut measure = |length, ended| busy.measure(MICROS(length), MICROS(ended), Nanos::ZERO, false);
        assert_eq!(measure(1_000, 0), Nanos::ZERO);
        assert_eq!(measure(100, 500), MICROS(500));
        assert_eq!(measure(100, 900), MICROS(700), "all time is busy");
        assert_eq!(measure(1_000, 0), MICROS(200), "the rest");
    }

    /// A program waits for its work, pauses, and has launched much again by the time of the next poll.
    #[test]
    fn a_pause_between_two_polls_is_not_busy() {
        let mut busy = BusyTime::default();
        let mut measured = Nanos::ZERO;
        for _ in 0..100 {
            // 0.3 ms of the work that was queued, a pause of 0.9 ms, and 0.5 ms of new work, then 1.2 ms of it.
            measured += busy.measure(MICROS(1_700), MICROS(300), MICROS(500), false);
            measured += busy.measure(MICROS(900), MICROS(1_400), MICROS(0), true);
        }
        assert_eq!(measured, MICROS((300 + 500 + 900) * 100));
    }

    #[test]
    fn a_long_kernel_is_counted_once() {
        let mut busy = BusyTime::default();
        let length = MICROS(2_300);
        let first = busy.measure(MICROS(1_000), Nanos::ZERO, length, false);
        let second = busy.measure(MICROS(1_000), Nanos::ZERO, length, true);
        let last = busy.measure(MICROS(1_000), length, Nanos::ZERO, false);
        assert_eq!([first, second, last], [MICROS(1_000), MICROS(1_000), MICROS(300)]);
    }

    proptest! {
        /// The program is slower than the GPU, and each fence covers several launches.
        #[test]
        fn the_cost_of_work_is_busy_time(kernels in prop::collection::vec((1..200u64, 1..20u64), 500..1_000)) {
            let (mut busy, mut measured, mut cost) = (BusyTime::default(), Nanos::ZERO, Nanos::ZERO);
            for (kernel, launches) in kernels {
                // Each launch takes the program twice as long as the GPU takes for the kernel.
                let ended = MICROS(kernel * launches).min(MAX_CARRIED);
                cost += ended;
                measured += busy.measure(ended * 2, ended, Nanos::ZERO, false);
            }
            prop_assert!(measured <= cost && cost - measured <= MAX_CARRIED, "{measured:?} of {cost:?}");
        }

        #[test]
        fn no_more_time_is_busy_than_has_passed(
            steps in prop::collection::vec((0..5_000u64, 0..20_000u64, 0..9_000u64, any::<bool>()), 1..100),
        ) {
            let (mut busy, mut measured, mut passed) = (BusyTime::default(), Nanos::ZERO, Nanos::ZERO);
            for (length, ended, queued, is_always_busy) in steps {
                measured += busy.measure(MICROS(length), MICROS(ended), MICROS(queued), is_always_busy);
                passed += MICROS(length);
                prop_assert!(measured <= passed);
            }
        }
    }
}
