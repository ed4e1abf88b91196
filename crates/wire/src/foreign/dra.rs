//! Objects of dynamic resource allocation (API group `resource.k8s.io`, version `v1`): slices, claims and
//! classes, and the parts of pods that name claims.
//!
//! The types hold the fields that Tessera reads or writes. Unknown fields are skipped when an object is read.
//! So a claim of another author must not be written back from these types; its status must be edited as JSON.

mod claim;
mod class;
mod pod;
mod slice;
#[cfg(test)]
mod tests;

pub use self::claim::{
    Allocation, AllocationConfig, AllocationResult, CapacityRequest, ClaimConfig, ClaimDevices, ClaimSpec,
    ClaimStatus, Constraint, Consumer, DeviceRequest, DeviceStatus, ExactRequest, OpaqueConfig,
    RequestedDevices, ResourceClaim, Selector, SubRequest,
};
pub use self::class::{ClassSpec, DeviceClass};
pub use self::pod::{
    ClaimName, ClaimedRequest, ContainerClaim, ExtendedResourceClaimStatus, ExtendedResourceRequest,
    PodResourceClaim, PodResourceClaimStatus,
};
pub use self::slice::{
    Attribute, Capacity, Device, DeviceTaint, Pool, RequestPolicy, RequestRange, ResourceSlice, SliceSpec,
};

/// API group of all objects of dynamic resource allocation.
pub const GROUP: &str = "resource.k8s.io";

/// Version of the API group that Tessera speaks. Kubernetes serves it from 1.34 on.
pub const VERSION: &str = "v1";
