//! Who leads, as a machine without IO: it is told the time and what the lease says, and answers what to do.

use std::time::Duration;

/// How long things take.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Others take over when a leader has not renewed its lease for so long.
    pub duration: Duration,
    /// A leader that could not renew for so long leads no more. Less than `duration`, so that it has stopped, and what it
    /// sent has arrived, before anybody takes over.
    pub renew_within: Duration,
    /// How often to look.
    pub retry: Duration,
}

/// A takeover takes at most 8 + 1 seconds and the time of a list: with a list of 5 s still under 15.
impl Default for Timing {
    fn default() -> Self {
        Self {
            duration: Duration::from_secs(8),
            renew_within: Duration::from_secs(5),
            retry: Duration::from_secs(1),
        }
    }
}

/// The lease as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Who holds it; empty if it was given up.
    pub holder: String,
    /// Changes with every write.
    pub version: String,
    /// For how long it holds without being renewed, as its holder says.
    pub duration: Duration,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing: somebody else holds it.
    Wait,
    /// Write it in our name, provided it is still of this version; without one, create it.
    Take(Option<String>),
}

/// One candidate. Clocks of different machines are never compared: what counts is how long a lease has been seen
/// unchanged.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    timing: Timing,
    /// What was last seen, and when it was first seen so.
    seen: Option<(Found, Duration)>,
    /// When the last write that succeeded was begun.
    renewed: Option<Duration>,
    /// How often we have come to lead.
    term: u64,
    /// Whether somebody else may have led since we did.
    is_interrupted: bool,
}

impl Election {
    /// A candidate. No two may have the same identity, nor one in two lives.
    #[must_use]
    pub fn new(identity: String, timing: Timing) -> Self {
        Self { identity, timing, seen: None, renewed: None, term: 0, is_interrupted: true }
    }

    /// Looks at the lease.
    pub fn look(&mut self, now: Duration, found: Option<Found>) -> Step {
        let Some(found) = found else { return self.look_at_none(now) };
        let version = Some(found.version.clone());
        if found.holder == self.identity {
            return Step::Take(version);
        }
        // Somebody else took it, and may have given it back.
        self.renewed = None;
        self.is_interrupted = true;
        if found.holder.is_empty() {
            return Step::Take(version);
        }
        match &self.seen {
            Some((known, since)) if *known == found => {
                if now.saturating_sub(*since) >= found.duration {
                    Step::Take(version)
                } else {
                    Step::Wait
                }
            }
            _ => {
                self.seen = Some((found, now));
                Step::Wait
            }
        }
    }

    /// There is none: there never was one, or somebody has deleted it. Whoever held it then does not know that yet, and leads on for as
    /// long as it may.
    fn look_at_none(&mut self, now: Duration) -> Step {
        let is_first = self.seen.is_none() && self.term == 0;
        if is_first || self.leads(now) {
            return Step::Take(None);
        }
        self.is_interrupted = true;
        let unknown = || Found { holder: String::new(), version: "?".into(), duration: self.timing.duration };
        let (known, since) = self.seen.get_or_insert_with(|| (unknown(), now));
        if !known.version.is_empty() {
            known.version.clear();
            *since = now;
        }
        if now.saturating_sub(*since) >= known.duration { Step::Take(None) } else { Step::Wait }
    }

    /// A write that was begun at `begun` has succeeded.
    pub fn taken(&mut self, begun: Duration) {
        self.renewed = Some(begun);
        self.seen = None;
        if std::mem::take(&mut self.is_interrupted) {
            self.term += 1;
        }
    }

    /// Grows whenever we come to lead after somebody else may have led: what we knew before may be out of date.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Whether we lead, and may write in that role.
    #[must_use]
    pub fn leads(&self, now: Duration) -> bool {
        self.renewed.is_some_and(|renewed| now.saturating_sub(renewed) < self.timing.renew_within)
    }

    /// Gives up leading.
    pub fn resign(&mut self) {
        self.renewed = None;
    }

    /// Who else holds it, as last seen.
    #[must_use]
    pub fn other_holder(&self) -> Option<&str> {
        self.seen.as_ref().map(|(found, _)| found.holder.as_str()).filter(|holder| !holder.is_empty())
    }

