//! Maps the devices of this process to the GPUs of the grant. `CUDA_VISIBLE_DEVICES` changes the
//! numbers of devices, so GPUs are identified by UUID.

use std::sync::atomic::{AtomicBool, AtomicI8, Ordering};

use tessera_limits::{GpuSlot, GrantLimits, UuidBytes};

use crate::cuda::{Device, OUT_OF_MEMORY, SUCCESS, Status};
use crate::entry::library::driver_functions;
use crate::grant::log;

/// The GPUs of the grant, in the order of their slots.
pub struct GrantedGpus {
    uuids: Vec<UuidBytes>,
    /// Slot of each device, or [`UNKNOWN`] until it is looked up.
    of_device: [AtomicI8; MAX_DEVICES],
    has_warned: AtomicBool,
}

/// Number of devices whose slots are cached, more than any host has.
const MAX_DEVICES: usize = 128;
const UNKNOWN: i8 = -1;

driver_functions! { Cuda:
    current_device = c"cuCtxGetDevice" (device: *mut Device);
    uuid = c"cuDeviceGetUuid" (uuid: *mut [u8; 16], device: Device);
    uuid_v2 = c"cuDeviceGetUuid_v2" (uuid: *mut [u8; 16], device: Device);
}

impl GrantedGpus {
    pub fn of(limits: &GrantLimits) -> Self {
        Self {
            uuids: limits.gpus.iter().map(|gpu| gpu.uuid).collect(),
            of_device: [const { AtomicI8::new(UNKNOWN) }; MAX_DEVICES],
            has_warned: AtomicBool::new(false),
        }
    }

    /// Returns the slot of a device.
    ///
    /// # Errors
    /// "Out of memory" for a device that is not in the grant, or the driver's error.
    pub fn of_device(&self, device: Device) -> Result<GpuSlot, Status> {
        let known = usize::try_from(device).ok().and_then(|device| self.of_device.get(device));
        if let Some(gpu) =
            known.and_then(|known| usize::try_from(known.load(Ordering::Relaxed)).ok()).and_then(GpuSlot::new)
        {
            return Ok(gpu);
        }
        let mut bytes = [0; 16];
        // SAFETY: `bytes` is writable and has the size of a UUID. The second version also
        // identifies MIG instances.
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

    /// Returns the slot of the GPU with this UUID. Logs the first UUID that is not in the grant.
    pub fn of_uuid(&self, uuid: UuidBytes) -> Option<GpuSlot> {
        let gpu = self.uuids.iter().position(|known| *known == uuid).and_then(GpuSlot::new);
        if gpu.is_none() && !self.has_warned.swap(true, Ordering::Relaxed) {
            let hex: String = uuid.0.iter().map(|byte| format!("{byte:02x}")).collect();
            log(&format!("GPU {hex} is not part of this container's grant; the program cannot use it"));
        }
        gpu
    }

    /// Returns the slot of the calling thread's context, or `None` if the thread has no context.
    pub fn current(&self) -> Option<Result<GpuSlot, Status>> {
        let mut device = 0;
        // SAFETY: `device` is writable.
        let status = unsafe { current_device(&raw mut device) };
        (status == SUCCESS).then(|| self.of_device(device))
    }
}
