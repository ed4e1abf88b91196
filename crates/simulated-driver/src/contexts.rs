//! Devices and contexts. A context is identified by a number, and its destruction frees what was
//! allocated in it.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::gpu::{CONTEXT_BYTES, GpuProcess, gpu_of, uuid, visible};
use crate::{Handle, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED, OUT_OF_MEMORY, SUCCESS, Status};

static INITIALISED: AtomicBool = AtomicBool::new(false);
/// True in a child of the process that initialised the driver.
static INHERITED: AtomicBool = AtomicBool::new(false);
/// Number of retains and the context number of each device's primary context.
static PRIMARY: LazyLock<Mutex<HashMap<i32, (u64, u64)>>> = LazyLock::new(Mutex::default);
/// The devices of all existing contexts.
static CONTEXTS: LazyLock<Mutex<HashMap<u64, i32>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(0x1000);
/// An allocation: its size, its GPU, and the context whose destruction frees it.
pub static LIVE: LazyLock<Mutex<HashMap<u64, Piece>>> = LazyLock::new(Mutex::default);

pub struct Piece {
    pub bytes: u64,
    pub gpu: &'static GpuProcess,
    pub context: u64,
}

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Returns the current context and its GPU. As with the real driver, no call works in a child
/// forked after `cuInit`.
pub fn current() -> Result<(u64, &'static GpuProcess), Status> {
    initialised()?;
    let context = CURRENT.get();
    let device = device_of(context).ok_or(INVALID_CONTEXT)?;
    Ok((context, on(device)?))
}

fn device_of(context: u64) -> Option<i32> {
    CONTEXTS.lock().ok()?.get(&context).copied()
}

/// Aborts if the context is destroyed. The real driver may crash in this case; the tests must
/// detect it.
pub fn assert_alive(context: u64) {
    if context != 0 && device_of(context).is_none() {
        std::process::abort();
    }
}

pub fn initialised() -> Result<(), Status> {
    let by_us = !INHERITED.load(Ordering::Relaxed);
    if INITIALISED.load(Ordering::SeqCst) && by_us { Ok(()) } else { Err(NOT_INITIALIZED) }
}

extern "C" fn inherit() {
    INHERITED.store(true, Ordering::SeqCst);
}

/// Returns the GPU of a device.
pub fn on(device: i32) -> Result<&'static GpuProcess, Status> {
    initialised()?;
    gpu_of(device).and_then(GpuProcess::get).ok_or(INVALID_VALUE)
}

pub fn next_handle() -> u64 {
    NEXT.fetch_add(0x1000, Ordering::SeqCst)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> Status {
    if !INITIALISED.swap(true, Ordering::SeqCst) {
        unsafe { libc::pthread_atfork(None, None, Some(inherit)) };
    }
    initialised().map_or_else(|status| status, |()| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> Status {
    unsafe { *version = 13_000 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> Status {
    unsafe { *count = i32::try_from(visible().len()).unwrap_or(0) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, place: i32) -> Status {
    unsafe { *device = place };
    if gpu_of(place).is_some() { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(name: *mut [u8; 16], device: i32) -> Status {
    let Some(gpu) = gpu_of(device) else { return INVALID_VALUE };
    unsafe { *name = uuid(gpu) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> Status {
    match device_of(CURRENT.get()) {
        Some(current) => {
            unsafe { *device = current };
            SUCCESS
        }
        None => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> Status {
    unsafe { *context = CURRENT.get() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> Status {
    assert_alive(context);
    CURRENT.set(context);
    SUCCESS
}

/// Creates a context if the GPU has enough memory.
fn begin(device: i32) -> Result<u64, Status> {
    if !on(device)?.take(CONTEXT_BYTES) {
        return Err(OUT_OF_MEMORY);
    }
    let handle = next_handle();
    CONTEXTS.lock().map_err(|_| INVALID_VALUE)?.insert(handle, device);
    Ok(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) -> Status {
    let Ok(mut primary) = PRIMARY.lock() else { return INVALID_VALUE };
    let primary = primary.entry(device).or_default();
    if primary.0 == 0 {
        match begin(device) {
            Ok(handle) => primary.1 = handle,
            Err(status) => return status,
        }
    }
    primary.0 += 1;
    unsafe { *context = primary.1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> Status {
    release(device, 1)
}

fn release(device: i32, times: u64) -> Status {
    let Ok(mut primary) = PRIMARY.lock() else { return INVALID_VALUE };
    let primary = primary.entry(device).or_default();
    primary.0 = primary.0.saturating_sub(times);
    if primary.0 == 0 { end(primary.1) } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut u64, _flags: u32, device: i32) -> Status {
    match begin(device) {
        Ok(handle) => {
            CURRENT.set(handle);
            unsafe { *context = handle };
            SUCCESS
        }
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuVDPAUCtxCreate_v2(
    context: *mut u64,
    flags: u32,
    device: i32,
    _display: u32,
    _find: Handle,
) -> Status {
    unsafe { cuCtxCreate_v2(context, flags, device) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: u64) -> Status {
    end(context)
}

/// Destroys the primary context regardless of its retains.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(device: i32) -> Status {
    release(device, u64::MAX)
}

/// Creates a green context, which retains the primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGreenCtxCreate(
    green: *mut u64,
    _description: *mut std::ffi::c_void,
    device: i32,
    _flags: u32,
) -> Status {
    let mut primary = 0;
    let status = unsafe { cuDevicePrimaryCtxRetain(&raw mut primary, device) };
    unsafe { *green = next_handle() };
    status
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGreenCtxDestroy(_green: u64) -> Status {
    cuDevicePrimaryCtxRelease_v2(0)
}

/// The heap of kernels, the only limit that takes memory here.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(limit: i32, value: usize) -> Status {
    const HEAP: i32 = 2;
    static HEAPS: Mutex<u64> = Mutex::new(0);
    let (Ok((_, mine)), Ok(mut heap)) = (current(), HEAPS.lock()) else { return INVALID_CONTEXT };
    if limit == HEAP {
        mine.give(std::mem::take(&mut *heap));
        if !mine.take(value as u64) {
            return OUT_OF_MEMORY;
        }
        *heap = value as u64;
    }
    SUCCESS
}

thread_local! {
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(0) };
}

/// The capture mode of this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut i32) -> Status {
    if initialised().is_err() {
        return NOT_INITIALIZED;
    }
    unsafe { *mode = CAPTURE_MODE.replace(*mode) };
    SUCCESS
}

/// Returns whether this thread's capture mode allows calls that could disturb captures of other
/// threads.
pub fn is_relaxed() -> bool {
    const RELAXED: i32 = 2;
    CAPTURE_MODE.get() == RELAXED
}

fn end(context: u64) -> Status {
    let Some(device) = CONTEXTS.lock().ok().and_then(|mut contexts| contexts.remove(&context)) else {
        return INVALID_CONTEXT;
    };
    let (Ok(mine), Ok(mut live)) = (on(device), LIVE.lock()) else { return INVALID_VALUE };
    mine.give(CONTEXT_BYTES);
    live.retain(|_, piece| {
        if piece.context == context {
            piece.gpu.give(piece.bytes);
        }
        piece.context != context
    });
    if CURRENT.get() == context {
        CURRENT.set(0);
    }
    SUCCESS
}

/// Converts a number to the driver's opaque pointer.
pub fn as_handle(number: u64) -> Handle {
    std::ptr::without_provenance_mut(usize::try_from(number).unwrap_or(0))
}
