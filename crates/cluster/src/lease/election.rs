//! The leader election without IO: it receives the time and the state of the lease, and returns
//! what to do.

use std::time::Duration;

use super::timing::{Latency, LeaseTiming};

/// The lease as read from the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// Identity of the holder, or empty if the lease was released.
    pub holder: String,
    /// Resource version, which changes with every write.
    pub version: String,
    /// Time without renewal after which the lease expires, as set by its holder.
    pub duration: Duration,
}

/// Next action of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseStep {
    /// Do nothing, because another replica holds the lease.
    Wait,
    /// Write the lease if it still has this version, or create it if there is no version.
    Take(Option<String>),
}

/// One candidate. The clocks of different hosts are never compared. Only the time for which this
/// candidate has seen the lease unchanged counts.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    timing: LeaseTiming,
    /// Last state of the lease, and when it was first seen in this state.
    seen: Option<(LeaseRecord, Duration)>,
    /// Start of the last write that succeeded, and the duration that counts from there on.
    renewed: Option<(Duration, Duration)>,
    /// Shortest duration of the next write. The leader already leads no longer than that, because the
    /// write may succeed without an answer.
    planned: Duration,
    latency: Latency,
    /// Number of times this candidate started to lead.
    term: u64,
    /// True if another replica may have led since this candidate last led.
    is_interrupted: bool,
}

impl Election {
    /// Returns a candidate. The identity must be unique and must change with every restart.
    #[must_use]
    pub fn new(identity: String, timing: LeaseTiming) -> Self {
        Self {
            identity,
            timing,
            seen: None,
            renewed: None,
            planned: timing.duration,
            latency: Latency::default(),
            term: 0,
            is_interrupted: true,
        }
    }

    /// Takes in the state of the lease and returns what to do. `now` is not before the answer to the
    /// read: the holder may have renewed the lease while it was read.
    pub fn observe(&mut self, now: Duration, found: Option<LeaseRecord>) -> LeaseStep {
        let Some(found) = found else { return self.observe_missing(now) };
        let version = Some(found.version.clone());
        if found.holder == self.identity {
            return LeaseStep::Take(version);
        }
        // Another replica took the lease, and may have released it.
        self.renewed = None;
        self.is_interrupted = true;
        if found.holder.is_empty() {
            return LeaseStep::Take(version);
        }
        match &self.seen {
            Some((known, since)) if *known == found => {
                if now.saturating_sub(*since) >= found.duration {
                    LeaseStep::Take(version)
                } else {
                    LeaseStep::Wait
                }
            }
            _ => {
                self.seen = Some((found, now));
                LeaseStep::Wait
            }
        }
    }

    /// Handles a missing lease, which never existed or was deleted. Its last holder may not know
    /// that it was deleted, and may lead for the longest duration that it may have written.
    fn observe_missing(&mut self, now: Duration) -> LeaseStep {
        let is_first = self.seen.is_none() && self.term == 0;
        if is_first || self.leads(now) {
            return LeaseStep::Take(None);
        }
        self.is_interrupted = true;
        let missing = |duration| LeaseRecord { holder: String::new(), version: String::new(), duration };
        let longest = self.timing.longest();
        match &self.seen {
            Some((known, since)) if known.version.is_empty() => {
                if now.saturating_sub(*since) >= known.duration {
                    LeaseStep::Take(None)
                } else {
                    LeaseStep::Wait
                }
            }
            known => {
                let duration = known.as_ref().map_or(longest, |(known, _)| known.duration.max(longest));
                self.seen = Some((missing(duration), now));
                LeaseStep::Wait
            }
        }
    }

    /// Records the latency of a request, or the timeout of one without an answer.
    pub fn record_latency(&mut self, took: Duration) {
        self.latency.record(took);
    }

