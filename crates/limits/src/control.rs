//! The file the agent writes and the container may only read: limits, and the time windows of each GPU.
//!
//! GrantLimits are kept twice. The agent writes the copy not in use and then turns to it, so a reader finds a whole copy
//! at any time, also when the agent died while writing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::limits::{GrantLimits, InvalidLimits, WORDS};
use crate::{GpuSlot, PerGpu};

/// First word of the file: the format. Another layout gets another number.
pub const FORMAT: u64 = u64::from_le_bytes(*b"tessera2");

/// The agent is taken for gone when its heartbeat is older than this: far longer than a busy node delays a thread.
pub const HEARTBEAT_TIMEOUT_NS: u64 = 500_000_000;

/// The whole file, as it is mapped.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Control {
    format: AtomicU64,
    /// Which copy is in use: the lowest bit.
    revision: AtomicU64,
    /// When the arbiter last looked, on the monotonic clock; 0 when there never was one.
    heartbeat: AtomicU64,
    copies: [[AtomicU64; WORDS]; 2],
    windows: PerGpu<SharedWindow>,
    /// Device memory that the agent sees on the GPU and no process of the container has in its ledger.
    uncharged: PerGpu<AtomicU64>,
    /// When that was measured, on the monotonic clock.
    measured: PerGpu<AtomicU64>,
}

/// The time window of one GPU.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SharedWindow {
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
    pub fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    /// The limits in use.
    ///
    /// # Errors
    /// When neither copy is whole.
    pub fn read(&self) -> Result<GrantLimits, InvalidLimits> {
        let revision = self.revision();
        self.copy(revision).or_else(|damage| self.copy(revision ^ 1).map_err(|_| damage))
    }

    /// Puts `limits` in use. Only the agent has this file writable.
    pub fn write(&self, limits: &GrantLimits) {
        let revision = self.revision().wrapping_add(1);
        for (place, word) in self.place(revision).iter().zip(limits.to_words()) {
            place.store(word, Ordering::Relaxed);
        }
        self.revision.store(revision, Ordering::Release);
        self.format.store(FORMAT, Ordering::Release);
    }

    /// The time window of a GPU.
    #[must_use]
    pub fn window(&self, gpu: GpuSlot) -> &SharedWindow {
        &self.windows[gpu]
    }

    /// Tells the container that the arbiter is there.
    pub fn write_heartbeat(&self, now: u64) {
        self.heartbeat.store(now, Ordering::Release);
    }

    /// Whether an arbiter hands out windows.
    #[must_use]
    pub fn has_arbiter(&self, now: u64) -> bool {
        let beat = self.heartbeat.load(Ordering::Acquire);
        beat != 0 && now.saturating_sub(beat) < HEARTBEAT_TIMEOUT_NS
    }

    /// Bytes on the GPU that no ledger of the container explains.
    #[must_use]
    pub fn uncharged(&self, gpu: GpuSlot) -> u64 {
        self.uncharged[gpu].load(Ordering::Relaxed)
    }

    /// When that was measured; 0: never.
    #[must_use]
    pub fn measured_at(&self, gpu: GpuSlot) -> u64 {
        self.measured[gpu].load(Ordering::Acquire)
    }

    /// Tells the container how much of the GPU it uses beyond its ledgers, and when that was measured.
    pub fn set_uncharged(&self, gpu: GpuSlot, bytes: u64, measured: u64) {
        self.uncharged[gpu].store(bytes, Ordering::Relaxed);
        self.measured[gpu].store(measured, Ordering::Release);
    }

    /// The copy in use at a revision.
    fn place(&self, revision: u64) -> &[AtomicU64; WORDS] {
        &self.copies[usize::from(revision & 1 == 1)]
    }

    fn copy(&self, revision: u64) -> Result<GrantLimits, InvalidLimits> {
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(self.place(revision)) {
            *word = place.load(Ordering::Acquire);
        }
        GrantLimits::from_words(&words)
    }
}

/// A window as a process sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowState {
    /// To sleep on.
    pub change: u32,
    /// Which one it is.
    pub number: u32,
    /// When it closes, or has closed: its own deadline, or a later window's.
    pub deadline: u64,
}

impl SharedWindow {
    /// The window as it is now.
    #[must_use]
    pub fn read(&self) -> WindowState {
        let change = self.change.load(Ordering::Acquire);
        let number = self.number.load(Ordering::Acquire);
        WindowState { change, number, deadline: self.deadline.load(Ordering::Acquire) }
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
    use crate::{UuidBytes, limits::GpuLimit};

    /// What a new file maps to.
    fn empty() -> Box<Control> {
        Box::new(Control {
            format: AtomicU64::new(0),
            revision: AtomicU64::new(0),
            heartbeat: AtomicU64::new(0),
            copies: [const { [const { AtomicU64::new(0) }; WORDS] }; 2],
            windows: PerGpu::from_fn(|_| SharedWindow {
                change: AtomicU32::new(0),
                number: AtomicU32::new(0),
                deadline: AtomicU64::new(0),
            }),
            uncharged: PerGpu::default(),
            measured: PerGpu::default(),
        })
    }

    fn limits(memory: u64) -> GrantLimits {
        let gpu = GpuLimit {
            uuid: UuidBytes([7; 16]),
            memory_bytes: memory,
            context_bytes: 0,
            compute_percent: 30,
            compute_ceiling_percent: 30,
        };
        GrantLimits { generation: memory, gpus: vec![gpu], ..GrantLimits::default() }
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
        let in_use = control.revision();
        control.place(in_use ^ 1)[5].store(99, Ordering::Relaxed);
        assert_eq!(control.read(), Ok(limits(2)));
        control.place(in_use)[5].store(99, Ordering::Relaxed);
        assert!(control.read().is_err());
    }

    /// A process that saw the number of a window with the end of the one before would say that it has drained it.
    #[test]
    fn a_new_window_is_never_taken_for_one_that_is_over() {
        let control = empty();
        let window = control.window(GpuSlot::FIRST);
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
        control.write_heartbeat(1_000);
        assert!(control.has_arbiter(HEARTBEAT_TIMEOUT_NS));
        assert!(!control.has_arbiter(HEARTBEAT_TIMEOUT_NS + 1_000));
    }
}
