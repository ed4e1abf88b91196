//! Code: any image has the two kernels of the measuring program, one that ends at once and one that lasts as long as it is told.

use std::ffi::{CStr, c_char, c_void};

use crate::contexts::initialised;
use crate::{Handle, NOT_FOUND, SUCCESS, Status};

/// A kernel of so many nanoseconds is its handle; this one's first parameter tells.
const SPIN: usize = 1 << 62;
const EMPTY: usize = 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status {
    unsafe { *module = image.cast_mut() };
    initialised().err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut Handle,
    _module: Handle,
    name: *const c_char,
) -> Status {
    let found = match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"spin" => SPIN,
        b"empty" => EMPTY,
        _ => return NOT_FOUND,
    };
    unsafe { *function = std::ptr::without_provenance_mut(found) };
    SUCCESS
}

/// How long a kernel lasts.
pub fn length(function: Handle, parameters: *mut *mut c_void) -> u64 {
    if function.addr() == SPIN {
        unsafe { **parameters.cast::<*const u64>() }
    } else {
        function.addr() as u64
    }
}
