//! Tessera's devices of dynamic resource allocation: how a node's GPUs are written as a slice, and how the
//! allocation of a claim is read as holds.
//!
//! Each GPU is one device that several claims can hold. Its capacities are [`CORES`] and [`MEMORY`], and the
//! default of both is the whole GPU, so a claim without amounts holds the GPU alone.

mod allocation;
mod attributes;
mod correction;
mod held;
mod prepared;
mod request;
mod selectors;
mod share_config;
mod slice;
#[cfg(test)]
mod tests;

use tessera_core::gpu_set::GpuSet;
use tessera_core::units::GpuIndex;

pub use self::allocation::{BadAllocation, ClaimHold, claim_holds, claim_usage, pool};
pub use self::attributes::GpuDetails;
pub use self::correction::{cleared, reallocated};
pub use self::held::{Fixed, claim_parts, exchange, is_plain, names_gpus, served_dialects, waiting_requests};
pub use self::prepared::{BadRecord, GrantedGpu, PreparedClaim, PreparedGpu, request_directory};
pub use self::request::{BadRequest, gpu_request};
pub use self::share_config::{BadShareConfig, ShareConfig, share_config};
pub use self::slice::{NodeDevices, Sharing, TAINT_KEY, is_shared, slice, slice_name};

/// Name of the driver, in slices, allocations and classes.
pub const DRIVER: &str = "gpu.tessera.dev";

/// Capacity of compute: percent of one GPU's time.
pub const CORES: &str = "cores";

/// Capacity of memory, in bytes.
pub const MEMORY: &str = "memory";

/// Name of the class for claims with or without amounts.
pub const CLASS: &str = "tessera";

/// Start of a device's name. The index of the GPU follows.
const DEVICE_PREFIX: &str = "gpu-";

/// Returns the name of a GPU's device.
#[must_use]
pub fn device_name(gpu: GpuIndex) -> String {
    format!("{DEVICE_PREFIX}{gpu}")
}

/// Returns the GPU of a device, or `None` if no GPU has a device of this name.
#[must_use]
pub fn gpu_of_device(device: &str) -> Option<GpuIndex> {
    let index: u8 = device.strip_prefix(DEVICE_PREFIX)?.parse().ok()?;
    let gpu = GpuIndex(index);
    (gpu.position() < GpuSet::CAPACITY && device_name(gpu) == device).then_some(gpu)
}
