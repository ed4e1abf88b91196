//! Memory that kernels have by themselves, as much as a limit of their context says.

use super::allocation_table::AllocationKind;
use super::contexts::current;
use super::take;
use crate::cuda::{SUCCESS, Status};
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuCtxSetLimit(limit: i32, value: usize) => set_limit;
}

/// GrantLimits that are memory of the GPU. Others cost nothing, or as the stack of a thread nobody can tell before.
const PRINT_BUFFER: i32 = 1;
const HEAP: i32 = 2;

/// What a context has of them from the start, which its own charge covers.
const USUAL: u64 = 8 << 20;

unsafe fn set_limit(driver: unsafe extern "C" fn(i32, usize) -> Status, limit: i32, value: usize) -> Status {
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(limit, value) };
    let kind = match limit {
        PRINT_BUFFER => AllocationKind::PrintBuffer,
        HEAP => AllocationKind::Heap,
        _ => {
            if let Some(process) = Process::if_loaded() {
                process.memory.code.note_loaded();
            }
            return ask();
        }
    };
    let Some(process) = Process::if_loaded() else { return ask() };
    let (context, bytes) = (current() as u64, (value as u64).saturating_sub(USUAL));
    let before = process.memory.allocations.remove(kind, context);
    // SAFETY: as above.
    let status = unsafe { take(kind, bytes, ask, || context) };
    match before {
        Some(before) if status == SUCCESS => process.refund_piece(before.gpu, before.piece),
        Some(before) => process.write_down(kind, context, before),
        None => {}
    }
    status
}
