//! Handles of physical memory and their mappings. The memory is freed when every reference to the
//! handle is released and no mapping is left.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::{MutexGuard, PoisonError};

use tessera_limits::allocation_size::round_up_to_blocks;
use tessera_limits::{Bytes, GpuSlot};

use super::allocation_table::KeyHasher;
use crate::cuda::{AllocationProperties, DevicePointer, Location, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::entry::table::hooks;
use crate::grant::Process;

hooks! { Cuda:
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64) => create;
    cuMemRelease(handle: u64) => release;
    cuMemRetainAllocationHandle(handle: *mut u64, address: DevicePointer) => retain;
    cuMemImportFromShareableHandle(
        handle: *mut u64, os_handle: DevicePointer, kind: i32
    ) => import;
    cuMemMap(
        address: DevicePointer, bytes: usize, offset: usize, handle: u64, flags: u64
    ) => map;
    cuMemUnmap(address: DevicePointer, bytes: usize) => unmap;
}

driver_functions! { Cuda:
    get_properties = c"cuMemGetAllocationPropertiesFromHandle" (properties: *mut AllocationProperties, handle: u64);
}

/// The handles of this process, and its mappings by address.
#[derive(Default)]
pub struct Handles {
    handles: HashMap<u64, Physical, BuildHasherDefault<KeyHasher>>,
    mappings: HashMap<DevicePointer, Mapping, BuildHasherDefault<KeyHasher>>,
}

#[derive(Clone, Copy)]
struct Mapping {
    handle: u64,
    bytes: Bytes,
}

struct Physical {
    gpu: GpuSlot,
    charged: Bytes,
    /// Number of references that are not released, plus the number of mappings.
    references: u64,
}

type Map = unsafe extern "C" fn(DevicePointer, usize, usize, u64, u64) -> Status;

impl Handles {
    /// Removes one reference. Returns the charge to refund if it was the last one.
    fn drop_reference(&mut self, handle: u64) -> Option<(GpuSlot, Bytes)> {
        let physical = self.handles.get_mut(&handle)?;
        physical.references = physical.references.saturating_sub(1);
        if physical.references > 0 {
            return None;
        }
        self.handles.remove(&handle).map(|physical| (physical.gpu, physical.charged))
    }
}

fn handles(process: &Process) -> MutexGuard<'_, Handles> {
    process.memory.vmm.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe fn create(
    driver: unsafe extern "C" fn(*mut u64, usize, *const AllocationProperties, u64) -> Status,
    handle: *mut u64,
    bytes: usize,
    properties: *const AllocationProperties,
    flags: u64,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let call_driver = || unsafe { driver(handle, bytes, properties, flags) };
    // SAFETY: the program passes valid properties or null. Only the first fields are read, which
    // every version has.
    let location = (!properties.is_null()).then(|| unsafe { (*properties).location });
    let Some(device) = location.and_then(Location::device) else { return call_driver() };
    let process = match Process::get() {
        Ok(process) => process,
        Err(status) => return status,
    };
    let gpu = match process.gpus.of_device(device) {
        Ok(gpu) => gpu,
        Err(status) => return status,
    };
    let charged = round_up_to_blocks(Bytes(bytes as u64));
    if let Err(status) = process.charge(gpu, charged) {
        return status;
    }
    let status = call_driver();
    if status == SUCCESS {
        // SAFETY: the driver reported success, so it has written the handle.
        let handle = unsafe { *handle };
        handles(process).handles.insert(handle, Physical { gpu, charged, references: 1 });
    } else {
        process.refund(gpu, charged);
    }
    status
}

unsafe fn release(driver: unsafe extern "C" fn(u64) -> Status, handle: u64) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    let status = unsafe { driver(handle) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
        && let Some((gpu, bytes)) = { handles(process).drop_reference(handle) }
    {
        process.refund(gpu, bytes);
    }
    status
}

