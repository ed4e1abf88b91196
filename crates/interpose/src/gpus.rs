//! Which device of this process is which GPU of the grant. A process numbers its devices as it likes
//! (`CUDA_VISIBLE_DEVICES`), so GPUs are known by UUID.

use std::sync::atomic::{AtomicBool, AtomicI8, Ordering};

use tessera_limits::{GpuSlot, GrantLimits, UuidBytes};

use crate::cuda::{Device, OUT_OF_MEMORY, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::grant::say;

/// The GPUs of the grant, in its order.
pub struct GrantedGpus {
    uuids: Vec<UuidBytes>,
    /// GPU of each device, once asked for.
    of_device: [AtomicI8; DEVICES],
    has_complained: AtomicBool,
}

/// More than any machine has.
const DEVICES: usize = 128;
const NOT_ASKED: i8 = -1;

driver_functions! { Cuda:
    current_device = c"cuCtxGetDevice" (device: *mut Device);
    uuid = c"cuDeviceGetUuid" (uuid: *mut [u8; 16], device: Device);
    uuid_v2 = c"cuDeviceGetUuid_v2" (uuid: *mut [u8; 16], device: Device);
}

impl GrantedGpus {
    pub fn of(limits: &GrantLimits) -> Self {
        Self {
            uuids: limits.gpus.iter().map(|gpu| gpu.uuid).collect(),
            of_device: [const { AtomicI8::new(NOT_ASKED) }; DEVICES],
            has_complained: AtomicBool::new(false),
        }
    }

    /// The GPU of a device.
    ///
    /// # Errors
    /// "Out of memory" for a device that is not in the grant: nothing of it is ours.
    pub fn of_device(&self, device: Device) -> Result<GpuSlot, Status> {
        let known = usize::try_from(device).ok().and_then(|device| self.of_device.get(device));
        if let Some(gpu) =
            known.and_then(|known| usize::try_from(known.load(Ordering::Relaxed)).ok()).and_then(GpuSlot::new)
        {
            return Ok(gpu);
        }
        let mut bytes = [0; 16];
        // SAFETY: `bytes` is the place for the answer. The second form tells instances of a split GPU apart.
        let status = unsafe {
            match uuid_v2(&raw mut bytes, device) {
                SUCCESS => SUCCESS,
                _ => uuid(&raw mut bytes, device),
            }
        };
        if status != SUCCESS {
            return Err(status);
        }
        let gpu = self.of_uuid(UuidBytes(bytes)).ok_or(OUT_OF_MEMORY)?;
        if let (Some(known), Ok(index)) = (known, i8::try_from(gpu.index())) {
            known.store(index, Ordering::Relaxed);
        }
        Ok(gpu)
    }

    /// The GPU with a UUID.
    pub fn of_uuid(&self, uuid: UuidBytes) -> Option<GpuSlot> {
        let gpu = self.uuids.iter().position(|known| *known == uuid).and_then(GpuSlot::new);
        if gpu.is_none() && !self.has_complained.swap(true, Ordering::Relaxed) {
            let hex: String = uuid.0.iter().map(|byte| format!("{byte:02x}")).collect();
            say(&format!("the GPU {hex} is not granted to this container and cannot be used"));
        }
        gpu
    }

    /// The GPU, where there is only one.
    pub fn only(&self) -> Option<GpuSlot> {
        (self.uuids.len() == 1).then_some(GpuSlot::FIRST)
    }

    /// The GPU of the calling thread's context; none where it has no context.
    pub fn current(&self) -> Option<Result<GpuSlot, Status>> {
        let mut device = 0;
        // SAFETY: `device` is the place for the answer.
        let status = unsafe { current_device(&raw mut device) };
        (status == SUCCESS).then(|| self.of_device(device))
    }
}
