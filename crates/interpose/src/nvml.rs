//! NVML's memory information, which `nvidia-smi` shows: the container sees its own limit and usage.

use std::ffi::{CStr, c_char};

use tessera_limits::allocation_size::visible_memory;
use tessera_limits::limits::UuidBytes;

use crate::cuda::{Handle, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Nvml:
    nvmlDeviceGetMemoryInfo(device: Handle, info: *mut Info) => memory_info;
    nvmlDeviceGetMemoryInfo_v2(device: Handle, info: *mut InfoV2) => memory_info_v2;
}

driver_functions! { Nvml:
    device_uuid = c"nvmlDeviceGetUUID" (device: Handle, text: *mut c_char, length: u32);
}

/// `nvmlMemory_t`.
#[repr(C)]
pub struct Info {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct InfoV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

unsafe fn memory_info(
    driver: unsafe extern "C" fn(Handle, *mut Info) -> Status,
    device: Handle,
    info: *mut Info,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this NVML function.
    let status = unsafe { driver(device, info) };
    if status == SUCCESS
        // SAFETY: NVML reported success, so `info` is null or has been written.
        && let Some(info) = unsafe { info.as_mut() }
        && let Some((limit, held)) = share(device)
    {
        let (free, total) = visible_memory(limit, held, info.total, info.free);
        *info = Info { total, free, used: total.saturating_sub(free) };
    }
    status
}

unsafe fn memory_info_v2(
    driver: unsafe extern "C" fn(Handle, *mut InfoV2) -> Status,
    device: Handle,
    info: *mut InfoV2,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this NVML function.
    let status = unsafe { driver(device, info) };
    if status == SUCCESS
        // SAFETY: NVML reported success, so `info` is null or has been written.
        && let Some(info) = unsafe { info.as_mut() }
        && let Some((limit, held)) = share(device)
    {
        let (free, total) = visible_memory(limit, held, info.total, info.free);
        *info = InfoV2 { version: info.version, total, reserved: 0, free, used: total.saturating_sub(free) };
    }
    status
}

/// Returns the container's memory limit on a GPU and its usage, or `None` if the memory is not
/// limited.
fn share(device: Handle) -> Option<(u64, u64)> {
    let process = Process::get().ok()?;
    let mut text = [0; 96];
    // SAFETY: NVML writes at most as many characters as the length says, which is the size of
    // `text`.
    if unsafe { device_uuid(device, text.as_mut_ptr(), 96) } != SUCCESS {
        return None;
    }
    // SAFETY: NVML reported success, so it has terminated the text with NUL.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().ok()?;
    // The UUID of a GPU begins with "GPU-", the UUID of a MIG instance with "MIG-".
    let (_, digits) = text.split_once('-')?;
    let gpu = process.gpus.of_uuid(UuidBytes::parse(digits)?)?;
    process.sweep();
    let granted = process.granted(gpu);
    (granted != u64::MAX).then(|| (granted, process.held(gpu)))
}
