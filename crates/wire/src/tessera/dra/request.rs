//! The requests of a claim as requests for GPUs.

use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::units::{MiB, Percent};

use super::{CORES, DRIVER, MEMORY};
use crate::foreign::dra::RequestedDevices;
use crate::foreign::quantity::{BadQuantity, Quantity};

/// A request that no GPU can fulfil.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// An amount is not a number, or negative.
    #[error("capacity {capacity} is requested with {amount}: write an amount such as 30 or 8Gi")]
    Amount {
        /// Name of the capacity.
        capacity: String,
        /// Amount as the claim has it.
        amount: String,
    },
    /// More than all of a GPU's compute is requested.
    #[error("{CORES} is requested with {0}: write at most 100, and a count for several GPUs")]
    Cores(u64),
    /// The request names a capacity that GPUs do not have.
    #[error("capacity {0} is requested, which no GPU has; request {CORES} and {MEMORY}")]
    UnknownCapacity(String),
    /// The number of devices is not possible.
    #[error("{0} GPUs are requested: write a number from 1 to 64")]
    Count(i64),
}

/// Returns what a request for devices of ours asks of each of its GPUs. What it does not name is everything. With the
/// allocation mode `All` the count is 1, because the number of GPUs depends on the node.
///
/// # Errors
/// Fails if no GPU can fulfil the request.
pub fn gpu_request(devices: &RequestedDevices) -> Result<Request, BadRequest> {
    let count = devices.count.unwrap_or(1);
    let Ok(count @ 1..=64) = u8::try_from(count) else { return Err(BadRequest::Count(count)) };
    let (mut cores, mut memory) = (None, None);
    for (capacity, amount) in &devices.capacity.requests {
        let own_name = capacity.strip_prefix(DRIVER).and_then(|rest| rest.strip_prefix('/'));
        let bad = || BadRequest::Amount { capacity: capacity.clone(), amount: amount.0.clone() };
        let quantity: Quantity = amount.0.parse().map_err(|_: BadQuantity| bad())?;
        match own_name.unwrap_or(capacity) {
            CORES => {
                let asked = quantity.milli().ok_or_else(bad)?.div_ceil(1000);
                let percent = u32::try_from(asked).ok().filter(|percent| *percent <= Percent::WHOLE.0);
                cores = Some(Percent(percent.ok_or(BadRequest::Cores(asked))?));
            }
            // The range of the capacity starts at 1 MiB.
            MEMORY => memory = Some(MiB(quantity.mib().ok_or_else(bad)?.max(1))),
            _ => return Err(BadRequest::UnknownCapacity(capacity.clone())),
        }
    }
    Ok(match (cores, memory) {
        (None | Some(Percent::WHOLE), None) => Request::Whole(count),
        (compute_percent, memory) => Request::Share(Share {
            count,
            compute_percent: compute_percent.unwrap_or(Percent::WHOLE),
            memory: memory.map_or(MemoryRequest::PartOfGpu(Percent::WHOLE), MemoryRequest::Amount),
        }),
    })
}
