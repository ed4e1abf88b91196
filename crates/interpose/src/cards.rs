//! Which device of this process is which GPU of the grant. A process numbers its devices as it likes
//! (`CUDA_VISIBLE_DEVICES`), so GPUs are known by UUID.

use std::sync::atomic::{AtomicBool, AtomicI8, Ordering};

use tessera_limits::Limits;

use crate::cuda::{Device, OUT_OF_MEMORY, SUCCESS, Status};
use crate::door::library::driver_functions;
use crate::grant::say;

/// The GPUs of the grant, in its order.
pub struct Cards {
    uuids: Vec<[u8; 16]>,
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

impl Cards {
    pub fn of(limits: &Limits) -> Self {
        Self {
            uuids: limits.cards.iter().map(|card| card.uuid).collect(),
            of_device: [const { AtomicI8::new(NOT_ASKED) }; DEVICES],
            has_complained: AtomicBool::new(false),
        }
    }

    /// The GPU of a device.
    ///
    /// # Errors
    /// "Out of memory" for a device that is not in the grant: nothing of it is ours.
    pub fn of_device(&self, device: Device) -> Result<usize, Status> {
        let known = usize::try_from(device).ok().and_then(|device| self.of_device.get(device));
        if let Some(card) = known.and_then(|known| usize::try_from(known.load(Ordering::Relaxed)).ok()) {
            return Ok(card);
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
        let card = self.of_uuid(&bytes).ok_or(OUT_OF_MEMORY)?;
        if let (Some(known), Ok(card)) = (known, i8::try_from(card)) {
            known.store(card, Ordering::Relaxed);
        }
        Ok(card)
    }

    /// The GPU with a UUID.
    pub fn of_uuid(&self, uuid: &[u8; 16]) -> Option<usize> {
        let card = self.uuids.iter().position(|known| known == uuid);
        if card.is_none() && !self.has_complained.swap(true, Ordering::Relaxed) {
            let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
            say(&format!("the GPU {hex} is not granted to this container and cannot be used"));
        }
        card
    }

    /// The GPU, where there is only one.
    pub fn only(&self) -> Option<usize> {
        (self.uuids.len() == 1).then_some(0)
    }

    /// The GPU of the calling thread's context; none where it has no context.
    pub fn current(&self) -> Option<Result<usize, Status>> {
        let mut device = 0;
        // SAFETY: `device` is the place for the answer.
        let status = unsafe { current_device(&raw mut device) };
        (status == SUCCESS).then(|| self.of_device(device))
    }
}
