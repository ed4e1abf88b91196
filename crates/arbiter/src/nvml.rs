//! The power and the processes of a GPU, for an arbiter that runs without an agent. The agent has
//! its own access to NVML.

#![allow(unsafe_code, reason = "calls a C library found at run time")]
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "looking up a function and calling it is one operation"
)]

use std::ffi::{CStr, CString, c_void};

use tessera_limits::Bytes;

/// A handle of one GPU in NVML.
pub(crate) struct NvmlGpu {
    device: *mut c_void,
    fields: GetFields,
    power_limit: GetPowerLimit,
    processes: GetProcesses,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    number: u32,
    bytes: u64,
    instance: u32,
    compute_instance: u32,
}

/// `nvmlFieldValue_t`.
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

/// `NVML_FI_DEV_POWER_AVERAGE`: milliwatts, averaged over the last second.
const AVERAGE_POWER: u32 = 185;

/// Largest number of processes on one GPU that is reported, as many as one container may have.
const MAX_PROCESSES: usize = 512;

type GetFields = unsafe extern "C" fn(*mut c_void, i32, *mut Field) -> i32;
type GetProcesses = unsafe extern "C" fn(*mut c_void, *mut u32, *mut Process) -> i32;
type GetPowerLimit = unsafe extern "C" fn(*mut c_void, *mut u32) -> i32;

impl NvmlGpu {
    /// Returns the GPU with this UUID, or `None` if NVML or the GPU is missing.
    pub(crate) fn find(uuid: &str) -> Option<Self> {
        type Init = unsafe extern "C" fn() -> i32;
        type ByUuid = unsafe extern "C" fn(*const i8, *mut *mut c_void) -> i32;
        // SAFETY: all names are NUL-terminated. The library stays loaded, and its functions have
        // the documented signatures.
        unsafe {
            let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY);
            if library.is_null() {
                return None;
            }
            let find =
                |name: &CStr| Some(libc::dlsym(library, name.as_ptr())).filter(|found| !found.is_null());
            let init = std::mem::transmute::<*mut c_void, Init>(find(c"nvmlInit_v2")?);
            let by_uuid = std::mem::transmute::<*mut c_void, ByUuid>(find(c"nvmlDeviceGetHandleByUUID")?);
            let fields = std::mem::transmute::<*mut c_void, GetFields>(find(c"nvmlDeviceGetFieldValues")?);
            let power_limit =
                std::mem::transmute::<*mut c_void, GetPowerLimit>(find(c"nvmlDeviceGetEnforcedPowerLimit")?);
            let processes = find(c"nvmlDeviceGetComputeRunningProcesses_v3")?;
            let processes = std::mem::transmute::<*mut c_void, GetProcesses>(processes);
            let (uuid, mut device) = (CString::new(uuid).ok()?, std::ptr::null_mut());
            let found = init() == 0 && by_uuid(uuid.as_ptr(), &raw mut device) == 0;
            found.then_some(Self { device, fields, power_limit, processes })
        }
    }

    /// Returns the average power of the last second in watts, if the GPU reports it.
    pub(crate) fn average_power_watts(&self) -> Option<f64> {
        let mut field = Field { number: AVERAGE_POWER, ..Field::default() };
        // SAFETY: NVML returned `device`, and `field` is one writable field, as the count says.
        let status = unsafe { (self.fields)(self.device, 1, &raw mut field) };
        let milliwatts = u32::try_from(field.value).ok()?;
        (status == 0 && field.status == 0).then(|| f64::from(milliwatts) / 1e3)
    }

    /// Returns the processes on the GPU and the memory that each holds.
    pub(crate) fn processes(&self) -> Vec<(u32, Bytes)> {
        let (mut count, mut list) = (512, [Process::default(); MAX_PROCESSES]);
        // SAFETY: NVML returned `device`, and `list` has as many entries as `count` says.
        let status = unsafe { (self.processes)(self.device, &raw mut count, list.as_mut_ptr()) };
        let count = if status == 0 { count as usize } else { 0 };
        list.iter().take(count).map(|process| (process.number, Bytes(process.bytes))).collect()
    }

    /// Returns the enforced power limit of the GPU in watts.
    pub(crate) fn power_limit_watts(&self) -> Option<f64> {
        let mut milliwatts = 0;
        // SAFETY: NVML returned `device`, and `milliwatts` is writable.
        (unsafe { (self.power_limit)(self.device, &raw mut milliwatts) } == 0)
            .then(|| f64::from(milliwatts) / 1e3)
    }
}
