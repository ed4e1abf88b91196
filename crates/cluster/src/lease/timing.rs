//! The durations of the election, and how they follow the latency of the API server.

use std::time::Duration;

/// Durations of the election.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    /// Another replica takes over when the leader has not renewed its lease for this long.
    pub duration: Duration,
    /// A leader that could not renew its lease for this long stops leading: it sends no more
    /// requests. It is shorter than `duration`, so that its last requests have ended before another
    /// replica takes over.
    pub renew_within: Duration,
    /// Time between two polls of the lease.
    pub retry: Duration,
}

/// Longest lease of a slow API server, as a multiple of the shortest one.
const MAX_STRETCH: u32 = 8;

/// Duration of the lease as a multiple of the API server's latency. The leader must have two answers
/// in 0.65 of the duration, so this leaves twice the time that it needs.
const LATENCIES_PER_LEASE: u32 = 6;

/// A takeover takes at most 2.25 seconds plus the time of a list, unless the API server is slow.
impl Default for LeaseTiming {
    fn default() -> Self {
        Self::with_duration(2)
    }
}

impl LeaseTiming {
    /// Returns the timing for a lease of this duration.
    #[must_use]
    pub fn with_duration(seconds: u32) -> Self {
        let duration = Duration::from_secs(seconds.into());
        Self { duration, renew_within: duration * 13 / 20, retry: duration / 8 }
    }

    /// Returns the time since the last renewal at which the leader aborts requests that it sent
    /// before it stopped leading. The rest of `duration` is for the abort to reach the API server.
    #[must_use]
    pub fn abort_within(&self) -> Duration {
        (self.renew_within + self.duration) / 2
    }

    /// Returns the duration of the lease at this latency of the API server, in whole seconds. A
    /// Lease object cannot hold fractions.
    pub(super) fn duration_at(&self, latency: Duration) -> Duration {
        let wanted = latency * LATENCIES_PER_LEASE;
        let wanted = Duration::from_secs(wanted.as_secs() + u64::from(wanted.subsec_nanos() > 0));
        wanted.clamp(self.duration, self.longest())
    }

    /// Returns the longest duration that a replica with this timing writes.
    pub(super) fn longest(&self) -> Duration {
        self.duration * MAX_STRETCH
    }

    /// Returns the same timing for a lease of another duration.
    pub(super) fn stretched(&self, duration: Duration) -> Self {
        let stretch = duration.as_secs_f64() / self.duration.as_secs_f64();
        Self { duration, renew_within: self.renew_within.mul_f64(stretch), retry: self.retry }
    }

    /// Returns the timeout of a request about the lease at this latency of the API server.
    pub(super) fn timeout_at(&self, latency: Duration) -> Duration {
        (latency * 3).clamp(self.renew_within / 2, self.longest() / 4)
    }
}

/// Latency of the API server: the longest recent one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latency(Duration);

impl Latency {
    /// Takes in the latency of a request, or the timeout of one without an answer.
    pub(super) fn record(&mut self, took: Duration) {
        // At four requests a second, half of a peak is forgotten after 11 s.
        self.0 = took.max(self.0 * 63 / 64);
    }

    pub(super) fn get(self) -> Duration {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    #[test]
    fn requests_end_between_the_end_of_the_leadership_and_a_takeover() {
        for seconds in [1, 2, 8, 60] {
            let timing = LeaseTiming::with_duration(seconds);
            assert!(timing.retry * 2 < timing.renew_within, "{timing:?}");
            for timing in [timing, timing.stretched(timing.longest())] {
                assert!(timing.renew_within < timing.abort_within(), "{timing:?}");
                assert!(timing.abort_within() < timing.duration, "{timing:?}");
            }
        }
    }

    #[test]
    fn a_slow_api_server_makes_the_lease_longer() {
        let timing = LeaseTiming::with_duration(2);
        let at = |latency| timing.duration_at(millis(latency)).as_secs();
        assert_eq!([0, 333, 334, 500, 1000, 9000].map(at), [2, 2, 3, 3, 6, 16]);
        let stretched = timing.stretched(Duration::from_secs(4));
        assert_eq!((stretched.renew_within, stretched.retry), (millis(2600), millis(250)));
        assert_eq!(
            [0, 1000, 9000].map(|latency| timing.timeout_at(millis(latency))),
            [millis(650), millis(3000), millis(4000)]
        );
    }

    #[test]
    fn a_peak_of_the_latency_is_forgotten_slowly() {
        let mut latency = Latency::default();
        latency.record(millis(1000));
        latency.record(millis(10));
        assert!(latency.get() > millis(980));
        (0..400).for_each(|_| latency.record(millis(10)));
        assert_eq!(latency.get(), millis(10));
    }
}
