//! Linear memory.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use tessera_limits::Bytes;

use super::allocation_table::AllocationKind;
use super::{allocate, free as release, import as import_memory};
use crate::cuda::{DevicePointer, Handle, INVALID_VALUE, IpcHandle, Status};
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuMemAlloc_v2(pointer: *mut DevicePointer, bytes: usize) => alloc;
    cuMemAlloc(pointer: *mut u32, bytes: u32) => alloc_v1;
    cuMemAllocManaged(pointer: *mut DevicePointer, bytes: usize, flags: u32) => managed;
    cuMemAllocPitch_v2(
        pointer: *mut DevicePointer, pitch: *mut usize, width: usize, height: usize, element: u32
    ) => pitched;
    cuMemAllocPitch(
        pointer: *mut u32, pitch: *mut u32, width: u32, height: u32, element: u32
    ) => pitched_v1;
    cuMemFree_v2(pointer: DevicePointer) => free;
    cuMemFree(pointer: u32) => free_v1;
    cuIpcOpenMemHandle(pointer: *mut DevicePointer, handle: IpcHandle, flags: u32) => import;
    cuIpcOpenMemHandle_v2(
        pointer: *mut DevicePointer, handle: IpcHandle, flags: u32
    ) => import;
    cuIpcCloseMemHandle(pointer: DevicePointer) => close;
    cuImportExternalMemory(memory: *mut Handle, description: *const ExternalMemory) => import_external;
    cuDestroyExternalMemory(memory: Handle) => destroy_external;
}

/// The first fields of `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`, as far as the library reads them.
#[repr(C)]
pub struct ExternalMemory {
    kind: c_int,
    handle: [u64; 2],
    bytes: u64,
}

/// Alignment of the rows of pitched memory, the same on all GPUs so far.
const PITCH: Bytes = Bytes(512);

type Import = unsafe extern "C" fn(*mut DevicePointer, IpcHandle, u32) -> Status;

// In each hook, `driver` is the driver's function of the same name.

unsafe fn alloc(
    driver: unsafe extern "C" fn(*mut DevicePointer, usize) -> Status,
    pointer: *mut DevicePointer,
    bytes: usize,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the pointer.
    unsafe { allocate(AllocationKind::Pointer, Bytes(bytes as u64), || driver(pointer, bytes), || *pointer) }
}

unsafe fn alloc_v1(
    driver: unsafe extern "C" fn(*mut u32, u32) -> Status,
    pointer: *mut u32,
    bytes: u32,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the result.
    unsafe {
        allocate(
            AllocationKind::Pointer,
            Bytes(bytes.into()),
            || driver(pointer, bytes),
            || (*pointer).into(),
        )
    }
}

unsafe fn managed(
    driver: unsafe extern "C" fn(*mut DevicePointer, usize, u32) -> Status,
    pointer: *mut DevicePointer,
    bytes: usize,
    flags: u32,
) -> Status {
    if let Err(status) = charge_managed_base() {
        return status;
    }
    // Managed memory takes device memory when it is touched, without another call. All of it is
    // charged from the start.
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the result.
    unsafe {
        allocate(AllocationKind::Pointer, Bytes(bytes as u64), || driver(pointer, bytes, flags), || *pointer)
    }
}

/// Memory that the driver takes in addition to the first managed allocation of a process. Measured
/// on an H200 with driver 580.
const MANAGED_BASE: Bytes = Bytes::from_mib(64);

/// Charges [`MANAGED_BASE`] once for each GPU.
fn charge_managed_base() -> Result<(), Status> {
    let process = Process::get()?;
    let Some(gpu) = process.gpus.current().transpose()? else { return Ok(()) };
    if process.memory.has_managed[gpu].swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    process.charge(gpu, MANAGED_BASE).inspect_err(|_| {
        process.memory.has_managed[gpu].store(false, Ordering::SeqCst);
    })
}

unsafe fn pitched(
    driver: unsafe extern "C" fn(*mut DevicePointer, *mut usize, usize, usize, u32) -> Status,
    pointer: *mut DevicePointer,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> Status {
    let bytes = pitched_bytes(width as u64, height as u64);
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the result.
    unsafe {
        allocate(
            AllocationKind::Pointer,
            bytes,
            || driver(pointer, pitch, width, height, element),
            || *pointer,
        )
    }
}

unsafe fn pitched_v1(
    driver: unsafe extern "C" fn(*mut u32, *mut u32, u32, u32, u32) -> Status,
    pointer: *mut u32,
    pitch: *mut u32,
    width: u32,
    height: u32,
    element: u32,
) -> Status {
    let bytes = pitched_bytes(width.into(), height.into());
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the result.
    unsafe {
        allocate(
            AllocationKind::Pointer,
            bytes,
            || driver(pointer, pitch, width, height, element),
            || (*pointer).into(),
        )
    }
}

unsafe fn free(driver: unsafe extern "C" fn(DevicePointer) -> Status, pointer: DevicePointer) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    unsafe { release(AllocationKind::Pointer, pointer, || driver(pointer)) }
}

unsafe fn free_v1(driver: unsafe extern "C" fn(u32) -> Status, pointer: u32) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    unsafe { release(AllocationKind::Pointer, pointer.into(), || driver(pointer)) }
}

unsafe fn import(driver: Import, pointer: *mut DevicePointer, handle: IpcHandle, flags: u32) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged. The program does not know the
    // address yet when a failed import is closed again.
    unsafe {
        import_memory(
            AllocationKind::Imported,
            pointer,
            || driver(pointer, handle, flags),
            |opened| cuIpcCloseMemHandle(opened),
        )
    }
}

unsafe fn close(driver: unsafe extern "C" fn(DevicePointer) -> Status, pointer: DevicePointer) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    unsafe { release(AllocationKind::Imported, pointer, || driver(pointer)) }
}

unsafe fn import_external(
    driver: unsafe extern "C" fn(*mut Handle, *const ExternalMemory) -> Status,
    memory: *mut Handle,
    description: *const ExternalMemory,
) -> Status {
    // SAFETY: the program passes a valid description or null.
    let Some(described) = (unsafe { description.as_ref() }) else { return INVALID_VALUE };
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the result.
    unsafe {
        allocate(
            AllocationKind::ExternalMemory,
            Bytes(described.bytes),
            || driver(memory, description),
            || (*memory).addr() as u64,
        )
    }
}

unsafe fn destroy_external(driver: unsafe extern "C" fn(Handle) -> Status, memory: Handle) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    unsafe { release(AllocationKind::ExternalMemory, memory.addr() as u64, || driver(memory)) }
}

fn pitched_bytes(width: u64, height: u64) -> Bytes {
    Bytes(Bytes(width).round_up_to(PITCH).0.saturating_mul(height))
}
