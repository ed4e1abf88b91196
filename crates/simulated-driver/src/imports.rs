//! Memory of other processes. The exporting process has already taken it from the GPU, so an import
//! takes nothing. The shared handle contains the address and the size.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::contexts::next_handle;
use crate::{INVALID_VALUE, SUCCESS, Status};

/// Size of each imported address, and the number of imports.
static OPEN: LazyLock<Mutex<HashMap<u64, (usize, u32)>>> = LazyLock::new(Mutex::default);

#[repr(C)]
pub struct IpcHandle {
    address: u64,
    bytes: usize,
    rest: [u64; 6],
}

/// Opens a handle. A second import returns the same address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(pointer: *mut u64, handle: IpcHandle, _flags: u32) -> Status {
    let Ok(mut open) = OPEN.lock() else { return INVALID_VALUE };
    open.entry(handle.address).or_insert((handle.bytes, 0)).1 += 1;
    unsafe { *pointer = handle.address };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(pointer: u64) -> Status {
    let Ok(mut open) = OPEN.lock() else { return INVALID_VALUE };
    let Some((_, times)) = open.get_mut(&pointer) else { return INVALID_VALUE };
    *times -= 1;
    if *times == 0 {
        open.remove(&pointer);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, pointer: u64) -> Status {
    let Some((size, _)) = OPEN.lock().ok().and_then(|open| open.get(&pointer).copied()) else {
        return INVALID_VALUE;
    };
    unsafe { (*base, *bytes) = (pointer, size) };
    SUCCESS
}

/// Imports a handle of memory whose size is unknown.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(handle: *mut u64, _from: u64, _kind: i32) -> Status {
    unsafe { *handle = next_handle() };
    SUCCESS
}

/// Returns the properties of imported memory, which is always on the first device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    placement: *mut [i32; 4],
    _handle: u64,
) -> Status {
    unsafe { *placement = [1, 0, 1, 0] };
    SUCCESS
}
