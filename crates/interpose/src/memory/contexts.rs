//! Contexts. Each context takes memory of its own, and its destruction frees what was allocated in
//! it.

use std::ffi::c_void;
use std::sync::{MutexGuard, PoisonError};

use tessera_limits::{Bytes, GpuSlot};

use super::context_size;

use crate::cuda::{Device, Handle, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
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
    cuGLCtxCreate(context: *mut Handle, flags: u32, device: Device) => create;
    cuGLCtxCreate_v2(context: *mut Handle, flags: u32, device: Device) => create;
    cuVDPAUCtxCreate(
        context: *mut Handle, flags: u32, device: Device, display: u32, find: *mut c_void
    ) => create_vdpau;
    cuVDPAUCtxCreate_v2(
        context: *mut Handle, flags: u32, device: Device, display: u32, find: *mut c_void
    ) => create_vdpau;
    cuCtxDestroy(context: Handle) => destroy;
    cuCtxDestroy_v2(context: Handle) => destroy;
    cuCtxAttach(context: *mut Handle, flags: u32) => attach;
    cuCtxDetach(context: Handle) => detach;
    cuGreenCtxCreate(green: *mut Handle, description: *mut c_void, device: Device, flags: u32) => create_green;
    cuGreenCtxDestroy(green: Handle) => destroy_green;
}

driver_functions! { Cuda:
    get_current = c"cuCtxGetCurrent" (context: *mut Handle);
    of_green = c"cuCtxFromGreenCtx" (context: *mut Handle, green: Handle);
}

/// The contexts of this process. A process has few of them.
#[derive(Debug, Default)]
pub struct Contexts {
    primary: Vec<Primary>,
    created: Vec<Created>,
    /// Green contexts, each with its device. A green context has a part of the multiprocessors, in
    /// a primary context.
    green: Vec<(usize, Device)>,
}

/// The primary context of a device. It takes memory from the first retain to the last release.
#[derive(Debug)]
struct Primary {
    device: Device,
    retained: u64,
    charged: Option<Charged>,
    handle: usize,
}

#[derive(Debug)]
struct Created {
    handle: usize,
    charged: Charged,
    /// Number of attachments; the last detach destroys the context.
    attached: u32,
}

/// A GPU and what was charged on it.
type Charged = (GpuSlot, Bytes);

impl Contexts {
    fn primary(&mut self, device: Device) -> &mut Primary {
        let place = self.primary.iter().position(|primary| primary.device == device).unwrap_or_else(|| {
            self.primary.push(Primary { device, retained: 0, charged: None, handle: 0 });
            self.primary.len() - 1
        });
        &mut self.primary[place]
    }
}

fn contexts(process: &Process) -> MutexGuard<'_, Contexts> {
    process.memory.contexts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the address of the calling thread's context, or 0 if it has none.
pub fn current() -> usize {
    let mut context: Handle = std::ptr::null_mut();
    // SAFETY: `context` is writable.
    let status = unsafe { get_current(&raw mut context) };
    if status == SUCCESS { context.expose_provenance() } else { 0 }
}

/// Rejects `cuInit` if there are no valid limits, so that the program cannot use a GPU.
unsafe fn init(driver: unsafe extern "C" fn(u32) -> Status, flags: u32) -> Status {
    match Process::get() {
        // SAFETY: the program's argument goes to the driver unchanged.
        Ok(_) => unsafe { driver(flags) },
        Err(status) => status,
    }
}

unsafe fn retain(
    driver: unsafe extern "C" fn(*mut Handle, Device) -> Status,
    context: *mut Handle,
    device: Device,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the context.
    unsafe { retain_primary(device, || driver(context, device), || (*context).addr()) }
}

