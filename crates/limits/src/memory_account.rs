//! How much memory of each GPU the processes of a container hold.
//!
//! Each process has one slot. Only the owner writes its slot, and the kernel marks the slot when
//! the owner dies: the word [`Slot::owner`] is on the robust list of a thread that lives as long as
//! the process. No lock can be left behind by a killed process, no process waits for the record of
//! another, and nothing is ever moved.
//!
//! The container's usage is the sum over the slots. A process first announces what it wants
//! (`tentative`) and then adds up all slots. Of two processes that announce at once, at least one
//! sees the other. Both together therefore never exceed a limit that has room for only one of them.
//!
//! The kernel's mark does not say when a process has ended, and the driver reclaims memory a moment
//! after that. The first process that sees an end therefore writes the time into the slot, where all
//! other processes find it, however short they live.

mod end_stamp;
mod snapshot;

use std::time::Duration;

use crate::atomic::{AtomicU32, AtomicU64, Ordering, yield_now};
use crate::pacer::{BUSY_PLACE, SharedPacer};
use crate::{AtomicBytes, Bytes, GpuSlot, PerGpu};

use end_stamp::EndStamp;

pub use snapshot::{AccountSnapshot, ProcessUsage, WindowDemand};

/// First word of the file, which identifies its format. A new layout gets a new value.
pub const FORMAT: u64 = u64::from_le_bytes(*b"account4");

/// Offset of the format word in the file.
pub const FORMAT_OFFSET: u64 = std::mem::offset_of!(MemoryAccount, format) as u64;

/// Largest number of processes of one container that may use GPUs at the same time.
pub const SLOTS: usize = if cfg!(loom) { 3 } else { 512 };

/// The bit that the kernel sets in a robust word when its owner dies.
const OWNER_DIED: u32 = 0x4000_0000;

/// How often [`MemoryAccount::charge`] adds up the slots while other processes are announcing too.
const MAX_ATTEMPTS: u32 = if cfg!(loom) { 2 } else { 2_000 };

/// How many attempts only yield the processor. Later attempts sleep for [`RETRY_SLEEP_NS`].
const YIELDING_ATTEMPTS: u32 = 100;

const RETRY_SLEEP_NS: u64 = 10_000;

/// Time that the driver gets to reclaim memory after the process's files are closed. NVML shows the
/// memory for up to some tens of milliseconds longer on an H200 with driver 580.
const RECLAIM_TIME: Duration = Duration::from_millis(250);

/// Time after which a process that does not finish its exit counts as gone. Such a process has
/// replaced its program by `execve`, which closes the driver's files too.
const MAX_EXIT_TIME: Duration = Duration::from_secs(3);

/// The whole account file, as it is mapped.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct MemoryAccount {
    format: AtomicU64,
    /// Number of slots used so far; all slots from this index on have never been used.
    used_slots: AtomicU32,
    /// Time at which a process was last seen to have ended, in milliseconds of the monotonic clock,
    /// or 0.
    last_end_ms: AtomicU32,
    /// Time used on each GPU by all processes, for pacing while no arbiter runs.
    pacers: PerGpu<SharedPacer>,
    slots: [Slot; SLOTS],
}

/// The record of one process.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    /// Thread id of the owner: 0 if the slot was never used, marked by the kernel once the owner
    /// has died.
    pub owner: AtomicU32,
    /// Process id of the owner, by which others check whether the kernel has reclaimed its memory.
    process: AtomicU32,
    /// Process id of the last owner whose memory the driver has reclaimed.
    gone: AtomicU32,
    held: PerGpu<AtomicBytes>,
    tentative: PerGpu<AtomicBytes>,
    /// Size of all rejected requests.
    pub denied: AtomicBytes,
    /// Nanoseconds that threads of this process have waited for a window.
    pub waited: AtomicU64,
    /// Number of threads that wait until the agent has measured the uncharged memory.
    pub awaiting_measurement: AtomicU32,
    /// Demand of the process on each GPU.
    pub demand: PerGpu<GpuDemand>,
    /// Number of times that a thread of this process had to wait for a window.
    pub waits: AtomicU64,
    /// Start time of the owner in clock ticks since boot, which tells it from a later process with
    /// the same id. 0 if unknown.
    started: AtomicU64,
    /// When other processes saw that the owner has ended, see [`EndStamp`].
    end: AtomicU64,
}

