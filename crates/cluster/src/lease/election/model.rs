//! A model of candidates whose requests to the API server take time, and whose neighbours gain and lose leases of their
//! own. No request of a leader may run while another one leads, and a candidate leads soon after its neighbour does.

use std::time::Duration;

use proptest::prelude::*;

use super::super::neighbour::{Turn, turn};
use super::{Election, LeaseRecord, LeaseStep, LeaseTiming};

/// Random durations and outcomes of one poll, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Poll {
    /// Pause before the poll.
    pause: u64,
    /// Time from the start of the read until the API server executes it, and from there to the
    /// answer.
    read: (u64, u64),
    /// The same for the write.
    write: (u64, u64),
    /// True if the write reaches the API server, and if its answer reaches the candidate.
    arrives: bool,
    is_answered: bool,
    /// What the candidate last heard about its neighbour.
    neighbour_leads: Option<bool>,
}

/// A poll without delays and losses.
const SMOOTH: Poll =
    Poll { pause: 0, read: (1, 1), write: (1, 1), arrives: true, is_answered: true, neighbour_leads: None };

/// Next event of a candidate.
#[derive(Clone, Debug)]
enum Event {
    Poll,
    /// The API server executes the read.
    Read,
    /// The candidate receives the state of the lease.
    Found(Option<LeaseRecord>),
    /// The API server executes the read of a candidate that gives the lease up.
    ReadOwn,
    /// The API server releases the lease, if it has this version.
    Release(String),
    /// The API server executes a write, if the lease has this version.
    Write(Attempt, Option<String>),
    /// The candidate receives the answer to a write: the new version.
    Wrote(Attempt, Option<String>),
}

/// A write of the lease.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    begun: Duration,
    /// Duration of the lease.
    duration: Duration,
}

struct Candidate {
    election: Election,
    polls: std::vec::IntoIter<Poll>,
    current: Poll,
    event: Event,
    /// Time of `event`.
    due: Duration,
    /// Version of the last write, by which the leader renews without a read.
    version: Option<String>,
}

struct World {
    candidates: Vec<Candidate>,
    lease: Option<LeaseRecord>,
    versions: u64,
}

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

impl World {
    /// Executes the next event. Returns its time, or `None` after the last poll.
    fn step(&mut self) -> Option<Duration> {
        let number = (0..self.candidates.len()).min_by_key(|number| self.candidates[*number].due)?;
        let candidate = &mut self.candidates[number];
        let (now, poll) = (candidate.due, candidate.current);
        match candidate.event.clone() {
            Event::Poll => match candidate.turn(now) {
                Turn::StepDown => {
                    candidate.election.resign();
                    candidate.schedule(now + millis(poll.read.0), Event::ReadOwn);
                }
                Turn::Observe => candidate.schedule(now + millis(poll.read.0), Event::Read),
                Turn::Compete => match candidate.version.take().filter(|_| candidate.election.leads(now)) {
                    Some(version) => candidate.write(now, Some(version)),
                    None => candidate.schedule(now + millis(poll.read.0), Event::Read),
                },
            },
            Event::ReadOwn => {
                let own = self.lease.as_ref().filter(|lease| lease.holder == candidate.election.identity());
                match own {
                    Some(own) => {
                        let due = now + millis(poll.read.1 + poll.write.0);
                        candidate.schedule(due, Event::Release(own.version.clone()));
                    }
                    None => candidate.rest(now)?,
                }
            }
            Event::Release(version) => {
                if let Some(lease) =
                    self.lease.as_mut().filter(|lease| lease.version == version && poll.arrives)
                {
                    self.versions += 1;
                    lease.holder.clear();
                    lease.version = self.versions.to_string();
                }
                candidate.rest(now + millis(poll.write.1))?;
            }
            Event::Read => {
                candidate.schedule(now + millis(poll.read.1), Event::Found(self.lease.clone()));
            }
            Event::Found(found) => {
                candidate.election.record_latency(millis(poll.read.0 + poll.read.1));
                match candidate.election.observe(now, found) {
                    LeaseStep::Take(version) if candidate.turn(now) == Turn::Compete => {
                        candidate.write(now, version);
                    }
                    _ => candidate.rest(now)?,
                }
            }
            Event::Write(attempt, version) => {
                let matches = version == self.lease.as_ref().map(|lease| lease.version.clone());
                let mut written = None;
                if matches && poll.arrives {
                    self.versions += 1;
                    let version = self.versions.to_string();
                    written = Some(version.clone());
                    let holder = candidate.election.identity().to_owned();
                    self.lease = Some(LeaseRecord { holder, version, duration: attempt.duration });
                }
                candidate.schedule(now + millis(poll.write.1), Event::Wrote(attempt, written));
            }
            Event::Wrote(attempt, written) => {
                candidate.election.record_latency(now - attempt.begun);
                if let Some(version) = written.filter(|_| poll.is_answered) {
                    candidate.election.record_write(attempt.begun, attempt.duration);
                    candidate.version = Some(version);
                }
                candidate.rest(now)?;
            }
        }
        Some(now)
    }

