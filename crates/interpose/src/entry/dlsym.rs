//! Our `dlsym`, in front of libc's.
//!
//! What `RTLD_DEFAULT` and `RTLD_NEXT` find depends on who asks, which libc reads from the return address. So such a
//! look-up is jumped to, not called: libc sees the program's own return address. Both find our exported functions by
//! themselves, as this library is preloaded.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::table::in_place_of_named;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// libc's `dlsym`.
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
        // RTLD_NEXT is -1, RTLD_DEFAULT 0: below 2 after adding 1.
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

/// libc's `dlsym`, for our own look-ups by handle.
pub unsafe fn real_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let known = REAL.load(Ordering::Acquire);
    let real = if known.is_null() { find() } else { known };
    if real.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: `find` stores libc's dlsym or nothing.
    let real: Dlsym = unsafe { std::mem::transmute(real) };
    // SAFETY: the caller passes a live handle and a name.
    unsafe { real(handle, name) }
}

/// Finds libc's `dlsym`: by its version, for a plain look-up would find ours.
extern "C" fn find() -> *mut c_void {
    // Newest first: since glibc 2.34 it is in libc itself, before in libdl under the version of the architecture's first glibc.
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"] {
        // SAFETY: constant strings.
        let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        if !found.is_null() {
            REAL.store(found, Ordering::Release);
            return found;
        }
    }
    // Jumping there answers "not found", as libc would for an unknown name.
    let none = not_found as *const c_void;
    REAL.store(none.cast_mut(), Ordering::Release);
    none.cast_mut()
}

extern "C" fn not_found(_: *mut c_void, _: *const c_char) -> *mut c_void {
    std::ptr::null_mut()
}

/// A look-up in a library the program has a handle of.
unsafe extern "C" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: passed on as they came.
    let found = unsafe { real_dlsym(handle, name) };
    if found.is_null() || name.is_null() {
        return found;
    }
    // SAFETY: libc has just read this name.
    let name = unsafe { CStr::from_ptr(name) };
    let bytes = name.to_bytes();
    if !(bytes.starts_with(b"cu") || bytes.starts_with(b"nvml")) {
        return found;
    }
    in_place_of_named(name, found).unwrap_or(found)
}
