//! Who in the container holds how much memory of which GPU.
//!
//! One slot per process. A slot is written by its owner alone, and the kernel tells when the owner dies: the word
//! [`Slot::owner`] is on the robust list of a thread that lives as long as the process. So there is no lock that a
//! killed process could keep, no record others would wait for, and nothing is ever moved.
//!
//! What is held is the sum over the slots. A process first announces what it wants (`tentative`) and then adds up: of
//! two that announce at once at least one sees the other, so both together never pass what only one may have.

use crate::atomic::{AtomicU32, AtomicU64, Ordering, yield_now};

use crate::pacer::{BUSY_PLACE, SharedPacer};
use crate::{GpuSlot, PerGpu};

/// First word of the file: the format.
pub const FORMAT: u64 = u64::from_le_bytes(*b"account4");

/// Where in the file that word lies.
pub const FORMAT_OFFSET: u64 = std::mem::offset_of!(MemoryAccount, format) as u64;

/// How many processes of one container may use GPUs at a time.
pub const SLOTS: usize = if cfg!(loom) { 3 } else { 512 };

/// The bit the kernel sets in a robust word when its owner dies.
const OWNER_DIED: u32 = 0x4000_0000;

/// The whole file, as it is mapped.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct MemoryAccount {
    format: AtomicU64,
    /// No slot from here on was ever used.
    used_slots: AtomicU32,
    /// What the processes have used of each GPU's time, for when they hold themselves to their share.
    pacers: PerGpu<SharedPacer>,
    slots: [Slot; SLOTS],
}

/// What one process holds and wants.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    /// Thread id of the owner; 0: never used; with the kernel's mark: the owner died.
    pub owner: AtomicU32,
    /// Process id of the owner, to ask whether the kernel has taken its memory back.
    process: AtomicU32,
    /// Process id of the last owner whose memory is known to be back with the GPU.
    gone: AtomicU32,
    held: PerGpu<AtomicU64>,
    tentative: PerGpu<AtomicU64>,
    /// Bytes refused so far.
    pub denied: AtomicU64,
    /// Nanoseconds threads of this process have waited for a window.
    pub waited: AtomicU64,
    /// Threads that wait for the agent to measure what is beyond the ledger.
    pub awaiting_measurement: AtomicU32,
    /// Per GPU, see [`GpuDemand`].
    pub demand: PerGpu<GpuDemand>,
    /// How often a thread of this process had to wait for a window.
    pub waits: AtomicU64,
}

/// What a process tells the arbiter about one GPU.
#[repr(C)]
#[derive(Debug)]
pub struct GpuDemand {
    /// 1 while it has work running or waiting.
    pub wants: AtomicU32,
    /// Number of the last window whose work has all ended: it is given back, and not used again unless the arbiter says so.
    pub drained: AtomicU32,
}

/// A slot of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotIndex(usize);

/// The container is at its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit;

/// What is known of the process behind a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotOwner {
    /// No process ever had the slot.
    Unused,
    /// It lives.
    Alive,
    /// Its threads have ended; the driver may still be taking its memory back.
    Exiting {
        /// Its process id.
        process: u32,
    },
    /// Nothing of it is left.
    Gone,
}

/// How often a process looks again while another one is just announcing.
const MAX_ATTEMPTS: u32 = if cfg!(loom) { 2 } else { 2_000 };

