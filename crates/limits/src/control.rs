//! The file the agent writes and the container may only read: limits, and the time windows of each GPU.
//!
//! Limits are kept twice. The agent writes the copy not in use and then turns to it, so a reader finds a whole copy
//! at any time, also when the agent died while writing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::CARDS;
use crate::limits::{Damage, Limits, WORDS};

/// First word of the file: the format. Another layout gets another number.
pub const FORMAT: u64 = u64::from_le_bytes(*b"tessera2");

/// The agent is taken for gone when its heartbeat is older than this: far longer than a busy node delays a thread.
pub const HEARTBEAT_LOST: u64 = 500_000_000;

/// The whole file, as it is mapped.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Control {
    format: AtomicU64,
    /// Which copy is in use: the lowest bit.
    turn: AtomicU64,
    /// When the arbiter last looked, on the monotonic clock; 0 when there never was one.
    heartbeat: AtomicU64,
    copies: [[AtomicU64; WORDS]; 2],
    windows: [Window; CARDS],
    /// Device memory that the agent sees on the GPU and no process of the container has in its ledger.
    unledgered: [AtomicU64; CARDS],
    /// When that was measured, on the monotonic clock.
    measured: [AtomicU64; CARDS],
}

/// The time window of one GPU.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Window {
    /// Changes with every change below; processes sleep on it.
    pub change: AtomicU32,
    /// Counts windows. What a process drained is told by this number.
    pub number: AtomicU32,
    /// When the window closes, in nanoseconds on the monotonic clock; in the past: it is closed.
    deadline: AtomicU64,
}

impl Control {
    /// Whether this is the format this crate reads.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.format.load(Ordering::Acquire) == FORMAT
    }

    /// Grows with each change of the limits.
    #[must_use]
    pub fn turn(&self) -> u64 {
        self.turn.load(Ordering::Acquire)
    }

    /// The limits in use.
    ///
    /// # Errors
    /// When neither copy is whole.
    pub fn read(&self) -> Result<Limits, Damage> {
        let turn = self.turn();
        self.copy(turn).or_else(|damage| self.copy(turn ^ 1).map_err(|_| damage))
    }

    /// Puts `limits` in use. Only the agent has this file writable.
    pub fn write(&self, limits: &Limits) {
        let turn = self.turn().wrapping_add(1);
        for (place, word) in self.place(turn).iter().zip(limits.to_words()) {
            place.store(word, Ordering::Relaxed);
        }
        self.turn.store(turn, Ordering::Release);
        self.format.store(FORMAT, Ordering::Release);
    }

    /// The time window of a GPU.
    #[must_use]
    pub fn window(&self, card: usize) -> &Window {
        &self.windows[card]
    }

    /// Tells the container that the arbiter is there.
    pub fn beat(&self, now: u64) {
        self.heartbeat.store(now, Ordering::Release);
    }

    /// Whether an arbiter hands out windows.
    #[must_use]
    pub fn has_arbiter(&self, now: u64) -> bool {
        let beat = self.heartbeat.load(Ordering::Acquire);
        beat != 0 && now.saturating_sub(beat) < HEARTBEAT_LOST
    }

    /// Bytes on the GPU that no ledger of the container explains.
    #[must_use]
    pub fn unledgered(&self, card: usize) -> u64 {
        self.unledgered[card].load(Ordering::Relaxed)
    }

    /// When that was measured; 0: never.
    #[must_use]
    pub fn measured(&self, card: usize) -> u64 {
        self.measured[card].load(Ordering::Acquire)
    }

    /// Tells the container how much of the GPU it uses beyond its ledgers, and when that was measured.
    pub fn set_unledgered(&self, card: usize, bytes: u64, measured: u64) {
        self.unledgered[card].store(bytes, Ordering::Relaxed);
        self.measured[card].store(measured, Ordering::Release);
    }

    /// The copy in use at a turn.
    fn place(&self, turn: u64) -> &[AtomicU64; WORDS] {
        &self.copies[usize::from(turn & 1 == 1)]
    }

    fn copy(&self, turn: u64) -> Result<Limits, Damage> {
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(self.place(turn)) {
            *word = place.load(Ordering::Acquire);
        }
        Limits::from_words(&words)
    }
}

