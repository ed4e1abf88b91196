//! The driver's own look-up, which the CUDA runtime uses for everything.

use std::ffi::{CStr, c_char, c_void};

use super::table::{hooks, in_place_of};
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
    // SAFETY: passed on as they came.
    let status = unsafe { driver(name, function, version, flags) };
    // SAFETY: the driver has just written there.
    unsafe { swap(status, name, function) };
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
    // SAFETY: passed on as they came.
    let status = unsafe { driver(name, function, version, flags, found) };
    // SAFETY: the driver has just written there.
    unsafe { swap(status, name, function) };
    status
}

unsafe fn swap(status: Status, name: *const c_char, function: *mut *mut c_void) {
    if status != SUCCESS || function.is_null() || name.is_null() {
        return;
    }
    // SAFETY: the driver succeeded, so it wrote an address here and has read the name.
    let (found, name) = unsafe { (*function, CStr::from_ptr(name)) };
    if !found.is_null()
        && let Some(ours) = in_place_of(name, found)
    {
        // SAFETY: as above.
        unsafe { *function = ours };
    }
}
