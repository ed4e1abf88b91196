//! Code on the GPU. The driver takes memory for modules, and for what their kernels need, when it likes: with the module, with
//! the function, or at the first launch. How much, only the agent sees, by NVML. So it is noted *when* code may have been loaded;
//! near the limit nothing more is given until the agent has measured while the request waits: at any other moment memory may be
//! booked and not taken yet, and the agent finds too little.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tessera_limits::{GpuSlot, PerGpu, futex};

use crate::cuda::{Handle, Status};
use crate::entry::table::hooks;
use crate::grant::Process;

/// Since when the agent's figure may be too low.
#[derive(Debug, Default)]
pub struct Code {
    loaded: AtomicU64,
    /// Until when it is known, on each GPU.
    known: PerGpu<AtomicU64>,
}

/// The driver took at most some 160 MiB for PyTorch's kernels on an H200: closer to the limit than this, it matters.
const MARGIN: u64 = 256 << 20;

/// What is set aside for code while no agent is there to measure it.
const UNMEASURED: u64 = 128 << 20;

/// How long a request near the limit waits for a measurement.
const PATIENCE: Duration = Duration::from_millis(400);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Code {
    /// Code may have been loaded, up to now.
    pub fn note_loaded(&self) {
        self.loaded.store(futex::now(), Ordering::Relaxed);
    }

    /// What must stay free on the GPU for code not yet measured, when `bytes` more are asked for and `held` are held of
    /// `limit`. Waits for the agent where that makes a difference.
    pub fn set_aside(&self, process: &Process, gpu: GpuSlot, bytes: u64, held: u64, limit: u64) -> u64 {
        let known = &self.known[gpu];
        let is_known = self.loaded.load(Ordering::Relaxed) <= known.load(Ordering::Relaxed);
        if is_known || limit == u64::MAX || held.saturating_add(bytes + MARGIN) <= limit {
            return 0;
        }
        let begin = futex::now();
        let is_measured = || process.control.measured_at(gpu) > begin;
        let awaiting_measurement = &process.slot().awaiting_measurement;
        awaiting_measurement.fetch_add(1, Ordering::SeqCst);
        process.wake_arbiter();
        let mut waited = Duration::ZERO;
        while !is_measured() && process.control.has_arbiter(futex::now()) && waited < PATIENCE {
            std::thread::sleep(LOOK_AGAIN);
            waited += LOOK_AGAIN;
        }
        awaiting_measurement.fetch_sub(1, Ordering::SeqCst);
        if !is_measured() {
            return UNMEASURED;
        }
        known.store(begin, Ordering::Relaxed);
        0
    }
}

type Load = unsafe extern "C" fn(*mut Handle, *const c_void) -> Status;
type LoadEx = unsafe extern "C" fn(*mut Handle, *const c_void, u32, *mut c_void, *mut c_void) -> Status;
type LoadLibrary = unsafe extern "C" fn(
    *mut Handle,
    *const c_void,
    *mut c_void,
    *mut c_void,
    u32,
    *mut c_void,
    *mut c_void,
    u32,
) -> Status;
type Find = unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> Status;
type Function = unsafe extern "C" fn(*mut Handle, Handle) -> Status;

hooks! { Cuda:
    cuModuleLoad(module: *mut Handle, name: *const c_void) => load;
    cuModuleLoadData(module: *mut Handle, image: *const c_void) => load;
    cuModuleLoadFatBinary(module: *mut Handle, image: *const c_void) => load;
    cuModuleLoadDataEx(
        module: *mut Handle, image: *const c_void, count: u32, options: *mut c_void, values: *mut c_void
    ) => load_ex;
    cuLibraryLoadData(
        library: *mut Handle, code: *const c_void, options: *mut c_void, values: *mut c_void, count: u32,
        library_options: *mut c_void, library_values: *mut c_void, library_count: u32
    ) => load_library;
    cuLibraryLoadFromFile(
        library: *mut Handle, name: *const c_void, options: *mut c_void, values: *mut c_void, count: u32,
        library_options: *mut c_void, library_values: *mut c_void, library_count: u32
    ) => load_library;
    cuFuncLoad(function: Handle) => load_function;
    cuLibraryGetModule(module: *mut Handle, library: Handle) => function_of;
    cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) => find;
    cuLibraryGetKernel(kernel: *mut Handle, library: Handle, name: *const c_char) => find;
    cuKernelGetFunction(function: *mut Handle, kernel: Handle) => function_of;
}

// In all of the following: `driver` is the driver's function of the same form, called with what the program passed.

fn noting(ask: impl FnOnce() -> Status) -> Status {
    let status = ask();
    if let Some(process) = Process::if_loaded() {
        process.memory.code.note_loaded();
    }
    status
}

unsafe fn load(driver: Load, module: *mut Handle, image: *const c_void) -> Status {
    // SAFETY: see above.
    noting(|| unsafe { driver(module, image) })
}

unsafe fn load_ex(
    driver: LoadEx,
    module: *mut Handle,
    image: *const c_void,
    count: u32,
    options: *mut c_void,
    values: *mut c_void,
) -> Status {
    // SAFETY: see above.
    noting(|| unsafe { driver(module, image, count, options, values) })
}

#[allow(clippy::too_many_arguments, reason = "the driver's form")]
unsafe fn load_library(
    driver: LoadLibrary,
    library: *mut Handle,
    code: *const c_void,
    options: *mut c_void,
    values: *mut c_void,
    count: u32,
    library_options: *mut c_void,
    library_values: *mut c_void,
    library_count: u32,
) -> Status {
    noting(|| {
        // SAFETY: see above.
        unsafe {
            driver(library, code, options, values, count, library_options, library_values, library_count)
        }
    })
}

unsafe fn find(driver: Find, found: *mut Handle, within: Handle, name: *const c_char) -> Status {
    // SAFETY: see above.
    noting(|| unsafe { driver(found, within, name) })
}

unsafe fn load_function(driver: unsafe extern "C" fn(Handle) -> Status, function: Handle) -> Status {
    // SAFETY: see above.
    noting(|| unsafe { driver(function) })
}

unsafe fn function_of(driver: Function, function: *mut Handle, kernel: Handle) -> Status {
    // SAFETY: see above.
    noting(|| unsafe { driver(function, kernel) })
}