impl MemoryAccount {
    /// Whether this is the format this crate reads.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.format.load(Ordering::Acquire) == FORMAT
    }

    /// Takes a free slot for the process, or one whose owner is gone. `thread` must have announced to the kernel
    /// each word that `about_to_take` was told before it returns: then no death goes unnoticed.
    pub fn claim(
        &self,
        process: u32,
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
            // A claimer killed in these lines leaves a dead slot that holds less than before, and no charge of its own.
            self.used_slots.fetch_max(u32::try_from(index + 1).unwrap_or(u32::MAX), Ordering::SeqCst);
            slot.clear();
            slot.process.store(process, Ordering::SeqCst);
            return Some(SlotIndex(index));
        }
        None
    }

    /// The slot of a process.
    #[must_use]
    pub fn slot(&self, index: SlotIndex) -> &Slot {
        &self.slots[index.0]
    }

    /// What all processes together have used of a GPU's time.
    #[must_use]
    pub fn pacer(&self, gpu: GpuSlot) -> &SharedPacer {
        &self.pacers[gpu]
    }

    /// All slots that were ever used.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        // The word is the tenant's: never more than there are.
        &self.slots[..(self.used_slots.load(Ordering::SeqCst) as usize).min(SLOTS)]
    }

    /// Bytes of the GPU held by all processes together.
    #[must_use]
    pub fn held(&self, gpu: GpuSlot) -> u64 {
        self.sum(gpu).settled
    }

    /// Adds `bytes` to what the process holds unless the container would then hold more than `limit`. One thread of
    /// a process at a time.
    ///
    /// # Errors
    /// [`OverLimit`] at the limit.
    pub fn charge(&self, me: SlotIndex, gpu: GpuSlot, bytes: u64, limit: u64) -> Result<(), OverLimit> {
        let mine = self.slot(me);
        for look in 0..MAX_ATTEMPTS {
            mine.tentative[gpu].store(bytes, Ordering::SeqCst);
            let sum = self.sum(gpu);
            if sum.settled.saturating_add(sum.tentative) <= limit {
                // Held first, so that nobody misses it in between; seen twice does no harm.
                mine.held[gpu].fetch_add(bytes, Ordering::SeqCst);
                mine.tentative[gpu].store(0, Ordering::SeqCst);
                return Ok(());
            }
            if sum.settled.saturating_add(bytes) > limit {
                break;
            }
            // It would fit but for others who are announcing too. The lowest slot stays, the others step back.
            if self.slots[..me.0].iter().any(|slot| slot.tentative(gpu) > 0) {
                mine.tentative[gpu].store(0, Ordering::SeqCst);
            }
            if look < 100 { yield_now() } else { crate::futex::sleep(10_000) }
        }
        mine.tentative[gpu].store(0, Ordering::SeqCst);
        Err(OverLimit)
    }

    /// Adds what the process already has, limit or not.
    pub fn charge_anyway(&self, me: SlotIndex, gpu: GpuSlot, bytes: u64) {
        self.slot(me).held[gpu].fetch_add(bytes, Ordering::SeqCst);
    }

    /// Gives back.
    pub fn refund(&self, me: SlotIndex, gpu: GpuSlot, bytes: u64) {
        let held = &self.slot(me).held[gpu];
        // Saturating: a tenant that writes here must not turn its own refund into a huge sum.
        let _ =
            held.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |held| Some(held.saturating_sub(bytes)));
    }

    /// Looks after the slots of the dead: whatever `is_gone` says has left the GPU no longer counts.
    pub fn sweep(&self, is_gone: impl Fn(u32) -> bool) {
        for slot in self.slots() {
            let seen = slot.owner.load(Ordering::SeqCst);
            if let SlotOwner::Exiting { process } = slot.state(seen)
                && is_gone(process)
            {
                // By its name: if somebody else has taken the slot meanwhile, this says nothing about them.
                slot.gone.store(process, Ordering::SeqCst);
            }
        }
    }

    fn sum(&self, gpu: GpuSlot) -> Sum {
        let mut sum = Sum::default();
        for slot in self.slots() {
            // In this order: what moves from tentative to held while we look is seen at least once.
            let tentative = slot.tentative(gpu);
            let held = slot.held(gpu);
            sum.tentative = sum.tentative.saturating_add(tentative);
            sum.settled = sum.settled.saturating_add(held);
        }
        sum
    }
}

/// What all processes hold of a GPU, and what they are asking for at this moment.
#[derive(Default)]
struct Sum {
    settled: u64,
    tentative: u64,
}

impl Slot {
    /// What is known of the owner.
    #[must_use]
    pub fn owner(&self) -> SlotOwner {
        self.state(self.owner.load(Ordering::SeqCst))
    }

    /// Bytes of the GPU its process holds; nothing once the process is gone.
    #[must_use]
    pub fn held(&self, gpu: GpuSlot) -> u64 {
        if self.owner() == SlotOwner::Gone { 0 } else { self.held[gpu].load(Ordering::SeqCst) }
    }

    fn tentative(&self, gpu: GpuSlot) -> u64 {
        // The dead ask for nothing.
        if matches!(self.owner(), SlotOwner::Alive) { self.tentative[gpu].load(Ordering::SeqCst) } else { 0 }
    }

    fn state(&self, owner: u32) -> SlotOwner {
        match owner {
            0 => SlotOwner::Unused,
            _ if owner & OWNER_DIED == 0 => SlotOwner::Alive,
            _ => match self.process.load(Ordering::SeqCst) {
                process if process == self.gone.load(Ordering::SeqCst) => SlotOwner::Gone,
                process => SlotOwner::Exiting { process },
            },
        }
    }

    fn clear(&self) {
        for place in self.held.iter().chain(&self.tentative).chain([&self.denied, &self.waited, &self.waits])
        {
            place.store(0, Ordering::SeqCst);
        }
        self.awaiting_measurement.store(0, Ordering::SeqCst);
        for demand in &self.demand {
            demand.wants.store(0, Ordering::SeqCst);
            demand.drained.store(0, Ordering::SeqCst);
        }
    }
}

/// What the processes of a container want, as the agent reads it from the file: by reading, not by mapping, for the
/// container can cut its file short at any time.
#[derive(Debug, Default)]
pub struct AccountSnapshot {
    /// What lies before the slots.
    head: Vec<u8>,
    bytes: Vec<u8>,
    slots: usize,
}

