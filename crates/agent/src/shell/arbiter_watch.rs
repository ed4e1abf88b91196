//! Tells since when the arbiter has worked without a pause.
//!
//! While the arbiter pauses, the libraries hold their containers to their shares alone, and no windows
//! are recorded. The GPU time of containers cannot be compared with windows then, nor for a while
//! afterwards, because the driver reports late.

/// Time in nanoseconds between two publications of the arbiter that counts as a pause. It publishes every
/// second.
const PAUSE_NS: u64 = 3_000_000_000;

/// Time in nanoseconds after a pause until GPU times count again.
const RECOVERY_NS: u64 = 10_000_000_000;

/// Publications of the arbiter as the agent sees them. All times are in nanoseconds, by
/// [`futex::now`](tessera_limits::futex::now).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ArbiterWatch {
    /// Time of the last publication, and of the last call.
    last: (u64, u64),
    steady_since: u64,
}

impl ArbiterWatch {
    /// Returns whether the arbiter has worked without a pause for long enough. `published` is the time of
    /// its newest values.
    pub(super) fn is_steady(&mut self, now: u64, published: u64) -> bool {
        let (published_before, seen_before) = std::mem::replace(&mut self.last, (published, now));
        let gaps = [
            now.saturating_sub(published),
            published.saturating_sub(published_before),
            now.saturating_sub(seen_before),
        ];
        if gaps.into_iter().any(|gap| gap > PAUSE_NS) {
            self.steady_since = now;
        }
        now.saturating_sub(self.steady_since) >= RECOVERY_NS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Returns the seconds in which the arbiter counts as steady, for publications at these seconds.
    fn steady(seconds: impl Iterator<Item = (u64, u64)>) -> Vec<u64> {
        let mut watch = ArbiterWatch::default();
        let is_steady = |(now, published): &(u64, u64)| watch.is_steady(now * SECOND, published * SECOND);
        seconds.filter(is_steady).map(|(now, _)| now).collect()
    }

    #[test]
    fn an_arbiter_is_steady_ten_seconds_after_its_start() {
        assert_eq!(steady((100..113).map(|now| (now, now))), [110, 111, 112]);
    }

    #[test]
    fn a_pause_of_the_arbiter_or_of_the_whole_agent_starts_again() {
        // The arbiter publishes nothing from second 112 to 120.
        let published = |now: u64| if (112..=120).contains(&now) { 112 } else { now };
        let expected = [110, 111, 112, 113, 114, 115, 131, 132];
        assert_eq!(steady((100..133).map(|now| (now, published(now)))), expected);
        // The whole agent is stopped from second 112 to 120.
        let runs = (100..=112).chain(120..=131).map(|now| (now, now));
        assert_eq!(steady(runs), [110, 111, 112, 130, 131]);
    }
}
