//! Devices and contexts. A context is known by a number; what was allocated in it is freed with it.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::card::{CONTEXT, Mine, UUID};
use crate::{Handle, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED, OUT_OF_MEMORY, SUCCESS, Status};

static INITIALISED: AtomicBool = AtomicBool::new(false);
static INITIALISED_BY: AtomicU64 = AtomicU64::new(0);
static PRIMARY: Mutex<(u64, u64)> = Mutex::new((0, 0));
static NEXT: AtomicU64 = AtomicU64::new(0x1000);
/// Bytes by address, and the context they die with.
pub static LIVE: LazyLock<Mutex<HashMap<u64, (u64, u64)>>> = LazyLock::new(Mutex::default);

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// The current context and the card; like the real driver nothing works in a child forked after `cuInit`.
pub fn current() -> Result<(u64, &'static Mine), Status> {
    let mine = initialised()?;
    match CURRENT.get() {
        0 => Err(INVALID_CONTEXT),
        context => Ok((context, mine)),
    }
}

pub fn initialised() -> Result<&'static Mine, Status> {
    let by_us = INITIALISED_BY.load(Ordering::SeqCst) == u64::from(std::process::id());
    if !INITIALISED.load(Ordering::SeqCst) || !by_us {
        return Err(NOT_INITIALIZED);
    }
    Mine::get().ok_or(NOT_INITIALIZED)
}

pub fn next_handle() -> u64 {
    NEXT.fetch_add(0x1000, Ordering::SeqCst)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: u32) -> Status {
    if INITIALISED.swap(true, Ordering::SeqCst) {
        return initialised().map_or_else(|status| status, |_| SUCCESS);
    }
    INITIALISED_BY.store(u64::from(std::process::id()), Ordering::SeqCst);
    initialised().map_or_else(|status| status, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> Status {
    unsafe { *version = 13_000 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> Status {
    unsafe { *count = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) -> Status {
    if device != 0 {
        return INVALID_VALUE;
    }
    unsafe { *uuid = UUID };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut i32) -> Status {
    match current() {
        Ok(_) => {
            unsafe { *device = 0 };
            SUCCESS
        }
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> Status {
    unsafe { *context = CURRENT.get() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> Status {
    CURRENT.set(context);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, _device: i32) -> Status {
    let mine = match initialised() {
        Ok(mine) => mine,
        Err(status) => return status,
    };
    let Ok(mut primary) = PRIMARY.lock() else { return INVALID_VALUE };
    if primary.0 == 0 {
        if !mine.take(CONTEXT) {
            return OUT_OF_MEMORY;
        }
        primary.1 = next_handle();
    }
    primary.0 += 1;
    unsafe { *context = primary.1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: i32) -> Status {
    let (Ok(mine), Ok(mut primary)) = (initialised(), PRIMARY.lock()) else { return INVALID_VALUE };
    primary.0 = primary.0.saturating_sub(1);
    if primary.0 == 0 {
        end(mine, primary.1);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut u64, _flags: u32, _device: i32) -> Status {
    match initialised() {
        Ok(mine) if mine.take(CONTEXT) => {
            let handle = next_handle();
            CURRENT.set(handle);
            unsafe { *context = handle };
            SUCCESS
        }
        Ok(_) => OUT_OF_MEMORY,
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: u64) -> Status {
    match initialised() {
        Ok(mine) => {
            end(mine, context);
            SUCCESS
        }
        Err(status) => status,
    }
}

/// The primary context goes, however often it was retained.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(device: i32) -> Status {
    if let Ok(mut primary) = PRIMARY.lock() {
        primary.0 = 1;
    }
    cuDevicePrimaryCtxRelease_v2(device)
}

/// A part of the primary context, which lives as long.
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

/// The heap of kernels, the one limit that takes memory here.
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

/// A thread may look at the capture mode; nothing else comes of it here.
#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(_mode: *mut i32) -> Status {
    SUCCESS
}

fn end(mine: &Mine, context: u64) {
    mine.give(CONTEXT);
    if let Ok(mut live) = LIVE.lock() {
        live.retain(|_, &mut (bytes, owner)| {
            if owner == context {
                mine.give(bytes);
            }
            owner != context
        });
    }
    if CURRENT.get() == context {
        CURRENT.set(0);
    }
}

/// A handle as the driver's opaque pointer.
pub fn as_handle(number: u64) -> Handle {
    std::ptr::without_provenance_mut(usize::try_from(number).unwrap_or(0))
}
