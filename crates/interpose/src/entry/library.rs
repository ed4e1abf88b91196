//! The driver's own functions: found when first needed, never searched for in a process that has no driver.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::dlsym::real_dlsym;

/// One of the two libraries we stand in front of.
#[derive(Debug)]
pub struct Library {
    name: &'static CStr,
    handle: AtomicPtr<c_void>,
}

/// The address of one function of a driver library.
#[derive(Debug)]
pub struct Entry {
    pub name: &'static CStr,
    of: Of,
    address: AtomicPtr<c_void>,
}

/// Which library. Not by its address: some hundred of them would have to be written down when this library is loaded.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    Cuda,
    Nvml,
}

static CUDA: Library = Library::new(c"libcuda.so.1");
static NVML: Library = Library::new(c"libnvidia-ml.so.1");

impl Of {
    fn library(self) -> &'static Library {
        match self {
            Self::Cuda => &CUDA,
            Self::Nvml => &NVML,
        }
    }
}

impl Library {
    const fn new(name: &'static CStr) -> Self {
        Self { name, handle: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The library, loading it only where `load` says so.
    fn handle(&self, load: bool) -> *mut c_void {
        let known = self.handle.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        let flags = libc::RTLD_LAZY | if load { 0 } else { libc::RTLD_NOLOAD };
        // SAFETY: a constant name; the handle is kept for ever.
        let handle = unsafe { libc::dlopen(self.name.as_ptr(), flags) };
        self.handle.store(handle, Ordering::Release);
        handle
    }
}

impl Entry {
    pub const fn new(name: &'static CStr, of: Of) -> Self {
        Self { name, of, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Stands for "this driver has no such function".
    const ABSENT: *mut c_void = std::ptr::without_provenance_mut(1);

    /// The driver's function, or null where this driver has none.
    #[inline]
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.addr() > Self::ABSENT.addr() { known } else { self.find(true) }
    }

    /// The driver's function if the driver is already in this process.
    pub fn address_if_loaded(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.addr() > Self::ABSENT.addr() { known } else { self.find(false) }
    }

    #[cold]
    fn find(&self, load: bool) -> *mut c_void {
        if self.address.load(Ordering::Relaxed) == Self::ABSENT {
            return std::ptr::null_mut();
        }
        let library = self.of.library().handle(load);
        if library.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: a live handle and a constant name.
        let address = unsafe { real_dlsym(library, self.name.as_ptr()) };
        self.address.store(if address.is_null() { Self::ABSENT } else { address }, Ordering::Relaxed);
        address
    }
}

/// A name that ends in zero, as the dynamic linker wants it.
pub const fn named(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("seen by the compiler"),
    }
}

/// Functions of the driver that we call and do not wrap.
macro_rules! driver_functions {
    ($library:ident: $($name:ident = $symbol:literal ( $($argument:ident : $type:ty),* );)*) => {
        $(
            /// The driver's function; "not supported" where it has none.
            #[inline]
            pub unsafe fn $name($($argument: $type),*) -> $crate::cuda::Status {
                static ENTRY: $crate::entry::library::Entry =
                    $crate::entry::library::Entry::new($symbol, $crate::entry::library::Of::$library);
                let address = ENTRY.address();
                if address.is_null() {
                    return $crate::cuda::NOT_SUPPORTED;
                }
                type Form = unsafe extern "C" fn($($type),*) -> $crate::cuda::Status;
                // SAFETY: the driver's function of this name has this form.
                let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Form>(address) };
                // SAFETY: the caller keeps the rules of the driver's function.
                unsafe { function($($argument),*) }
            }
        )*
    };
}
pub(crate) use driver_functions;
