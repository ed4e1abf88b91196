//! The library's `dlopen`, `dlmopen`, `dlsym` and `dlvsym`, which wrap libc's.
//!
//! Several results depend on the caller, which libc finds by the return address: the answer to
//! `RTLD_DEFAULT` and `RTLD_NEXT`, the search path of `dlopen`, and the namespace of the caller. The
//! library therefore jumps to libc's function instead of calling it, so that libc sees the program's
//! own return address.
//!
//! - `RTLD_DEEPBIND` is removed from the flags. With it, an object would find the driver's functions and
//!   libc's `dlsym` before those of this library.
//! - A new namespace of `dlmopen` has no preloaded libraries. So the library is loaded into it first,
//!   which puts it first in the namespace's global scope, as if it were preloaded.
//! - A look-up that finds a wrapped function, or one of the four functions here, returns the hook.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::libc_functions::LibcFunction;
use super::table::hook_of_name;

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Dlmopen = unsafe extern "C" fn(libc::Lmid_t, *const c_char, c_int) -> *mut c_void;
type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// Namespace number that asks `dlmopen` for a new namespace.
const NEW_NAMESPACE: libc::Lmid_t = -1;
/// Request of `dlinfo` for the namespace of a handle.
const RTLD_DI_LMID: c_int = 1;

static DLOPEN: LibcFunction = LibcFunction::new(c"dlopen");
static DLMOPEN: LibcFunction = LibcFunction::new(c"dlmopen");
static DLSYM: LibcFunction = LibcFunction::new(c"dlsym");
static DLVSYM: LibcFunction = LibcFunction::new(c"dlvsym");

/// Returns the wrapped function of libc with this name, and the function that replaces it.
fn wrapped_loader_function(name: &CStr) -> Option<(&'static LibcFunction, *mut c_void)> {
    let all = [
        (&DLOPEN, dlopen as Dlopen as *mut c_void),
        (&DLMOPEN, dlmopen as Dlmopen as *mut c_void),
        (&DLSYM, dlsym as Dlsym as *mut c_void),
        (&DLVSYM, dlvsym as Dlvsym as *mut c_void),
    ];
    all.into_iter().find(|(function, _)| function.name() == name)
}

/// Opens an object as libc does, without `RTLD_DEEPBIND`.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "and esi, {mask}",
        "jmp rax",
        real = sym real_dlopen,
        mask = const !libc::RTLD_DEEPBIND,
    )
}

/// Opens an object in a namespace as libc does, after this library if the namespace is new.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlmopen(namespace: libc::Lmid_t, file: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {prepare}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        // The new namespace could not be prepared. The error of libc stays for `dlerror`.
        "cmp rax, -1",
        "je 2f",
        "push rax",
        "push rsi",
        "push rdx",
        "call {real}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "and edx, {mask}",
        "jmp rax",
        "2:",
        "xor eax, eax",
        "ret",
        prepare = sym prepare_namespace,
        real = sym real_dlmopen,
        mask = const !libc::RTLD_DEEPBIND,
    )
}

#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        // RTLD_NEXT is -1 and RTLD_DEFAULT is 0, so adding 1 gives a value below 2.
        "lea rcx, [rdi + 1]",
        "cmp rcx, 2",
        "jb 2f",
        "jmp {look_up}",
        "2:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {in_order}",
        "test rax, rax",
        "jnz 3f",
        "call {real}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        "3:",
        "add rsp, 24",
        "ret",
        look_up = sym look_up,
        in_order = sym hook_in_order,
        real = sym real_dlsym_address,
    )
}

#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    std::arch::naked_asm!(
        "lea rcx, [rdi + 1]",
        "cmp rcx, 2",
        "jb 2f",
        "jmp {look_up}",
        "2:",
        "push rdi",
        "push rsi",
        "push rdx",
        "call {in_order}",
        "test rax, rax",
        "jnz 3f",
        "call {real}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        "3:",
        "add rsp, 24",
        "ret",
        look_up = sym look_up_version,
        in_order = sym hook_of_version_in_order,
        real = sym real_dlvsym_address,
    )
}

/// Opens an object as libc does, without `RTLD_DEEPBIND`.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x0, x1, [sp, -32]!",
        "str x30, [sp, 16]",
        "bl {real}",
        "mov x9, x0",
        "ldr x30, [sp, 16]",
        "ldp x0, x1, [sp], 32",
        "and w1, w1, {mask}",
        "br x9",
        real = sym real_dlopen,
        mask = const !libc::RTLD_DEEPBIND,
    )
}

