//! NVML: the GPUs, their UUIDs and memory. A handle is the GPU's number plus one. With the variable
//! `SIMULATED_PENDING_RESET`, retired memory of every GPU waits for a reset: `pages` as on GPUs before the A100, `rows`
//! as on later ones.

use std::ffi::c_char;

use crate::contexts::as_handle;
use crate::gpu::{GpuProcess, TOTAL_BYTES, uuid};
use crate::nvml_mig::{Instance, write};
use crate::{Handle, INVALID_VALUE, SUCCESS, Status};

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Handle) -> Status {
    unsafe { *device = as_handle(u64::from(index) + 1) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, text: *mut c_char, length: u32) -> Status {
    if let Some(instance) = Instance::of(device) {
        return unsafe { write(&instance.uuid(), text, length) };
    }
    let mut name = String::from("GPU-");
    for (index, byte) in uuid(device.addr() - 1).iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            name.push('-');
        }
        name += &format!("{byte:02x}");
    }
    unsafe { write(&name, text, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Handle, info: *mut [u64; 3]) -> Status {
    if let Some(instance) = Instance::of(device) {
        unsafe { *info = [instance.bytes(), instance.bytes(), 0] };
        return SUCCESS;
    }
    let used = GpuProcess::get(device.addr() - 1).map_or(0, GpuProcess::used);
    unsafe { *info = [TOTAL_BYTES, TOTAL_BYTES - used, used] };
    SUCCESS
}

/// `nvmlMemory_v2_t`, which adds a version and the reserved bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, info: *mut [u64; 5]) -> Status {
    let mut plain = [0; 3];
    let status = unsafe { nvmlDeviceGetMemoryInfo(device, &raw mut plain) };
    unsafe { *info = [(*info)[0], plain[0], 0, plain[1], plain[2]] };
    status
}

/// Returns 1 if retired memory of this kind waits for a reset.
fn pending(kind: &str) -> u32 {
    u32::from(std::env::var("SIMULATED_PENDING_RESET").is_ok_and(|pending| pending == kind))
}

/// Answers 1 if a reset must take retired pages out of use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetRetiredPagesPendingStatus(_: Handle, is_pending: *mut u32) -> Status {
    unsafe { *is_pending = pending("pages") };
    SUCCESS
}

/// `NVML_FI_DEV_REMAPPED_PENDING`.
const REMAPPED_PENDING: u32 = 144;

/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Status = 3;

/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED_INT: u32 = 1;

/// `nvmlFieldValue_t`.
#[repr(C)]
pub struct FieldValue {
    field: u32,
    scope: u32,
    timestamp: i64,
    latency: i64,
    value_type: u32,
    status: Status,
    /// A union of numbers. An unsigned int is its first half.
    value: u64,
}

/// Answers the field that is 1 if a reset must remap rows of memory. Other fields are not supported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(_: Handle, count: i32, fields: *mut FieldValue) -> Status {
    let Ok(count) = usize::try_from(count) else { return INVALID_VALUE };
    for field in unsafe { std::slice::from_raw_parts_mut(fields, count) } {
        if field.field == REMAPPED_PENDING {
            (field.value_type, field.status, field.value) = (UNSIGNED_INT, SUCCESS, pending("rows").into());
        } else {
            field.status = NOT_SUPPORTED;
        }
    }
    SUCCESS
}