    /// Returns the number of candidates that may have requests at the API server.
    fn active(&self, now: Duration) -> usize {
        let is_active = |candidate: &&Candidate| {
            candidate.election.held(now).is_some_and(|(since, timing)| since < timing.abort_within())
        };
        self.candidates.iter().filter(is_active).count()
    }
}

impl Candidate {
    fn turn(&self, now: Duration) -> Turn {
        turn(self.current.neighbour_leads, self.election.held(now).is_some())
    }

    fn write(&mut self, now: Duration, version: Option<String>) {
        let attempt = Attempt { begun: now, duration: self.election.next_duration() };
        self.schedule(now + millis(self.current.write.0), Event::Write(attempt, version));
    }

    fn schedule(&mut self, due: Duration, event: Event) {
        self.due = due;
        self.event = event;
    }

    /// Schedules the next poll. Returns `None` if there is none.
    fn rest(&mut self, now: Duration) -> Option<()> {
        self.current = self.polls.next()?;
        // Half of the polls come when the election asks for them, the others at any time.
        let pause = if self.current.pause.is_multiple_of(2) {
            self.election.next_poll(now)
        } else {
            millis(self.current.pause)
        };
        self.schedule(now + pause, Event::Poll);
        Some(())
    }
}

fn polls() -> impl Strategy<Value = Vec<Poll>> {
    let delay = || prop_oneof![4 => 0..40u64, 1 => 0..900u64, 1 => 0..4000u64];
    let neighbour = prop_oneof![1 => Just(None), 2 => Just(Some(true)), 1 => Just(Some(false))];
    let poll = (0..3000u64, (delay(), delay()), (delay(), delay()), 0..6u8, neighbour).prop_map(
        |(pause, read, write, luck, neighbour_leads)| Poll {
            pause,
            read,
            write,
            arrives: luck > 0,
            is_answered: luck > 1,
            neighbour_leads,
        },
    );
    prop::collection::vec(poll, 2..80)
}

/// Returns three candidates that follow these scripts. The first one leads.
fn world(scripts: Vec<Vec<Poll>>, timing: LeaseTiming) -> World {
    let first = LeaseRecord { holder: "c0".into(), version: "0".into(), duration: timing.duration };
    let candidates = scripts.into_iter().enumerate().map(|(number, script)| {
        let mut election = Election::new(format!("c{number}"), timing);
        if number == 0 {
            election.record_write(Duration::ZERO, timing.duration);
        } else {
            election.observe(Duration::ZERO, Some(first.clone()));
        }
        let mut polls = script.into_iter();
        let current = polls.next().unwrap();
        let due = millis(current.pause);
        Candidate { election, polls, current, event: Event::Poll, due, version: None }
    });
    World { candidates: candidates.collect(), lease: Some(first.clone()), versions: 0 }
}

proptest! {
    #[test]
    fn never_has_two_leaders(
        scripts in prop::collection::vec(polls(), 3),
        seconds in 1..4u32,
        deleted in 0..400usize,
    ) {
        let mut world = world(scripts, LeaseTiming::with_duration(seconds));
        for step in 0.. {
            if step == deleted {
                world.lease = None;
            }
            let Some(now) = world.step() else { break };
            let active = world.active(now);
            prop_assert!(active <= 1, "{active} candidates may have requests at {now:?}");
        }
    }
    /// Whatever happened before, the candidate whose neighbour leads is the leader after the longest lease, once the
    /// API server answers and the neighbours agree.
    #[test]
    fn the_candidate_leads_whose_neighbour_does(
        mut scripts in prop::collection::vec(polls(), 3),
        seconds in 1..4u32,
        chosen in 0..3usize,
    ) {
        let timing = LeaseTiming::with_duration(seconds);
        for (number, script) in scripts.iter_mut().enumerate() {
            let poll = Poll { neighbour_leads: Some(number == chosen), ..SMOOTH };
            script.extend(std::iter::repeat_n(poll, 2000));
        }
        let mut world = world(scripts, timing);
        let mut last = Duration::ZERO;
        while let Some(now) = world.step() {
            prop_assert!(world.active(now) <= 1);
            last = now;
        }
        for (number, candidate) in world.candidates.iter().enumerate() {
            prop_assert_eq!(candidate.election.leads(last), number == chosen, "candidate {}", number);
        }
    }
}