impl AccountSnapshot {
    /// Reads anew. `read_at` is given a place in the file and returns how many bytes it has read.
    pub fn read(&mut self, read_at: impl Fn(&mut [u8], u64) -> std::io::Result<usize>) {
        self.head.resize(std::mem::offset_of!(MemoryAccount, slots), 0);
        let read = read_at(&mut self.head, 0).unwrap_or(0);
        self.head.truncate(read);
        self.slots = (word(&self.head, std::mem::offset_of!(MemoryAccount, used_slots)) as usize).min(SLOTS);
        self.bytes.resize(self.slots * size_of::<Slot>(), 0);
        if self.slots == 0 {
            return;
        }
        let read = read_at(&mut self.bytes, std::mem::offset_of!(MemoryAccount, slots) as u64).unwrap_or(0);
        self.slots = read / size_of::<Slot>();
    }

    /// How many processes want the GPU, and how many of those have drained the window of that number.
    #[must_use]
    pub fn of(&self, gpu: GpuSlot, window: u32) -> (u32, u32) {
        let (mut want, mut have_drained) = (0, 0);
        for slot in self.living() {
            let demand = std::mem::offset_of!(Slot, demand) + gpu.index() * size_of::<GpuDemand>();
            if word(slot, demand) == 1 {
                want += 1;
                let drained = word(slot, demand + std::mem::offset_of!(GpuDemand, drained));
                have_drained += u32::from(drained == window);
            }
        }
        (want, have_drained)
    }

    /// Nanoseconds the GPU was busy for the container, as its processes tell. Only ever more, unless they lie.
    #[must_use]
    pub fn busy(&self, gpu: GpuSlot) -> u64 {
        let pacer = std::mem::offset_of!(MemoryAccount, pacers) + gpu.index() * size_of::<SharedPacer>();
        long(&self.head, pacer + BUSY_PLACE)
    }

    /// Bytes of the GPU that living processes say they hold.
    #[must_use]
    pub fn held(&self, gpu: GpuSlot) -> u64 {
        let place = std::mem::offset_of!(Slot, held) + gpu.index() * size_of::<AtomicU64>();
        self.living().map(|slot| long(slot, place)).fold(0, u64::saturating_add)
    }

    /// Whether a process waits until what it holds has been measured.
    #[must_use]
    pub fn is_awaiting_measurement(&self) -> bool {
        self.living().any(|slot| word(slot, std::mem::offset_of!(Slot, awaiting_measurement)) > 0)
    }

    /// Whether no process wants a GPU, or waits for anything else.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.is_awaiting_measurement() && GpuSlot::all().all(|gpu| self.of(gpu, 0).0 == 0)
    }

    /// The living processes, by the numbers they have in their container.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.living().map(|slot| word(slot, std::mem::offset_of!(Slot, process)))
    }

    /// Bytes refused, and nanoseconds waited for windows, over all processes that still have a slot.
    #[must_use]
    pub fn refused_and_waited(&self) -> (u64, u64) {
        let sum = |place: usize| self.used().map(|slot| long(slot, place)).fold(0, u64::saturating_add);
        (sum(std::mem::offset_of!(Slot, denied)), sum(std::mem::offset_of!(Slot, waited)))
    }

    fn used(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(size_of::<Slot>()).take(self.slots)
    }

    fn living(&self) -> impl Iterator<Item = &[u8]> {
        self.used().filter(|slot| {
            let owner = word(slot, std::mem::offset_of!(Slot, owner));
            owner != 0 && owner & OWNER_DIED == 0
        })
    }
}

/// What one process says of itself in its slot, as the agent reads it. The tenant's own word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Its process id, as the container numbers it.
    pub process: u32,
    /// Whether it lives; what the dead held may not be back with the GPU yet.
    pub is_alive: bool,
    /// Bytes of each GPU.
    pub held: PerGpu<u64>,
    /// Bytes refused so far.
    pub denied: u64,
    /// Nanoseconds its threads have waited for a window.
    pub waited: u64,
    /// How often.
    pub waits: u64,
}

impl AccountSnapshot {
    /// What each slot says, by its place; `None` where nobody ever was, or where nothing is held any more.
    pub fn process_usage(&self) -> impl Iterator<Item = Option<ProcessUsage>> {
        self.used().map(|slot| {
            let owner = word(slot, std::mem::offset_of!(Slot, owner));
            let process = word(slot, std::mem::offset_of!(Slot, process));
            let is_alive = owner & OWNER_DIED == 0;
            let is_gone = !is_alive && word(slot, std::mem::offset_of!(Slot, gone)) == process;
            let held = std::mem::offset_of!(Slot, held);
            (owner != 0 && !is_gone).then(|| ProcessUsage {
                process,
                is_alive,
                held: PerGpu::from_fn(|gpu| long(slot, held + gpu.index() * 8)),
                denied: long(slot, std::mem::offset_of!(Slot, denied)),
                waited: long(slot, std::mem::offset_of!(Slot, waited)),
                waits: long(slot, std::mem::offset_of!(Slot, waits)),
            })
        })
    }
}

fn long(bytes: &[u8], place: usize) -> u64 {
    bytes.get(place..place + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

fn word(bytes: &[u8], place: usize) -> u32 {
    bytes.get(place..place + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "memory_account/tests.rs"]
mod tests;

#[cfg(test)]
#[cfg(loom)]
#[path = "memory_account/interleavings.rs"]
mod interleavings;