// Containers keep the library that they started with, and an agent of another version reads their
// accounts. New words therefore go into unused bytes, or the format gets a new value.
#[cfg(not(loom))]
const _: () = assert!(
    size_of::<Slot>() == 448
        && std::mem::offset_of!(Slot, waits) == 424
        && std::mem::offset_of!(MemoryAccount, pacers) == 16
);

/// A process, as the container numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Process id.
    pub id: u32,
    /// Start time in clock ticks since boot, or 0 if unknown.
    pub started_ticks: u64,
}

/// What a process reports to the arbiter about one GPU.
#[repr(C)]
#[derive(Debug)]
pub struct GpuDemand {
    /// 1 while the process has work running or waiting, otherwise 0.
    pub wants: AtomicU32,
    /// Number of the last window whose work has finished. The process has returned that window and
    /// does not use it again until the arbiter changes it.
    pub drained: AtomicU32,
}

/// The index of a slot that the calling process owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotIndex(usize);

/// A charge was rejected because the container is at its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit;

/// The state of the process behind a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotOwner {
    /// No process has ever used the slot.
    Unused,
    /// The process is alive.
    Alive,
    /// The threads of the process have ended, but the driver may still be reclaiming its memory.
    Exiting(ProcessIdentity),
    /// The driver has reclaimed all memory of the process.
    Gone,
}

