//! Hooks of the functions that copy or fill memory.
//!
//! A function without a stream argument uses the default stream and may block its caller until the
//! transfer has ended. The limiter charges that time too, because the launch lasts until the driver
//! returns.
//!
//! A copy between host and GPU does not use the GPU's processors, but it uses the memory and the
//! link, which containers share as well. Therefore every transfer counts as GPU time.

use std::ffi::{c_uint, c_void};

use super::{mix, work};
use crate::cuda::{DEFAULT_STREAM, DevicePointer, Handle, Location};

/// A device address in the first version of the interface, which had 32 bits.
type Short = c_uint;
type Host = *const c_void;

/// The leading fields of `CUDA_MEMCPY2D`, up to the last one that the library reads.
#[repr(C)]
pub struct Copy2d {
    /// The source and the destination, which the library does not read.
    ends: [usize; 14],
    extents: [usize; 2],
}

/// The leading fields of `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`, up to the last one that the
/// library reads.
#[repr(C)]
pub struct Copy3d {
    ends: [usize; 22],
    extents: [usize; 3],
}

/// A kind of transfer. Transfers of one kind and similar size cost about the same.
#[derive(Clone, Copy)]
enum Route {
    Within,
    Up,
    Down,
    /// The addresses determine the direction, which the library does not resolve.
    Any,
    Fill,
    Unpack,
}
use Route::{Any, Down, Fill, Unpack, Up, Within};

impl Route {
    /// Returns the key of equal work. Transfers of the same kind share a key if their sizes lie
    /// between the same powers of two.
    #[inline(never)]
    fn of(self, bytes: usize) -> u64 {
        mix(self as u64 + 1, u64::from(bytes.checked_ilog2().unwrap_or(0)))
    }
}

