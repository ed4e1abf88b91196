//! Allocation in the order of a stream, from pools.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use super::allocation_table::AllocationKind;
use tessera_limits::GpuSlot;

use super::pools::PoolSource;
use super::{give, graphs, imported};
use crate::compute::Stream;
use crate::cuda::{
    DEFAULT_STREAM, Device, DevicePointer, Handle, Location, MANAGED, Placement, SUCCESS, Status,
};
use crate::entry::library::driver_functions;
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuMemAllocAsync(pointer: *mut DevicePointer, bytes: usize, stream: Handle) => alloc::<false>;
    cuMemAllocAsync_ptsz(pointer: *mut DevicePointer, bytes: usize, stream: Handle) => alloc::<true>;
    cuMemAllocFromPoolAsync(
        pointer: *mut DevicePointer, bytes: usize, pool: Handle, stream: Handle
    ) => alloc_from::<false>;
    cuMemAllocFromPoolAsync_ptsz(
        pointer: *mut DevicePointer, bytes: usize, pool: Handle, stream: Handle
    ) => alloc_from::<true>;
    cuMemFreeAsync(pointer: DevicePointer, stream: Handle) => free;
    cuMemFreeAsync_ptsz(pointer: DevicePointer, stream: Handle) => free;
    cuDeviceSetMemPool(device: Device, pool: Handle) => set_pool;
    cuMemSetMemPool(location: *mut Location, kind: i32, pool: Handle) => set_pool_at;
    cuMemPoolCreate(pool: *mut Handle, placement: *const Placement) => create;
    cuMemPoolDestroy(pool: Handle) => destroy;
    cuMemPoolImportPointer(pointer: *mut DevicePointer, pool: Handle, shared: *mut c_void) => import;
}

driver_functions! { Cuda:
    pool_of_device = c"cuDeviceGetMemPool" (pool: *mut Handle, device: Device);
    default_pool = c"cuDeviceGetDefaultMemPool" (pool: *mut Handle, device: Device);
    current_device = c"cuCtxGetDevice" (device: *mut Device);
    device_count = c"cuDeviceGetCount" (count: *mut i32);
    free_async = c"cuMemFreeAsync" (pointer: DevicePointer, stream: Handle);
    free_own = c"cuMemFreeAsync_ptsz" (pointer: DevicePointer, stream: Handle);
}

type Alloc = unsafe extern "C" fn(*mut DevicePointer, usize, Handle) -> Status;
type AllocFrom = unsafe extern "C" fn(*mut DevicePointer, usize, Handle, Handle) -> Status;

unsafe fn alloc<const PER_THREAD: bool>(
    driver: Alloc,
    pointer: *mut DevicePointer,
    bytes: usize,
    stream: Handle,
) -> Status {
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(pointer, bytes, stream) };
    // SAFETY: as above; the stream is the program's.
    unsafe { take(None, bytes, &ask, pointer, Stream { handle: stream, per_thread: PER_THREAD }) }
}

/// The pool of the current device.
fn usual_pool() -> Option<Handle> {
    let known = Process::if_loaded().map(|process| &process.memory.pools.usual);
    if let Some(usual) = known.map(|usual| usual.load(Ordering::Acquire)).filter(|usual| *usual != 0) {
        return Some(std::ptr::with_exposed_provenance_mut(usual));
    }
    let (mut device, mut pool, mut count) = (0, std::ptr::null_mut(), 0);
    // SAFETY: places for the answers.
    let found = unsafe {
        current_device(&raw mut device) == SUCCESS && pool_of_device(&raw mut pool, device) == SUCCESS
    };
    // SAFETY: as above.
    let is_only = unsafe { device_count(&raw mut count) } == SUCCESS && count == 1;
    if let Some(usual) = known.filter(|_| found && is_only) {
        usual.store(pool.expose_provenance(), Ordering::Release);
    }
    found.then_some(pool)
}

unsafe fn set_pool(
    driver: unsafe extern "C" fn(Device, Handle) -> Status,
    device: Device,
    pool: Handle,
) -> Status {
    // SAFETY: passed on as they came.
    from_another_pool(|| unsafe { driver(device, pool) })
}

unsafe fn set_pool_at(
    driver: unsafe extern "C" fn(*mut Location, i32, Handle) -> Status,
    location: *mut Location,
    kind: i32,
    pool: Handle,
) -> Status {
    // SAFETY: passed on as they came.
    from_another_pool(|| unsafe { driver(location, kind, pool) })
}

/// From now on allocations come from another pool.
fn from_another_pool(ask: impl FnOnce() -> Status) -> Status {
    let status = ask();
    if let Some(process) = Process::if_loaded() {
        process.memory.pools.usual.store(0, Ordering::Release);
    }
    status
}

