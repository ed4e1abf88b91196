//! Contexts: each takes memory of its own, and what was allocated in one dies with it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{MutexGuard, PoisonError};

use crate::cuda::{Device, Handle, SUCCESS, Status};
use crate::door::library::driver_functions;
use crate::door::table::hooks;
use crate::grant::Process;

hooks! { CUDA:
    cuInit(flags: u32) => init;
    cuDevicePrimaryCtxRetain(context: *mut Handle, device: Device) => retain;
    cuDevicePrimaryCtxRelease_v2(device: Device) => release;
    cuDevicePrimaryCtxRelease(device: Device) => release;
    cuDevicePrimaryCtxReset_v2(device: Device) => reset;
    cuDevicePrimaryCtxReset(device: Device) => reset;
    cuCtxCreate(context: *mut Handle, flags: u32, device: Device) => create;
    cuCtxCreate_v2(context: *mut Handle, flags: u32, device: Device) => create;
    cuCtxCreate_v3(
        context: *mut Handle, affinity: *mut c_void, count: i32, flags: u32, device: Device
    ) => create_v3;
    cuCtxCreate_v4(
        context: *mut Handle, parameters: *mut c_void, flags: u32, device: Device
    ) => create_v4;
    cuCtxDestroy(context: Handle) => destroy;
    cuCtxDestroy_v2(context: Handle) => destroy;
}

driver_functions! { CUDA:
    get_current = c"cuCtxGetCurrent" (context: *mut Handle);
}

/// The contexts of this process.
#[derive(Debug, Default)]
pub struct Contexts {
    primary: HashMap<Device, Primary>,
    /// Created ones: their card and what they were charged.
    created: HashMap<usize, (usize, u64)>,
}

/// The shared context of a device. It takes memory from the first retain to the last release.
#[derive(Debug, Default)]
struct Primary {
    retained: u64,
    charged: Option<(usize, u64)>,
    handle: usize,
}

fn contexts(process: &Process) -> MutexGuard<'_, Contexts> {
    process.memory.contexts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread's context, as a key.
pub fn current() -> usize {
    let mut context: Handle = std::ptr::null_mut();
    // SAFETY: `context` is the place for the answer.
    let status = unsafe { get_current(&raw mut context) };
    if status == SUCCESS { context.expose_provenance() } else { 0 }
}

/// Without valid limits a program does not get as far as using a card.
unsafe fn init(driver: unsafe extern "C" fn(u32) -> Status, flags: u32) -> Status {
    match Process::get() {
        // SAFETY: passed on as it came.
        Ok(_) => unsafe { driver(flags) },
        Err(status) => status,
    }
}

unsafe fn retain(
    driver: unsafe extern "C" fn(*mut Handle, Device) -> Status,
    context: *mut Handle,
    device: Device,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let is_first = contexts(process).primary.get(&device).is_none_or(|primary| primary.charged.is_none());
    let charged = if is_first {
        match charge(process, device) {
            Ok(charged) => Some(charged),
            Err(status) => return status,
        }
    } else {
        None
    };
    // SAFETY: passed on as they came.
    let status = unsafe { driver(context, device) };
    let mut all = contexts(process);
    let primary = all.primary.entry(device).or_default();
    // Two threads may have been first at once: one charge is enough.
    let spare = if status == SUCCESS {
        primary.retained += 1;
        // SAFETY: written by the driver.
        primary.handle = unsafe { *context }.addr();
        if primary.charged.is_none() { std::mem::replace(&mut primary.charged, charged) } else { charged }
    } else {
        charged
    };
    drop(all);
    if let Some((card, bytes)) = spare {
        process.refund(card, bytes);
    }
    status
}

/// Our own thread must be out of a context before it goes; the primary one goes with its last retain.
fn forget_primary(device: Device, last: u64) {
    if let Some(process) = Process::if_loaded() {
        let handle =
            contexts(process).primary.get(&device).filter(|it| it.retained <= last).map(|it| it.handle);
        if let Some(handle) = handle {
            process.compute.forget_context(handle);
        }
    }
}

unsafe fn release(driver: unsafe extern "C" fn(Device) -> Status, device: Device) -> Status {
    forget_primary(device, 1);
    // SAFETY: passed on as it came.
    let status = unsafe { driver(device) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        let mut all = contexts(process);
        let Some(primary) = all.primary.get_mut(&device) else { return status };
        primary.retained = primary.retained.saturating_sub(1);
        if primary.retained == 0 {
            let ended = (primary.charged.take(), primary.handle);
            drop(all);
            end(process, ended.0, ended.1);
        }
    }
    status
}

unsafe fn reset(driver: unsafe extern "C" fn(Device) -> Status, device: Device) -> Status {
    forget_primary(device, u64::MAX);
    // SAFETY: passed on as it came.
    let status = unsafe { driver(device) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        let ended = contexts(process).primary.get_mut(&device).map(|it| (it.charged.take(), it.handle));
        if let Some((charged, handle)) = ended {
            end(process, charged, handle);
        }
    }
    status
}

unsafe fn create(
    driver: unsafe extern "C" fn(*mut Handle, u32, Device) -> Status,
    context: *mut Handle,
    flags: u32,
    device: Device,
) -> Status {
    // SAFETY: passed on as they came.
    unsafe { created(context, device, || driver(context, flags, device)) }
}

unsafe fn create_v3(
    driver: unsafe extern "C" fn(*mut Handle, *mut c_void, i32, u32, Device) -> Status,
    context: *mut Handle,
    affinity: *mut c_void,
    count: i32,
    flags: u32,
    device: Device,
) -> Status {
    // SAFETY: passed on as they came.
    unsafe { created(context, device, || driver(context, affinity, count, flags, device)) }
}

unsafe fn create_v4(
    driver: unsafe extern "C" fn(*mut Handle, *mut c_void, u32, Device) -> Status,
    context: *mut Handle,
    parameters: *mut c_void,
    flags: u32,
    device: Device,
) -> Status {
    // SAFETY: passed on as they came.
    unsafe { created(context, device, || driver(context, parameters, flags, device)) }
}

unsafe fn created(context: *mut Handle, device: Device, ask: impl FnOnce() -> Status) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let (card, bytes) = match charge(process, device) {
        Ok(charged) => charged,
        Err(status) => return status,
    };
    let status = ask();
    if status == SUCCESS {
        // SAFETY: written by the driver.
        let handle = unsafe { *context };
        contexts(process).created.insert(handle.addr(), (card, bytes));
    } else {
        process.refund(card, bytes);
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, context: Handle) -> Status {
    if let Some(process) = Process::if_loaded() {
        process.compute.forget_context(context.addr());
    }
    // SAFETY: passed on as it came.
    let status = unsafe { driver(context) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        let charged = contexts(process).created.remove(&context.addr());
        end(process, charged, context.addr());
    }
    status
}

fn charge(process: &Process, device: Device) -> Result<(usize, u64), Status> {
    let card = process.cards.of_device(device)?;
    let bytes = process.context_bytes(card);
    process.charge(card, bytes)?;
    Ok((card, bytes))
}

/// Gives back a context and what was allocated in it.
fn end(process: &Process, charged: Option<(usize, u64)>, context: usize) {
    for record in process.memory.books.remove_context(context) {
        process.refund_piece(record.card, record.piece);
    }
    if let Some((card, bytes)) = charged {
        process.refund(card, bytes);
    }
}