unsafe fn retain(
    driver: unsafe extern "C" fn(*mut u64, DevicePointer) -> Status,
    handle: *mut u64,
    address: DevicePointer,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(handle, address) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
        // SAFETY: the driver reported success, so it has written the handle.
        && let Some(physical) = handles(process).handles.get_mut(&unsafe { *handle })
    {
        physical.references += 1;
    }
    status
}

/// Imports memory of another process. Its size is known only when it is mapped, so it is charged by
/// its mappings.
unsafe fn import(
    driver: unsafe extern "C" fn(*mut u64, DevicePointer, i32) -> Status,
    handle: *mut u64,
    os_handle: DevicePointer,
    kind: i32,
) -> Status {
    if let Err(status) = Process::get() {
        return status;
    }
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(handle, os_handle, kind) };
    if status == SUCCESS
        && let Some(process) = Process::if_loaded()
    {
        let mut properties = AllocationProperties {
            kind: 0,
            handle_kinds: 0,
            location: Location { kind: 0, id: 0 },
            rest: [0; 16],
        };
        // SAFETY: the driver has written the handle, and `properties` is larger than the structure
        // of any version.
        let asked = unsafe { get_properties(&raw mut properties, *handle) };
        if asked == SUCCESS
            && let Some(device) = properties.location.device()
            && let Ok(gpu) = process.gpus.of_device(device)
        {
            // SAFETY: the driver reported success, so it has written the handle.
            let handle = unsafe { *handle };
            let known = &mut handles(process).handles;
            known
                .entry(handle)
                .or_insert(Physical { gpu, charged: Bytes::ZERO, references: 0 })
                .references += 1;
        }
    }
    status
}

unsafe fn map(
    driver: Map,
    address: DevicePointer,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Status {
    let Some(process) = Process::if_loaded() else {
        // SAFETY: the program's arguments go to the driver unchanged.
        return unsafe { driver(address, bytes, offset, handle, flags) };
    };
    // Imported memory is charged as far as it is mapped. Memory that this process created is
    // already charged.
    let needed = round_up_to_blocks(Bytes(bytes as u64) + Bytes(offset as u64));
    let known = handles(process).handles.get(&handle).map(|it| (it.gpu, needed - it.charged));
    let uncovered = known.filter(|(_, missing)| *missing > Bytes::ZERO);
    if let Some((gpu, missing)) = uncovered
        && let Err(status) = process.charge(gpu, missing)
    {
        return status;
    }
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(address, bytes, offset, handle, flags) };
    let mut all = handles(process);
    match all.handles.get_mut(&handle) {
        Some(physical) if status == SUCCESS => {
            physical.references += 1;
            physical.charged += uncovered.map_or(Bytes::ZERO, |(_, missing)| missing);
            all.mappings.insert(address, Mapping { handle, bytes: Bytes(bytes as u64) });
        }
        _ => {
            if let Some((gpu, missing)) = uncovered {
                process.refund(gpu, missing);
            }
        }
    }
    status
}

unsafe fn unmap(
    driver: unsafe extern "C" fn(DevicePointer, usize) -> Status,
    address: DevicePointer,
    bytes: usize,
) -> Status {
    // SAFETY: the program's arguments go to the driver unchanged.
    let status = unsafe { driver(address, bytes) };
    let Some(process) = Process::if_loaded().filter(|_| status == SUCCESS) else { return status };
    let mut all = handles(process);
    let mut refunds = Vec::new();
    match all.mappings.remove(&address) {
        // Nearly every call unmaps exactly one mapping.
        Some(gone) if gone.bytes == Bytes(bytes as u64) => refunds.extend(all.drop_reference(gone.handle)),
        first => {
            let range = address..address.saturating_add(bytes as u64);
            let rest: Vec<_> = all.mappings.extract_if(|at, _| range.contains(at)).collect();
            for gone in first.into_iter().chain(rest.into_iter().map(|(_, gone)| gone)) {
                refunds.extend(all.drop_reference(gone.handle));
            }
        }
    }
    drop(all);
    for (gpu, bytes) in refunds {
        process.refund(gpu, bytes);
    }
    status
}
