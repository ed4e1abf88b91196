//! Decides for which callers the API server is asked, and remembers its answers. Free of IO and of clocks.
//!
//! Callers without rights must neither flood the API server nor delay callers with rights. So a caller counts as
//! *known* if its token or its address was allowed recently, and reviews for strangers have budgets of their own.

use core::net::IpAddr;
use std::collections::HashMap;
use std::time::Duration;

use super::budget::{Budget, Rate};

/// Time for which an allowed caller is not reviewed again. A revocation has effect after it if the API server answers,
/// and after [`GRACE`] at the latest.
const ALLOWED: Duration = Duration::from_secs(60);

/// Time for which a refused caller is not reviewed again. A new right has effect after it.
const REFUSED: Duration = Duration::from_secs(5);

/// Time since the last review for which an allowed caller goes on while the API server does not answer.
const GRACE: Duration = Duration::from_secs(600);

/// Pause between two reviews of a caller that goes on without the API server.
const RETRY: Duration = Duration::from_secs(5);

/// Largest number of remembered answers. One needs about 200 bytes.
const MAX_ENTRIES: usize = 1024;

/// Largest number of remembered addresses. One needs about 100 bytes.
const MAX_PEERS: usize = 1024;

/// Reviews that may run at once, for known callers and for strangers each. A review is up to three API requests.
const MAX_IN_FLIGHT: usize = 4;

/// Reviews for one address: at most half of what all strangers have. Many users may share an address, so one of them
/// who sends wrong tokens must not use up the rate: with `n` of them a second, a new token succeeds at every `n / 5`th
/// attempt.
const OF_PEER: Rate = Rate { interval: Duration::from_millis(200), burst: 10 };

/// Reviews for all strangers together.
const OF_STRANGERS: Rate = Rate { interval: Duration::from_millis(100), burst: 20 };

/// Longest token. Tokens of service accounts have about 1,000 characters.
const MAX_TOKEN_BYTES: usize = 8192;

/// A token and the path for which it was sent, as their hash. The token itself is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AccessKey(pub [u8; 32]);

/// The answer of the API server about one caller and path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller may read the path.
    Allowed,
    /// The token is invalid.
    Unauthenticated,
    /// The user of this name may not read the path.
    Forbidden(String),
}

/// The kind of caller for which a review runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The token or the address was allowed recently.
    Known,
    /// All others.
    Stranger,
}

/// What to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The answer is known.
    Answer(Outcome),
    /// The API server has to be asked. [`AccessTable::finish`] must be called afterwards.
    Review(Caller),
    /// Too many reviews are wanted; the request is refused.
    Busy,
}

/// The answers of the API server, and the reviews that run.
#[derive(Debug, Default)]
pub struct AccessTable {
    entries: HashMap<AccessKey, Entry>,
    peers: HashMap<IpAddr, Peer>,
    of_strangers: Budget,
    /// Running reviews of known callers and of strangers.
    in_flight: [usize; 2],
}

#[derive(Debug)]
struct Entry {
    outcome: Outcome,
    /// End of the time without a new review.
    until: Duration,
    /// End of the time in which an allowed caller goes on without the API server.
    grace_until: Duration,
    is_under_review: bool,
}

#[derive(Debug, Default)]
struct Peer {
    budget: Budget,
    last_seen: Duration,
    /// End of the time in which the address counts as known.
    known_until: Duration,
}

/// Returns whether a text can be a token at all (RFC 6750), so that the API server need not be asked.
#[must_use]
pub fn is_token(text: &str) -> bool {
    let body = text.trim_end_matches('=');
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte);
    !body.is_empty() && text.len() <= MAX_TOKEN_BYTES && body.bytes().all(is_allowed)
}

