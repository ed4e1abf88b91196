//! How much work a process may have queued at a GPU, and how long who has queued enough waits.

/// More queued work than this holds the caller back, by the time it will take.
pub const QUEUE: u64 = 2_500_000;

/// Nobody is held back for longer than this: work may wait for other work that is not launched yet.
pub const HOLD: u64 = 250_000_000;

/// How long to sleep before there can be room, where the work that must not end meanwhile is `sure` by estimate, and `part` of such
/// work takes as long as [`QUEUE`]. Estimates may be wrong: of much work only a quarter is slept through.
#[must_use]
pub fn until_room(sure: u64, part: u64) -> u64 {
    let sure = sure.saturating_mul(QUEUE) / part.max(1);
    (sure / 6 * 5).clamp(QUEUE / 10, (sure / 4).max(QUEUE / 2)).min(HOLD)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn little_work_is_nearly_slept_through_and_much_in_steps() {
        assert_eq!(until_room(1_200_000, QUEUE), 1_000_000);
        assert_eq!(
            until_room(600_000, QUEUE / 2),
            1_000_000,
            "one of two streams has the GPU for half the time"
        );
        assert_eq!(until_room(2_400_000, QUEUE), QUEUE / 2);
        assert_eq!(until_room(40_000_000, QUEUE), 10_000_000);
        assert_eq!(until_room(60_000_000_000, QUEUE), HOLD, "kernels of a minute");
    }

    proptest! {
        #[test]
        fn nobody_sleeps_for_longer_than_he_may_be_held(sure: u64, part: u64) {
            prop_assert!((QUEUE / 10..=HOLD).contains(&until_room(sure, part)));
        }
    }
}
