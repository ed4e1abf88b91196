//! NVML's memory information, which `nvidia-smi` shows: the container sees its own limit and usage.

use std::ffi::{CStr, c_char};

use tessera_limits::allocation_size::{FreeAndTotal, visible_memory};
use tessera_limits::{Bytes, GpuLimit, UuidBytes};

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
    let limited = limited(device);
    // SAFETY: the arguments are those that the program passed to this NVML function.
    let status = unsafe { driver(device, info) };
    if status == SUCCESS
        // SAFETY: NVML reported success, so `info` is null or has been written.
        && let Some(info) = unsafe { info.as_mut() }
        && let Some((granted, held)) = limited
    {
        let of_gpu = FreeAndTotal { free: Bytes(info.free), total: Bytes(info.total) };
        let FreeAndTotal { free, total } = visible_memory(granted, held, of_gpu);
        *info = Info { total: total.0, free: free.0, used: (total - free).0 };
    }
    status
}

unsafe fn memory_info_v2(
    driver: unsafe extern "C" fn(Handle, *mut InfoV2) -> Status,
    device: Handle,
    info: *mut InfoV2,
) -> Status {
    let limited = limited(device);
    // SAFETY: the arguments are those that the program passed to this NVML function.
    let status = unsafe { driver(device, info) };
    if status == SUCCESS
        // SAFETY: NVML reported success, so `info` is null or has been written.
        && let Some(info) = unsafe { info.as_mut() }
        && let Some((granted, held)) = limited
    {
        let of_gpu = FreeAndTotal { free: Bytes(info.free), total: Bytes(info.total) };
        let FreeAndTotal { free, total } = visible_memory(granted, held, of_gpu);
        let (version, used) = (info.version, (total - free).0);
        *info = InfoV2 { version, total: total.0, reserved: 0, free: free.0, used };
    }
    status
}

/// Returns the memory that this container was granted on a GPU and what it holds of it, or `None` if
/// the memory is not limited. NVML is asked afterwards, because this may wait until a process has ended.
fn limited(device: Handle) -> Option<(Bytes, Bytes)> {
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
    let granted = process.granted(gpu);
    (granted != GpuLimit::WHOLE).then(|| (granted, process.held(gpu)))
}
