//! Stream-ordered allocation from pools.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use super::allocation_table::AllocationKind;
use tessera_limits::{Bytes, GpuSlot};

use super::pools::PoolSource;
use super::{free as release, graphs, import as import_memory};
use crate::compute::Stream;
use crate::cuda::{
    AllocationProperties, DEFAULT_STREAM, Device, DevicePointer, Handle, Location, MANAGED, SUCCESS, Status,
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
    cuMemPoolCreate(pool: *mut Handle, properties: *const AllocationProperties) => create;
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
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(pointer, bytes, stream) };
    // SAFETY: `pointer` and `stream` are the program's arguments, and the closure calls the driver
    // with them.
    unsafe {
        allocate_from(None, bytes, &call_driver, pointer, Stream { handle: stream, per_thread: PER_THREAD })
    }
}

/// Returns the pool for allocations on the current device that name no pool.
fn current_default_pool() -> Option<Handle> {
    let known = Process::if_loaded().map(|process| &process.memory.pools.default_pool);
    if let Some(cached) = known.map(|cached| cached.load(Ordering::Acquire)).filter(|cached| *cached != 0) {
        return Some(std::ptr::with_exposed_provenance_mut(cached));
    }
    let (mut device, mut pool, mut count) = (0, std::ptr::null_mut(), 0);
    // SAFETY: `device` and `pool` are writable.
    let found = unsafe {
        current_device(&raw mut device) == SUCCESS && pool_of_device(&raw mut pool, device) == SUCCESS
    };
    // SAFETY: `count` is writable.
    let is_only = unsafe { device_count(&raw mut count) } == SUCCESS && count == 1;
    if let Some(cached) = known.filter(|_| found && is_only) {
        cached.store(pool.expose_provenance(), Ordering::Release);
    }
    found.then_some(pool)
}

unsafe fn set_pool(
    driver: unsafe extern "C" fn(Device, Handle) -> Status,
    device: Device,
    pool: Handle,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    forget_default_pool(|| unsafe { driver(device, pool) })
}

unsafe fn set_pool_at(
    driver: unsafe extern "C" fn(*mut Location, i32, Handle) -> Status,
    location: *mut Location,
    kind: i32,
    pool: Handle,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    forget_default_pool(|| unsafe { driver(location, kind, pool) })
}

/// Calls the driver to change the default pool of a device, and forgets the cached one.
fn forget_default_pool(call_driver: impl FnOnce() -> Status) -> Status {
    let status = call_driver();
    if let Some(process) = Process::if_loaded() {
        process.memory.pools.default_pool.store(0, Ordering::Release);
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
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(pointer, bytes, pool, stream) };
    // SAFETY: `pointer` and `stream` are the program's arguments, and the closure calls the driver
    // with them.
    unsafe {
        allocate_from(
            Some(pool),
            bytes,
            &call_driver,
            pointer,
            Stream { handle: stream, per_thread: PER_THREAD },
        )
    }
}

/// Allocates from `pool`, or from the default pool of the current device.
#[inline(never)]
unsafe fn allocate_from(
    pool: Option<Handle>,
    bytes: usize,
    call_driver: &dyn Fn() -> Status,
    pointer: *mut DevicePointer,
    stream: Stream,
) -> Status {
    if let Some(graph) = graphs::captured_by(stream) {
        return graphs::add_allocation_node(graph, None, bytes, call_driver);
    }
    // Without a context the driver rejects the call itself.
    let Some(pool) = pool.or_else(current_default_pool) else { return call_driver() };
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let source = PoolSource::Pool(pool.expose_provenance());
    let pool = match process.memory.pools.known(source) {
        Some(pool) => pool,
        None => match gpu_of_pool(process, pool) {
            Some(Ok(gpu)) => process.memory.pools.get(source, Some(gpu)),
            Some(Err(status)) => return status,
            None => return call_driver(),
        },
    };
    let undo = || {
        // SAFETY: the driver has just allocated this memory on this stream, and the program does
        // not know its address.
        unsafe {
            if stream.per_thread {
                free_own(*pointer, stream.handle)
            } else {
                free_async(*pointer, stream.handle)
            }
        };
    };
    pool.allocate(process, Bytes(bytes as u64), call_driver, undo)
}

/// Returns the GPU of a pool that the program did not create: the device with this default pool, or
/// else the current device.
fn gpu_of_pool(process: &Process, pool: Handle) -> Option<Result<GpuSlot, Status>> {
    let (mut count, mut of_device) = (0, std::ptr::null_mut());
    // SAFETY: `count` is writable.
    if unsafe { device_count(&raw mut count) } == SUCCESS {
        for device in 0..count {
            // SAFETY: `of_device` is writable.
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
    // Linear memory may be freed in stream order too.
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { release(AllocationKind::Pointer, pointer, || driver(pointer, stream)) }
}

unsafe fn create(
    driver: unsafe extern "C" fn(*mut Handle, *const AllocationProperties) -> Status,
    pool: *mut Handle,
    properties: *const AllocationProperties,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(pool, properties) };
    if status == SUCCESS && !properties.is_null() {
        // SAFETY: the driver has read `properties` and written `pool`. Only the first fields of
        // `properties` are read, which every version has.
        let (location, is_managed, pool) =
            unsafe { ((*properties).location, (*properties).kind == MANAGED, *pool) };
        let gpu = match location.device() {
            Some(device) => process.gpus.of_device(device).ok().map(Some),
            // Managed memory moves to the GPU that uses it, which is most likely the current one.
            None if is_managed => process.gpus.current().and_then(Result::ok).map(Some),
            None => Some(None),
        };
        if let Some(gpu) = gpu {
            let pool = process.memory.pools.get(PoolSource::Pool(pool.expose_provenance()), gpu);
            pool.is_created_by_program.store(true, Ordering::Relaxed);
        }
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, pool: Handle) -> Status {
    match Process::if_loaded() {
        Some(process) => process.memory.pools.destroy(process, PoolSource::Pool(pool.expose_provenance())),
        // SAFETY: the program's argument goes to the driver unchanged.
        None => unsafe { driver(pool) },
    }
}

/// Imports one allocation of another process's pool.
unsafe fn import(
    driver: unsafe extern "C" fn(*mut DevicePointer, Handle, *mut c_void) -> Status,
    pointer: *mut DevicePointer,
    pool: Handle,
    shared: *mut c_void,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(pointer, pool, shared) };
    // SAFETY: on success the driver has written the pointer. Imported memory may be freed in stream
    // order.
    unsafe {
        import_memory(AllocationKind::Pointer, pointer, call_driver, |pointer| {
            cuMemFreeAsync(pointer, DEFAULT_STREAM)
        })
    }
}