/// Opens an object in a namespace as libc does, after this library if the namespace is new.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlmopen(namespace: libc::Lmid_t, file: *const c_char, flags: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x1, x2, [sp, -32]!",
        "str x30, [sp, 16]",
        "bl {prepare}",
        // The new namespace could not be prepared. The error of libc stays for `dlerror`.
        "cmn x0, 1",
        "b.eq 2f",
        "str x0, [sp, 24]",
        "bl {real}",
        "mov x9, x0",
        "ldp x30, x0, [sp, 16]",
        "ldp x1, x2, [sp], 32",
        "and w2, w2, {mask}",
        "br x9",
        "2:",
        "ldr x30, [sp, 16]",
        "add sp, sp, 32",
        "mov x0, 0",
        "ret",
        prepare = sym prepare_namespace,
        real = sym real_dlmopen,
        mask = const !libc::RTLD_DEEPBIND,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "add x10, x0, 1",
        "cmp x10, 2",
        "b.lo 2f",
        "b {look_up}",
        "2:",
        "stp x0, x1, [sp, -32]!",
        "str x30, [sp, 16]",
        "bl {in_order}",
        "cbnz x0, 3f",
        "bl {real}",
        "mov x9, x0",
        "ldr x30, [sp, 16]",
        "ldp x0, x1, [sp], 32",
        "br x9",
        "3:",
        "ldr x30, [sp, 16]",
        "add sp, sp, 32",
        "ret",
        look_up = sym look_up,
        in_order = sym hook_in_order,
        real = sym real_dlsym_address,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    std::arch::naked_asm!(
        "add x10, x0, 1",
        "cmp x10, 2",
        "b.lo 2f",
        "b {look_up}",
        "2:",
        "stp x0, x1, [sp, -32]!",
        "stp x2, x30, [sp, 16]",
        "bl {in_order}",
        "cbnz x0, 3f",
        "bl {real}",
        "mov x9, x0",
        "ldp x2, x30, [sp, 16]",
        "ldp x0, x1, [sp], 32",
        "br x9",
        "3:",
        "ldr x30, [sp, 24]",
        "add sp, sp, 32",
        "ret",
        look_up = sym look_up_version,
        in_order = sym hook_of_version_in_order,
        real = sym real_dlvsym_address,
    )
}

extern "C" fn real_dlopen() -> *mut c_void {
    DLOPEN.address()
}

extern "C" fn real_dlmopen() -> *mut c_void {
    DLMOPEN.address()
}

extern "C" fn real_dlsym_address() -> *mut c_void {
    DLSYM.address()
}

extern "C" fn real_dlvsym_address() -> *mut c_void {
    DLVSYM.address()
}

/// Calls libc's `dlsym`, for the library's own look-ups by handle.
pub unsafe fn real_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the address is that of libc's `dlsym`, or of a function that ignores its arguments.
    let real = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(DLSYM.address()) };
    // SAFETY: the caller passes a valid handle and a NUL-terminated name.
    unsafe { real(handle, name) }
}

/// Calls libc's `dlmopen`.
unsafe fn open_in_namespace(namespace: libc::Lmid_t, file: &CStr, flags: c_int) -> *mut c_void {
    // SAFETY: the address is that of libc's `dlmopen`, or of a function that ignores its arguments.
    let real = unsafe { std::mem::transmute::<*mut c_void, Dlmopen>(DLMOPEN.address()) };
    // SAFETY: the file's name is NUL-terminated.
    unsafe { real(namespace, file.as_ptr(), flags) }
}

/// Looks a name up in a library by its handle, and replaces a wrapped function by its hook.
unsafe extern "C" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the arguments are those that the program passed to `dlsym`.
    let found = unsafe { real_dlsym(handle, name) };
    // SAFETY: libc's `dlsym` has accepted the handle and the name.
    unsafe { replaced(handle, name, found) }
}

/// Looks a versioned name up in a library by its handle, and replaces a wrapped function by its hook.
unsafe extern "C" fn look_up_version(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // SAFETY: the address is that of libc's `dlvsym`, or of a function that ignores its arguments.
    let real = unsafe { std::mem::transmute::<*mut c_void, Dlvsym>(DLVSYM.address()) };
    // SAFETY: the arguments are those that the program passed to `dlvsym`.
    let found = unsafe { real(handle, name, version) };
    // SAFETY: libc's `dlvsym` has accepted the handle and the name.
    unsafe { replaced(handle, name, found) }
}

/// Returns the hook for what a look-up by handle has found, or `found` if the library does not wrap it.
///
/// # Safety
/// The handle must be valid. The name must be a NUL-terminated string if `found` is not null.
unsafe fn replaced(handle: *mut c_void, name: *const c_char, found: *mut c_void) -> *mut c_void {
    if found.is_null() || name.is_null() {
        return found;
    }
    // SAFETY: the caller guarantees a NUL-terminated string, because something was found.
    let name = unsafe { CStr::from_ptr(name) };
    if !may_be_wrapped(name) {
        return found;
    }
    let (original, hook) = match wrapped_loader_function(name) {
        Some((function, hook)) => (function.address(), hook),
        None => match hook_of_name(name) {
            Some(hook) => (hook.function.address_if_loaded(), hook.address.cast_mut()),
            None => return found,
        },
    };
    if std::ptr::eq(found, original) {
        return hook;
    }
    if std::ptr::eq(found, hook) {
        return found;
    }
    // SAFETY: the caller guarantees a valid handle.
    unsafe { hook_in_other_namespace(handle, name) }.unwrap_or(found)
}

