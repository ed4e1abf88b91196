//! Free and total memory, as the program sees them: the container's, not the GPU's.

use tessera_limits::GpuSlot;
use tessera_limits::allocation_size::visible_memory;

use crate::cuda::{Device, SUCCESS, Status};
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => info;
    cuMemGetInfo(free: *mut u32, total: *mut u32) => info;
    cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) => total;
    cuDeviceTotalMem(bytes: *mut u32, device: Device) => total;
}

/// The integer type in which a version of the interface counts bytes.
trait Bytes: Copy + Ord {
    fn wide(self) -> u64;
    /// Converts `bytes`, or returns the largest value if `bytes` is larger.
    fn narrow(bytes: u64) -> Self;
}

impl Bytes for u32 {
    fn wide(self) -> u64 {
        self.into()
    }

    fn narrow(bytes: u64) -> Self {
        bytes.try_into().unwrap_or(Self::MAX)
    }
}

impl Bytes for usize {
    fn wide(self) -> u64 {
        self as u64
    }

    fn narrow(bytes: u64) -> Self {
        bytes.try_into().unwrap_or(Self::MAX)
    }
}

unsafe fn info<T: Bytes>(
    driver: unsafe extern "C" fn(*mut T, *mut T) -> Status,
    free: *mut T,
    total: *mut T,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(free, total) };
    if status == SUCCESS && !free.is_null() && !total.is_null() {
        // SAFETY: the driver reported success, so it has written both values.
        let (gpu_free, gpu_total) = unsafe { ((*free).wide(), (*total).wide()) };
        if let Some((shown_free, shown_total)) = share(gpu_free, gpu_total) {
            // SAFETY: the driver has written both values, so both are writable.
            unsafe { (*free, *total) = (T::narrow(shown_free), T::narrow(shown_total)) };
        }
    }
    status
}

unsafe fn total<T: Bytes>(
    driver: unsafe extern "C" fn(*mut T, Device) -> Status,
    bytes: *mut T,
    device: Device,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(bytes, device) };
    if status == SUCCESS
        && !bytes.is_null()
        && let Some(granted) = granted(device)
    {
        // SAFETY: the driver reported success, so it has written `bytes`.
        unsafe { *bytes = (*bytes).min(T::narrow(granted)) };
    }
    status
}

fn granted(device: Device) -> Option<u64> {
    let process = Process::get().ok()?;
    Some(process.granted(process.gpus.of_device(device).ok()?))
}

/// Returns the free and total bytes of this container on the current GPU.
fn share(gpu_free: u64, gpu_total: u64) -> Option<(u64, u64)> {
    let process = Process::get().ok()?;
    let gpu = process.gpus.current()?.ok()?;
    process.memory.pools.settle_all(process);
    process.sweep();
    Some(visible_memory(process.granted(gpu), process.held(gpu), gpu_total, gpu_free))
}

impl Process {
    /// Returns the bytes of a GPU that the container holds, charged or uncharged.
    pub fn held(&self, gpu: GpuSlot) -> u64 {
        self.account.held(gpu).saturating_add(self.control.uncharged(gpu))
    }
}