/// A window as a process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenWindow {
    /// To sleep on.
    pub change: u32,
    /// Which one it is.
    pub number: u32,
    /// When it closes, or has closed: its own deadline, or a later window's.
    pub deadline: u64,
}

impl Window {
    /// The window as it is now.
    #[must_use]
    pub fn read(&self) -> SeenWindow {
        let change = self.change.load(Ordering::Acquire);
        let number = self.number.load(Ordering::Acquire);
        SeenWindow { change, number, deadline: self.deadline.load(Ordering::Acquire) }
    }

    /// Opens the next window, until `deadline`; returns its number.
    pub fn open(&self, deadline: u64) -> u32 {
        let number = self.number.load(Ordering::Relaxed).wrapping_add(1);
        // In this order: whoever sees the number sees an end that is not over.
        self.deadline.store(deadline, Ordering::Release);
        self.number.store(number, Ordering::Release);
        self.change.fetch_add(1, Ordering::Release);
        number
    }

    /// Moves the end of the window: later, or to now.
    pub fn set_deadline(&self, deadline: u64) {
        self.deadline.store(deadline, Ordering::Release);
        self.change.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::GpuLimit;

    /// What a new file maps to.
    fn empty() -> Box<Control> {
        Box::new(Control {
            format: AtomicU64::new(0),
            turn: AtomicU64::new(0),
            heartbeat: AtomicU64::new(0),
            copies: [const { [const { AtomicU64::new(0) }; WORDS] }; 2],
            windows: [const {
                Window { change: AtomicU32::new(0), number: AtomicU32::new(0), deadline: AtomicU64::new(0) }
            }; CARDS],
            unledgered: [const { AtomicU64::new(0) }; CARDS],
            measured: [const { AtomicU64::new(0) }; CARDS],
        })
    }

    fn limits(memory: u64) -> Limits {
        let card = GpuLimit { uuid: [7; 16], memory, context: 0, compute_percent: 30, ceiling: 30 };
        Limits { generation: memory, cards: vec![card], ..Limits::default() }
    }

    #[test]
    fn the_newest_limits_are_read() {
        let control = empty();
        assert!(control.read().is_err());
        for memory in [1, 2, 3] {
            control.write(&limits(memory));
            assert_eq!(control.read(), Ok(limits(memory)));
        }
    }

    #[test]
    fn a_half_written_copy_does_not_hide_the_whole_one() {
        let control = empty();
        control.write(&limits(1));
        control.write(&limits(2));
        let in_use = control.turn();
        control.place(in_use ^ 1)[5].store(99, Ordering::Relaxed);
        assert_eq!(control.read(), Ok(limits(2)));
        control.place(in_use)[5].store(99, Ordering::Relaxed);
        assert!(control.read().is_err());
    }

    /// A process that saw the number of a window with the end of the one before would say that it has drained it.
    #[test]
    fn a_new_window_is_never_taken_for_one_that_is_over() {
        let control = empty();
        let window = control.window(0);
        let end = |number: u32| u64::from(number) * 10;
        std::thread::scope(|scope| {
            let opens = scope
                .spawn(|| (1..=10_000_000).for_each(|number| assert_eq!(window.open(end(number)), number)));
            while !opens.is_finished() {
                let seen = window.read();
                assert!(seen.deadline >= end(seen.number), "{seen:?}");
            }
        });
    }

    #[test]
    fn an_old_heartbeat_is_no_arbiter() {
        let control = empty();
        assert!(!control.has_arbiter(5));
        control.beat(1_000);
        assert!(control.has_arbiter(HEARTBEAT_LOST));
        assert!(!control.has_arbiter(HEARTBEAT_LOST + 1_000));
    }
}