/// Returns whether the library may wrap a function of this name. Most look-ups need no more than this.
fn may_be_wrapped(name: &CStr) -> bool {
    let bytes = name.to_bytes();
    [&b"cu"[..], b"nvml", b"dl"].iter().any(|prefix| bytes.starts_with(prefix))
}

/// Returns the hook for a look-up with `RTLD_DEFAULT` or `RTLD_NEXT`, or null if libc is to answer.
///
/// `RTLD_DEFAULT` finds the exported hooks without help, because the library is preloaded. `RTLD_NEXT`
/// does so only from objects before this library. Behind it, the next definition is the driver's.
unsafe extern "C" fn hook_in_order(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    if handle == libc::RTLD_DEFAULT {
        return std::ptr::null_mut();
    }
    // SAFETY: the program passes a NUL-terminated name to `dlsym`, or null.
    unsafe { hook_if_loaded(name) }
}

/// Does the same for `dlvsym`. With a version, `RTLD_DEFAULT` does not find the hooks either, because
/// they have no version.
unsafe extern "C" fn hook_of_version_in_order(_handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the program passes a NUL-terminated name to `dlvsym`, or null.
    unsafe { hook_if_loaded(name) }
}

/// Returns the hook of this name if the function that it wraps is loaded, otherwise null.
unsafe fn hook_if_loaded(name: *const c_char) -> *mut c_void {
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the name is not null, so the caller guarantees a NUL-terminated string.
    let name = unsafe { CStr::from_ptr(name) };
    if !may_be_wrapped(name) {
        return std::ptr::null_mut();
    }
    if let Some((_, hook)) = wrapped_loader_function(name) {
        return hook;
    }
    hook_of_name(name)
        .filter(|hook| !hook.function.address_if_loaded().is_null())
        .map_or(std::ptr::null_mut(), |hook| hook.address.cast_mut())
}

/// Loads this library into a new namespace, and returns the namespace's number. Returns other
/// namespaces as they are, and [`NEW_NAMESPACE`] on failure.
extern "C" fn prepare_namespace(namespace: libc::Lmid_t) -> libc::Lmid_t {
    if namespace != NEW_NAMESPACE {
        return namespace;
    }
    let Some(file) = own_file() else { return NEW_NAMESPACE };
    // SAFETY: the loader keeps the name of this library for as long as it is loaded, which is for ever.
    let own = unsafe { open_in_namespace(NEW_NAMESPACE, file, libc::RTLD_LAZY) };
    if own.is_null() {
        return NEW_NAMESPACE;
    }
    // SAFETY: the handle was opened just now and is never closed.
    unsafe { namespace_of(own) }.unwrap_or(NEW_NAMESPACE)
}

/// Returns the hook of this name in the namespace of a handle, if that is not the library's own
/// namespace.
///
/// # Safety
/// The handle must be valid.
unsafe fn hook_in_other_namespace(handle: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    /// Handle of this library in its own namespace, or null until it is needed.
    static OWN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let file = own_file()?;
    let mut own = OWN.load(Ordering::Acquire);
    if own.is_null() {
        // SAFETY: the name is NUL-terminated, and the handle is never closed. The call is made from
        // this library, so it searches the library's own namespace.
        own = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        OWN.store(own, Ordering::Release);
    }
    if own.is_null() {
        return None;
    }
    // SAFETY: both handles are valid.
    let (here, there) = unsafe { (namespace_of(own)?, namespace_of(handle)?) };
    if here == there {
        return None;
    }
    // SAFETY: the file's name is NUL-terminated. `RTLD_NOLOAD` only finds the library if it is there.
    let library = unsafe { open_in_namespace(there, file, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the handle is valid, and the name is NUL-terminated.
    let hook = unsafe { real_dlsym(library, name.as_ptr()) };
    (!hook.is_null()).then_some(hook)
}

/// Returns the namespace of a handle.
///
/// # Safety
/// The handle must be valid.
unsafe fn namespace_of(handle: *mut c_void) -> Option<libc::Lmid_t> {
    let mut namespace: libc::Lmid_t = 0;
    // SAFETY: the caller guarantees a valid handle, and this request writes one number.
    let status = unsafe { libc::dlinfo(handle, RTLD_DI_LMID, (&raw mut namespace).cast()) };
    (status == 0).then_some(namespace)
}

/// Returns the path of this library, as the loader knows it.
fn own_file() -> Option<&'static CStr> {
    // SAFETY: all fields are pointers, for which zero is a valid value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is writable, and the address is only looked up.
    let found = unsafe { libc::dladdr(own_file as *const c_void, &raw mut info) };
    // SAFETY: on success the name is a NUL-terminated string that the loader keeps while this library
    // is loaded, which is for ever.
    (found != 0 && !info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) })
}
