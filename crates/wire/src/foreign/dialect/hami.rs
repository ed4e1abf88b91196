//! HAMi's dialect: `nvidia.com/gpu` with a part of the memory and of the compute of each GPU.
//!
//! Without the resources of this module, `nvidia.com/gpu` requests whole GPUs.

use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::units::{MiB, Percent};

use super::{BadRequest, RequestedAmounts, whole};

/// Resource for the number of GPUs, which NVIDIA's dialect uses too.
pub const COUNT: &str = whole::NVIDIA.resource;

/// Resource for the memory of each GPU, in MiB.
pub const MEMORY: &str = "nvidia.com/gpumem";

/// Resource for the memory of each GPU, in percent of what the GPU has.
pub const MEMORY_PERCENT: &str = "nvidia.com/gpumem-percentage";

/// Resource for the compute of each GPU, in percent. Zero sets no limit, 100 is the whole GPU.
pub const CORES: &str = "nvidia.com/gpucores";

/// Resource for the priority of the container among those of its GPU: 0 is high, 1 is low.
pub const PRIORITY: &str = "nvidia.com/priority";

/// All resources that pods of this dialect name beside [`COUNT`]. Nodes do not offer them: they are
/// amounts per GPU, which kube-scheduler and the kubelet cannot sum up.
pub const PER_GPU: [&str; 4] = [MEMORY, MEMORY_PERCENT, CORES, PRIORITY];

/// Largest number of MiB that HAMi accepts.
const MAX_MEMORY_MIB: u64 = i32::MAX as u64;

/// Lowest priority.
const MAX_PRIORITY: u64 = 1;

/// Returns the request of a container, or `None` if it names no resource of [`PER_GPU`] other than
/// the priority.
///
/// Missing memory is all memory of the GPU. All memory without a part of the compute is the whole
/// GPU, and so is all compute.
pub(super) fn parse(amounts: &RequestedAmounts<'_>) -> Result<Option<Request>, BadRequest> {
    let memory = amounts.units(MEMORY, "3000 for 3000 MiB of each GPU", "1 MiB")?;
    let percent = amounts.count(MEMORY_PERCENT, "1 to 100")?;
    let cores = amounts.count(CORES, "0 to 100; 0 sets no limit")?;
    let priority = amounts.count(PRIORITY, "0 for high or 1 for low")?;
    let limits = [
        (MEMORY, memory, MAX_MEMORY_MIB),
        (MEMORY_PERCENT, percent, 100),
        (CORES, cores, 100),
        (PRIORITY, priority, MAX_PRIORITY),
    ];
    if let Some((resource, value, max)) = limits.into_iter().find(|(_, value, max)| value > max) {
        return Err(BadRequest::OutOfRange { resource, value, max });
    }
    if memory > 0 && percent > 0 {
        return Err(BadRequest::MemoryTwice);
    }
    let is_named = |resource| amounts.text(resource).map(|text| text.is_some());
    if !is_named(MEMORY)? && !is_named(MEMORY_PERCENT)? && !is_named(CORES)? {
        return Ok(None);
    }
    // The kubelet hands over devices of this resource only.
    let count = amounts.count(COUNT, "1 for a part of one GPU")?;
    let Some(Request::Whole(count)) = whole::gpus(COUNT, count, 1)? else {
        return Err(BadRequest::PartOfNoGpu);
    };
    let memory = match (memory, percent) {
        (0, 0 | 100) => MemoryRequest::PartOfGpu(Percent::WHOLE),
        (0, part) => MemoryRequest::PartOfGpu(percent_of(part)),
        (memory, _) => MemoryRequest::Amount(MiB(memory)),
    };
    let all_memory = memory == MemoryRequest::PartOfGpu(Percent::WHOLE);
    Ok(Some(match cores {
        100 => Request::Whole(count),
        0 if all_memory => Request::Whole(count),
        _ => Request::Share(Share { count, compute_percent: percent_of(cores), memory }),
    }))
}

fn percent_of(amount: u64) -> Percent {
    Percent(u32::try_from(amount).unwrap_or(u32::MAX))
}