unsafe fn alloc_from<const PER_THREAD: bool>(
    driver: AllocFrom,
    pointer: *mut DevicePointer,
    bytes: usize,
    pool: Handle,
    stream: Handle,
) -> Status {
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(pointer, bytes, pool, stream) };
    // SAFETY: as above.
    unsafe { take(Some(pool), bytes, &ask, pointer, Stream { handle: stream, per_thread: PER_THREAD }) }
}

/// Takes from a pool, or the one of the current device. One function for all forms.
#[inline(never)]
unsafe fn take(
    pool: Option<Handle>,
    bytes: usize,
    ask: &dyn Fn() -> Status,
    pointer: *mut DevicePointer,
    stream: Stream,
) -> Status {
    if let Some(graph) = graphs::captured_by(stream) {
        return graphs::taking(graph, None, bytes, ask);
    }
    // Without a context the driver refuses by itself.
    let Some(pool) = pool.or_else(usual_pool) else { return ask() };
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let source = PoolSource::Pool(pool.expose_provenance());
    let pool = match process.memory.pools.known(source) {
        Some(pool) => pool,
        None => match home(process, pool) {
            Some(Ok(gpu)) => process.memory.pools.get(source, Some(gpu)),
            Some(Err(status)) => return status,
            None => return ask(),
        },
    };
    let undo = || {
        // SAFETY: allocated just before, on this stream, and not yet known to the program.
        unsafe {
            if stream.per_thread {
                free_own(*pointer, stream.handle)
            } else {
                free_async(*pointer, stream.handle)
            }
        };
    };
    pool.take(process, bytes as u64, ask, undo)
}

/// The GPU of a pool that was there before the program made any: each device has one. Of others nothing is known but who uses them.
fn home(process: &Process, pool: Handle) -> Option<Result<GpuSlot, Status>> {
    let (mut count, mut of_device) = (0, std::ptr::null_mut());
    // SAFETY: `count` is the place for the answer.
    if unsafe { device_count(&raw mut count) } == SUCCESS {
        for device in 0..count {
            // SAFETY: `of_device` is the place for the answer.
            if unsafe { default_pool(&raw mut of_device, device) } == SUCCESS && of_device == pool {
                return Some(process.gpus.of_device(device));
            }
        }
    }
    process.gpus.current()
}

unsafe fn free(
    driver: unsafe extern "C" fn(DevicePointer, Handle) -> Status,
    pointer: DevicePointer,
    stream: Handle,
) -> Status {
    // Plain memory may be freed in stream order too.
    // SAFETY: passed on as they came.
    unsafe { give(AllocationKind::Pointer, pointer, || driver(pointer, stream)) }
}

unsafe fn create(
    driver: unsafe extern "C" fn(*mut Handle, *const Placement) -> Status,
    pool: *mut Handle,
    placement: *const Placement,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    // SAFETY: passed on as they came.
    let status = unsafe { driver(pool, placement) };
    if status == SUCCESS && !placement.is_null() {
        // Only the first fields are read, which every version has.
        // SAFETY: the driver has read the one and written the other.
        let (location, is_managed, pool) =
            unsafe { ((*placement).location, (*placement).kind == MANAGED, *pool) };
        let gpu = match location.device() {
            Some(device) => process.gpus.of_device(device).ok().map(Some),
            // It will move to the GPUs that use it: most likely this one.
            None if is_managed => process.gpus.current().and_then(Result::ok).map(Some),
            None => Some(None),
        };
        if let Some(gpu) = gpu {
            let pool = process.memory.pools.get(PoolSource::Pool(pool.expose_provenance()), gpu);
            pool.is_made.store(true, Ordering::Relaxed);
        }
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, pool: Handle) -> Status {
    match Process::if_loaded() {
        Some(process) => process.memory.pools.destroy(process, PoolSource::Pool(pool.expose_provenance())),
        // SAFETY: passed on as it came.
        None => unsafe { driver(pool) },
    }
}

/// One piece of another process's pool.
unsafe fn import(
    driver: unsafe extern "C" fn(*mut DevicePointer, Handle, *mut c_void) -> Status,
    pointer: *mut DevicePointer,
    pool: Handle,
    shared: *mut c_void,
) -> Status {
    // SAFETY: passed on as they came.
    let ask = || unsafe { driver(pointer, pool, shared) };
    // SAFETY: on success the driver has written the pointer. It is freed like other memory, also in stream order.
    unsafe {
        imported(AllocationKind::Pointer, pointer, ask, |pointer| cuMemFreeAsync(pointer, DEFAULT_STREAM))
    }
}