/// Charges the primary context if this is its first use. `handle` returns its address, or 0 if the
/// call does not return it.
unsafe fn retain_primary(
    device: Device,
    call_driver: impl FnOnce() -> Status,
    handle: impl FnOnce() -> usize,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let is_first = contexts(process).primary(device).charged.is_none();
    let charged = match is_first.then(|| charge(process, device)).transpose() {
        Ok(charged) => charged,
        Err(status) => return status,
    };
    let status = call_driver();
    let mut all = contexts(process);
    let primary = all.primary(device);
    // Two threads may both have charged the first use. One of the charges is refunded.
    let spare = if status == SUCCESS {
        primary.retained += 1;
        match handle() {
            0 => {}
            known => primary.handle = known,
        }
        if primary.charged.is_none() { std::mem::replace(&mut primary.charged, charged) } else { charged }
    } else {
        charged
    };
    drop(all);
    if let Some((gpu, bytes)) = spare {
        process.refund(gpu, bytes);
    } else if status == SUCCESS
        && let Ok(gpu) = process.gpus.of_device(device)
    {
        context_size::measure(process, gpu);
    }
    status
}

/// Makes the monitor thread stop using the primary context if it has at most `last` retains left,
/// because the following call destroys it.
fn forget_primary_context(device: Device, last: u64) {
    if let Some(process) = Process::if_loaded() {
        let mut all = contexts(process);
        let primary = all.primary(device);
        let (handle, is_destroyed) = (primary.handle, primary.retained <= last);
        drop(all);
        if is_destroyed {
            process.compute.forget_context(handle);
        }
    }
}

unsafe fn release(driver: unsafe extern "C" fn(Device) -> Status, device: Device) -> Status {
    forget_primary_context(device, 1);
    // SAFETY: the program's argument goes to the driver unchanged.
    let status = unsafe { driver(device) };
    if status == SUCCESS {
        released(device, 1);
    }
    status
}

unsafe fn reset(driver: unsafe extern "C" fn(Device) -> Status, device: Device) -> Status {
    forget_primary_context(device, u64::MAX);
    // SAFETY: the program's argument goes to the driver unchanged.
    let status = unsafe { driver(device) };
    if status == SUCCESS {
        released(device, u64::MAX);
    }
    status
}

/// Subtracts `times` retains of the primary context, and refunds it after the last one.
fn released(device: Device, times: u64) {
    let Some(process) = Process::if_loaded() else { return };
    let mut all = contexts(process);
    let primary = all.primary(device);
    primary.retained = primary.retained.saturating_sub(times);
    if primary.retained == 0 {
        let (charged, handle) = (primary.charged.take(), primary.handle);
        drop(all);
        end(process, charged, handle);
    }
}

/// Creates a green context, which retains the primary context of its device.
unsafe fn create_green(
    driver: unsafe extern "C" fn(*mut Handle, *mut c_void, Device, u32) -> Status,
    green: *mut Handle,
    description: *mut c_void,
    device: Device,
    flags: u32,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { retain_primary(device, || driver(green, description, device, flags), || 0) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        // SAFETY: the driver reported success, so it has written the handle.
        contexts(process).green.push((unsafe { *green }.addr(), device));
        // A green context takes memory as well, which only the agent can measure.
        process.memory.code.note_loaded();
    }
    status
}

