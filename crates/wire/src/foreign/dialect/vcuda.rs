//! gpu-manager's vocabulary: percent of a GPU and 256 MiB blocks.

use tessera_core::request::Request;
use tessera_core::units::{MiB, Percent};

use super::{Asked, BadRequest, whole};

/// Percent of a GPU; 100 and its multiples are whole GPUs.
pub const CORE: &str = "tencent.com/vcuda-core";

/// Memory in blocks.
pub const MEMORY: &str = "tencent.com/vcuda-memory";

/// One block.
pub const BLOCK: MiB = MiB(256);

/// A share for `core` below 100, else whole GPUs, of which memory is neither asked nor limited.
pub fn request(core: u64, memory: u64) -> Result<Option<Request>, BadRequest> {
    match (core, memory) {
        (0, 0) => Ok(None),
        (0, _) => Err(BadRequest::MemoryWithoutShare(memory)),
        (1..100, 0) => Err(BadRequest::ShareWithoutMemory(core)),
        (1..100, _) => Ok(Some(Request::Share {
            compute_percent: Percent(u32::try_from(core).unwrap_or(u32::MAX)),
            memory: MiB(memory.saturating_mul(BLOCK.0)),
        })),
        _ if core.is_multiple_of(100) => whole::cards(CORE, core / 100, 100),
        _ => Err(BadRequest::CoresBetweenGpus(core)),
    }
}

pub(super) fn read(asked: &Asked<'_>) -> Result<Option<Request>, BadRequest> {
    let core = asked.count(CORE, "1 to 99 for a share of a GPU, or a multiple of 100 for whole ones")?;
    let memory = asked.units(MEMORY, "30 for 30 blocks of 256 MiB", "256 MiB")?;
    request(core, memory)
}
