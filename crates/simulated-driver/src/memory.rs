//! Device memory. All requests take memory from the GPU in blocks of 2 MiB.

use std::sync::{Mutex, MutexGuard};

use crate::contexts::{LIVE, Piece, as_handle, cuCtxGetDevice, current, next_handle, on};
use crate::gpu::{GpuProcess, TOTAL_BYTES};
use crate::{Handle, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, Status, graphs, work};

const BLOCK: u64 = 2 << 20;
/// Context of memory that belongs to no context: physical memory by handle, and pools.
const NO_CONTEXT: u64 = 0;

/// The pools: first the default pool of each device, then the pools that the program created.
static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());
const POOL_HANDLE: usize = 0x77;
const DEVICES: usize = 4;
const POOL_RESERVED: i32 = 5;

#[derive(Default)]
struct Pool {
    device: i32,
    /// Bytes that the pool has reserved.
    reserved: u64,
    used: u64,
    /// Sizes of the allocations by address.
    pieces: Vec<(u64, u64)>,
    /// True if the program has destroyed the pool. It is removed with its last allocation.
    is_left: bool,
}

fn pools() -> Result<MutexGuard<'static, Vec<Pool>>, Status> {
    let mut pools = POOLS.lock().map_err(|_| INVALID_VALUE)?;
    while pools.len() < DEVICES {
        let device = i32::try_from(pools.len()).unwrap_or(0);
        pools.push(Pool { device, ..Pool::default() });
    }
    Ok(pools)
}

/// Returns a pool that exists. A query of a destroyed pool may crash the real driver, so this
/// driver aborts.
fn pool_of(pools: &mut [Pool], handle: Handle) -> &mut Pool {
    match pools.get_mut(handle.addr() - POOL_HANDLE) {
        Some(pool) if !pool.is_left => pool,
        _ => std::process::abort(),
    }
}

impl Pool {
    /// Releases unused memory to the GPU, except for `keep` bytes.
    fn trim(&mut self, keep: u64) -> Result<(), Status> {
        let kept = self.used.max(keep).min(self.reserved);
        on(self.device)?.give(self.reserved - kept);
        self.reserved = kept;
        Ok(())
    }
}

/// Allocates memory of a GPU.
fn take_of(gpu: &'static GpuProcess, context: u64, bytes: usize) -> Result<u64, Status> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let bytes = (bytes as u64).checked_next_multiple_of(BLOCK).ok_or(OUT_OF_MEMORY)?;
    if !gpu.take(bytes) {
        return Err(OUT_OF_MEMORY);
    }
    let address = next_handle();
    LIVE.lock().map_err(|_| INVALID_VALUE)?.insert(address, Piece { bytes, gpu, context });
    Ok(address)
}

/// Allocates memory in the current context.
fn take(bytes: usize) -> Result<u64, Status> {
    let (context, gpu) = current()?;
    take_of(gpu, context, bytes)
}

unsafe fn answer(place: *mut u64, taken: Result<u64, Status>) -> Status {
    match taken {
        Ok(address) => {
            unsafe { *place = address };
            SUCCESS
        }
        Err(status) => status,
    }
}

