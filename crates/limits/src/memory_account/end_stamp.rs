//! When the end of a process was first seen, as one word that is written at once.

use std::time::Duration;

/// The bit of [`EndStamp::word`] that says whether the process has ended.
const ENDED: u64 = 1 << 31;

/// Milliseconds wrap around after 24 days. A slot that no process has read for so long is released
/// a moment later than others.
const MASK_MS: u64 = ENDED - 1;

/// The time at which a process was first seen in its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndStamp {
    process: u32,
    /// True if the process has ended: its files are closed. False if it is still exiting.
    pub(super) has_ended: bool,
    milliseconds: u64,
}

impl EndStamp {
    /// Returns the stamp of a process that is seen at `now_ns`, in nanoseconds of the monotonic clock.
    pub(super) fn new(process: u32, has_ended: bool, now_ns: u64) -> Self {
        Self { process, has_ended, milliseconds: (now_ns / 1_000_000) & MASK_MS }
    }

    /// Parses the word of a slot, or returns `None` if it is not about `process`.
    pub(super) fn of(word: u64, process: u32) -> Option<Self> {
        let stamp = Self { process, has_ended: word & ENDED != 0, milliseconds: word & MASK_MS };
        (word == stamp.word()).then_some(stamp)
    }

    pub(super) fn word(self) -> u64 {
        u64::from(self.process) << 32 | if self.has_ended { ENDED } else { 0 } | self.milliseconds
    }

    /// Returns the time since the stamp.
    pub(super) fn age(self, now_ns: u64) -> Duration {
        Duration::from_millis((now_ns / 1_000_000).wrapping_sub(self.milliseconds) & MASK_MS)
    }
}

/// Returns the time in milliseconds, never 0.
pub(super) fn milliseconds(time_ns: u64) -> u32 {
    u32::try_from((time_ns / 1_000_000) & MASK_MS).unwrap_or_default().max(1)
}

/// Returns whether the past time `milliseconds` is later than the past time `time_ns`. Times in the same millisecond
/// count as later. Both are compared by their age, because milliseconds wrap around and the last end may be long ago.
pub(super) fn is_later(milliseconds: u32, time_ns: u64, now_ns: u64) -> bool {
    let age = (now_ns / 1_000_000).wrapping_sub(u64::from(milliseconds)) & MASK_MS;
    age <= (now_ns / 1_000_000).saturating_sub(time_ns / 1_000_000)
}