impl AccessTable {
    /// Decides about a request from `peer` at the time `now`.
    pub fn begin(&mut self, now: Duration, key: AccessKey, peer: IpAddr) -> Step {
        if let Some(entry) = self.entries.get_mut(&key) {
            if now < entry.until {
                return Step::Answer(entry.outcome.clone());
            }
            if entry.outcome == Outcome::Allowed && now < entry.grace_until {
                // One review at a time is enough for one caller.
                if entry.is_under_review || self.in_flight[Caller::Known as usize] >= MAX_IN_FLIGHT {
                    return Step::Answer(Outcome::Allowed);
                }
                entry.is_under_review = true;
                return self.review(Caller::Known);
            }
        }
        let peer = self.peer(now, peer);
        let is_known = now < peer.known_until;
        if !peer.budget.take(now, OF_PEER) {
            return Step::Busy;
        }
        let caller = if is_known { Caller::Known } else { Caller::Stranger };
        let may_run = self.in_flight[caller as usize] < MAX_IN_FLIGHT
            && (is_known || self.of_strangers.take(now, OF_STRANGERS));
        if may_run { self.review(caller) } else { Step::Busy }
    }

    /// Records the end of a review. Returns the answer to the request: `None` if the API server gave none.
    pub fn finish(
        &mut self,
        now: Duration,
        (key, peer): (AccessKey, IpAddr),
        caller: Caller,
        outcome: Option<Outcome>,
    ) -> Option<Outcome> {
        self.in_flight[caller as usize] -= 1;
        let Some(outcome) = outcome else {
            let entry = self.entries.get_mut(&key)?;
            entry.is_under_review = false;
            entry.until = entry.grace_until.min(now + RETRY);
            return (now < entry.grace_until).then_some(Outcome::Allowed);
        };
        let is_allowed = outcome == Outcome::Allowed;
        if is_allowed {
            self.peer(now, peer).known_until = now + GRACE;
        }
        let (until, grace_until) =
            if is_allowed { (now + ALLOWED, now + GRACE) } else { (now + REFUSED, Duration::ZERO) };
        let entry = Entry { outcome: outcome.clone(), until, grace_until, is_under_review: false };
        if self.entries.contains_key(&key) || self.has_room(now, is_allowed) {
            self.entries.insert(key, entry);
        }
        Some(outcome)
    }

    fn review(&mut self, caller: Caller) -> Step {
        self.in_flight[caller as usize] += 1;
        Step::Review(caller)
    }

    /// Removes an entry if the table is full. Refusals never displace allowed callers.
    fn has_room(&mut self, now: Duration, for_allowed: bool) -> bool {
        if self.entries.len() < MAX_ENTRIES {
            return true;
        }
        self.entries.retain(|_, entry| now < entry.until.max(entry.grace_until) || entry.is_under_review);
        if self.entries.len() < MAX_ENTRIES {
            return true;
        }
        let removable = self.entries.iter().filter(|(_, entry)| {
            !entry.is_under_review && (for_allowed || entry.outcome != Outcome::Allowed)
        });
        // Refused callers have the shorter times, so they are removed first.
        let first =
            removable.min_by_key(|(_, entry)| entry.until.max(entry.grace_until)).map(|(key, _)| *key);
        first.is_some_and(|first| self.entries.remove(&first).is_some())
    }