    /// Who we are.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// How long things take.
    #[must_use]
    pub fn timing(&self) -> Timing {
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

    fn held(holder: &str, version: &str) -> Option<Found> {
        Some(Found { holder: holder.into(), version: version.into(), duration: seconds(8) })
    }

    #[test]
    fn a_free_lease_is_taken_and_a_held_one_after_it_has_stood_still() {
        let mut me = Election::new("me".into(), Timing::default());
        assert_eq!(me.look(seconds(0), None), Step::Take(None));
        assert_eq!(me.look(seconds(0), held("you", "1")), Step::Wait);
        assert_eq!(me.look(seconds(7), held("you", "2")), Step::Wait);
        assert_eq!(me.look(seconds(14), held("you", "2")), Step::Wait);
        assert_eq!(me.look(seconds(15), held("you", "2")), Step::Take(Some("2".into())));
        assert_eq!(me.look(seconds(15), held("", "3")), Step::Take(Some("3".into())));
        assert!(!me.leads(seconds(15)));
    }

    #[test]
    fn a_leader_that_cannot_renew_stops_before_others_start() {
        let mut me = Election::new("me".into(), Timing::default());
        me.taken(seconds(10));
        assert!(me.leads(seconds(14)));
        assert!(!me.leads(seconds(15)));
        assert_eq!(me.look(seconds(20), held("me", "4")), Step::Take(Some("4".into())));
        me.taken(seconds(20));
        assert_eq!(me.look(seconds(21), held("you", "5")), Step::Wait);
        assert!(!me.leads(seconds(21)), "somebody else took it");
    }

    #[test]
    fn a_term_ends_when_somebody_else_may_have_led() {
        let mut me = Election::new("me".into(), Timing::default());
        me.look(seconds(0), None);
        me.taken(seconds(0));
        assert_eq!(me.term(), 1);
        // Cut off for a minute, and nobody took it.
        assert_eq!(me.look(seconds(60), held("me", "1")), Step::Take(Some("1".into())));
        me.taken(seconds(60));
        assert_eq!(me.term(), 1);
        // Cut off again; somebody took it and gave it back. The answer to our write is lost.
        assert_eq!(me.look(seconds(120), held("", "3")), Step::Take(Some("3".into())));
        assert_eq!(me.look(seconds(121), held("me", "4")), Step::Take(Some("4".into())));
        me.taken(seconds(121));
        assert_eq!(me.term(), 2);
        // Deleted by hand while we lead, and while we do not.
        assert_eq!(me.look(seconds(122), None), Step::Take(None));
        me.taken(seconds(122));
        assert_eq!(me.term(), 2);
        assert_eq!(me.look(seconds(180), None), Step::Wait, "somebody may have held it");
        assert_eq!(me.look(seconds(188), None), Step::Take(None));
        me.taken(seconds(188));
        assert_eq!(me.term(), 3);
    }

    #[test]
    fn a_deleted_lease_is_waited_for_like_a_held_one() {
        let mut me = Election::new("me".into(), Timing::default());
        assert_eq!(me.look(seconds(0), held("you", "1")), Step::Wait);
        assert_eq!(me.look(seconds(7), None), Step::Wait, "its holder leads on");
        assert_eq!(me.look(seconds(14), None), Step::Wait);
        assert_eq!(me.look(seconds(15), None), Step::Take(None));
        assert_eq!(me.look(seconds(15), held("you", "2")), Step::Wait, "made anew by its holder");
    }

    proptest! {
        /// Candidates that look at any times, some of whose writes fail, on one lease that checks versions and that somebody
        /// deletes once.
        #[test]
        fn never_two_at_a_time(
            steps in prop::collection::vec((0..3usize, 0..3000u64, 0..5u8), 1..200),
            deleted in 0..200usize,
        ) {
            let mut candidates: Vec<Election> =
                (0..3).map(|number| Election::new(format!("c{number}"), Timing::default())).collect();
            let mut lease = held("c0", "0");
            candidates[0].taken(Duration::ZERO);
            for candidate in &mut candidates[1..] {
                candidate.look(Duration::ZERO, lease.clone());
            }
            let mut now = Duration::ZERO;
            let mut version = 0;
            for (step, (number, pause, luck)) in steps.into_iter().enumerate() {
                now += Duration::from_millis(pause);
                if step == deleted {
                    lease = None;
                }
                if let Step::Take(expected) = candidates[number].look(now, lease.clone())
                    && luck > 0
                    && expected == lease.as_ref().map(|lease| lease.version.clone())
                {
                    version += 1;
                    lease = held(&format!("c{number}"), &version.to_string());
                    // The answer to the write may be lost.
                    if luck > 1 {
                        candidates[number].taken(now);
                    }
                }
                let leaders = candidates.iter().filter(|candidate| candidate.leads(now)).count();
                prop_assert!(leaders <= 1, "{leaders} leaders");
            }
        }
    }
}
