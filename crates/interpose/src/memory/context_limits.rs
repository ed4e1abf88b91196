//! Memory for the kernels of a context, whose size a limit of the context sets.

use tessera_limits::Bytes;

use super::allocate;
use super::allocation_table::AllocationKind;
use super::contexts::current;
use crate::cuda::{SUCCESS, Status};
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuCtxSetLimit(limit: i32, value: usize) => set_limit;
}

/// `CU_LIMIT_PRINTF_FIFO_SIZE`, a limit that allocates device memory. The other limits allocate
/// nothing, or an amount that is not known before, such as the stacks of threads.
const PRINT_BUFFER: i32 = 1;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`, a limit that allocates device memory.
const HEAP: i32 = 2;

/// Size of both buffers in a new context, which the charge for the context covers.
const DEFAULT_SIZE: Bytes = Bytes::from_mib(8);

unsafe fn set_limit(driver: unsafe extern "C" fn(i32, usize) -> Status, limit: i32, value: usize) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(limit, value) };
    let kind = match limit {
        PRINT_BUFFER => AllocationKind::PrintBuffer,
        HEAP => AllocationKind::Heap,
        _ => {
            if let Some(process) = Process::if_loaded() {
                process.memory.code.note_loaded();
            }
            return call_driver();
        }
    };
    let Some(process) = Process::if_loaded() else { return call_driver() };
    let (context, bytes) = (current() as u64, Bytes(value as u64) - DEFAULT_SIZE);
    let before = process.memory.allocations.remove(kind, context);
    // SAFETY: the closure calls the driver with the program's arguments, and the key does not
    // depend on its result.
    let status = unsafe { allocate(kind, bytes, call_driver, || context) };
    match before {
        Some(before) if status == SUCCESS => process.refund_size(before.gpu, before.size),
        Some(before) => process.record(kind, context, before),
        None => {}
    }
    status
}
