//! The card's energy counter, for running the arbiter alone. The agent has its own way to NVML.

#![allow(unsafe_code, reason = "calls a C library found at run time")]
#![allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calling through a pointer found by name is one act"
)]

use std::ffi::{CStr, CString, c_void};

/// One card, by NVML.
pub(crate) struct Card {
    device: *mut c_void,
    energy: Energy,
    limit: Limit,
}

type Energy = unsafe extern "C" fn(*mut c_void, *mut u64) -> i32;
type Limit = unsafe extern "C" fn(*mut c_void, *mut u32) -> i32;

impl Card {
    /// The card with a UUID, where there is NVML and such a card.
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
            let energy =
                std::mem::transmute::<*mut c_void, Energy>(find(c"nvmlDeviceGetTotalEnergyConsumption")?);
            let limit = std::mem::transmute::<*mut c_void, Limit>(find(c"nvmlDeviceGetEnforcedPowerLimit")?);
            let (uuid, mut device) = (CString::new(uuid).ok()?, std::ptr::null_mut());
            let found = init() == 0 && by_uuid(uuid.as_ptr(), &raw mut device) == 0;
            found.then_some(Self { device, energy, limit })
        }
    }

    /// Millijoules since the driver was loaded.
    pub(crate) fn energy(&self) -> Option<u64> {
        let mut millijoules = 0;
        // SAFETY: a live device, and the place for the answer.
        (unsafe { (self.energy)(self.device, &raw mut millijoules) } == 0).then_some(millijoules)
    }

    /// Watts that the card may draw.
    pub(crate) fn limit(&self) -> Option<f64> {
        let mut milliwatts = 0;
        // SAFETY: as above.
        (unsafe { (self.limit)(self.device, &raw mut milliwatts) } == 0).then(|| f64::from(milliwatts) / 1e3)
    }
}
