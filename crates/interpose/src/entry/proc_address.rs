//! The driver's own look-up function, which the CUDA runtime uses for all driver functions.

use std::ffi::{CStr, c_char, c_void};

use super::table::{hook_for_address, hooks};
use crate::cuda::{SUCCESS, Status};

type Lookup = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> Status;
type LookupV2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> Status;

hooks! { Cuda:
    cuGetProcAddress(
        name: *const c_char, function: *mut *mut c_void, version: i32, flags: u64
    ) => look_up;
    cuGetProcAddress_v2(
        name: *const c_char, function: *mut *mut c_void, version: i32, flags: u64, status: *mut i32
    ) => look_up_v2;
}

unsafe fn look_up(
    driver: Lookup,
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this driver function.
    let status = unsafe { driver(name, function, version, flags) };
    // SAFETY: `status` is the driver's result for these arguments.
    unsafe { replace_by_hook(status, name, function) };
    status
}

unsafe fn look_up_v2(
    driver: LookupV2,
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
    found: *mut i32,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this driver function.
    let status = unsafe { driver(name, function, version, flags, found) };
    // SAFETY: `status` is the driver's result for these arguments.
    unsafe { replace_by_hook(status, name, function) };
    status
}

/// Replaces the address that the driver found by the address of its hook, if the library wraps the
/// function.
unsafe fn replace_by_hook(status: Status, name: *const c_char, function: *mut *mut c_void) {
    if status != SUCCESS || function.is_null() || name.is_null() {
        return;
    }
    // SAFETY: the driver reported success, so it has read the name and written an address.
    let (found, name) = unsafe { (*function, CStr::from_ptr(name)) };
    if !found.is_null()
        && let Some(hook) = hook_for_address(name, found)
    {
        // SAFETY: the driver has written to `function`, so it is writable.
        unsafe { *function = hook };
    }
}