impl MemoryAccount {
    /// Returns whether the file has the format that this crate reads.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.format.load(Ordering::Acquire) == FORMAT
    }

    /// Claims a slot that is unused or whose owner is gone, and returns its index.
    ///
    /// `about_to_take` is called with the owner word before the word is taken. It must register the
    /// word with the kernel as a robust word of `thread`, so that the kernel marks the slot if the
    /// thread dies at any time.
    pub fn claim(
        &self,
        process: ProcessIdentity,
        thread: u32,
        mut about_to_take: impl FnMut(&AtomicU32),
    ) -> Option<SlotIndex> {
        for (index, slot) in self.slots.iter().enumerate() {
            let seen = slot.owner.load(Ordering::Acquire);
            if !matches!(slot.state(seen), SlotOwner::Unused | SlotOwner::Gone) {
                continue;
            }
            about_to_take(&slot.owner);
            if slot.owner.compare_exchange(seen, thread, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                continue;
            }
            // A process killed between these lines leaves a dead slot with a smaller charge than
            // before, and no charge of its own.
            self.used_slots.fetch_max(u32::try_from(index + 1).unwrap_or(u32::MAX), Ordering::SeqCst);
            slot.clear();
            slot.process.store(process.id, Ordering::SeqCst);
            slot.started.store(process.started_ticks, Ordering::SeqCst);
            // The process id may be that of the last owner.
            slot.gone.store(0, Ordering::SeqCst);
            return Some(SlotIndex(index));
        }
        None
    }

    /// Returns the slot with this index.
    #[must_use]
    pub fn slot(&self, index: SlotIndex) -> &Slot {
        &self.slots[index.0]
    }

    /// Returns the account of the GPU's time that all processes share.
    #[must_use]
    pub fn pacer(&self, gpu: GpuSlot) -> &SharedPacer {
        &self.pacers[gpu]
    }

    /// Returns all slots that have ever been used.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        // The container can write any count, so it is limited to the slots that exist.
        &self.slots[..(self.used_slots.load(Ordering::SeqCst) as usize).min(SLOTS)]
    }

    /// Returns the memory of the GPU that all processes together hold, also those whose memory the
    /// driver has not reclaimed yet.
    #[must_use]
    pub fn held(&self, gpu: GpuSlot) -> Bytes {
        self.sum(gpu).settled
    }

    /// Returns the memory of the GPU that stays held once the driver has reclaimed the memory of
    /// processes that have ended.
    #[must_use]
    pub fn held_without_ended(&self, gpu: GpuSlot) -> Bytes {
        self.slots().iter().filter(|slot| !slot.has_ended()).map(|slot| slot.held(gpu)).sum()
    }

    /// Returns whether a process that holds memory of the GPU began to exit less than `max_time` ago
    /// and has not ended, as of the last [`Self::sweep`].
    #[must_use]
    pub fn is_awaiting_exit(&self, gpu: GpuSlot, now_ns: u64, max_time: Duration) -> bool {
        self.slots().iter().any(|slot| {
            let SlotOwner::Exiting(process) = slot.owner() else { return false };
            let stamp = EndStamp::of(slot.end.load(Ordering::SeqCst), process.id);
            slot.held(gpu) > Bytes::ZERO
                && stamp.is_some_and(|stamp| !stamp.has_ended && stamp.age(now_ns) < max_time)
        })
    }

    /// Returns whether a process was seen to have ended after `time_ns`.
    #[must_use]
    pub fn has_end_since(&self, time_ns: u64, now_ns: u64) -> bool {
        let last = self.last_end_ms.load(Ordering::SeqCst);
        last != 0 && end_stamp::is_later(last, time_ns, now_ns)
    }

    /// Adds `bytes` to the slot `me` unless the container would then hold more than `limit`.
    ///
    /// Only one thread of a process may call this at a time.
    ///
    /// # Errors
    /// [`OverLimit`] if the bytes do not fit.
    pub fn charge(&self, me: SlotIndex, gpu: GpuSlot, bytes: Bytes, limit: Bytes) -> Result<(), OverLimit> {
        let mine = self.slot(me);
        for attempt in 0..MAX_ATTEMPTS {
            mine.tentative[gpu].store(bytes, Ordering::SeqCst);
            let sum = self.sum(gpu);
            if sum.settled + sum.tentative <= limit {
                // `held` is raised first, so that no other process misses the bytes in between.
                // Counting them twice for a moment is harmless.
                mine.held[gpu].fetch_add(bytes, Ordering::SeqCst);
                mine.tentative[gpu].store(Bytes::ZERO, Ordering::SeqCst);
                return Ok(());
            }
            if sum.settled + bytes > limit {
                break;
            }
            // Only the announcements of other processes are in the way. The process with the lowest
            // slot keeps its announcement, all others withdraw theirs.
            if self.slots[..me.0].iter().any(|slot| slot.tentative(gpu) > Bytes::ZERO) {
                mine.tentative[gpu].store(Bytes::ZERO, Ordering::SeqCst);
            }
            if attempt < YIELDING_ATTEMPTS { yield_now() } else { crate::futex::sleep(RETRY_SLEEP_NS) }
        }
        mine.tentative[gpu].store(Bytes::ZERO, Ordering::SeqCst);
        Err(OverLimit)
    }

    /// Adds memory that the process already holds, even above the limit.
    pub fn charge_anyway(&self, me: SlotIndex, gpu: GpuSlot, bytes: Bytes) {
        self.slot(me).held[gpu].fetch_add(bytes, Ordering::SeqCst);
    }

    /// Releases `bytes` of the slot's charge.
    pub fn refund(&self, me: SlotIndex, gpu: GpuSlot, bytes: Bytes) {
        // The container can write any charge into its slot.
        self.slot(me).held[gpu].saturating_sub(bytes, Ordering::SeqCst);
    }

    /// Notes which processes have ended, as `has_ended` reports, and releases the charges of those
    /// whose memory the driver has reclaimed.
    ///
    /// `me` is the calling process. A dead slot with its identity belongs to the program that it ran
    /// before `execve`.
    pub fn sweep(&self, me: ProcessIdentity, now_ns: u64, has_ended: impl Fn(ProcessIdentity) -> bool) {
        for slot in self.slots() {
            let SlotOwner::Exiting(process) = slot.owner() else { continue };
            let now = EndStamp::new(process.id, process != me && has_ended(process), now_ns);
            let seen = slot.end.load(Ordering::SeqCst);
            let stamp = match EndStamp::of(seen, process.id) {
                Some(stamp) if stamp.has_ended == now.has_ended => stamp,
                _ => {
                    // The stamp names the process: a process that has claimed the slot meanwhile has
                    // another id and stays unaffected.
                    let _ = slot.end.compare_exchange(seen, now.word(), Ordering::SeqCst, Ordering::SeqCst);
                    self.last_end_ms.store(end_stamp::milliseconds(now_ns), Ordering::SeqCst);
                    now
                }
            };
            let time = if stamp.has_ended { RECLAIM_TIME } else { MAX_EXIT_TIME };
            if process == me || stamp.age(now_ns) >= time {
                slot.gone.store(process.id, Ordering::SeqCst);
            }
        }
    }

    fn sum(&self, gpu: GpuSlot) -> Sum {
        let mut sum = Sum::default();
        for slot in self.slots() {
            // `tentative` is read first: bytes that move from `tentative` to `held` meanwhile are
            // seen at least once.
            let tentative = slot.tentative(gpu);
            let held = slot.held(gpu);
            sum.tentative += tentative;
            sum.settled += held;
        }
        sum
    }
}

