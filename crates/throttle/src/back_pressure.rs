//! Back-pressure: how much work a process may queue at a GPU, and how long a stream with a full queue
//! waits before it polls again.

use crate::nanos::Nanos;

/// Work, in real time, that a process may have queued at a GPU while other tenants wait for short times. A
/// launch beyond it waits. The next tenant of the GPU waits for at most about this long until queued work has
/// ended.
pub const QUEUE_LIMIT: Nanos = Nanos::from_micros(2_500);

/// Work, in real time, that a process may have queued while no other tenant suffers from it: the program may do
/// other things for so long without leaving the GPU idle.
pub const DEEP_QUEUE_LIMIT: Nanos = Nanos::from_millis(20);

/// What all streams of a process may have queued at a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimit {
    /// Estimated work. It is more than `time` where streams run concurrently, or where estimates are too high:
    /// then the work ends in less time.
    pub work: Nanos,
    /// Real time in which that work ends.
    pub time: Nanos,
}

/// Longest time that a launch waits for room in the queue. After that it proceeds, because the queued
/// work may depend on work that is not launched yet.
pub const MAX_HOLD: Nanos = Nanos::from_millis(250);

/// Returns how long a stream sleeps before there can be room in its queue.
///
/// `remaining` is the work that must still be queued at that moment, and `limit` what all streams may have queued,
/// both in real time. Estimates may be wrong, so only a quarter of much work is slept through at once.
#[must_use]
pub fn until_room(remaining: Nanos, limit: Nanos) -> Nanos {
    let limit = limit.min(QUEUE_LIMIT);
    (remaining / 6 * 5).clamp(limit / 10, (remaining / 4).max(limit / 2)).min(MAX_HOLD)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn little_work_is_nearly_slept_through_and_much_work_in_steps() {
        let micros = Nanos::from_micros;
        assert_eq!(until_room(micros(1_200), QUEUE_LIMIT), micros(1_000));
        assert_eq!(
            until_room(micros(1_200), DEEP_QUEUE_LIMIT),
            micros(1_000),
            "room is noticed as soon where more may be queued"
        );
        assert_eq!(until_room(micros(2_400), QUEUE_LIMIT), QUEUE_LIMIT / 2);
        assert_eq!(until_room(micros(40_000), QUEUE_LIMIT), micros(10_000));
        assert_eq!(until_room(Nanos::from_secs(60), QUEUE_LIMIT), MAX_HOLD, "kernels of a minute");
    }

    proptest! {
        #[test]
        fn no_sleep_is_longer_than_the_longest_hold(remaining: u64, limit in QUEUE_LIMIT.0..=DEEP_QUEUE_LIMIT.0) {
            let sleep = until_room(Nanos(remaining), Nanos(limit));
            prop_assert!((QUEUE_LIMIT / 10..=MAX_HOLD).contains(&sleep));
        }
    }
}