    fn peer(&mut self, now: Duration, peer: IpAddr) -> &mut Peer {
        if !self.peers.contains_key(&peer) && self.peers.len() >= MAX_PEERS {
            // Known addresses are kept, and of the others those seen last.
            let order = |peer: &Peer| (now < peer.known_until, peer.last_seen);
            let first = self.peers.iter().min_by_key(|(_, peer)| order(peer)).map(|(address, _)| *address);
            first.and_then(|first| self.peers.remove(&first));
        }
        let peer = self.peers.entry(peer).or_default();
        peer.last_seen = now;
        peer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMETHEUS: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 1));

    fn key(number: u64) -> AccessKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        AccessKey(bytes)
    }

    fn stranger(number: u64) -> IpAddr {
        let [.., a, b, c] = number.to_be_bytes();
        IpAddr::from([11, a, b, c])
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Begins a request and ends its review with this outcome. Returns the answer, or `None` if none is known.
    fn ask(
        table: &mut AccessTable,
        now: Duration,
        (number, peer): (u64, IpAddr),
        outcome: Option<Outcome>,
    ) -> Option<Outcome> {
        match table.begin(now, key(number), peer) {
            Step::Answer(known) => Some(known),
            Step::Review(caller) => table.finish(now, (key(number), peer), caller, outcome),
            Step::Busy => panic!("busy"),
        }
    }

    #[test]
    fn answers_are_remembered_for_their_time() {
        for (outcome, seconds) in [
            (Outcome::Allowed, 60),
            (Outcome::Unauthenticated, 5),
            (Outcome::Forbidden("system:serviceaccount:a:b".to_owned()), 5),
        ] {
            let mut table = AccessTable::default();
            assert_eq!(
                ask(&mut table, at(100), (1, PROMETHEUS), Some(outcome.clone())),
                Some(outcome.clone())
            );
            let before = at(100 + seconds) - Duration::from_millis(1);
            assert_eq!(table.begin(before, key(1), PROMETHEUS), Step::Answer(outcome.clone()));
            assert!(matches!(table.begin(at(100 + seconds), key(1), PROMETHEUS), Step::Review(_)));
            assert!(
                matches!(table.begin(before, key(2), PROMETHEUS), Step::Review(_)),
                "another token or path"
            );
        }
    }

    #[test]
    fn a_revoked_right_ends_with_the_next_review() {
        let mut table = AccessTable::default();
        ask(&mut table, at(0), (1, PROMETHEUS), Some(Outcome::Allowed));
        let refused = Outcome::Forbidden("u".to_owned());
        assert_eq!(ask(&mut table, at(60), (1, PROMETHEUS), Some(refused.clone())), Some(refused.clone()));
        assert_eq!(table.begin(at(61), key(1), PROMETHEUS), Step::Answer(refused.clone()));
        assert_eq!(ask(&mut table, at(65), (1, PROMETHEUS), None), None, "no grace after a refusal");
    }

    #[test]
    fn allowed_callers_go_on_for_ten_minutes_while_the_api_server_is_away() {
        let mut table = AccessTable::default();
        ask(&mut table, at(0), (1, PROMETHEUS), Some(Outcome::Allowed));
        assert_eq!(ask(&mut table, at(60), (1, PROMETHEUS), None), Some(Outcome::Allowed));
        assert_eq!(
            table.begin(at(64), key(1), PROMETHEUS),
            Step::Answer(Outcome::Allowed),
            "no new attempt yet"
        );
        assert_eq!(ask(&mut table, at(599), (1, PROMETHEUS), None), Some(Outcome::Allowed));
        assert_eq!(ask(&mut table, at(600), (1, PROMETHEUS), None), None);
        assert_eq!(ask(&mut table, at(600), (2, stranger(1)), None), None, "strangers get no answer");
    }

    #[test]
    fn an_answer_that_comes_after_the_grace_time_keeps_no_entry() {
        let mut table = AccessTable::default();
        ask(&mut table, at(0), (1, PROMETHEUS), Some(Outcome::Allowed));
        assert_eq!(table.begin(at(599), key(1), PROMETHEUS), Step::Review(Caller::Known));
        assert_eq!(table.finish(at(602), (key(1), PROMETHEUS), Caller::Known, None), None);
        assert!(!table.entries[&key(1)].is_under_review, "it can be removed");
    }

    #[test]
    fn other_requests_of_an_allowed_caller_do_not_wait_for_its_review() {
        let mut table = AccessTable::default();
        ask(&mut table, at(0), (1, PROMETHEUS), Some(Outcome::Allowed));
        assert_eq!(table.begin(at(60), key(1), PROMETHEUS), Step::Review(Caller::Known));
        assert_eq!(table.begin(at(60), key(1), PROMETHEUS), Step::Answer(Outcome::Allowed));
    }

    #[test]
    fn strangers_delay_no_known_caller_and_ask_a_bounded_number_of_times() {
        let mut table = AccessTable::default();
        ask(&mut table, at(0), (0, PROMETHEUS), Some(Outcome::Allowed));
        let mut reviews = 0;
        // Each second, 2,000 requests with tokens that are all different, from 2,000 addresses.
        for number in 0..40_000 {
            let (now, peer) = (at(1 + number / 2000), stranger(number % 2000));
            match table.begin(now, key(number + 1), peer) {
                Step::Review(Caller::Stranger) => {
                    reviews += 1;
                    table.finish(
                        now,
                        (key(number + 1), peer),
                        Caller::Stranger,
                        Some(Outcome::Unauthenticated),
                    );
                }
                Step::Busy => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(reviews, 20 + 19 * 10);
        assert!(table.entries.len() <= MAX_ENTRIES && table.peers.len() <= MAX_PEERS);
        assert_eq!(table.begin(at(100), key(0), PROMETHEUS), Step::Review(Caller::Known));
        assert_eq!(
            table.begin(at(100), key(u64::MAX), PROMETHEUS),
            Step::Review(Caller::Known),
            "a new token"
        );
    }

    #[test]
    fn one_address_cannot_use_up_the_budget_of_others() {
        let mut table = AccessTable::default();
        let mut asked = |now, number, peer| {
            let step = table.begin(now, key(number), peer);
            if let Step::Review(caller) = step {
                table.finish(now, (key(number), peer), caller, Some(Outcome::Unauthenticated));
            }
            step != Step::Busy
        };
        // An address that has used up its own budget does not take from that of all strangers.
        assert_eq!((0..1000).filter(|number| asked(at(10), *number, stranger(1))).count(), 10);
        assert_eq!((0..1000).filter(|number| asked(at(11), 1000 + number, stranger(1))).count(), 5);
        assert!(asked(at(11), 5000, PROMETHEUS));
        // Even at this rate half of the budget of all strangers is left for others.
        for second in 12..100 {
            let of_one = (0..1000).filter(|number| asked(at(second), second << 20 | number, stranger(1)));
            assert_eq!(of_one.count(), 5);
            let of_others =
                (0..1000).filter(|number| asked(at(second), second << 21 | number, stranger(2 + number)));
            assert_eq!(of_others.count(), if second == 12 { 15 } else { 5 });
        }
    }

    #[test]
    fn wrong_tokens_every_second_keep_no_new_caller_of_the_same_address_out() {
        let mut table = AccessTable::default();
        for second in 0..600 {
            let wrong = (1000 + second, PROMETHEUS);
            ask(&mut table, at(second), wrong, Some(Outcome::Unauthenticated));
            let later = at(second) + Duration::from_millis(500);
            let new = (1 << 40 | second, PROMETHEUS);
            assert_eq!(
                ask(&mut table, later, new, Some(Outcome::Unauthenticated)),
                Some(Outcome::Unauthenticated)
            );
        }
    }

    #[test]
    fn reviews_in_flight_are_bounded() {
        let mut table = AccessTable::default();
        let begun: Vec<Step> =
            (0..6).map(|number| table.begin(at(1), key(number), stranger(number))).collect();
        assert_eq!(
            begun.iter().filter(|step| **step == Step::Review(Caller::Stranger)).count(),
            MAX_IN_FLIGHT
        );
        assert_eq!(begun[4..], [Step::Busy, Step::Busy]);
        table.finish(at(1), (key(0), stranger(0)), Caller::Stranger, None);
        assert_eq!(table.begin(at(1), key(9), stranger(9)), Step::Review(Caller::Stranger));
    }

    #[test]
    fn a_full_table_keeps_the_allowed_callers() {
        let mut table = AccessTable::default();
        let most = u64::try_from(MAX_ENTRIES).unwrap();
        for number in 0..most {
            let outcome = if number < 10 { Outcome::Allowed } else { Outcome::Unauthenticated };
            table.in_flight[1] += 1;
            table.finish(at(1), (key(number), stranger(number)), Caller::Stranger, Some(outcome));
        }
        for number in most..2 * most {
            table.in_flight[1] += 1;
            table.finish(
                at(2),
                (key(number), stranger(number)),
                Caller::Stranger,
                Some(Outcome::Unauthenticated),
            );
        }
        assert_eq!(table.entries.len(), MAX_ENTRIES);
        assert!(
            (0..10)
                .all(|number| table.begin(at(3), key(number), PROMETHEUS) == Step::Answer(Outcome::Allowed))
        );
    }

    #[test]
    fn only_texts_of_the_right_form_are_tokens() {
        assert!(is_token("eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOlsiYSJdfQ.c2ln-_~+/=="));
        for text in ["", "=", "a b", "a=b", "a\u{e4}", "<script>", "a\0", &"a".repeat(MAX_TOKEN_BYTES + 1)] {
            assert!(!is_token(text), "{text:?}");
        }
    }
}
