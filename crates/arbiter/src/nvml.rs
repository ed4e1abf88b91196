//! The GPU's power and processes, for running the arbiter alone. The agent has its own way to NVML.

#![allow(unsafe_code, reason = "calls a C library found at run time")]
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calling through a pointer found by name is one act"
)]

use std::ffi::{CStr, CString, c_void};

/// One GPU, by NVML.
pub(crate) struct NvmlGpu {
    device: *mut c_void,
    fields: Fields,
    limit: Limit,
    processes: Processes,
}

/// A process on the GPU, in NVML's form.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    number: u32,
    bytes: u64,
    instance: u32,
    compute_instance: u32,
}

/// A value by its number, in NVML's form.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Field {
    number: u32,
    scope: u32,
    at: i64,
    latency: i64,
    kind: u32,
    status: i32,
    value: u64,
}

/// Milliwatts on average over the last second.
const AVERAGE_POWER: u32 = 185;

/// More processes than this on one GPU are not seen.
const PROCESSES: usize = 512;

type Fields = unsafe extern "C" fn(*mut c_void, i32, *mut Field) -> i32;
type Processes = unsafe extern "C" fn(*mut c_void, *mut u32, *mut Process) -> i32;
type Limit = unsafe extern "C" fn(*mut c_void, *mut u32) -> i32;

impl NvmlGpu {
    /// The GPU with a UUID, where there is NVML and such a GPU.
    pub(crate) fn find(uuid: &str) -> Option<Self> {
        type Init = unsafe extern "C" fn() -> i32;
        type ByUuid = unsafe extern "C" fn(*const i8, *mut *mut c_void) -> i32;
        // SAFETY: a constant name; the library stays loaded. The functions have the forms NVML documents.
        unsafe {
            let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY);
            if library.is_null() {
                return None;
            }
            let find =
                |name: &CStr| Some(libc::dlsym(library, name.as_ptr())).filter(|found| !found.is_null());
            let init = std::mem::transmute::<*mut c_void, Init>(find(c"nvmlInit_v2")?);
            let by_uuid = std::mem::transmute::<*mut c_void, ByUuid>(find(c"nvmlDeviceGetHandleByUUID")?);
            let fields = std::mem::transmute::<*mut c_void, Fields>(find(c"nvmlDeviceGetFieldValues")?);
            let limit = std::mem::transmute::<*mut c_void, Limit>(find(c"nvmlDeviceGetEnforcedPowerLimit")?);
            let processes = find(c"nvmlDeviceGetComputeRunningProcesses_v3")?;
            let processes = std::mem::transmute::<*mut c_void, Processes>(processes);
            let (uuid, mut device) = (CString::new(uuid).ok()?, std::ptr::null_mut());
            let found = init() == 0 && by_uuid(uuid.as_ptr(), &raw mut device) == 0;
            found.then_some(Self { device, fields, limit, processes })
        }
    }

    /// Watts on average over the last second, where the GPU tells.
    pub(crate) fn power(&self) -> Option<f64> {
        let mut field = Field { number: AVERAGE_POWER, ..Field::default() };
        // SAFETY: a live device, and one field to fill in.
        let status = unsafe { (self.fields)(self.device, 1, &raw mut field) };
        let milliwatts = u32::try_from(field.value).ok()?;
        (status == 0 && field.status == 0).then(|| f64::from(milliwatts) / 1e3)
    }

    /// The processes on the GPU, and the bytes each holds.
    pub(crate) fn processes(&self) -> Vec<(u32, u64)> {
        let (mut count, mut list) = (512, [Process::default(); PROCESSES]);
        // SAFETY: a live device, a list as long as told.
        let status = unsafe { (self.processes)(self.device, &raw mut count, list.as_mut_ptr()) };
        let count = if status == 0 { count as usize } else { 0 };
        list.iter().take(count).map(|process| (process.number, process.bytes)).collect()
    }

    /// Watts that the GPU may draw.
    pub(crate) fn limit(&self) -> Option<f64> {
        let mut milliwatts = 0;
        // SAFETY: as above.
        (unsafe { (self.limit)(self.device, &raw mut milliwatts) } == 0).then(|| f64::from(milliwatts) / 1e3)
    }
}
