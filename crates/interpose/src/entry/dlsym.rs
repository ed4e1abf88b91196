//! The library's `dlsym`, which wraps libc's.
//!
//! The result of `RTLD_DEFAULT` and `RTLD_NEXT` depends on the caller, which libc finds by the
//! return address. The library therefore jumps to libc's function instead of calling it, so that
//! libc sees the program's own return address. Both look-ups find the exported hooks without help,
//! because the library is preloaded.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::table::hook_for_name;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// Address of libc's `dlsym`, or null until it is found.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jnz 2f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "2:",
        // RTLD_NEXT is -1 and RTLD_DEFAULT is 0, so adding 1 gives a value below 2.
        "lea rcx, [rdi + 1]",
        "cmp rcx, 2",
        "jb 3f",
        "jmp {look_up}",
        "3:",
        "jmp rax",
        real = sym REAL,
        find = sym find,
        look_up = sym look_up,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "adrp x9, {real}",
        "ldr x9, [x9, :lo12:{real}]",
        "cbnz x9, 2f",
        "stp x0, x1, [sp, -32]!",
        "str x30, [sp, 16]",
        "bl {find}",
        "mov x9, x0",
        "ldr x30, [sp, 16]",
        "ldp x0, x1, [sp], 32",
        "2:",
        "add x10, x0, 1",
        "cmp x10, 2",
        "b.lo 3f",
        "b {look_up}",
        "3:",
        "br x9",
        real = sym REAL,
        find = sym find,
        look_up = sym look_up,
    )
}

/// Calls libc's `dlsym`, for the library's own look-ups by handle.
pub unsafe fn real_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let known = REAL.load(Ordering::Acquire);
    let real = if known.is_null() { find() } else { known };
    if real.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: `find` returns libc's `dlsym` or `not_found`, which have this signature.
    let real: Dlsym = unsafe { std::mem::transmute(real) };
    // SAFETY: the caller passes a valid handle and a NUL-terminated name.
    unsafe { real(handle, name) }
}

/// Finds libc's `dlsym` by its symbol version, because a look-up without version would find this
/// library's.
extern "C" fn find() -> *mut c_void {
    // Since glibc 2.34 the function is in libc. Before, it was in libdl, with the version of the
    // architecture's first glibc.
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"] {
        // SAFETY: both strings are NUL-terminated constants.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            REAL.store(found, Ordering::Release);
            return found;
        }
    }
    // `not_found` answers every look-up as libc does for an unknown name.
    let none = not_found as *const c_void;
    REAL.store(none.cast_mut(), Ordering::Release);
    none.cast_mut()
}

extern "C" fn not_found(_: *mut c_void, _: *const c_char) -> *mut c_void {
    std::ptr::null_mut()
}

/// Looks a name up in a library by its handle, and replaces a wrapped function by its hook.
unsafe extern "C" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the arguments are those that the program passed to `dlsym`.
    let found = unsafe { real_dlsym(handle, name) };
    if found.is_null() || name.is_null() {
        return found;
    }
    // SAFETY: libc found a symbol by this name, so the name is a valid NUL-terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    let bytes = name.to_bytes();
    if !(bytes.starts_with(b"cu") || bytes.starts_with(b"nvml")) {
        return found;
    }
    hook_for_name(name, found).unwrap_or(found)
}
