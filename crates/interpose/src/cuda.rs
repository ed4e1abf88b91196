//! The driver's types, as far as the library reads them.

use std::ffi::c_void;

use tessera_limits::Bytes;

/// The result of every driver function.
pub type Status = i32;
pub type Device = i32;
pub type DevicePointer = u64;
/// A context, stream, pool, array or graph, which is opaque to the library.
pub type Handle = *mut c_void;

/// The stream of work that does not name a stream.
pub const DEFAULT_STREAM: Handle = std::ptr::null_mut();

pub const SUCCESS: Status = 0;
pub const INVALID_VALUE: Status = 1;
pub const OUT_OF_MEMORY: Status = 2;
pub const NOT_PERMITTED: Status = 800;
pub const NOT_SUPPORTED: Status = 801;

/// Allocation type of managed memory, which moves between host and GPUs and may have no location.
pub const MANAGED: i32 = 2;
pub const POOL_RESERVED: i32 = 5;
pub const POOL_USED: i32 = 7;
pub const GRAPH_MEMORY_RESERVED: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

impl Location {
    const DEVICE: i32 = 1;
    /// A part of a device's memory. The first byte of the id is the device, the second byte is the
    /// part.
    const PART_OF_DEVICE: i32 = 6;

    /// Returns the device, or `None` for host memory.
    pub fn device(self) -> Option<Device> {
        match self.kind {
            Self::DEVICE => Some(self.id),
            Self::PART_OF_DEVICE => Some(self.id & 0xff),
            _ => None,
        }
    }
}

/// The first fields of `CUmemAllocationProp` and `CUmemPoolProps`, padded beyond the size of both.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProperties {
    pub kind: i32,
    pub handle_kinds: i32,
    pub location: Location,
    pub rest: [u64; 16],
}

/// The first fields of `CUDA_MEM_ALLOC_NODE_PARAMS`. `CUmemPoolProps` takes 88 bytes in all
/// versions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationNodeParameters {
    pub kind: i32,
    pub handle_kinds: i32,
    pub location: Location,
    pub rest: [u64; 9],
    pub access: *const c_void,
    pub access_count: usize,
    pub bytes: usize,
}

/// `CUgraphNodeParams` of a node that allocates memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GraphNodeParameters {
    pub kind: i32,
    pub reserved: [i32; 3],
    pub allocation: AllocationNodeParameters,
}

impl GraphNodeParameters {
    pub const ALLOCATES: i32 = 10;
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: u32,
    pub channels: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Array3dDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ShortArrayDescriptor {
    pub extents: [u32; 2],
    pub format: u32,
    pub channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ShortArray3dDescriptor {
    pub extents: [u32; 3],
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle {
    pub bytes: [u8; 64],
}

impl ArrayDescriptor {
    pub fn in_3d(self) -> Array3dDescriptor {
        Array3dDescriptor {
            width: self.width,
            height: self.height,
            depth: 0,
            format: self.format,
            channels: self.channels,
            flags: 0,
        }
    }
}

impl ShortArrayDescriptor {
    pub fn in_3d(self) -> Array3dDescriptor {
        let [width, height] = self.extents;
        ShortArray3dDescriptor {
            extents: [width, height, 0],
            format: self.format,
            channels: self.channels,
            flags: 0,
        }
        .widened()
    }
}

impl ShortArray3dDescriptor {
    pub fn widened(self) -> Array3dDescriptor {
        let [width, height, depth] = self.extents.map(|extent| extent as usize);
        Array3dDescriptor {
            width,
            height,
            depth,
            format: self.format,
            channels: self.channels,
            flags: self.flags,
        }
    }
}

impl Array3dDescriptor {
    /// Flag of an array whose depth is the number of layers.
    const LAYERED: u32 = 0x01;
    const CUBE: u32 = 0x04;
    /// Flag of an array that has no memory until the program maps some.
    const SPARSE: u32 = 0x40;
    const DEFERRED: u32 = 0x80;

    /// Returns the array at a level of a mipmap. Each level halves every extent except the number
    /// of layers.
    pub fn at_level(mut self, level: u32) -> Self {
        let halved = |extent: usize| (extent >> level).max(extent.min(1));
        (self.width, self.height) = (halved(self.width), halved(self.height));
        if self.flags & (Self::LAYERED | Self::CUBE) == 0 {
            self.depth = halved(self.depth);
        }
        self
    }

    /// Returns the approximate size of the array, because the driver tiles it. Unknown formats
    /// count as the widest.
    pub fn bytes(&self) -> Bytes {
        if self.flags & (Self::SPARSE | Self::DEFERRED) != 0 {
            return Bytes::ZERO;
        }
        let element = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            _ => 4,
        } * u64::from(self.channels.max(1));
        let extents = [self.width, self.height, self.depth];
        Bytes(extents.iter().fold(element, |bytes, &extent| bytes.saturating_mul(extent.max(1) as u64)))
    }
}

/// The first fields of `CUlaunchConfig`, as far as the library reads them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: Handle,
}
