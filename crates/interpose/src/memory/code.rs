//! Device memory for code.
//!
//! The driver takes memory for a module and its kernels when the module is loaded, when a function
//! is looked up, or at the first launch. Only the agent can measure how much, with NVML. The
//! library therefore records *when* code may have been loaded. Near the limit, a request waits
//! until the agent has measured. The measurement must happen while the request waits: at other
//! times memory may be charged and not taken yet, so that the agent finds too little uncharged
//! memory.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tessera_limits::{Bytes, GpuLimit, GpuSlot, PerGpu, futex};

use crate::cuda::{Handle, Status};
use crate::entry::table::hooks;
use crate::grant::{GpuPlace, Process};

/// Times at which code was loaded, and up to which the agent's measurement includes it.
#[derive(Debug, Default)]
pub struct Code {
    loaded: AtomicU64,
    /// Time up to which code is measured, for each GPU.
    known: PerGpu<AtomicU64>,
}

/// Distance from the limit within which unmeasured code matters. The driver took at most about 160
/// MiB for PyTorch's kernels on an H200.
const MARGIN: Bytes = Bytes::from_mib(256);

/// Memory that stays reserved for code while no agent measures it.
const UNMEASURED: Bytes = Bytes::from_mib(128);

/// Longest time for which a request waits for a measurement.
const MAX_MEASUREMENT_WAIT: Duration = Duration::from_millis(400);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl Code {
    /// Records that code may have been loaded until now.
    pub fn note_loaded(&self) {
        self.loaded.store(futex::now(), Ordering::Relaxed);
    }

    /// Returns the memory that must stay free for unmeasured code if `bytes` are requested while
    /// `held` of `limit` are in use. Waits for a measurement if the request is near the limit.
    pub fn reserve_for_code(
        &self,
        process: &Process,
        gpu: GpuSlot,
        bytes: Bytes,
        held: Bytes,
        limit: Bytes,
    ) -> Bytes {
        let known = &self.known[gpu];
        let is_known = self.loaded.load(Ordering::Relaxed) <= known.load(Ordering::Relaxed);
        if is_known || limit == GpuLimit::WHOLE || held + bytes + MARGIN <= limit {
            return Bytes::ZERO;
        }
        let begin = futex::now();
        if !process.wait_for_measurement(gpu) {
            return UNMEASURED;
        }
        known.store(begin, Ordering::Relaxed);
        Bytes::ZERO
    }
}

impl Process {
    /// Asks the agent to measure the uncharged memory of a GPU, and waits for it. Returns false if the
    /// measurement did not come in time, or no agent runs.
    pub fn wait_for_measurement(&self, gpu: GpuSlot) -> bool {
        let begin = futex::now();
        let GpuPlace { grant, gpu } = self.place(gpu);
        let is_measured = || grant.control.measured_at(*gpu) > begin;
        let awaiting_measurement = &grant.slot().awaiting_measurement;
        awaiting_measurement.fetch_add(1, Ordering::SeqCst);
        grant.wake_arbiter();
        let mut waited = Duration::ZERO;
        while !is_measured() && grant.control.has_arbiter(futex::now()) && waited < MAX_MEASUREMENT_WAIT {
            std::thread::sleep(POLL_INTERVAL);
            waited += POLL_INTERVAL;
        }
        awaiting_measurement.fetch_sub(1, Ordering::SeqCst);
        is_measured()
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

// In each hook, `driver` is the driver's function of the same name.

fn call_and_note_load(call_driver: impl FnOnce() -> Status) -> Status {
    let status = call_driver();
    if let Some(process) = Process::if_loaded() {
        process.memory.code.note_loaded();
    }
    status
}

unsafe fn load(driver: Load, module: *mut Handle, image: *const c_void) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    call_and_note_load(|| unsafe { driver(module, image) })
}

unsafe fn load_ex(
    driver: LoadEx,
    module: *mut Handle,
    image: *const c_void,
    count: u32,
    options: *mut c_void,
    values: *mut c_void,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    call_and_note_load(|| unsafe { driver(module, image, count, options, values) })
}

#[allow(clippy::too_many_arguments, reason = "the driver's function has these arguments")]
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
    call_and_note_load(|| {
        // SAFETY: the program's arguments go to the driver unchanged.
        unsafe {
            driver(library, code, options, values, count, library_options, library_values, library_count)
        }
    })
}

unsafe fn find(driver: Find, found: *mut Handle, within: Handle, name: *const c_char) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    call_and_note_load(|| unsafe { driver(found, within, name) })
}

unsafe fn load_function(driver: unsafe extern "C" fn(Handle) -> Status, function: Handle) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    call_and_note_load(|| unsafe { driver(function) })
}

unsafe fn function_of(driver: Function, function: *mut Handle, kernel: Handle) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    call_and_note_load(|| unsafe { driver(function, kernel) })
}
