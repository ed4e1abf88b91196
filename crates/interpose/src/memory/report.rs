//! What a program is told about memory: its share, not the GPU.

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

/// How a form of the interface counts bytes.
trait Bytes: Copy + Ord {
    fn wide(self) -> u64;
    /// The most it can say, where it is more.
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
    // SAFETY: passed on as they came.
    let status = unsafe { driver(free, total) };
    if status == SUCCESS && !free.is_null() && !total.is_null() {
        // SAFETY: written by the driver.
        let (gpu_free, gpu_total) = unsafe { ((*free).wide(), (*total).wide()) };
        if let Some((shown_free, shown_total)) = share(gpu_free, gpu_total) {
            // SAFETY: as above.
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
    // SAFETY: passed on as they came.
    let status = unsafe { driver(bytes, device) };
    if status == SUCCESS
        && !bytes.is_null()
        && let Some(granted) = granted(device)
    {
        // SAFETY: written by the driver.
        unsafe { *bytes = (*bytes).min(T::narrow(granted)) };
    }
    status
}

fn granted(device: Device) -> Option<u64> {
    let process = Process::get().ok()?;
    Some(process.granted(process.gpus.of_device(device).ok()?))
}

/// Free and total of the current GPU, as this container has them.
fn share(gpu_free: u64, gpu_total: u64) -> Option<(u64, u64)> {
    let process = Process::get().ok()?;
    let gpu = process.gpus.current()?.ok()?;
    process.memory.pools.settle_all(process);
    process.sweep();
    Some(visible_memory(process.granted(gpu), process.held(gpu), gpu_total, gpu_free))
}

impl Process {
    /// What the container holds of a GPU, in ledgers or not.
    pub fn held(&self, gpu: GpuSlot) -> u64 {
        self.account.held(gpu).saturating_add(self.control.uncharged(gpu))
    }
}