unsafe fn destroy_green(driver: unsafe extern "C" fn(Handle) -> Status, green: Handle) -> Status {
    let process = Process::if_loaded();
    let mut context: Handle = std::ptr::null_mut();
    if let Some(process) = process
        // SAFETY: `green` is the program's green context, and `context` is writable.
        && unsafe { of_green(&raw mut context, green) } == SUCCESS
    {
        process.compute.forget_context(context.addr());
    }
    // SAFETY: the program's argument goes to the driver unchanged.
    let status = unsafe { driver(green) };
    if status == SUCCESS
        && let Some(process) = process
    {
        let mut all = contexts(process);
        let place = all.green.iter().position(|(known, _)| *known == green.addr());
        let device = place.map(|place| all.green.swap_remove(place).1);
        drop(all);
        if let Some(device) = device {
            released(device, 1);
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
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { create_charged(context, device, || driver(context, flags, device)) }
}

unsafe fn create_v3(
    driver: unsafe extern "C" fn(*mut Handle, *mut c_void, i32, u32, Device) -> Status,
    context: *mut Handle,
    affinity: *mut c_void,
    count: i32,
    flags: u32,
    device: Device,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { create_charged(context, device, || driver(context, affinity, count, flags, device)) }
}

unsafe fn create_v4(
    driver: unsafe extern "C" fn(*mut Handle, *mut c_void, u32, Device) -> Status,
    context: *mut Handle,
    parameters: *mut c_void,
    flags: u32,
    device: Device,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { create_charged(context, device, || driver(context, parameters, flags, device)) }
}

unsafe fn create_vdpau(
    driver: unsafe extern "C" fn(*mut Handle, u32, Device, u32, *mut c_void) -> Status,
    context: *mut Handle,
    flags: u32,
    device: Device,
    display: u32,
    find: *mut c_void,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    unsafe { create_charged(context, device, || driver(context, flags, device, display, find)) }
}

unsafe fn create_charged(
    context: *mut Handle,
    device: Device,
    call_driver: impl FnOnce() -> Status,
) -> Status {
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let (gpu, bytes) = match charge(process, device) {
        Ok(charged) => charged,
        Err(status) => return status,
    };
    let status = call_driver();
    if status == SUCCESS {
        // SAFETY: the driver reported success, so it has written the handle.
        let handle = unsafe { *context }.addr();
        contexts(process).created.push(Created { handle, charged: (gpu, bytes), attached: 1 });
        context_size::measure(process, gpu);
    } else {
        process.refund(gpu, bytes);
    }
    status
}

unsafe fn destroy(driver: unsafe extern "C" fn(Handle) -> Status, context: Handle) -> Status {
    if let Some(process) = Process::if_loaded() {
        process.compute.forget_context(context.addr());
    }
    // SAFETY: the program's argument goes to the driver unchanged.
    let status = unsafe { driver(context) };
    if status == SUCCESS {
        destroyed(context.addr());
    }
    status
}

fn destroyed(context: usize) {
    let Some(process) = Process::if_loaded() else { return };
    let mut all = contexts(process);
    let place = all.created.iter().position(|created| created.handle == context);
    let charged = place.map(|place| all.created.swap_remove(place).charged);
    drop(all);
    end(process, charged, context);
}

unsafe fn attach(
    driver: unsafe extern "C" fn(*mut Handle, u32) -> Status,
    context: *mut Handle,
    flags: u32,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(context, flags) };
    if status == SUCCESS && !context.is_null() {
        // SAFETY: the driver reported success, so it has written the handle.
        count_attached(unsafe { *context }.addr(), 1);
    }
    status
}

/// Detaches from a context. The last detach destroys it.
unsafe fn detach(driver: unsafe extern "C" fn(Handle) -> Status, context: Handle) -> Status {
    let is_last = count_attached(context.addr(), -1) == Some(0);
    if is_last && let Some(process) = Process::if_loaded() {
        process.compute.forget_context(context.addr());
    }
    // SAFETY: the program's argument goes to the driver unchanged.
    let status = unsafe { driver(context) };
    if status != SUCCESS {
        count_attached(context.addr(), 1);
    } else if is_last {
        destroyed(context.addr());
    }
    status
}

/// Changes the number of attachments of a created context and returns the new number.
fn count_attached(context: usize, change: i32) -> Option<u32> {
    let mut all = contexts(Process::if_loaded()?);
    let created = all.created.iter_mut().find(|created| created.handle == context)?;
    created.attached = created.attached.saturating_add_signed(change);
    Some(created.attached)
}

fn charge(process: &Process, device: Device) -> Result<Charged, Status> {
    let gpu = process.gpus.of_device(device)?;
    context_size::charge(process, gpu).map(|bytes| (gpu, bytes))
}

/// Corrects the charges of contexts to the size that the agent has measured since.
pub fn settle(process: &Process) {
    let mut all = contexts(process);
    let Contexts { primary, created, .. } = &mut *all;
    let primary = primary.iter_mut().filter_map(|primary| primary.charged.as_mut());
    for (gpu, bytes) in primary.chain(created.iter_mut().map(|created| &mut created.charged)) {
        let size = process.context_size(*gpu);
        let before = std::mem::replace(bytes, size);
        process.charge_anyway(*gpu, size - before);
        process.refund(*gpu, before - size);
    }
}

/// Refunds a context and everything that was allocated in it.
fn end(process: &Process, charged: Option<Charged>, context: usize) {
    for record in process.memory.allocations.remove_context(context) {
        process.refund_size(record.gpu, record.size);
    }
    if let Some((gpu, bytes)) = charged {
        process.refund(gpu, bytes);
    }
}