work! {
    [cuMemcpy cuMemcpy_ptds] (to: DevicePointer, from: DevicePointer, bytes: usize) on DEFAULT_STREAM, like Any.of(bytes);
    [cuMemcpyAsync cuMemcpyAsync_ptsz] (to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle)
        on stream, like Any.of(bytes);
    [cuMemcpyPeer cuMemcpyPeer_ptds] (
        to: DevicePointer, to_context: Handle, from: DevicePointer, from_context: Handle, bytes: usize
    ) on DEFAULT_STREAM, like Any.of(bytes);
    [cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz] (
        to: DevicePointer, to_context: Handle, from: DevicePointer, from_context: Handle, bytes: usize, stream: Handle
    ) on stream, like Any.of(bytes);

    [cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds] (to: DevicePointer, from: Host, bytes: usize) on DEFAULT_STREAM, like Up.of(bytes);
    [cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds] (to: Host, from: DevicePointer, bytes: usize) on DEFAULT_STREAM, like Down.of(bytes);
    [cuMemcpyDtoD_v2 cuMemcpyDtoD_v2_ptds] (to: DevicePointer, from: DevicePointer, bytes: usize)
        on DEFAULT_STREAM, like Within.of(bytes);
    [cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz] (to: DevicePointer, from: Host, bytes: usize, stream: Handle)
        on stream, like Up.of(bytes);
    [cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz] (to: Host, from: DevicePointer, bytes: usize, stream: Handle)
        on stream, like Down.of(bytes);
    [cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz] (
        to: DevicePointer, from: DevicePointer, bytes: usize, stream: Handle
    ) on stream, like Within.of(bytes);

    [cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds] (to: Handle, offset: usize, from: DevicePointer, bytes: usize)
        on DEFAULT_STREAM, like Within.of(bytes);
    [cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds] (to: DevicePointer, from: Handle, offset: usize, bytes: usize)
        on DEFAULT_STREAM, like Within.of(bytes);
    [cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds] (to: Handle, offset: usize, from: Host, bytes: usize)
        on DEFAULT_STREAM, like Up.of(bytes);
    [cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds] (to: Host, from: Handle, offset: usize, bytes: usize)
        on DEFAULT_STREAM, like Down.of(bytes);
    [cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds] (
        to: Handle, to_offset: usize, from: Handle, from_offset: usize, bytes: usize
    ) on DEFAULT_STREAM, like Within.of(bytes);
    [cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz] (
        to: Handle, offset: usize, from: Host, bytes: usize, stream: Handle
    ) on stream, like Up.of(bytes);
    [cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz] (
        to: Host, from: Handle, offset: usize, bytes: usize, stream: Handle
    ) on stream, like Down.of(bytes);

    [cuMemcpy2D_v2 cuMemcpy2D_v2_ptds] (copy: *const Copy2d) on DEFAULT_STREAM, like Any.of(area(copy));
    [cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds] (copy: *const Copy2d) on DEFAULT_STREAM, like Any.of(area(copy));
    [cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz] (copy: *const Copy2d, stream: Handle) on stream, like Any.of(area(copy));
    [cuMemcpy3D_v2 cuMemcpy3D_v2_ptds] (copy: *const Copy3d) on DEFAULT_STREAM, like Any.of(volume(copy));
    [cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz] (copy: *const Copy3d, stream: Handle)
        on stream, like Any.of(volume(copy));
    [cuMemcpy3DPeer cuMemcpy3DPeer_ptds] (copy: *const Copy3d) on DEFAULT_STREAM, like Any.of(volume(copy));
    [cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz] (copy: *const Copy3d, stream: Handle)
        on stream, like Any.of(volume(copy));

    [cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz] (
        to: *mut DevicePointer, from: *mut DevicePointer, sizes: *mut usize, count: usize, attributes: *mut c_void,
        indices: *mut usize, attribute_count: usize, failed: *mut usize, stream: Handle
    ) on stream, like Any.of(sum(sizes, count));
    [cuMemcpyBatchAsync_v2 cuMemcpyBatchAsync_v2_ptsz] (
        to: *mut DevicePointer, from: *mut DevicePointer, sizes: *mut usize, count: usize, attributes: *mut c_void,
        indices: *mut usize, attribute_count: usize, stream: Handle
    ) on stream, like Any.of(sum(sizes, count));
    [cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz] (
        count: usize, copies: *mut c_void, failed: *mut usize, flags: u64, stream: Handle
    ) on stream, like Any.of(count);
    [cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz] (count: usize, copies: *mut c_void, flags: u64, stream: Handle)
        on stream, like Any.of(count);
    [cuMemcpyWithAttributesAsync cuMemcpyWithAttributesAsync_ptsz] (
        to: DevicePointer, from: DevicePointer, bytes: usize, attributes: *mut c_void, stream: Handle
    ) on stream, like Any.of(bytes);
    [cuMemcpy3DWithAttributesAsync cuMemcpy3DWithAttributesAsync_ptsz] (copy: *mut c_void, flags: u64, stream: Handle)
        on stream, like Any.of(1);
    [cuMemBatchDecompressAsync cuMemBatchDecompressAsync_ptsz] (
        parameters: *mut c_void, count: usize, flags: c_uint, failed: *mut usize, stream: Handle
    ) on stream, like Unpack.of(count);

    [cuMemPrefetchAsync cuMemPrefetchAsync_ptsz] (at: DevicePointer, bytes: usize, device: i32, stream: Handle)
        on stream, like Up.of(bytes);
    [cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz] (
        at: DevicePointer, bytes: usize, location: Location, flags: c_uint, stream: Handle
    ) on stream, like Up.of(bytes);
    [cuMemPrefetchBatchAsync cuMemPrefetchBatchAsync_ptsz] (
        at: *mut DevicePointer, sizes: *mut usize, count: usize, locations: *mut Location, indices: *mut usize,
        location_count: usize, flags: u64, stream: Handle
    ) on stream, like Up.of(sum(sizes, count));
    [cuMemDiscardAndPrefetchBatchAsync cuMemDiscardAndPrefetchBatchAsync_ptsz] (
        at: *mut DevicePointer, sizes: *mut usize, count: usize, locations: *mut Location, indices: *mut usize,
        location_count: usize, flags: u64, stream: Handle
    ) on stream, like Up.of(sum(sizes, count));

    [cuMemsetD8_v2 cuMemsetD8_v2_ptds] (to: DevicePointer, value: u8, count: usize) on DEFAULT_STREAM, like Fill.of(count);
    [cuMemsetD16_v2 cuMemsetD16_v2_ptds] (to: DevicePointer, value: u16, count: usize)
        on DEFAULT_STREAM, like Fill.of(count.saturating_mul(2));
    [cuMemsetD32_v2 cuMemsetD32_v2_ptds] (to: DevicePointer, value: u32, count: usize)
        on DEFAULT_STREAM, like Fill.of(count.saturating_mul(4));
    [cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds] (to: DevicePointer, pitch: usize, value: u8, width: usize, height: usize)
        on DEFAULT_STREAM, like Fill.of(width.saturating_mul(height));
    [cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds] (to: DevicePointer, pitch: usize, value: u16, width: usize, height: usize)
        on DEFAULT_STREAM, like Fill.of(width.saturating_mul(height).saturating_mul(2));
    [cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds] (to: DevicePointer, pitch: usize, value: u32, width: usize, height: usize)
        on DEFAULT_STREAM, like Fill.of(width.saturating_mul(height).saturating_mul(4));
    [cuMemsetD8Async cuMemsetD8Async_ptsz] (to: DevicePointer, value: u8, count: usize, stream: Handle)
        on stream, like Fill.of(count);
    [cuMemsetD16Async cuMemsetD16Async_ptsz] (to: DevicePointer, value: u16, count: usize, stream: Handle)
        on stream, like Fill.of(count.saturating_mul(2));
    [cuMemsetD32Async cuMemsetD32Async_ptsz] (to: DevicePointer, value: u32, count: usize, stream: Handle)
        on stream, like Fill.of(count.saturating_mul(4));
    [cuMemsetD2D8Async cuMemsetD2D8Async_ptsz] (
        to: DevicePointer, pitch: usize, value: u8, width: usize, height: usize, stream: Handle
    ) on stream, like Fill.of(width.saturating_mul(height));
    [cuMemsetD2D16Async cuMemsetD2D16Async_ptsz] (
        to: DevicePointer, pitch: usize, value: u16, width: usize, height: usize, stream: Handle
    ) on stream, like Fill.of(width.saturating_mul(height).saturating_mul(2));
    [cuMemsetD2D32Async cuMemsetD2D32Async_ptsz] (
        to: DevicePointer, pitch: usize, value: u32, width: usize, height: usize, stream: Handle
    ) on stream, like Fill.of(width.saturating_mul(height).saturating_mul(4));

    // The first version of the interface, with 32-bit addresses and sizes. Its descriptors have
    // another layout, and the library does not read them.
    [cuMemcpyHtoD] (to: Short, from: Host, bytes: c_uint) on DEFAULT_STREAM, like Up.of(bytes as usize);
    [cuMemcpyDtoH] (to: Host, from: Short, bytes: c_uint) on DEFAULT_STREAM, like Down.of(bytes as usize);
    [cuMemcpyDtoD] (to: Short, from: Short, bytes: c_uint) on DEFAULT_STREAM, like Within.of(bytes as usize);
    [cuMemcpyHtoDAsync] (to: Short, from: Host, bytes: c_uint, stream: Handle) on stream, like Up.of(bytes as usize);
    [cuMemcpyDtoHAsync] (to: Host, from: Short, bytes: c_uint, stream: Handle) on stream, like Down.of(bytes as usize);
    [cuMemcpyDtoDAsync] (to: Short, from: Short, bytes: c_uint, stream: Handle) on stream, like Within.of(bytes as usize);
    [cuMemcpyDtoA] (to: Handle, offset: c_uint, from: Short, bytes: c_uint) on DEFAULT_STREAM, like Within.of(bytes as usize);
    [cuMemcpyAtoD] (to: Short, from: Handle, offset: c_uint, bytes: c_uint) on DEFAULT_STREAM, like Within.of(bytes as usize);
    [cuMemcpyHtoA] (to: Handle, offset: c_uint, from: Host, bytes: c_uint) on DEFAULT_STREAM, like Up.of(bytes as usize);
    [cuMemcpyAtoH] (to: Host, from: Handle, offset: c_uint, bytes: c_uint) on DEFAULT_STREAM, like Down.of(bytes as usize);
    [cuMemcpyAtoA] (to: Handle, to_offset: c_uint, from: Handle, from_offset: c_uint, bytes: c_uint)
        on DEFAULT_STREAM, like Within.of(bytes as usize);
    [cuMemcpyHtoAAsync] (to: Handle, offset: c_uint, from: Host, bytes: c_uint, stream: Handle)
        on stream, like Up.of(bytes as usize);
    [cuMemcpyAtoHAsync] (to: Host, from: Handle, offset: c_uint, bytes: c_uint, stream: Handle)
        on stream, like Down.of(bytes as usize);
    [cuMemcpy2D] (copy: *const c_void) on DEFAULT_STREAM, like Any.of(1);
    [cuMemcpy2DUnaligned] (copy: *const c_void) on DEFAULT_STREAM, like Any.of(1);
    [cuMemcpy2DAsync] (copy: *const c_void, stream: Handle) on stream, like Any.of(1);
    [cuMemcpy3D] (copy: *const c_void) on DEFAULT_STREAM, like Any.of(1);
    [cuMemcpy3DAsync] (copy: *const c_void, stream: Handle) on stream, like Any.of(1);
    [cuMemsetD8] (to: Short, value: u8, count: c_uint) on DEFAULT_STREAM, like Fill.of(count as usize);
    [cuMemsetD16] (to: Short, value: u16, count: c_uint) on DEFAULT_STREAM, like Fill.of(count as usize * 2);
    [cuMemsetD32] (to: Short, value: u32, count: c_uint) on DEFAULT_STREAM, like Fill.of(count as usize * 4);
    [cuMemsetD2D8] (to: Short, pitch: c_uint, value: u8, width: c_uint, height: c_uint)
        on DEFAULT_STREAM, like Fill.of(width as usize * height as usize);
    [cuMemsetD2D16] (to: Short, pitch: c_uint, value: u16, width: c_uint, height: c_uint)
        on DEFAULT_STREAM, like Fill.of(width as usize * height as usize);
    [cuMemsetD2D32] (to: Short, pitch: c_uint, value: u32, width: c_uint, height: c_uint)
        on DEFAULT_STREAM, like Fill.of(width as usize * height as usize);
}

fn area(copy: *const Copy2d) -> usize {
    // SAFETY: the program passes null or a descriptor that the driver reads as well.
    unsafe { copy.as_ref() }.map_or(0, |copy| product(&copy.extents))
}

fn volume(copy: *const Copy3d) -> usize {
    // SAFETY: the program passes null or a descriptor that the driver reads as well.
    unsafe { copy.as_ref() }.map_or(0, |copy| product(&copy.extents))
}

fn product(extents: &[usize]) -> usize {
    extents.iter().fold(1, |bytes: usize, &extent| bytes.saturating_mul(extent))
}

fn sum(sizes: *const usize, count: usize) -> usize {
    if sizes.is_null() {
        return 0;
    }
    // SAFETY: the program passes an array of `count` sizes, which the driver reads as well.
    let sizes = unsafe { std::slice::from_raw_parts(sizes, count) };
    sizes.iter().fold(0, |bytes: usize, &size| bytes.saturating_add(size))
}
