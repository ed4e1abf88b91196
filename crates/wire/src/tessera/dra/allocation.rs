//! The allocation of a claim as holds on GPUs.

use std::collections::BTreeMap;

use tessera_core::grant::{GpuUsage, Hold};
use tessera_core::node::Node;
use tessera_core::units::{GpuIndex, MiB, Percent};

use super::{CORES, DRIVER, MEMORY, gpu_of_device};
use crate::foreign::dra::{AllocationResult, ResourceClaim};
use crate::foreign::quantity::{BadQuantity, Quantity};

/// What a claim holds of one GPU by one of its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimHold {
    /// Name of the request, or `request/alternative` for one of several alternatives.
    pub request: String,
    /// Index of the GPU on the node.
    pub gpu: GpuIndex,
    /// What is held, or `None` for administrative access, which holds nothing.
    pub hold: Option<Hold>,
    /// Identifies the share, if the GPU can be held by several claims.
    pub share_id: Option<String>,
}

/// An allocation that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAllocation {
    /// The allocation names a device of another pool.
    #[error(
        "request {request} of the claim has a device of pool {pool}, not of node {node}; delete the claim"
    )]
    OtherPool {
        /// Name of the request.
        request: String,
        /// Pool of the device.
        pool: String,
        /// Name of this node.
        node: String,
    },
    /// The allocation names a device that the node does not have.
    #[error(
        "request {request} of the claim has device {device}, which node {node} does not have; delete the claim"
    )]
    UnknownDevice {
        /// Name of the request.
        request: String,
        /// Name of the device.
        device: String,
        /// Name of this node.
        node: String,
    },
    /// An amount is not a number, or negative.
    #[error(
        "request {request} of the claim holds {amount} of {capacity}: expected an amount such as 30 or 8Gi"
    )]
    Amount {
        /// Name of the request.
        request: String,
        /// Name of the capacity.
        capacity: String,
        /// Amount as the claim has it.
        amount: String,
    },
    /// An amount is more than the GPU has.
    #[error(
        "request {request} of the claim holds {amount} of {capacity}, which is more than {device} has; delete the claim"
    )]
    TooMuch {
        /// Name of the request.
        request: String,
        /// Name of the capacity.
        capacity: String,
        /// Amount as the claim has it.
        amount: String,
        /// Name of the device.
        device: String,
    },
    /// The claim holds a capacity that GPUs do not have.
    #[error("request {request} of the claim holds capacity {capacity}, which no GPU has")]
    UnknownCapacity {
        /// Name of the request.
        request: String,
        /// Name of the capacity.
        capacity: String,
    },
}

/// Returns the pool of a claim's devices, which is the name of their node, or `None` if no device of ours is
/// allocated.
#[must_use]
pub fn pool(claim: &ResourceClaim) -> Option<&str> {
    claim.results(DRIVER).next().map(|result| result.pool.as_str())
}

/// Returns what a claim holds of the GPUs of `node`, in the order of its results. Devices of other drivers are left
/// out; a claim without an allocation holds nothing.
///
/// # Errors
/// Fails if the allocation names devices or amounts that the node does not have.
pub fn claim_holds(claim: &ResourceClaim, node: &Node) -> Result<Vec<ClaimHold>, BadAllocation> {
    claim.results(DRIVER).map(|result| result_hold(result, node)).collect()
}

/// Returns what holds take of each GPU together, by ascending index. Administrative access takes nothing.
pub fn claim_usage<'a>(holds: impl IntoIterator<Item = &'a ClaimHold>) -> Vec<(GpuIndex, GpuUsage)> {
    let mut usage: BTreeMap<GpuIndex, GpuUsage> = BTreeMap::new();
    for ClaimHold { gpu, hold, .. } in holds {
        if let Some(hold) = hold {
            let used = usage.entry(*gpu).or_default();
            *used = used.plus(GpuUsage::of(*hold));
        }
    }
    usage.into_iter().collect()
}

fn result_hold(result: &AllocationResult, node: &Node) -> Result<ClaimHold, BadAllocation> {
    let request = result.request.clone();
    if result.pool != node.name.0 {
        return Err(BadAllocation::OtherPool {
            request,
            pool: result.pool.clone(),
            node: node.name.to_string(),
        });
    }
    let gpu = gpu_of_device(&result.device).and_then(|index| node.gpu(index));
    let Some(gpu) = gpu else {
        let device = result.device.clone();
        return Err(BadAllocation::UnknownDevice { request, device, node: node.name.to_string() });
    };
    // What an allocation does not name costs the default, which is everything.
    let (mut compute_percent, mut memory) = (Percent::WHOLE, gpu.memory);
    for (capacity, amount) in &result.consumed_capacity {
        let own_name = capacity.strip_prefix(DRIVER).and_then(|rest| rest.strip_prefix('/'));
        let bad = || BadAllocation::Amount {
            request: request.clone(),
            capacity: capacity.clone(),
            amount: amount.0.clone(),
        };
        let too_much = || BadAllocation::TooMuch {
            request: request.clone(),
            capacity: capacity.clone(),
            amount: amount.0.clone(),
            device: result.device.clone(),
        };
        let quantity: Quantity = amount.0.parse().map_err(|_: BadQuantity| bad())?;
        match own_name.unwrap_or(capacity) {
            CORES => {
                let cores = quantity.milli().ok_or_else(bad)?.div_ceil(1000);
                let cores = u32::try_from(cores).map_err(|_| too_much())?;
                compute_percent = Percent(cores);
                if compute_percent > Percent::WHOLE {
                    return Err(too_much());
                }
            }
            MEMORY => {
                memory = MiB(quantity.mib().ok_or_else(bad)?);
                if memory > gpu.memory {
                    return Err(too_much());
                }
            }
            _ => return Err(BadAllocation::UnknownCapacity { request, capacity: capacity.clone() }),
        }
    }
    let hold = if (compute_percent, memory) == (Percent::WHOLE, gpu.memory) {
        Hold::Whole
    } else {
        Hold::Share { compute_percent, memory }
    };
    Ok(ClaimHold {
        request,
        gpu: gpu.index,
        hold: (!result.admin_access).then_some(hold),
        share_id: result.share_id.clone(),
    })
}
