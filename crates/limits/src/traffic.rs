//! Who is on the way to the driver, and what one stream may still have before it must be noted in the books of all streams: one word,
//! so that the usual launch needs no lock.
//!
//! Whoever locks the books takes the ration back and notes what was had of it; whoever unlocks them hands a new one out. While
//! they are locked there is none, so every launch then comes by the books.

use crate::atomic::{AtomicU64, Ordering};

/// What a stream may have, or has had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ration {
    /// At most 255.
    pub launches: u32,
    /// Nanoseconds, by estimate; below 2 to the 32.
    pub estimate: u64,
}

/// The word: from the lowest bit on, threads on the way, the turn, launches left, nanoseconds left.
#[derive(Debug)]
pub struct Traffic {
    word: AtomicU64,
    /// The number of the stream whose the ration is.
    fed: AtomicU64,
}

const ONE_PASSING: u64 = 1;
const PASSING: u64 = 0xffff;
/// Counts the rations, so that none is taken for another one.
const ONE_TURN: u64 = 1 << 16;
const TURN: u64 = 0xff << 16;
const ONE_LAUNCH: u64 = 1 << 24;
const LAUNCHES: u64 = 0xff << 24;
const ESTIMATE_PLACE: u32 = 32;

impl Ration {
    fn bits(self) -> u64 {
        (u64::from(self.launches) * ONE_LAUNCH) | (self.estimate << ESTIMATE_PLACE)
    }

    fn of(word: u64) -> Self {
        #[allow(clippy::cast_possible_truncation, reason = "eight bits")]
        let launches = ((word & LAUNCHES) / ONE_LAUNCH) as u32;
        Self { launches, estimate: word >> ESTIMATE_PLACE }
    }
}

impl Default for Traffic {
    fn default() -> Self {
        Self { word: AtomicU64::new(0), fed: AtomicU64::new(0) }
    }
}

impl Traffic {
    /// Somebody is on the way.
    pub fn enter(&self) {
        self.word.fetch_add(ONE_PASSING, Ordering::SeqCst);
    }

    /// It has arrived, or turned back.
    pub fn leave(&self) {
        self.word.fetch_sub(ONE_PASSING, Ordering::SeqCst);
    }

    /// It has arrived, with a launch into a stream that the ration allows. Otherwise it is still on the way, and the books must be told.
    #[must_use]
    pub fn leave_on_ration(&self, stream: u64, estimate: u64) -> bool {
        let word = self.word.load(Ordering::Acquire);
        let left = Ration::of(word);
        // Acquired after the word: a ration handed out since to another stream has another turn.
        left.launches > 0
            && left.estimate >= estimate
            && self.fed.load(Ordering::Acquire) == stream
            && self
                .word
                .compare_exchange(
                    word,
                    word - ONE_PASSING - ONE_LAUNCH - (estimate << ESTIMATE_PLACE),
                    Ordering::SeqCst,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    /// Whether anybody is on the way.
    #[must_use]
    pub fn is_anybody(&self) -> bool {
        self.word.load(Ordering::SeqCst) & PASSING > 0
    }

    /// Nanoseconds that are left of the ration.
    #[must_use]
    pub fn left(&self) -> u64 {
        Ration::of(self.word.load(Ordering::Relaxed)).estimate
    }

    /// Hands a ration out. Only while there is none, with the books locked.
    pub fn hand_out(&self, stream: u64, ration: Ration) {
        self.fed.store(stream, Ordering::Release);
        let with_ration =
            |word: u64| Some((word & PASSING) | (word.wrapping_add(ONE_TURN) & TURN) | ration.bits());
        let _ = self.word.fetch_update(Ordering::SeqCst, Ordering::Relaxed, with_ration);
    }

    /// Takes back what is left of the ration. Only with the books locked.
    #[must_use]
    pub fn take_back(&self) -> Ration {
        Ration::of(self.word.fetch_and(PASSING | TURN, Ordering::SeqCst))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const ONE: u64 = 1;
    const OTHER: u64 = 2;

    #[test]
    fn a_ration_is_had_by_its_stream_until_it_is_not_enough() {
        let traffic = Traffic::default();
        let had = |stream, estimate| {
            traffic.enter();
            let is_had = traffic.leave_on_ration(stream, estimate);
            if !is_had {
                assert!(traffic.is_anybody());
                traffic.leave();
            }
            assert!(!traffic.is_anybody());
            is_had
        };
        assert!(!had(ONE, 1), "none was handed out");
        traffic.hand_out(ONE, Ration { launches: 3, estimate: 1_000 });
        assert!(!had(OTHER, 1), "it is another's");
        assert!(had(ONE, 600) && !had(ONE, 401) && had(ONE, 400) && had(ONE, 0));
        assert!(!had(ONE, 0), "all launches are had");
        assert_eq!(traffic.take_back(), Ration::default());
        traffic.hand_out(OTHER, Ration { launches: 255, estimate: 0xffff_ffff });
        assert!(!had(ONE, 0) && had(OTHER, 5));
        assert_eq!(traffic.take_back(), Ration { launches: 254, estimate: 0xffff_fffa });
        assert!(!had(OTHER, 0));
    }
}

#[cfg(test)]
#[cfg(loom)]
mod interleavings {
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    /// What was handed to whom, and what each stream has had.
    #[derive(Default)]
    struct AllocationTable {
        fed: usize,
        handed: Ration,
        had: [u64; 2],
    }

    #[derive(Default)]
    struct Way {
        traffic: Traffic,
        books: Mutex<AllocationTable>,
    }

    impl Way {
        /// Opens the books, notes more launches of a stream, and feeds it.
        fn note(&self, stream: usize, launches: u64) {
            let mut books = self.allocations.lock().unwrap();
            let left = self.traffic.take_back();
            let (fed, had) = (books.fed, u64::from(books.handed.launches - left.launches));
            assert_eq!(books.handed.estimate - left.estimate, had * length(fed), "counted to another stream");
            books.had[fed] += had;
            books.had[stream] += launches;
            (books.fed, books.handed) = (stream, Ration { launches: 2, estimate: 9 });
            self.traffic.hand_out(stream as u64, books.handed);
        }

        fn launch(&self, stream: usize) {
            self.traffic.enter();
            if !self.traffic.leave_on_ration(stream as u64, length(stream)) {
                self.note(stream, 1);
                self.traffic.leave();
            }
        }
    }

    /// Launches into different streams are of different lengths, to be told apart.
    fn length(stream: usize) -> u64 {
        stream as u64 * 2 + 1
    }

    /// Threads that launch into two streams, beside one that opens the books: nothing is lost, nothing is counted to another
    /// stream, and nobody is left on the way.
    #[test]
    fn what_is_had_adds_up() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let way = Arc::new(Way::default());
            way.note(0, 0);
            let launchers = [0, 1].map(|stream| {
                let way = way.clone();
                thread::spawn(move || (0..2).for_each(|_| way.launch(stream)))
            });
            way.note(0, 0);
            launchers.into_iter().for_each(|launcher| launcher.join().unwrap());
            way.note(0, 0);
            assert_eq!(way.allocations.lock().unwrap().had, [2, 2]);
            assert!(!way.traffic.is_anybody());
        });
    }
}