/// Memory of one GPU that all processes hold (`settled`) and that they are requesting right now
/// (`tentative`).
#[derive(Default)]
struct Sum {
    settled: Bytes,
    tentative: Bytes,
}

impl Slot {
    /// Returns the state of the owner.
    #[must_use]
    pub fn owner(&self) -> SlotOwner {
        self.state(self.owner.load(Ordering::SeqCst))
    }

    /// Returns the memory of the GPU that the owner holds, or 0 once the owner is gone.
    #[must_use]
    pub fn held(&self, gpu: GpuSlot) -> Bytes {
        if self.owner() == SlotOwner::Gone { Bytes::ZERO } else { self.held[gpu].load(Ordering::SeqCst) }
    }

    /// Returns the memory that the owner is requesting; the announcement of a dead owner does not
    /// count.
    fn tentative(&self, gpu: GpuSlot) -> Bytes {
        match self.owner() {
            SlotOwner::Alive => self.tentative[gpu].load(Ordering::SeqCst),
            _ => Bytes::ZERO,
        }
    }

    fn state(&self, owner: u32) -> SlotOwner {
        match owner {
            0 => SlotOwner::Unused,
            _ if owner & OWNER_DIED == 0 => SlotOwner::Alive,
            _ => match self.process.load(Ordering::SeqCst) {
                process if process == self.gone.load(Ordering::SeqCst) => SlotOwner::Gone,
                id => {
                    let started_ticks = self.started.load(Ordering::SeqCst);
                    SlotOwner::Exiting(ProcessIdentity { id, started_ticks })
                }
            },
        }
    }

    /// Returns whether the owner was seen to have ended.
    fn has_ended(&self) -> bool {
        match self.owner() {
            SlotOwner::Exiting(process) => {
                EndStamp::of(self.end.load(Ordering::SeqCst), process.id).is_some_and(|stamp| stamp.has_ended)
            }
            SlotOwner::Gone => true,
            SlotOwner::Unused | SlotOwner::Alive => false,
        }
    }

    fn clear(&self) {
        for bytes in self.held.iter().chain(&self.tentative).chain([&self.denied]) {
            bytes.store(Bytes::ZERO, Ordering::SeqCst);
        }
        self.waited.store(0, Ordering::SeqCst);
        self.waits.store(0, Ordering::SeqCst);
        self.end.store(0, Ordering::SeqCst);
        self.awaiting_measurement.store(0, Ordering::SeqCst);
        for demand in &self.demand {
            demand.wants.store(0, Ordering::SeqCst);
            demand.drained.store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod interleavings;
