//! Decides when the account of a container is read.

use crate::rate_limit::RateLimit;

/// Number of slots per second that the arbiter reads in one account. An account with 512 processes is then
/// read every 10 ms, and one with 50 processes at every wake-up.
const MAX_SLOTS_PER_SECOND: u64 = 50_000;

/// Interval in nanoseconds between two reads of an account whose container has demand but sends no wake-up.
const BUSY_INTERVAL_NS: u64 = 1_000_000;

/// Interval in nanoseconds between two reads of the account of a container that wants nothing.
const IDLE_INTERVAL_NS: u64 = 400_000_000;

/// The past reads of one account.
#[derive(Debug)]
pub(crate) struct ReadSchedule {
    slots: RateLimit,
    /// Time of the last read, or `None` if the container has sent a wake-up since.
    read_at: Option<u64>,
}

impl Default for ReadSchedule {
    fn default() -> Self {
        Self { slots: RateLimit::per_second(MAX_SLOTS_PER_SECOND), read_at: None }
    }
}

impl ReadSchedule {
    /// Returns whether the account must be read now. `is_idle` tells whether the container wanted nothing when
    /// the account was last read.
    pub(crate) fn is_due(&self, now: u64, is_idle: bool) -> bool {
        let interval = if is_idle { IDLE_INTERVAL_NS } else { BUSY_INTERVAL_NS };
        self.slots.is_open(now) && self.read_at.is_none_or(|read_at| now.saturating_sub(read_at) >= interval)
    }

    /// Records that so many slots were read.
    pub(crate) fn record(&mut self, now: u64, slots: usize) {
        self.slots.charge(now, slots as u64);
        self.read_at = Some(now);
    }

    /// Records a wake-up of the container.
    pub(crate) fn wake(&mut self) {
        self.read_at = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_NS: u64 = 50_000;
    const SECOND_NS: u64 = 1_000_000_000;

    /// Returns how often an account is read in a second, with a step every 50 µs.
    fn reads(slots: usize, is_idle: bool, wakes: bool) -> usize {
        let mut schedule = ReadSchedule::default();
        let times = (SECOND_NS..2 * SECOND_NS).step_by(usize::try_from(STEP_NS).unwrap());
        let is_read = |&now: &u64| {
            if wakes {
                schedule.wake();
            }
            let is_due = schedule.is_due(now, is_idle);
            if is_due {
                schedule.record(now, slots);
            }
            is_due
        };
        times.filter(is_read).count()
    }

    #[test]
    fn an_account_is_read_at_every_wake_up_unless_it_has_many_slots() {
        assert_eq!(reads(1, false, true), 20_000);
        assert!((1_000..1_015).contains(&reads(50, false, true)));
        assert!((96..102).contains(&reads(512, false, true)));
        assert_eq!(reads(512, true, true), reads(512, false, true), "an idle account is read no more often");
    }

    #[test]
    fn an_account_without_wake_ups_is_polled() {
        assert_eq!(reads(1, false, false), 1_000);
        assert_eq!(reads(1, true, false), 3);
    }
}
