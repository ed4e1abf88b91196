//! Device memory: every allocation is charged before the driver is called.
//!
//! | file | contents |
//! | --- | --- |
//! | `allocation_table` | what the process has allocated |
//! | `plain` | linear, pitched, managed and imported memory |
//! | `arrays` | arrays and mipmapped arrays |
//! | `vmm` | handles of physical memory and their mappings |
//! | `stream_ordered`, `pools` | stream-ordered allocations, charged by what their pool has reserved |
//! | `graphs` | memory that graphs allocate when they run |
//! | `code` | times at which modules were loaded; the agent measures their size |
//! | `contexts`, `context_limits` | contexts, the memory that is freed with them, and the memory of their kernels |
//! | `context_size` | the memory that a context takes, as the agent measures it |
//! | `exits` | memory of other processes that have ended |
//! | `report` | free and total memory, as the program sees them |
//!
//! Host memory is not limited, so its functions have no hooks.

pub mod allocation_table;
pub mod arrays;
pub mod code;
pub mod context_limits;
pub mod context_size;
pub mod contexts;
pub mod exits;
pub mod graphs;
pub mod plain;
pub mod pools;
pub mod report;
pub mod stream_ordered;
pub mod vmm;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use tessera_limits::allocation_size::AllocationSize;
use tessera_limits::memory_account::SlotOwner;
use tessera_limits::{Bytes, GpuSlot, PerGpu};

