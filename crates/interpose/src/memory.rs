//! Device memory: every way to take it is charged before the driver is asked.
//!
//! | file | ways |
//! | --- | --- |
//! | `plain` | linear, pitched, managed, imported from other processes |
//! | `arrays` | arrays and mipmapped arrays |
//! | `vmm` | handles of physical memory and their mappings |
//! | `stream_ordered`, `pools` | allocation in the order of a stream, charged by what the pool has taken from the GPU |
//! | `graphs` | memory that graphs take when they run |
//! | `code` | modules: noted when, measured by the agent |
//! | `contexts`, `context_limits` | contexts, what dies with them, and what their kernels have by themselves |
//! | `report` | what the program is told: its share |
//!
//! Host memory costs nothing and is not wrapped.

pub mod allocation_table;
pub mod arrays;
pub mod code;
pub mod context_limits;
pub mod contexts;
pub mod graphs;
pub mod plain;
pub mod pools;
pub mod report;
pub mod stream_ordered;
pub mod vmm;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_limits::allocation_size::AllocationSize;
use tessera_limits::memory_account::SlotOwner;
use tessera_limits::{GpuSlot, PerGpu};

use crate::cuda::{DevicePointer, OUT_OF_MEMORY, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::Hook;
use crate::grant::Process;
use allocation_table::{AllocationKind, AllocationRecord, AllocationTable};

driver_functions! { Cuda:
    address_range = c"cuMemGetAddressRange_v2" (base: *mut DevicePointer, bytes: *mut usize, pointer: DevicePointer);
}

/// All hooks of this module.
pub static TABLES: &[&[Hook]] = &[
    plain::HOOKS,
    arrays::HOOKS,
    vmm::HOOKS,
    stream_ordered::HOOKS,
    graphs::HOOKS,
    code::HOOKS,
    contexts::HOOKS,
    context_limits::HOOKS,
    report::HOOKS,
];

/// What this process has taken.
#[derive(Default)]
pub struct Memory {
    pub allocations: AllocationTable,
    pub code: code::Code,
    pub pools: pools::Pools,
    pub vmm: Mutex<vmm::Handles>,
    pub graphs: Mutex<graphs::Graphs>,
    pub contexts: Mutex<contexts::Contexts>,
    /// GPUs on which managed memory was taken.
    pub has_managed: PerGpu<AtomicBool>,
}

/// How long a request waits for the driver to take back the memory of a process that has just died.
const PATIENCE: Duration = Duration::from_millis(1_000);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

impl Process {
    /// Charges `bytes` of a GPU.
    ///
    /// # Errors
    /// "Out of memory" at the limit.
    pub fn charge(&self, gpu: GpuSlot, bytes: u64) -> Result<(), Status> {
        if self.charge_now(gpu, bytes) {
            return Ok(());
        }
        // Freed pool memory and the memory of the dead come back late: look before refusing.
        self.memory.pools.shrink_all(self);
        let mut waited = Duration::ZERO;
        loop {
            self.sweep();
            if self.charge_now(gpu, bytes) {
                return Ok(());
            }
            let is_ending = |owner| matches!(owner, SlotOwner::Exiting { .. });
            let ending =
                self.account.slots().iter().any(|slot| is_ending(slot.owner()) && slot.held(gpu) > 0);
            if !ending || waited >= PATIENCE || bytes > self.memory_limit(gpu) {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
            waited += LOOK_AGAIN;
        }
        self.slot().denied.fetch_add(bytes, Ordering::Relaxed);
        Err(OUT_OF_MEMORY)
    }

    /// Charges what the process already has, limit or not.
    pub fn charge_anyway(&self, gpu: GpuSlot, bytes: u64) {
        self.own[gpu].fetch_add(bytes, Ordering::SeqCst);
        self.account.charge_anyway(self.slot, gpu, bytes);
    }

    /// Gives `bytes` of a GPU back.
    pub fn refund(&self, gpu: GpuSlot, bytes: u64) {
        self.own[gpu].fetch_sub(bytes, Ordering::SeqCst);
        self.account.refund(self.slot, gpu, bytes);
    }

    /// Charges if there is room at this moment.
    fn charge_now(&self, gpu: GpuSlot, bytes: u64) -> bool {
        let limit = self.memory_limit(gpu);
        let unmeasured = self.memory.code.set_aside(self, gpu, bytes, self.account.held(gpu), limit);
        let limit = self.memory_limit(gpu).saturating_sub(unmeasured);
        let _announcing = self.announcing();
        // Whatever is written in the account, a process alone never passes the limit.
        let own = self.own[gpu].load(Ordering::SeqCst).saturating_add(bytes);
        if own > limit || self.account.charge(self.slot, gpu, bytes, limit).is_err() {
            return false;
        }
        self.own[gpu].fetch_add(bytes, Ordering::SeqCst);
        true
    }

    /// Charges what the driver will take for `bytes`.
    fn charge_piece(&self, gpu: GpuSlot, bytes: u64) -> Result<AllocationSize, Status> {
        let piece = AllocationSize::of(bytes);
        let AllocationSize::Small(small) = piece else {
            let AllocationSize::Blocks(blocks) = piece else { return Ok(piece) };
            return self.charge(gpu, blocks).map(|()| piece);
        };
        let missing = self.announcing()[gpu].additional_charge(small);
        if missing > 0 {
            self.charge(gpu, missing)?;
        }
        self.announcing()[gpu].add(small, missing);
        Ok(piece)
    }

    fn write_down(&self, kind: AllocationKind, key: u64, record: AllocationRecord) {
        if let Some(before) = self.memory.allocations.insert(kind, key, record) {
            self.refund_piece(before.gpu, before.piece);
        }
    }

    fn refund_piece(&self, gpu: GpuSlot, piece: AllocationSize) {
        let bytes = match piece {
            AllocationSize::Blocks(bytes) => bytes,
            AllocationSize::Small(small) => self.announcing()[gpu].remove(small),
        };
        self.refund(gpu, bytes);
    }
}

/// Takes memory of the current GPU: charges `bytes`, asks the driver, and writes down under the key it answers with.
unsafe fn take(
    kind: AllocationKind,
    bytes: u64,
    ask: impl FnOnce() -> Status,
    key: impl FnOnce() -> u64,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let gpu = match process.gpus.current() {
        Some(Ok(gpu)) => gpu,
        Some(Err(status)) => return status,
        // Without a context the driver refuses by itself, in its own words.
        None => return ask(),
    };
    let piece = match process.charge_piece(gpu, bytes) {
        Ok(piece) => piece,
        Err(status) => return status,
    };
    let status = ask();
    if status == SUCCESS {
        process.write_down(
            kind,
            key(),
            AllocationRecord { gpu, piece, context: contexts::current(), again: 0 },
        );
    } else {
        process.refund_piece(gpu, piece);
    }
    status
}

/// Memory of another process. Its size is only known once it is here, so it is given back when it does not fit.
unsafe fn imported(
    kind: AllocationKind,
    pointer: *const DevicePointer,
    ask: impl FnOnce() -> Status,
    undo: impl FnOnce(DevicePointer) -> Status,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let status = ask();
    if status != SUCCESS {
        return status;
    }
    // SAFETY: written by the driver.
    let opened = unsafe { *pointer };
    if process.memory.allocations.open_again(kind, opened) {
        return status;
    }
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: an address of the driver's; `base` and `bytes` are places for the answer.
    if unsafe { address_range(&raw mut base, &raw mut bytes, opened) } != SUCCESS {
        return status;
    }
    // SAFETY: the driver is not asked again.
    let charged = unsafe { take(kind, bytes as u64, || SUCCESS, || opened) };
    if charged != SUCCESS {
        let _ = undo(opened);
    }
    charged
}

/// Gives memory back: first to the driver, then to the budget, so that nobody else gets it before it is free.
unsafe fn give(kind: AllocationKind, key: u64, ask: impl FnOnce() -> Status) -> Status {
    // Off the books first: the address may be somebody else's as soon as the driver has it.
    let record = Process::if_loaded()
        .and_then(|process| Some((process, process.memory.allocations.remove(kind, key)?)));
    let status = ask();
    match record {
        Some((process, record)) if status == SUCCESS && record.again == 0 => {
            process.refund_piece(record.gpu, record.piece);
        }
        Some((process, mut record)) => {
            record.again -= u32::from(status == SUCCESS);
            process.write_down(kind, key, record);
        }
        None => {}
    }
    status
}