    /// Returns the timeout of the next request.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        self.timing.timeout_at(self.latency.get())
    }

    /// Returns the duration of the lease that the next write sets.
    #[must_use]
    pub fn next_duration(&self) -> Duration {
        self.planned.max(self.timing.duration_at(self.latency.get()))
    }

    /// Records a successful write that started at `begun` and set this duration.
    pub fn record_write(&mut self, begun: Duration, duration: Duration) {
        self.planned = self.timing.duration_at(self.latency.get());
        self.renewed = Some((begun, duration.min(self.planned)));
        self.seen = None;
        if std::mem::take(&mut self.is_interrupted) {
            self.term += 1;
        }
    }

    /// Returns a number that grows when this candidate starts to lead after another one may have
    /// led. State from an earlier term may be stale.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Returns whether this candidate leads and may write as the leader.
    #[must_use]
    pub fn leads(&self, now: Duration) -> bool {
        self.held(now).is_some_and(|(since, timing)| since < timing.renew_within)
    }

    /// Returns the time since the last renewal and the timing that counts from there on, or `None` if
    /// this candidate does not hold the lease.
    #[must_use]
    pub fn held(&self, now: Duration) -> Option<(Duration, LeaseTiming)> {
        let (renewed, duration) = self.renewed?;
        Some((now.saturating_sub(renewed), self.timing.stretched(duration)))
    }

    /// Returns the time until the next poll: the retry interval, or less if the lease of another
    /// replica expires before.
    #[must_use]
    pub fn next_poll(&self, now: Duration) -> Duration {
        let expires = self.seen.as_ref().map(|(found, since)| (*since + found.duration).saturating_sub(now));
        // A lease that has expired could not be taken, so the next try is not at once.
        let expires = expires.filter(|left| !left.is_zero()).unwrap_or(self.timing.retry);
        expires.min(self.timing.retry)
    }

    /// Stops leading.
    pub fn resign(&mut self) {
        self.renewed = None;
    }

    /// Returns the other holder of the lease, as last seen.
    #[must_use]
    pub fn other_holder(&self) -> Option<&str> {
        self.seen.as_ref().map(|(found, _)| found.holder.as_str()).filter(|holder| !holder.is_empty())
    }

    /// Returns the identity of this candidate.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns the durations of the election.
    #[must_use]
    pub fn timing(&self) -> LeaseTiming {
        self.timing
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: LeaseTiming = LeaseTiming {
        duration: Duration::from_secs(8),
        renew_within: Duration::from_secs(5),
        retry: Duration::from_secs(1),
    };

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    fn held(holder: &str, version: &str) -> Option<LeaseRecord> {
        Some(LeaseRecord { holder: holder.into(), version: version.into(), duration: seconds(8) })
    }

    #[test]
    fn takes_a_free_lease_at_once_and_a_held_one_after_it_expires() {
        let mut me = Election::new("me".into(), LONG);
        assert_eq!(me.observe(seconds(0), None), LeaseStep::Take(None));
        assert_eq!(me.observe(seconds(0), held("you", "1")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(7), held("you", "2")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(14), held("you", "2")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(15), held("you", "2")), LeaseStep::Take(Some("2".into())));
        assert_eq!(me.observe(seconds(15), held("", "3")), LeaseStep::Take(Some("3".into())));
        assert!(!me.leads(seconds(15)));
    }

    #[test]
    fn polls_when_the_lease_of_another_replica_expires() {
        let mut me = Election::new("me".into(), LONG);
        assert_eq!(me.next_poll(seconds(0)), seconds(1));
        me.observe(seconds(0), held("you", "1"));
        assert_eq!(me.next_poll(seconds(1)), seconds(1));
        assert_eq!(me.next_poll(Duration::from_millis(7300)), Duration::from_millis(700));
        assert_eq!(me.next_poll(seconds(8)), seconds(1), "the write at this moment failed");
    }

    #[test]
    fn a_leader_that_cannot_renew_stops_before_another_starts() {
        let mut me = Election::new("me".into(), LONG);
        me.record_write(seconds(10), LONG.duration);
        assert!(me.leads(seconds(14)));
        assert!(!me.leads(seconds(15)));
        assert_eq!(me.observe(seconds(20), held("me", "4")), LeaseStep::Take(Some("4".into())));
        me.record_write(seconds(20), LONG.duration);
        assert_eq!(me.observe(seconds(21), held("you", "5")), LeaseStep::Wait);
        assert!(!me.leads(seconds(21)), "another replica took the lease");
    }

    #[test]
    fn a_shorter_lease_counts_before_it_is_written() {
        let mut me = Election::new("me".into(), LONG);
        me.record_latency(seconds(2));
        assert_eq!(me.next_duration(), seconds(12));
        me.record_write(seconds(0), seconds(12));
        assert!(me.leads(Duration::from_millis(7400)));
        (0..1000).for_each(|_| me.record_latency(Duration::ZERO));
        assert_eq!(me.next_duration(), seconds(12), "the leader counts on 12 s");
        me.record_write(seconds(10), seconds(12));
        assert_eq!(me.next_duration(), seconds(8));
        assert!(!me.leads(seconds(15)), "the leader counts on 8 s");
    }

    #[test]
    fn starts_a_new_term_when_another_replica_may_have_led() {
        let mut me = Election::new("me".into(), LONG);
        me.observe(seconds(0), None);
        me.record_write(seconds(0), LONG.duration);
        assert_eq!(me.term(), 1);
        // No connection for a minute, and no other replica took the lease.
        assert_eq!(me.observe(seconds(60), held("me", "1")), LeaseStep::Take(Some("1".into())));
        me.record_write(seconds(60), LONG.duration);
        assert_eq!(me.term(), 1);
        // No connection again. Another replica took the lease and released it, and the answer to
        // the write is lost.
        assert_eq!(me.observe(seconds(120), held("", "3")), LeaseStep::Take(Some("3".into())));
        assert_eq!(me.observe(seconds(121), held("me", "4")), LeaseStep::Take(Some("4".into())));
        me.record_write(seconds(121), LONG.duration);
        assert_eq!(me.term(), 2);
        // The lease is deleted while this candidate leads, and while it does not.
        assert_eq!(me.observe(seconds(122), None), LeaseStep::Take(None));
        me.record_write(seconds(122), LONG.duration);
        assert_eq!(me.term(), 2);
        assert_eq!(
            me.observe(seconds(180), None),
            LeaseStep::Wait,
            "another replica may have held the lease"
        );
        assert_eq!(me.observe(seconds(244), None), LeaseStep::Take(None));
        me.record_write(seconds(244), LONG.duration);
        assert_eq!(me.term(), 3);
    }

    #[test]
    fn waits_for_a_deleted_lease_as_for_a_held_one() {
        let mut me = Election::new("me".into(), LONG);
        assert_eq!(me.observe(seconds(0), held("you", "1")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(7), None), LeaseStep::Wait, "the holder still leads");
        assert_eq!(me.observe(seconds(70), None), LeaseStep::Wait, "the last lease may have been longer");
        assert_eq!(me.observe(seconds(71), None), LeaseStep::Take(None));
        assert_eq!(
            me.observe(seconds(71), held("you", "2")),
            LeaseStep::Wait,
            "the holder created the lease again"
        );
    }
}
