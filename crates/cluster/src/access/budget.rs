//! Limits how often something may happen. Time is an argument.

use std::time::Duration;

/// A rate with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    /// Time between two events in the long run.
    pub(super) interval: Duration,
    /// Number of events that may come at once after a pause.
    pub(super) burst: u32,
}

/// What is left of a rate, as the time until which it is used up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Budget {
    spent_until: Duration,
}

impl Budget {
    /// Takes one event from the budget. Returns false if none is left.
    pub(super) fn take(&mut self, now: Duration, rate: Rate) -> bool {
        let after = self.spent_until.max(now) + rate.interval;
        let is_left = after <= now + rate.interval * rate.burst;
        if is_left {
            self.spent_until = after;
        }
        is_left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_permitted_and_then_one_event_per_interval() {
        let rate = Rate { interval: Duration::from_secs(1), burst: 3 };
        let mut budget = Budget::default();
        let mut taken = |millis: u64| budget.take(Duration::from_millis(millis), rate);
        assert_eq!([taken(5000), taken(5000), taken(5000), taken(5000)], [true, true, true, false]);
        assert_eq!([taken(5999), taken(6000), taken(6000)], [false, true, false]);
        assert_eq!([taken(60_000), taken(60_000), taken(60_000), taken(60_000)], [true, true, true, false]);
    }
}
