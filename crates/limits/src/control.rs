//! The control file: the limits of a container and the time windows of its GPUs.
//!
//! The agent writes the file; the container can only read it. The file holds two copies of the
//! limits. The agent writes the copy that is not in use and then switches to it. A reader therefore
//! always finds a complete copy, even if the agent dies while writing.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::limits::{GrantLimits, InvalidLimits, WORDS};
use crate::{AtomicBytes, Bytes, GpuSlot, PerGpu};

/// First word of the file, which identifies its format. A new layout gets a new value.
pub const FORMAT: u64 = u64::from_le_bytes(*b"tessera2");

/// Age in nanoseconds after which a heartbeat means that no arbiter runs. A busy node delays a
/// thread far less.
pub const HEARTBEAT_TIMEOUT_NS: u64 = 500_000_000;

/// The whole control file, as it is mapped.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Control {
    format: AtomicU64,
    /// Number of changes of the limits; the lowest bit selects the copy in use.
    revision: AtomicU64,
    /// Time of the arbiter's last step in nanoseconds on the monotonic clock, or 0 if no arbiter
    /// has run yet.
    heartbeat: AtomicU64,
    copies: [[AtomicU64; WORDS]; 2],
    windows: PerGpu<SharedWindow>,
    /// Device memory that the agent measures on the GPU and that no process of the container has
    /// charged.
    uncharged: PerGpu<AtomicBytes>,
    /// Time of the measurement in nanoseconds on the monotonic clock.
    measured: PerGpu<AtomicU64>,
}

/// The time window of one GPU, as the processes of the container share it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SharedWindow {
    /// Wake-up futex: a counter of changes on which processes sleep.
    pub change: AtomicU32,
    /// Number of the current window. A process reports a drained window by this number.
    pub number: AtomicU32,
    /// End of the window in nanoseconds on the monotonic clock. The window is closed once this time
    /// has passed.
    deadline: AtomicU64,
    /// Work in nanoseconds that a process may have queued, or 0 if an arbiter of an earlier version writes the
    /// windows.
    queue_limit: AtomicU64,
}

impl Control {
    /// Returns whether the file has the format that this crate reads.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.format.load(Ordering::Acquire) == FORMAT
    }

    /// Returns the number of changes of the limits.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Reads the limits in use, or the other copy if the one in use is damaged.
    ///
    /// # Errors
    /// [`InvalidLimits`] if both copies are damaged.
    pub fn read(&self) -> Result<GrantLimits, InvalidLimits> {
        let revision = self.revision();
        self.copy(revision).or_else(|invalid| self.copy(revision ^ 1).map_err(|_| invalid))
    }

    /// Puts `limits` into use. Only the agent has write access to the file.
    pub fn write(&self, limits: &GrantLimits) {
        self.write_words(&limits.to_words());
    }

    /// Puts limits into use that are stored as words. Readers reject words that are not sealed or out of range.
    pub fn write_words(&self, words: &[u64; WORDS]) {
        let revision = self.revision().wrapping_add(1);
        for (stored, &word) in self.words(revision).iter().zip(words) {
            stored.store(word, Ordering::Relaxed);
        }
        self.revision.store(revision, Ordering::Release);
        self.format.store(FORMAT, Ordering::Release);
    }

    /// Returns the time window of a GPU.
    #[must_use]
    pub fn window(&self, gpu: GpuSlot) -> &SharedWindow {
        &self.windows[gpu]
    }

    /// Records that the arbiter is running at `now`.
    pub fn write_heartbeat(&self, now: u64) {
        self.heartbeat.store(now, Ordering::Release);
    }

    /// Returns whether an arbiter is running.
    #[must_use]
    pub fn has_arbiter(&self, now: u64) -> bool {
        let beat = self.heartbeat.load(Ordering::Acquire);
        beat != 0 && now.saturating_sub(beat) < HEARTBEAT_TIMEOUT_NS
    }

    /// Returns the measured memory on the GPU that no process of the container has charged.
    #[must_use]
    pub fn uncharged(&self, gpu: GpuSlot) -> Bytes {
        self.uncharged[gpu].load(Ordering::Relaxed)
    }

    /// Returns the time of the last measurement, or 0 if there was none.
    #[must_use]
    pub fn measured_at(&self, gpu: GpuSlot) -> u64 {
        self.measured[gpu].load(Ordering::Acquire)
    }

    /// Publishes how much uncharged memory the container uses on the GPU, and when that was measured.
    pub fn set_uncharged(&self, gpu: GpuSlot, bytes: Bytes, measured: u64) {
        self.uncharged[gpu].store(bytes, Ordering::Relaxed);
        self.measured[gpu].store(measured, Ordering::Release);
    }

    /// Returns the copy that is in use at a revision.
    fn words(&self, revision: u64) -> &[AtomicU64; WORDS] {
        &self.copies[copy_index(revision)]
    }

    fn copy(&self, revision: u64) -> Result<GrantLimits, InvalidLimits> {
        let mut words = [0; WORDS];
        for (word, stored) in words.iter_mut().zip(self.words(revision)) {
            *word = stored.load(Ordering::Acquire);
        }
        GrantLimits::from_words(&words)
    }
}

