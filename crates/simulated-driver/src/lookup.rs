//! The driver's look-up function. It resolves versions and per-thread-stream variants as the real
//! driver does, for the names used here.

use std::ffi::{CStr, CString, c_char, c_void};

use crate::{NOT_FOUND, SUCCESS, Status};

/// Flag that requests the per-thread-stream variant.
const PER_THREAD: u64 = 2;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
    found: *mut i32,
) -> Status {
    let address = unsafe { look_up(name, version, flags) };
    unsafe {
        *function = address.unwrap_or(std::ptr::null_mut());
        if !found.is_null() {
            *found = i32::from(address.is_none());
        }
    }
    if address.is_some() { SUCCESS } else { NOT_FOUND }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    function: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> Status {
    let address = unsafe { look_up(name, version, flags) };
    unsafe { *function = address.unwrap_or(std::ptr::null_mut()) };
    if address.is_some() { SUCCESS } else { NOT_FOUND }
}

unsafe fn look_up(name: *const c_char, version: i32, flags: u64) -> Option<*mut c_void> {
    let name = unsafe { CStr::from_ptr(name) }.to_str().ok()?;
    let mut forms = Vec::new();
    if flags & PER_THREAD != 0 {
        forms.extend(["_v2_ptsz", "_v2_ptds", "_ptsz", "_ptds"].map(|suffix| format!("{name}{suffix}")));
    }
    if version >= 3_020 {
        forms.push(format!("{name}_v2"));
    }
    forms.push(name.into());
    forms.into_iter().find_map(own)
}

/// Finds a function of this library. `dlsym` may be interposed in this process, so libc's is found
/// by its version.
fn own(name: String) -> Option<*mut c_void> {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    let name = CString::new(name).ok()?;
    let mut here: libc::Dl_info = unsafe { std::mem::zeroed() };
    unsafe { libc::dladdr(own as *const c_void, &raw mut here) };
    let this = unsafe { libc::dlopen(here.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    let libc = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY) };
    [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"].into_iter().find_map(|version| {
        let real = unsafe { libc::dlvsym(libc, c"dlsym".as_ptr(), version.as_ptr()) };
        if real.is_null() {
            return None;
        }
        let real = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(real) };
        let found = unsafe { real(this, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    })
}
