//! Free and total memory, as the program sees them: the container's, not the GPU's.

use tessera_limits::Bytes;
use tessera_limits::allocation_size::{FreeAndTotal, visible_memory};

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
trait SizeType: Copy + Ord {
    fn bytes(self) -> Bytes;
    /// Converts `bytes`, or returns the largest value if `bytes` is larger.
    fn narrow(bytes: Bytes) -> Self;
}

impl SizeType for u32 {
    fn bytes(self) -> Bytes {
        Bytes(self.into())
    }

    fn narrow(bytes: Bytes) -> Self {
        bytes.0.try_into().unwrap_or(Self::MAX)
    }
}

impl SizeType for usize {
    fn bytes(self) -> Bytes {
        Bytes(self as u64)
    }

    fn narrow(bytes: Bytes) -> Self {
        bytes.0.try_into().unwrap_or(Self::MAX)
    }
}

unsafe fn info<T: SizeType>(
    driver: unsafe extern "C" fn(*mut T, *mut T) -> Status,
    free: *mut T,
    total: *mut T,
) -> Status {
    // The container's usage is read first: it may wait until a process has ended, and the driver's
    // answer must be that of the time afterwards.
    let limited = limited();
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(free, total) };
    if status == SUCCESS && !free.is_null() && !total.is_null() {
        // SAFETY: the driver reported success, so it has written both values.
        let gpu = unsafe { FreeAndTotal { free: (*free).bytes(), total: (*total).bytes() } };
        if let Some((granted, held)) = limited {
            let shown = visible_memory(granted, held, gpu);
            // SAFETY: the driver has written both values, so both are writable.
            unsafe { (*free, *total) = (T::narrow(shown.free), T::narrow(shown.total)) };
        }
    }
    status
}

unsafe fn total<T: SizeType>(
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

fn granted(device: Device) -> Option<Bytes> {
    let process = Process::get().ok()?;
    Some(process.granted(process.gpus.of_device(device).ok()?))
}

/// Returns the memory that this container was granted on the current GPU, and what it holds of it.
fn limited() -> Option<(Bytes, Bytes)> {
    let process = Process::get().ok()?;
    let gpu = process.gpus.current()?.ok()?;
    process.memory.pools.settle_all(process);
    let held = process.held(gpu);
    Some((process.granted(gpu), held))
}