/// Parses the limits in use from the content of a control file, as [`Control::read`] does for a
/// mapped file.
///
/// # Errors
/// [`InvalidLimits`] if the content is not a control file of this version or both copies are
/// damaged.
pub fn parse_limits(file: &[u8]) -> Result<GrantLimits, InvalidLimits> {
    if u64_at(file, offset_of!(Control, format)) != Some(FORMAT) {
        return Err(InvalidLimits::Format);
    }
    let revision = u64_at(file, offset_of!(Control, revision)).ok_or(InvalidLimits::Format)?;
    let copy = |revision: u64| {
        let begin = offset_of!(Control, copies) + copy_index(revision) * WORDS * size_of::<u64>();
        let mut words = [0; WORDS];
        for (index, word) in words.iter_mut().enumerate() {
            *word = u64_at(file, begin + index * size_of::<u64>()).ok_or(InvalidLimits::Format)?;
        }
        GrantLimits::from_words(&words)
    };
    copy(revision).or_else(|invalid| copy(revision ^ 1).map_err(|_| invalid))
}

/// Returns which of the two copies is in use at a revision.
fn copy_index(revision: u64) -> usize {
    usize::from(revision & 1 == 1)
}

fn u64_at(file: &[u8], offset: usize) -> Option<u64> {
    file.get(offset..offset + size_of::<u64>())?.try_into().ok().map(u64::from_ne_bytes)
}

/// The state of a window at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowState {
    /// Value of the wake-up futex.
    pub change: u32,
    /// Number of the window.
    pub number: u32,
    /// End of this window or of a later one, in nanoseconds on the monotonic clock.
    pub deadline: u64,
    /// Work in nanoseconds that a process may have queued, or 0 if the arbiter does not say.
    pub queue_limit: u64,
}

impl SharedWindow {
    /// Reads the current state.
    #[must_use]
    pub fn read(&self) -> WindowState {
        let change = self.change.load(Ordering::Acquire);
        let number = self.number.load(Ordering::Acquire);
        let [deadline, queue_limit] =
            [&self.deadline, &self.queue_limit].map(|word| word.load(Ordering::Acquire));
        WindowState { change, number, deadline, queue_limit }
    }

    /// Sets how much work a process may have queued. The caller opens or changes the window afterwards, so that
    /// processes notice it.
    pub fn set_queue_limit(&self, queue_limit: u64) {
        self.queue_limit.store(queue_limit, Ordering::Release);
    }

    /// Opens the next window until `deadline` and returns its number.
    pub fn open(&self, deadline: u64) -> u32 {
        let number = self.number.load(Ordering::Relaxed).wrapping_add(1);
        // The deadline is stored first: a reader that sees the new number also sees a deadline in
        // the future.
        self.deadline.store(deadline, Ordering::Release);
        self.number.store(number, Ordering::Release);
        self.change.fetch_add(1, Ordering::Release);
        number
    }

    /// Moves the end of the window to a later time, or to now.
    pub fn set_deadline(&self, deadline: u64) {
        self.deadline.store(deadline, Ordering::Release);
        self.change.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{UuidBytes, limits::GpuLimit};

    /// Returns the control file that a new file maps to.
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
                queue_limit: AtomicU64::new(0),
            }),
            uncharged: PerGpu::default(),
            measured: PerGpu::default(),
        })
    }

    fn limits(memory: u64) -> GrantLimits {
        let gpu = GpuLimit {
            uuid: UuidBytes([7; 16]),
            memory: Bytes(memory),
            context: Bytes::ZERO,
            compute_percent: 30,
            compute_ceiling_percent: 30,
        };
        GrantLimits { generation: memory, gpus: vec![gpu], ..GrantLimits::default() }
    }

    #[test]
    fn reads_the_newest_limits() {
        let control = empty();
        assert!(control.read().is_err());
        for memory in [1, 2, 3] {
            control.write(&limits(memory));
            assert_eq!(control.read(), Ok(limits(memory)));
        }
    }

    #[test]
    fn a_half_written_copy_does_not_hide_the_complete_copy() {
        let control = empty();
        control.write(&limits(1));
        control.write(&limits(2));
        let in_use = control.revision();
        control.words(in_use ^ 1)[5].store(99, Ordering::Relaxed);
        assert_eq!(control.read(), Ok(limits(2)));
        control.words(in_use)[5].store(99, Ordering::Relaxed);
        assert!(control.read().is_err());
    }

    #[test]
    fn parses_the_same_limits_as_a_mapped_file_contains() {
        let control = empty();
        control.write(&limits(1));
        control.write(&limits(2));
        // SAFETY: the control file is alive and no other thread changes it while the slice exists.
        let file = unsafe {
            std::slice::from_raw_parts(std::ptr::from_ref(&*control).cast::<u8>(), size_of::<Control>())
        };
        assert_eq!(parse_limits(file), Ok(limits(2)));
        assert_eq!(parse_limits(&file[..100]), Err(InvalidLimits::Format), "a truncated file");
        assert_eq!(parse_limits(&[0; 4096]), Err(InvalidLimits::Format), "a file of zeros");
    }

    /// A process that reads a new number with the previous deadline would report the new window as
    /// drained.
    #[test]
    fn a_new_number_is_never_read_with_an_old_deadline() {
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
    fn an_old_heartbeat_means_that_no_arbiter_runs() {
        let control = empty();
        assert!(!control.has_arbiter(5));
        control.write_heartbeat(1_000);
        assert!(control.has_arbiter(HEARTBEAT_TIMEOUT_NS));
        assert!(!control.has_arbiter(HEARTBEAT_TIMEOUT_NS + 1_000));
    }
}
