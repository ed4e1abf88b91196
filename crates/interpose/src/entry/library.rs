//! The driver's own functions. They are looked up on first use, and never in a process without a
//! driver.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::loader::real_dlsym;

/// A driver library whose functions this library wraps.
#[derive(Debug)]
pub struct DriverLibrary {
    name: &'static CStr,
    handle: AtomicPtr<c_void>,
}

/// A function of a driver library, and its address once it is known.
#[derive(Debug)]
pub struct DriverFunction {
    pub name: &'static CStr,
    library: LibraryId,
    address: AtomicPtr<c_void>,
}

/// Identifies a driver library. A reference would need a relocation for each of the hundreds of
/// functions at load time.
#[derive(Clone, Copy, Debug)]
pub enum LibraryId {
    Cuda,
    Nvml,
}

static CUDA: DriverLibrary = DriverLibrary::new(c"libcuda.so.1");
static NVML: DriverLibrary = DriverLibrary::new(c"libnvidia-ml.so.1");

impl LibraryId {
    fn library(self) -> &'static DriverLibrary {
        match self {
            Self::Cuda => &CUDA,
            Self::Nvml => &NVML,
        }
    }
}

impl DriverLibrary {
    const fn new(name: &'static CStr) -> Self {
        Self { name, handle: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the handle of the library, or null. The library is loaded only if `load` is true.
    fn handle(&self, load: bool) -> *mut c_void {
        let known = self.handle.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        let flags = libc::RTLD_LAZY | if load { 0 } else { libc::RTLD_NOLOAD };
        // SAFETY: the name is a NUL-terminated constant, and the handle is never closed.
        let handle = unsafe { libc::dlopen(self.name.as_ptr(), flags) };
        self.handle.store(handle, Ordering::Release);
        handle
    }
}

impl DriverFunction {
    pub const fn new(name: &'static CStr, library: LibraryId) -> Self {
        Self { name, library, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Marks a function that this driver does not have.
    const ABSENT: *mut c_void = std::ptr::without_provenance_mut(1);

    /// Returns the address of the driver's function, or null if this driver does not have it. Loads
    /// the driver if necessary.
    #[inline]
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.addr() > Self::ABSENT.addr() { known } else { self.find(true) }
    }

    /// Returns the address of the driver's function if the driver is already loaded, otherwise
    /// null.
    pub fn address_if_loaded(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.addr() > Self::ABSENT.addr() { known } else { self.find(false) }
    }

    #[cold]
    fn find(&self, load: bool) -> *mut c_void {
        if self.address.load(Ordering::Relaxed) == Self::ABSENT {
            return std::ptr::null_mut();
        }
        let library = self.library.library().handle(load);
        if library.is_null() {
            return std::ptr::null_mut();
        }
        // SAFETY: the handle is never closed, and the name is a NUL-terminated constant.
        let address = unsafe { real_dlsym(library, self.name.as_ptr()) };
        self.address.store(if address.is_null() { Self::ABSENT } else { address }, Ordering::Relaxed);
        address
    }
}

/// Converts a string that ends in NUL to the type that the dynamic linker needs, at compile time.
pub const fn named(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name must end in NUL; this is checked at compile time"),
    }
}

/// Declares driver functions that the library calls without wrapping them.
macro_rules! driver_functions {
    ($library:ident: $($name:ident = $symbol:literal ( $($argument:ident : $type:ty),* );)*) => {
        $(
            /// Calls the driver's function, or returns "not supported" if this driver does not have
            /// it.
            #[inline]
            pub unsafe fn $name($($argument: $type),*) -> $crate::cuda::Status {
                static FUNCTION: $crate::entry::library::DriverFunction =
                    $crate::entry::library::DriverFunction::new($symbol, $crate::entry::library::LibraryId::$library);
                let address = FUNCTION.address();
                if address.is_null() {
                    return $crate::cuda::NOT_SUPPORTED;
                }
                type Signature = unsafe extern "C" fn($($type),*) -> $crate::cuda::Status;
                // SAFETY: the driver's function of this name has this signature.
                let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Signature>(address) };
                // SAFETY: the caller fulfils the requirements of the driver's function.
                unsafe { function($($argument),*) }
            }
        )*
    };
}
pub(crate) use driver_functions;
