//! Arrays and mipmapped arrays, whose memory layout the driver chooses.

use super::allocation_table::AllocationKind;
use super::{allocate, free};
use crate::cuda::{
    Array3dDescriptor, ArrayDescriptor, Handle, INVALID_VALUE, ShortArray3dDescriptor, ShortArrayDescriptor,
    Status,
};
use crate::entry::table::hooks;

hooks! { Cuda:
    cuArrayCreate(array: *mut Handle, description: *const ShortArrayDescriptor) => create_short;
    cuArray3DCreate(array: *mut Handle, description: *const ShortArray3dDescriptor) => create_3d_short;
    cuArrayCreate_v2(array: *mut Handle, description: *const ArrayDescriptor) => create;
    cuArray3DCreate_v2(array: *mut Handle, description: *const Array3dDescriptor) => create_3d;
    cuArrayDestroy(array: Handle) => destroy;
    cuMipmappedArrayCreate(
        array: *mut Handle, description: *const Array3dDescriptor, levels: u32
    ) => create_mipmapped;
    cuMipmappedArrayDestroy(array: Handle) => destroy_mipmapped;
}

type Create<T> = unsafe extern "C" fn(*mut Handle, *const T) -> Status;
type Destroy = unsafe extern "C" fn(Handle) -> Status;

unsafe fn create(
    driver: Create<ArrayDescriptor>,
    array: *mut Handle,
    description: *const ArrayDescriptor,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this driver function.
    unsafe { create_described(driver, array, description, |described| described.in_3d()) }
}

unsafe fn create_3d(
    driver: Create<Array3dDescriptor>,
    array: *mut Handle,
    description: *const Array3dDescriptor,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this driver function.
    unsafe { create_described(driver, array, description, |described| described) }
}

unsafe fn create_short(
    driver: Create<ShortArrayDescriptor>,
    array: *mut Handle,
    description: *const ShortArrayDescriptor,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this driver function.
    unsafe { create_described(driver, array, description, |described| described.in_3d()) }
}

unsafe fn create_3d_short(
    driver: Create<ShortArray3dDescriptor>,
    array: *mut Handle,
    description: *const ShortArray3dDescriptor,
) -> Status {
    // SAFETY: the arguments are those that the program passed to this driver function.
    unsafe { create_described(driver, array, description, |described| described.widened()) }
}

unsafe fn create_described<T: Copy>(
    driver: Create<T>,
    array: *mut Handle,
    description: *const T,
    in_3d: impl FnOnce(T) -> Array3dDescriptor,
) -> Status {
    // SAFETY: the program passes a valid description or null.
    let Some(descriptor) = (unsafe { description.as_ref() }) else { return INVALID_VALUE };
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the handle.
    unsafe {
        allocate(
            AllocationKind::Array,
            in_3d(*descriptor).bytes(),
            || driver(array, description),
            || key(*array),
        )
    }
}

unsafe fn create_mipmapped(
    driver: unsafe extern "C" fn(*mut Handle, *const Array3dDescriptor, u32) -> Status,
    array: *mut Handle,
    description: *const Array3dDescriptor,
    levels: u32,
) -> Status {
    // SAFETY: the program passes a valid description or null.
    let Some(described) = (unsafe { description.as_ref() }) else { return INVALID_VALUE };
    let all_levels = (0..levels.clamp(1, 32)).map(|level| described.at_level(level).bytes()).sum();
    // SAFETY: the program's arguments go to the driver unchanged, and on success the driver has
    // written the handle.
    unsafe {
        allocate(AllocationKind::Mipmap, all_levels, || driver(array, description, levels), || key(*array))
    }
}

unsafe fn destroy(driver: Destroy, array: Handle) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    unsafe { free(AllocationKind::Array, key(array), || driver(array)) }
}

unsafe fn destroy_mipmapped(driver: Destroy, array: Handle) -> Status {
    // SAFETY: the program's argument goes to the driver unchanged.
    unsafe { free(AllocationKind::Mipmap, key(array), || driver(array)) }
}

fn key(handle: Handle) -> u64 {
    handle.addr() as u64
}