use crate::cuda::{DevicePointer, OUT_OF_MEMORY, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::Hook;
use crate::grant::{GpuPlace, Process};
use allocation_table::{AllocationKind, AllocationRecord, AllocationTable};

driver_functions! { Cuda:
    address_range = c"cuMemGetAddressRange_v2" (base: *mut DevicePointer, bytes: *mut usize, pointer: DevicePointer);
}

/// All hooks of this module.
pub static TABLES: &[&[Hook]] = &[
    &plain::HOOKS,
    &arrays::HOOKS,
    &vmm::HOOKS,
    &stream_ordered::HOOKS,
    &graphs::HOOKS,
    &code::HOOKS,
    &contexts::HOOKS,
    &context_limits::HOOKS,
    &report::HOOKS,
];

/// The device memory of this process.
#[derive(Default)]
pub struct Memory {
    pub allocations: AllocationTable,
    pub code: code::Code,
    pub pools: pools::Pools,
    pub vmm: Mutex<vmm::Handles>,
    pub graphs: Mutex<graphs::Graphs>,
    pub contexts: Mutex<contexts::Contexts>,
    /// True for each GPU on which the process has asked for the size of a context.
    pub has_asked_context_size: PerGpu<AtomicBool>,
    /// True for each GPU on which the process has allocated managed memory.
    pub has_managed: PerGpu<AtomicBool>,
}

/// Longest time for which a request waits until the driver has reclaimed the memory of an exited
/// process.
const MAX_RECLAIM_WAIT: Duration = Duration::from_millis(1_000);
const RECLAIM_POLL_INTERVAL: Duration = Duration::from_millis(2);

impl Process {
    /// Charges `bytes` of a GPU. Waits for memory that is being reclaimed before it rejects the
    /// charge.
    ///
    /// # Errors
    /// "Out of memory" at the limit.
    pub fn charge(&self, gpu: GpuSlot, bytes: Bytes) -> Result<(), Status> {
        if self.try_charge(gpu, bytes) {
            return Ok(());
        }
        // Freed pool memory and the memory of exited processes are released late, so both are
        // checked before a rejection.
        self.memory.pools.shrink_all(self);
        let mut waited = Duration::ZERO;
        loop {
            self.sweep();
            self.remeasure_after_exit(gpu);
            if self.try_charge(gpu, bytes) {
                return Ok(());
            }
            let is_exiting = |owner| matches!(owner, SlotOwner::Exiting(_));
            let GpuPlace { grant, gpu: place } = self.place(gpu);
            let mut slots = grant.account.slots().iter();
            let any_exiting = slots.any(|slot| is_exiting(slot.owner()) && slot.held(*place) > Bytes::ZERO);
            if !any_exiting || waited >= MAX_RECLAIM_WAIT || bytes > self.memory_limit(gpu) {
                break;
            }
            std::thread::sleep(RECLAIM_POLL_INTERVAL);
            waited += RECLAIM_POLL_INTERVAL;
        }
        self.place(gpu).grant.slot().denied.fetch_add(bytes, Ordering::Relaxed);
        Err(OUT_OF_MEMORY)
    }

    /// Charges memory that the process already holds, even above the limit.
    pub fn charge_anyway(&self, gpu: GpuSlot, bytes: Bytes) {
        self.own_charge[gpu].fetch_add(bytes, Ordering::SeqCst);
        let GpuPlace { grant, gpu } = self.place(gpu);
        grant.account.charge_anyway(grant.slot_index, *gpu, bytes);
    }

    /// Releases a charge of `bytes`.
    pub fn refund(&self, gpu: GpuSlot, bytes: Bytes) {
        self.own_charge[gpu].fetch_sub(bytes, Ordering::SeqCst);
        let GpuPlace { grant, gpu } = self.place(gpu);
        grant.account.refund(grant.slot_index, *gpu, bytes);
    }

    /// Charges `bytes` if they fit right now. May wait for a measurement near the limit.
    fn try_charge(&self, gpu: GpuSlot, bytes: Bytes) -> bool {
        let limit = self.memory_limit(gpu);
        let unmeasured = self.memory.code.reserve_for_code(self, gpu, bytes, self.charged(gpu), limit);
        let limit = self.memory_limit(gpu) - unmeasured;
        let _guard = self.lock_small_allocations();
        // Even if the container has changed the account, a single process never exceeds the limit.
        let own = self.own_charge[gpu].load(Ordering::SeqCst) + bytes;
        let GpuPlace { grant, gpu: place } = self.place(gpu);
        if own > limit || grant.account.charge(grant.slot_index, *place, bytes, limit).is_err() {
            return false;
        }
        // The agent lowers a limit and then reads the account. A charge by the old limit is either in what the agent
        // reads, or undone here.
        fence(Ordering::SeqCst);
        let limit_now = self.memory_limit(gpu) - unmeasured;
        if limit_now < limit && self.charged(gpu) > limit_now {
            grant.account.refund(grant.slot_index, *place, bytes);
            return false;
        }
        self.own_charge[gpu].fetch_add(bytes, Ordering::SeqCst);
        true
    }

    /// Charges the memory that the driver will take for `bytes`.
    fn charge_size(&self, gpu: GpuSlot, bytes: Bytes) -> Result<AllocationSize, Status> {
        let size = AllocationSize::of(bytes);
        let AllocationSize::Small(small) = size else {
            let AllocationSize::Blocks(blocks) = size else { return Ok(size) };
            return self.charge(gpu, blocks).map(|()| size);
        };
        let missing = self.lock_small_allocations()[gpu].additional_charge(small);
        if missing > Bytes::ZERO {
            self.charge(gpu, missing)?;
        }
        self.lock_small_allocations()[gpu].add(small, missing);
        Ok(size)
    }

    fn record(&self, kind: AllocationKind, key: u64, record: AllocationRecord) {
        if let Some(before) = self.memory.allocations.insert(kind, key, record) {
            self.refund_size(before.gpu, before.size);
        }
    }

    fn refund_size(&self, gpu: GpuSlot, size: AllocationSize) {
        let bytes = match size {
            AllocationSize::Blocks(bytes) => bytes,
            AllocationSize::Small(small) => self.lock_small_allocations()[gpu].remove(small),
        };
        self.refund(gpu, bytes);
    }
}

/// Allocates memory of the current GPU: charges `bytes`, calls the driver, and records the
/// allocation under `key`.
unsafe fn allocate(
    kind: AllocationKind,
    bytes: Bytes,
    call_driver: impl FnOnce() -> Status,
    key: impl FnOnce() -> u64,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let gpu = match process.gpus.current() {
        Some(Ok(gpu)) => gpu,
        Some(Err(status)) => return status,
        // Without a context the driver rejects the call itself.
        None => return call_driver(),
    };
    let size = match process.charge_size(gpu, bytes) {
        Ok(size) => size,
        Err(status) => return status,
    };
    let status = call_driver();
    if status == SUCCESS {
        process.record(
            kind,
            key(),
            AllocationRecord { gpu, size, context: contexts::current(), reopened: 0 },
        );
    } else {
        process.refund_size(gpu, size);
    }
    status
}

/// Imports memory of another process. Its size is known only after the import, so the import is
/// undone if the memory does not fit.
unsafe fn import(
    kind: AllocationKind,
    pointer: *const DevicePointer,
    call_driver: impl FnOnce() -> Status,
    undo: impl FnOnce(DevicePointer) -> Status,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let status = call_driver();
    if status != SUCCESS {
        return status;
    }
    // SAFETY: the driver reported success, so it has written the pointer.
    let opened = unsafe { *pointer };
    if process.memory.allocations.reopen(kind, opened) {
        return status;
    }
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the driver returned this address, and `base` and `bytes` are writable.
    if unsafe { address_range(&raw mut base, &raw mut bytes, opened) } != SUCCESS {
        return status;
    }
    // SAFETY: the closures call no driver function, because the memory is already imported.
    let charged = unsafe { allocate(kind, Bytes(bytes as u64), || SUCCESS, || opened) };
    if charged != SUCCESS {
        let _ = undo(opened);
    }
    charged
}

/// Frees memory. The driver frees it before the charge is released, so that no other process is
/// promised memory that is still in use.
unsafe fn free(kind: AllocationKind, key: u64, call_driver: impl FnOnce() -> Status) -> Status {
    // The record is removed first: another thread may get the same address as soon as the driver
    // has freed it.
    let record = Process::if_loaded()
        .and_then(|process| Some((process, process.memory.allocations.remove(kind, key)?)));
    let status = call_driver();
    match record {
        Some((process, record)) if status == SUCCESS && record.reopened == 0 => {
            process.refund_size(record.gpu, record.size);
        }
        Some((process, mut record)) => {
            record.reopened -= u32::from(status == SUCCESS);
            process.record(kind, key, record);
        }
        None => {}
    }
    status
}
