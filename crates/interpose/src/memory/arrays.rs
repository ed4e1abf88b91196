//! Arrays and mipmapped arrays: memory laid out by the driver.

use super::books::Kind;
use super::{give, take};
use crate::cuda::{Array3dDescriptor, ArrayDescriptor, Handle, INVALID_VALUE, Status};
use crate::door::table::hooks;

hooks! { CUDA:
    cuArrayCreate_v2(array: *mut Handle, description: *const ArrayDescriptor) => create;
    cuArray3DCreate_v2(array: *mut Handle, description: *const Array3dDescriptor) => create_3d;
    cuArrayDestroy(array: Handle) => destroy;
    cuMipmappedArrayCreate(
        array: *mut Handle, description: *const Array3dDescriptor, levels: u32
    ) => create_mipmapped;
    cuMipmappedArrayDestroy(array: Handle) => destroy_mipmapped;
}

type Destroy = unsafe extern "C" fn(Handle) -> Status;

unsafe fn create(
    driver: unsafe extern "C" fn(*mut Handle, *const ArrayDescriptor) -> Status,
    array: *mut Handle,
    description: *const ArrayDescriptor,
) -> Status {
    // SAFETY: the program passes a description or null.
    let Some(described) = (unsafe { description.as_ref() }) else { return INVALID_VALUE };
    // SAFETY: what the program passed goes to the driver; on success it has written the handle.
    unsafe { take(Kind::Array, described.in_3d().bytes(), || driver(array, description), || key(*array)) }
}

unsafe fn create_3d(
    driver: unsafe extern "C" fn(*mut Handle, *const Array3dDescriptor) -> Status,
    array: *mut Handle,
    description: *const Array3dDescriptor,
) -> Status {
    // SAFETY: the program passes a description or null.
    let Some(described) = (unsafe { description.as_ref() }) else { return INVALID_VALUE };
    // SAFETY: as in `create`.
    unsafe { take(Kind::Array, described.bytes(), || driver(array, description), || key(*array)) }
}

unsafe fn create_mipmapped(
    driver: unsafe extern "C" fn(*mut Handle, *const Array3dDescriptor, u32) -> Status,
    array: *mut Handle,
    description: *const Array3dDescriptor,
    levels: u32,
) -> Status {
    // SAFETY: the program passes a description or null.
    let Some(described) = (unsafe { description.as_ref() }) else { return INVALID_VALUE };
    let all_levels = (0..levels.clamp(1, 32)).map(|level| described.at_level(level).bytes());
    let all_levels = all_levels.fold(0, u64::saturating_add);
    // SAFETY: as in `create`.
    unsafe { take(Kind::Mipmap, all_levels, || driver(array, description, levels), || key(*array)) }
}

unsafe fn destroy(driver: Destroy, array: Handle) -> Status {
    // SAFETY: passed on as it came.
    unsafe { give(Kind::Array, key(array), || driver(array)) }
}

unsafe fn destroy_mipmapped(driver: Destroy, array: Handle) -> Status {
    // SAFETY: passed on as it came.
    unsafe { give(Kind::Mipmap, key(array), || driver(array)) }
}

fn key(handle: Handle) -> u64 {
    handle.addr() as u64
}
