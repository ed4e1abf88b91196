//! The events that change the state.

use tessera_core::gpu_set::GpuSet;
use tessera_core::placement::static_table::StaticTable;
use tessera_core::quota::Quota;
use tessera_core::units::NodeName;
use tessera_wire::foreign::disruption::Budget;
use tessera_wire::foreign::dra::{DeviceClass, ResourceClaim, ResourceSlice};
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::foreign::pod_group::PodGroup;
use tessera_wire::foreign::resource_quota::ResourceQuota;
use tessera_wire::tessera::gang::GangOrigin;

/// A change in the cluster or in the configuration.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "events are handled one at a time and never stored")]
pub enum StateEvent {
    /// A watch event of a node.
    Node(WatchEvent<Node>),
    /// A watch event of a pod.
    Pod(WatchEvent<Pod>),
    /// A watch event of a PodDisruptionBudget.
    Budget(WatchEvent<Budget>),
    /// A watch event of a gpushare ConfigMap that lists unhealthy GPUs.
    Unhealthy(WatchEvent<UnhealthyGpus>),
    /// A watch event of a claim.
    Claim(WatchEvent<ResourceClaim>),
    /// A watch event of a device class.
    Class(WatchEvent<DeviceClass>),
    /// A watch event of a slice.
    Slice(WatchEvent<ResourceSlice>),
    /// A watch event of a PodGroup of this project.
    PodGroup(GangOrigin, WatchEvent<PodGroup>),
    /// The API server no longer serves the PodGroups of this project.
    PodGroupsWithdrawn(GangOrigin),
    /// The new limits of all namespaces.
    Quota(Quota),
    /// A watch event of a ResourceQuota.
    ResourceQuota(WatchEvent<ResourceQuota>),
    /// The new table of policy `static`.
    Table(StaticTable),
}

/// The unhealthy GPUs of one node according to its gpushare ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnhealthyGpus {
    /// The node that has the GPUs.
    pub node: NodeName,
    /// The unhealthy GPUs, by index.
    pub gpus: GpuSet,
}

/// A watch event of one kind of object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchEvent<T> {
    /// A list begins. Objects that it does not contain are gone when it ends.
    Listing,
    /// An object was added or modified.
    Set(T),
    /// An object was deleted.
    Gone(T),
    /// The list is complete.
    Listed,
}

impl<T> WatchEvent<T> {
    /// Returns whether the API server has answered. The start of a list is only an attempt.
    pub(crate) const fn proves_connection(&self) -> bool {
        !matches!(self, Self::Listing)
    }

    /// Converts the object with `convert`; returns `None` if `convert` does.
    pub(crate) fn and_then<U>(self, convert: impl FnOnce(T) -> Option<U>) -> Option<WatchEvent<U>> {
        Some(match self {
            Self::Listing => WatchEvent::Listing,
            Self::Set(object) => WatchEvent::Set(convert(object)?),
            Self::Gone(object) => WatchEvent::Gone(convert(object)?),
            Self::Listed => WatchEvent::Listed,
        })
    }
}
