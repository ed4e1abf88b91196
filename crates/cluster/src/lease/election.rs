//! The leader election without IO: it receives the time and the state of the lease, and returns
//! what to do.

use std::time::Duration;

/// Durations of the election.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTiming {
    /// Another replica takes over when the leader has not renewed its lease for this long.
    pub duration: Duration,
    /// A leader that could not renew its lease for this long stops leading. It is shorter than
    /// `duration`, so that the leader's last requests have arrived before another replica takes
    /// over.
    pub renew_within: Duration,
    /// Time between two polls of the lease.
    pub retry: Duration,
}

/// A takeover takes at most 8 + 1 seconds plus the time of a list: under 15 s with a list of 5 s.
impl Default for LeaseTiming {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(8),
            renew_within: Duration::from_secs(5),
            retry: Duration::from_secs(1),
        }
    }
}

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
    /// Start of the last write that succeeded.
    renewed: Option<Duration>,
    /// Number of times this candidate started to lead.
    term: u64,
    /// True if another replica may have led since this candidate last led.
    is_interrupted: bool,
}

impl Election {
    /// Returns a candidate. The identity must be unique and must change with every restart.
    #[must_use]
    pub fn new(identity: String, timing: LeaseTiming) -> Self {
        Self { identity, timing, seen: None, renewed: None, term: 0, is_interrupted: true }
    }

    /// Takes in the state of the lease and returns what to do.
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
    /// that it was deleted, and may lead until its time is over.
    fn observe_missing(&mut self, now: Duration) -> LeaseStep {
        let is_first = self.seen.is_none() && self.term == 0;
        if is_first || self.leads(now) {
            return LeaseStep::Take(None);
        }
        self.is_interrupted = true;
        let unknown =
            || LeaseRecord { holder: String::new(), version: "?".into(), duration: self.timing.duration };
        let (known, since) = self.seen.get_or_insert_with(|| (unknown(), now));
        if !known.version.is_empty() {
            known.version.clear();
            *since = now;
        }
        if now.saturating_sub(*since) >= known.duration { LeaseStep::Take(None) } else { LeaseStep::Wait }
    }

    /// Records a successful write that started at `begun`.
    pub fn record_write(&mut self, begun: Duration) {
        self.renewed = Some(begun);
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
        self.renewed.is_some_and(|renewed| now.saturating_sub(renewed) < self.timing.renew_within)
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    fn held(holder: &str, version: &str) -> Option<LeaseRecord> {
        Some(LeaseRecord { holder: holder.into(), version: version.into(), duration: seconds(8) })
    }

    #[test]
    fn takes_a_free_lease_at_once_and_a_held_one_after_it_expires() {
        let mut me = Election::new("me".into(), LeaseTiming::default());
        assert_eq!(me.observe(seconds(0), None), LeaseStep::Take(None));
        assert_eq!(me.observe(seconds(0), held("you", "1")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(7), held("you", "2")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(14), held("you", "2")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(15), held("you", "2")), LeaseStep::Take(Some("2".into())));
        assert_eq!(me.observe(seconds(15), held("", "3")), LeaseStep::Take(Some("3".into())));
        assert!(!me.leads(seconds(15)));
    }

    #[test]
    fn a_leader_that_cannot_renew_stops_before_another_starts() {
        let mut me = Election::new("me".into(), LeaseTiming::default());
        me.record_write(seconds(10));
        assert!(me.leads(seconds(14)));
        assert!(!me.leads(seconds(15)));
        assert_eq!(me.observe(seconds(20), held("me", "4")), LeaseStep::Take(Some("4".into())));
        me.record_write(seconds(20));
        assert_eq!(me.observe(seconds(21), held("you", "5")), LeaseStep::Wait);
        assert!(!me.leads(seconds(21)), "another replica took the lease");
    }

    #[test]
    fn starts_a_new_term_when_another_replica_may_have_led() {
        let mut me = Election::new("me".into(), LeaseTiming::default());
        me.observe(seconds(0), None);
        me.record_write(seconds(0));
        assert_eq!(me.term(), 1);
        // No connection for a minute, and no other replica took the lease.
        assert_eq!(me.observe(seconds(60), held("me", "1")), LeaseStep::Take(Some("1".into())));
        me.record_write(seconds(60));
        assert_eq!(me.term(), 1);
        // No connection again. Another replica took the lease and released it, and the answer to
        // the write is lost.
        assert_eq!(me.observe(seconds(120), held("", "3")), LeaseStep::Take(Some("3".into())));
        assert_eq!(me.observe(seconds(121), held("me", "4")), LeaseStep::Take(Some("4".into())));
        me.record_write(seconds(121));
        assert_eq!(me.term(), 2);
        // The lease is deleted while this candidate leads, and while it does not.
        assert_eq!(me.observe(seconds(122), None), LeaseStep::Take(None));
        me.record_write(seconds(122));
        assert_eq!(me.term(), 2);
        assert_eq!(
            me.observe(seconds(180), None),
            LeaseStep::Wait,
            "another replica may have held the lease"
        );
        assert_eq!(me.observe(seconds(188), None), LeaseStep::Take(None));
        me.record_write(seconds(188));
        assert_eq!(me.term(), 3);
    }

    #[test]
    fn waits_for_a_deleted_lease_as_for_a_held_one() {
        let mut me = Election::new("me".into(), LeaseTiming::default());
        assert_eq!(me.observe(seconds(0), held("you", "1")), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(7), None), LeaseStep::Wait, "the holder still leads");
        assert_eq!(me.observe(seconds(14), None), LeaseStep::Wait);
        assert_eq!(me.observe(seconds(15), None), LeaseStep::Take(None));
        assert_eq!(
            me.observe(seconds(15), held("you", "2")),
            LeaseStep::Wait,
            "the holder created the lease again"
        );
    }

    proptest! {
        /// Three candidates poll one lease at random times. Some writes fail, and the lease is
        /// deleted once.
        #[test]
        fn never_has_two_leaders(
            steps in prop::collection::vec((0..3usize, 0..3000u64, 0..5u8), 1..200),
            deleted in 0..200usize,
        ) {
            let mut candidates: Vec<Election> =
                (0..3).map(|number| Election::new(format!("c{number}"), LeaseTiming::default())).collect();
            let mut lease = held("c0", "0");
            candidates[0].record_write(Duration::ZERO);
            for candidate in &mut candidates[1..] {
                candidate.observe(Duration::ZERO, lease.clone());
            }
            let mut now = Duration::ZERO;
            let mut version = 0;
            for (step, (number, pause, luck)) in steps.into_iter().enumerate() {
                now += Duration::from_millis(pause);
                if step == deleted {
                    lease = None;
                }
                if let LeaseStep::Take(expected) = candidates[number].observe(now, lease.clone())
                    && luck > 0
                    && expected == lease.as_ref().map(|lease| lease.version.clone())
                {
                    version += 1;
                    lease = held(&format!("c{number}"), &version.to_string());
                    // The answer to the write may be lost, so that the candidate does not know of
                    // it.
                    if luck > 1 {
                        candidates[number].record_write(now);
                    }
                }
                let leaders = candidates.iter().filter(|candidate| candidate.leads(now)).count();
                prop_assert!(leaders <= 1, "{leaders} leaders");
            }
        }
    }
}