fn give(address: u64) -> Status {
    let Some(piece) = LIVE.lock().ok().and_then(|mut live| live.remove(&address)) else {
        return INVALID_VALUE;
    };
    piece.gpu.give(piece.bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize) -> Status {
    unsafe { answer(pointer, take(bytes)) }
}

/// Allocates host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(pointer: *mut Handle, bytes: usize) -> Status {
    unsafe { *pointer = libc::malloc(bytes) };
    if unsafe { *pointer }.is_null() { OUT_OF_MEMORY } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocManaged(pointer: *mut u64, bytes: usize, _flags: u32) -> Status {
    unsafe { answer(pointer, take(bytes)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocPitch_v2(
    pointer: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    _element: u32,
) -> Status {
    let row = width.next_multiple_of(512);
    unsafe { *pitch = row };
    unsafe { answer(pointer, take(row.saturating_mul(height))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(pointer: u64) -> Status {
    give(pointer)
}

/// Descriptor of an array: extents, format, channels and flags. Each element has four bytes here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuArray3DCreate_v2(array: *mut Handle, description: *const [usize; 3]) -> Status {
    unsafe { create_array(array, *description) }
}

unsafe fn create_array(array: *mut Handle, extents: [usize; 3]) -> Status {
    let bytes = extents.iter().fold(4_usize, |bytes, &extent| bytes.saturating_mul(extent.max(1)));
    match take(bytes) {
        Ok(handle) => {
            unsafe { *array = as_handle(handle) };
            SUCCESS
        }
        Err(status) => status,
    }
}

/// Creates a mipmapped array. Each level has half the width and height of the previous one, and
/// half the depth unless the depth is the number of layers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMipmappedArrayCreate(
    array: *mut Handle,
    description: *const Described,
    levels: u32,
) -> Status {
    const LAYERED: u32 = 1;
    let Described { extents: [width, height, depth], flags, .. } = unsafe { *description };
    let bytes = |level| {
        let layers = if flags & LAYERED == 0 { depth >> level } else { depth };
        [width >> level, height >> level, layers]
            .iter()
            .fold(4, |bytes, &extent: &usize| bytes * extent.max(1))
    };
    unsafe { create_array(array, [(0..levels).map(bytes).sum::<usize>() / 4, 1, 1]) }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Described {
    extents: [usize; 3],
    format: u32,
    channels: u32,
    flags: u32,
}

/// Version 1 of the interface, with extents of 32 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuArray3DCreate(array: *mut Handle, description: *const [u32; 3]) -> Status {
    unsafe { create_array(array, (*description).map(|extent| extent as usize)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayDestroy(array: Handle) -> Status {
    give(array.addr() as u64)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    placement: *const [i32; 4],
    _flags: u64,
) -> Status {
    const ON_DEVICE: i32 = 1;
    let [_, _, location, device] = unsafe { *placement };
    let taken = match location {
        ON_DEVICE => on(device).and_then(|gpu| take_of(gpu, NO_CONTEXT, bytes)),
        // Host memory takes no memory of a GPU.
        _ => current().and_then(|(_, gpu)| take_of(gpu, NO_CONTEXT, 1)),
    };
    unsafe { answer(handle, taken) }
}

/// Releases a handle. The real driver keeps mapped memory; the tests release after unmapping.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> Status {
    give(handle)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(
    _address: u64,
    _bytes: usize,
    _offset: usize,
    _handle: u64,
    _flags: u64,
) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(_address: u64, _bytes: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetMemPool(pool: *mut Handle, device: i32) -> Status {
    unsafe { *pool = std::ptr::without_provenance_mut(POOL_HANDLE + usize::try_from(device).unwrap_or(0)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut Handle, device: i32) -> Status {
    unsafe { cuDeviceGetMemPool(pool, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolCreate(pool: *mut Handle, placement: *const [i32; 4]) -> Status {
    let Ok(mut pools) = pools() else { return INVALID_VALUE };
    pools.push(Pool { device: unsafe { (*placement)[3] }, ..Pool::default() });
    unsafe { *pool = std::ptr::without_provenance_mut(POOL_HANDLE + pools.len() - 1) };
    SUCCESS
}

/// Destroys a pool. Memory in use stays until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: Handle) -> Status {
    let Ok(mut pools) = pools() else { return INVALID_VALUE };
    if pool.addr() < POOL_HANDLE + DEVICES {
        return INVALID_VALUE;
    }
    let pool = pool_of(&mut pools, pool);
    pool.is_left = true;
    pool.trim(0).map_or_else(|status| status, |()| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolGetAttribute(pool: Handle, attribute: i32, value: *mut u64) -> Status {
    let Ok(mut pools) = pools() else { return INVALID_VALUE };
    let pool = pool_of(&mut pools, pool);
    unsafe { *value = if attribute == POOL_RESERVED { pool.reserved } else { pool.used } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(pool: Handle, keep: usize) -> Status {
    let Ok(mut pools) = pools() else { return INVALID_VALUE };
    pool_of(&mut pools, pool).trim(keep as u64).map_or_else(|status| status, |()| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(pointer: *mut u64, bytes: usize, stream: Handle) -> Status {
    let (mut device, mut pool) = (0, std::ptr::null_mut());
    let _ = unsafe { cuCtxGetDevice(&raw mut device) };
    let _ = unsafe { cuDeviceGetMemPool(&raw mut pool, device) };
    unsafe { cuMemAllocFromPoolAsync(pointer, bytes, pool, stream) }
}

/// Allocates from the pool's unused memory, otherwise from the GPU in units of 32 MiB. The pool
/// keeps freed memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocFromPoolAsync(
    pointer: *mut u64,
    bytes: usize,
    pool: Handle,
    stream: Handle,
) -> Status {
    if let Some(graph) = work::captures(stream) {
        graphs::add(graph, 0, bytes as u64);
        unsafe { *pointer = next_handle() };
        return SUCCESS;
    }
    if let Err(status) = current() {
        return status;
    }
    let Ok(mut pools) = pools() else { return INVALID_VALUE };
    let pool = pool_of(&mut pools, pool);
    let Ok(mine) = on(pool.device) else { return INVALID_VALUE };
    let bytes = (bytes as u64).next_multiple_of(BLOCK);
    let missing = (pool.used + bytes).saturating_sub(pool.reserved);
    // Like the real driver, the pool reserves a larger unit if the GPU has enough memory, otherwise
    // just enough.
    let grown =
        [missing.next_multiple_of(32 << 20), missing].into_iter().find(|&more| more == 0 || mine.take(more));
    let Some(more) = grown else { return OUT_OF_MEMORY };
    let address = next_handle();
    pool.reserved += more;
    pool.used += bytes;
    pool.pieces.push((address, bytes));
    unsafe { *pointer = address };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(pointer: u64, _stream: Handle) -> Status {
    let Ok(mut pools) = pools() else { return INVALID_VALUE };
    for pool in pools.iter_mut() {
        if let Some(place) = pool.pieces.iter().position(|&(address, _)| address == pointer) {
            let (_, bytes) = pool.pieces.swap_remove(place);
            pool.used -= bytes;
            return if pool.is_left {
                pool.trim(0).map_or_else(|status| status, |()| SUCCESS)
            } else {
                SUCCESS
            };
        }
    }
    drop(pools);
    give(pointer)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    match current() {
        Ok((_, mine)) => {
            unsafe { *free = usize::try_from(TOTAL_BYTES.saturating_sub(mine.used())).unwrap_or(0) };
            unsafe { *total = usize::try_from(TOTAL_BYTES).unwrap_or(0) };
            SUCCESS
        }
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) -> Status {
    unsafe { *bytes = usize::try_from(TOTAL_BYTES).unwrap_or(0) };
    SUCCESS
}
