//! The driver's look-up function. It resolves versions and per-thread-stream variants as the real
//! driver does, for the names used here.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::LazyLock;

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

/// Returns the address of an exported function of this library.
///
/// The real driver has a table of its functions. Here the symbol table in the library's file is read,
/// because a preloaded library may wrap `dlsym`.
fn own(name: String) -> Option<*mut c_void> {
    static FUNCTIONS: LazyLock<HashMap<String, usize>> =
        LazyLock::new(|| exported_functions().unwrap_or_default());
    FUNCTIONS.get(&name).map(|address| std::ptr::with_exposed_provenance_mut(*address))
}

/// Reads the names and addresses of all exported functions from the file of this library.
fn exported_functions() -> Option<HashMap<String, usize>> {
    const DYNAMIC_SYMBOLS: usize = 11;
    let mut here: libc::Dl_info = unsafe { std::mem::zeroed() };
    unsafe { libc::dladdr(exported_functions as *const c_void, &raw mut here) };
    let path = unsafe { CStr::from_ptr(here.dli_fname) };
    let base = here.dli_fbase.expose_provenance();
    let file = std::fs::read(OsStr::from_bytes(path.to_bytes())).ok()?;
    let number = |place: usize, length: usize| {
        let bytes = file.get(place..place + length)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    };
    let (headers, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    let section = |index: usize| headers + size * index;
    let symbols = (0..count).map(section).find(|at| number(at + 4, 4) == Some(DYNAMIC_SYMBOLS))?;
    let strings = number(section(number(symbols + 0x28, 4)?) + 0x18, 8)?;
    let (begin, length) = (number(symbols + 0x18, 8)?, number(symbols + 0x20, 8)?);
    let functions = (begin..begin + length).step_by(24).filter_map(|symbol| {
        let name = CStr::from_bytes_until_nul(file.get(strings + number(symbol, 4)?..)?).ok()?;
        let is_defined = number(symbol + 6, 2)? != 0;
        is_defined.then_some((name.to_str().ok()?.to_owned(), base + number(symbol + 8, 8)?))
    });
    Some(functions.collect())
}
