//! gpu-manager's dialect: percent of a GPU and blocks of 256 MiB.

use std::collections::BTreeMap;

use tessera_core::request::Request;
use tessera_core::units::{MiB, Percent};

use super::{BadRequest, RequestedAmounts, whole};

/// Resource for percent of a GPU. Multiples of 100 are whole GPUs.
pub const CORE: &str = "tencent.com/vcuda-core";

/// Resource for memory, in blocks.
pub const MEMORY: &str = "tencent.com/vcuda-memory";

/// Pod annotation with the percentage up to which a share may grow while others are idle.
pub const CEILING: &str = "tencent.com/vcuda-core-limit";

/// The annotation [`CEILING`] is not a number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{CEILING}: found {0:?}; write a percentage of one GPU, such as 80")]
pub struct BadCeiling(String);

/// Parses the annotation [`CEILING`]. Returns `None` if the pod has none.
pub fn ceiling(annotations: &BTreeMap<String, String>) -> Result<Option<Percent>, BadCeiling> {
    let Some(text) = annotations.get(CEILING) else { return Ok(None) };
    match text.trim().parse::<u32>() {
        Ok(percent) => Ok(Some(Percent(percent.min(Percent::WHOLE.0)))),
        Err(_) => Err(BadCeiling(text.clone())),
    }
}

/// Size of one memory block.
pub const BLOCK: MiB = MiB(256);

/// Returns a share if `core` is below 100, otherwise whole GPUs, whose memory is not limited.
pub fn request(core: u64, memory: u64) -> Result<Option<Request>, BadRequest> {
    match (core, memory) {
        (0, 0) => Ok(None),
        (0, _) => Err(BadRequest::MemoryWithoutShare(memory)),
        (1..100, 0) => Err(BadRequest::ShareWithoutMemory(core)),
        (1..100, _) => Ok(Some(Request::share(
            Percent(u32::try_from(core).unwrap_or(u32::MAX)),
            MiB(memory.saturating_mul(BLOCK.0)),
        ))),
        _ if core.is_multiple_of(100) => whole::gpus(CORE, core / 100, 100),
        _ => Err(BadRequest::CoresBetweenGpus(core)),
    }
}

pub(super) fn parse(amounts: &RequestedAmounts<'_>) -> Result<Option<Request>, BadRequest> {
    let core = amounts.count(CORE, "1 to 99 for a share of a GPU, or a multiple of 100 for whole ones")?;
    let memory = amounts.units(MEMORY, "30 for 30 blocks of 256 MiB", "256 MiB")?;
    request(core, memory)
}
