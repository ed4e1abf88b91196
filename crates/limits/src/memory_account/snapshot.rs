//! The account file as the agent reads it.
//!
//! The agent reads the file and never maps it, because the container can truncate its file at any
//! time. All values are claims of the container: every number is possible, and none may cause a
//! panic.

use std::mem::offset_of;

use super::{BUSY_PLACE, GpuDemand, MemoryAccount, OWNER_DIED, SLOTS, Slot};
use crate::pacer::SharedPacer;
use crate::{AtomicBytes, Bytes, GpuSlot, PerGpu};

/// A copy of the used part of an account file.
#[derive(Debug, Default)]
pub struct AccountSnapshot {
    /// The bytes before the slots.
    head: Vec<u8>,
    bytes: Vec<u8>,
    slots: usize,
    /// True if a process wants a GPU.
    has_demand: bool,
    is_awaiting_measurement: bool,
}

/// The demand of a container on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowDemand {
    /// Number of processes that have work running or waiting.
    pub wanting: u32,
    /// Number of the wanting processes that have drained the window in question.
    pub drained: u32,
}

/// The content of one slot, as its process reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Process id, as the container numbers it.
    pub process: u32,
    /// True if the process is alive. The driver may not have reclaimed the memory of a dead process
    /// yet.
    pub is_alive: bool,
    /// Memory held of each GPU.
    pub held: PerGpu<Bytes>,
    /// Size of all rejected requests.
    pub denied: Bytes,
    /// Nanoseconds that the threads of the process have waited for a window.
    pub waited: u64,
    /// Number of times that a thread had to wait for a window.
    pub waits: u64,
    /// True if a thread of the process waits until its memory has been measured.
    pub is_awaiting_measurement: bool,
}

impl AccountSnapshot {
    /// Parses the content of an account file. Missing bytes read as an account without processes.
    #[must_use]
    pub fn parse(file: &[u8]) -> Self {
        let mut snapshot = Self::default();
        snapshot.read(|into, offset| {
            let rest = usize::try_from(offset).ok().and_then(|offset| file.get(offset..)).unwrap_or_default();
            let length = into.len().min(rest.len());
            into[..length].copy_from_slice(&rest[..length]);
            Ok(length)
        });
        snapshot
    }

    /// Replaces this snapshot by the current content of the file.
    ///
    /// `read_at` fills a buffer from an offset of the file and returns the number of bytes read.
    pub fn read(&mut self, read_at: impl Fn(&mut [u8], u64) -> std::io::Result<usize>) {
        self.head.resize(offset_of!(MemoryAccount, slots), 0);
        let read = read_at(&mut self.head, 0).unwrap_or(0);
        self.head.truncate(read);
        self.slots = (u32_at(&self.head, offset_of!(MemoryAccount, used_slots)) as usize).min(SLOTS);
        self.bytes.resize(self.slots * size_of::<Slot>(), 0);
        if self.slots > 0 {
            let read = read_at(&mut self.bytes, offset_of!(MemoryAccount, slots) as u64).unwrap_or(0);
            self.slots = self.slots.min(read / size_of::<Slot>());
        }
        // The arbiter asks for these more often than it reads.
        let is_awaiting =
            self.live_slots().any(|slot| u32_at(slot, offset_of!(Slot, awaiting_measurement)) > 0);
        let has_demand = self.live_slots().any(|slot| GpuSlot::all().any(|gpu| wants_at(slot, gpu)));
        (self.is_awaiting_measurement, self.has_demand) = (is_awaiting, has_demand);
    }

    /// Returns the number of slots that were read.
    #[must_use]
    pub fn slot_count(&self) -> usize {
        self.slots
    }

    /// Returns how many live processes want the GPU, and how many of these have drained the window
    /// `window`.
    #[must_use]
    pub fn demand(&self, gpu: GpuSlot, window: u32) -> WindowDemand {
        let mut total = WindowDemand::default();
        for slot in self.live_slots() {
            if wants_at(slot, gpu) {
                total.wanting += 1;
                let drained = u32_at(slot, demand_offset(gpu) + offset_of!(GpuDemand, drained));
                total.drained += u32::from(drained == window);
            }
        }
        total
    }

    /// Returns the nanoseconds for which the GPU was busy for the container. An honest value never
    /// decreases.
    #[must_use]
    pub fn busy(&self, gpu: GpuSlot) -> u64 {
        let pacer = offset_of!(MemoryAccount, pacers) + gpu.index() * size_of::<SharedPacer>();
        u64_at(&self.head, pacer + BUSY_PLACE)
    }

    /// Returns the memory of the GPU that live processes report to hold.
    #[must_use]
    pub fn held(&self, gpu: GpuSlot) -> Bytes {
        self.live_slots().map(|slot| held_at(slot, gpu)).sum()
    }

    /// Returns whether a process waits until its memory has been measured.
    #[must_use]
    pub fn is_awaiting_measurement(&self) -> bool {
        self.is_awaiting_measurement
    }

    /// Returns whether no process wants a GPU or waits for a measurement.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        !self.is_awaiting_measurement && !self.has_demand
    }

    /// Returns the ids of the live processes, as the container numbers them.
    pub fn live_processes(&self) -> impl Iterator<Item = u32> {
        self.live_slots().map(|slot| u32_at(slot, offset_of!(Slot, process)))
    }

    /// Returns the usage of each slot by its index, or `None` for a slot without charges: never
    /// used, or released.
    pub fn process_usage(&self) -> impl Iterator<Item = Option<ProcessUsage>> {
        self.used_slots().map(|slot| {
            let owner = u32_at(slot, offset_of!(Slot, owner));
            let process = u32_at(slot, offset_of!(Slot, process));
            let is_alive = owner & OWNER_DIED == 0;
            let is_gone = !is_alive && u32_at(slot, offset_of!(Slot, gone)) == process;
            (owner != 0 && !is_gone).then(|| ProcessUsage {
                process,
                is_alive,
                held: PerGpu::from_fn(|gpu| held_at(slot, gpu)),
                denied: Bytes(u64_at(slot, offset_of!(Slot, denied))),
                waited: u64_at(slot, offset_of!(Slot, waited)),
                waits: u64_at(slot, offset_of!(Slot, waits)),
                is_awaiting_measurement: u32_at(slot, offset_of!(Slot, awaiting_measurement)) > 0,
            })
        })
    }

    fn used_slots(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks_exact(size_of::<Slot>()).take(self.slots)
    }

    fn live_slots(&self) -> impl Iterator<Item = &[u8]> {
        self.used_slots().filter(|slot| {
            let owner = u32_at(slot, offset_of!(Slot, owner));
            owner != 0 && owner & OWNER_DIED == 0
        })
    }
}

/// Returns the offset of a GPU's demand in a slot.
fn demand_offset(gpu: GpuSlot) -> usize {
    offset_of!(Slot, demand) + gpu.index() * size_of::<GpuDemand>()
}

/// Returns whether the process of a slot wants a GPU.
fn wants_at(slot: &[u8], gpu: GpuSlot) -> bool {
    u32_at(slot, demand_offset(gpu) + offset_of!(GpuDemand, wants)) == 1
}

/// Returns what a slot holds of a GPU.
fn held_at(slot: &[u8], gpu: GpuSlot) -> Bytes {
    Bytes(u64_at(slot, offset_of!(Slot, held) + gpu.index() * size_of::<AtomicBytes>()))
}

/// Returns the number at `offset`, or 0 if the bytes end before it does.
fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..offset + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

/// Returns the number at `offset`, or 0 if the bytes end before it does.
fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
}
