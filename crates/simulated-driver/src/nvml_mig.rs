//! MIG instances of the first GPU, one for each profile in the variable `SIMULATED_MIG`, such as
//! `1g.10gb,2g.20gb`. Without the variable the GPU is not in MIG mode.

use std::ffi::c_char;

use crate::contexts::as_handle;
use crate::{Handle, INVALID_VALUE, SUCCESS, Status};

/// `NVML_ERROR_NOT_FOUND`.
const NO_INSTANCE: Status = 6;

/// Handle of the first instance. Handles of GPUs are lower.
const FIRST_HANDLE: usize = 0x1000;

/// ID of the first GPU instance.
const FIRST_INSTANCE: u32 = 7;

/// An instance: its place and its profile.
pub struct Instance {
    place: usize,
    profile: String,
}

impl Instance {
    /// Returns the instance of a handle, or `None` for the handle of a GPU.
    pub fn of(handle: Handle) -> Option<Self> {
        let place = handle.addr().checked_sub(FIRST_HANDLE)?;
        profiles().into_iter().nth(place).map(|profile| Self { place, profile })
    }

    pub fn uuid(&self) -> String {
        format!("MIG-73696d75-6c61-7465-642d-6d6967{:06x}", self.place)
    }

    /// Returns the memory in bytes, which the profile ends with.
    pub fn bytes(&self) -> u64 {
        let gib = self.profile.trim_end_matches("gb").rsplit('.').next().and_then(|text| text.parse().ok());
        gib.unwrap_or(0u64) << 30
    }
}

fn profiles() -> Vec<String> {
    let text = std::env::var("SIMULATED_MIG").unwrap_or_default();
    text.split(',').filter(|profile| !profile.is_empty()).map(str::to_owned).collect()
}

/// Writes a text with its end into a buffer of this length.
pub unsafe fn write(text: &str, buffer: *mut c_char, length: u32) -> Status {
    if text.len() >= length as usize {
        return INVALID_VALUE;
    }
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len());
        *buffer.add(text.len()) = 0;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> Status {
    unsafe { *count = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Handle, text: *mut c_char, length: u32) -> Status {
    let name = match Instance::of(device) {
        Some(instance) => format!("NVIDIA Simulated MIG {}", instance.profile),
        None => "NVIDIA Simulated".to_owned(),
    };
    unsafe { write(&name, text, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(_: Handle, current: *mut u32, pending: *mut u32) -> Status {
    let mode = u32::from(!profiles().is_empty());
    unsafe { (*current, *pending) = (mode, mode) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(_: Handle, count: *mut u32) -> Status {
    // A real driver counts the places, of which some have no instance.
    unsafe { *count = 7 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    _: Handle,
    index: u32,
    instance: *mut Handle,
) -> Status {
    if index as usize >= profiles().len() {
        return NO_INSTANCE;
    }
    unsafe { *instance = as_handle(FIRST_HANDLE as u64 + u64::from(index)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(device: Handle, id: *mut u32) -> Status {
    let Some(instance) = Instance::of(device) else { return INVALID_VALUE };
    unsafe { *id = FIRST_INSTANCE + u32::try_from(instance.place).unwrap_or(0) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(device: Handle, id: *mut u32) -> Status {
    if Instance::of(device).is_none() {
        return INVALID_VALUE;
    }
    unsafe { *id = 0 };
    SUCCESS
}
