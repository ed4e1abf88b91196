//! Events that the shell reports to the controller.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tessera_core::units::PodUid;
use tessera_node::{
    device_plugin::PreferenceRequest,
    dra::ClaimReference,
    gpus::{DiscoveredGpus, Incident},
    pod_resources::PodDevices,
};
use tessera_wire::{
    foreign::{
        dra::{ResourceClaim, SliceSpec},
        objects::{self, Pod},
    },
    kubelet::device_id::Resource,
    tessera::dra::PreparedClaim,
};

#[cfg(doc)]
use super::Action;
use super::{ContainerLimits, PodContainer, ShellError, UsageSample};

/// Time of an event, on a monotonic clock and by the calendar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTime {
    /// Time since the agent started. Never decreases.
    pub elapsed: Duration,
    /// Nanoseconds since 1970.
    pub unix_nanos: u128,
}

/// Identifies a call of the kubelet until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Input of the controller.
#[derive(Clone, Debug)]
pub enum Event {
    /// Result of a discovery of the node's GPUs.
    Gpus(Result<DiscoveredGpus, ShellError>),
    /// Error or recovery of a GPU, or of all GPUs.
    Incident(Incident),
    /// A kubelet has opened the device stream of a resource. It may be a restarted kubelet.
    StreamOpened(Resource),
    /// A kubelet has opened the device stream of a resource of MIG instances.
    InstanceStreamOpened(String),
    /// The plugin of a resource cannot create its socket. The shell keeps trying.
    PluginSocketFailed(Resource, String),
    /// All pods of this node. The watch reports them when it begins and when it restarts.
    Pods(Vec<Pod>),
    /// Answer to [`Action::ReadPods`]. The watch may have reported newer pods meanwhile.
    PodsRead(Result<Vec<Pod>, ShellError>),
    /// A pod of this node is new or has changed.
    PodApplied(Box<Pod>),
    /// A pod of this node was deleted.
    PodDeleted(PodUid),
    /// Current object of the node.
    Node(Box<objects::Node>),
    /// The API server has no object of the node, either not yet or no longer.
    NodeMissing,
    /// Answer to [`Action::ListPodResources`].
    PodResourcesListed(Result<Vec<PodDevices>, ShellError>),
    /// Answer to [`Action::ReadOfferedDevices`], if the kubelet has answered.
    DevicesOffered(BTreeMap<Resource, BTreeSet<String>>),
    /// The kubelet calls `GetPreferredAllocation`.
    Prefer(CallId, Resource, PreferenceRequest),
    /// The kubelet calls `Allocate` with these devices for one container.
    Allocate(CallId, Resource, BTreeSet<String>),
    /// The kubelet calls `PreStartContainer` for a container that holds these devices.
    PreStart(CallId, Resource, BTreeSet<String>),
    /// Grant directories found when the agent started: their pods, and the limits in them.
    GrantsOnDisk(BTreeSet<PodUid>, Vec<ContainerLimits>),
    /// Result of [`Action::CreateGrants`].
    GrantsCreated(CallId, Result<(), ShellError>),
    /// Result of [`Action::UpdateGrant`].
    GrantUpdated(Box<ContainerLimits>, Result<(), ShellError>),
    /// A container has made its account file this many bytes large, and the file was cut.
    AccountFileGrew(PodContainer, u64),
    /// Sample of what containers use.
    UsageSampled(Box<UsageSample>),
    /// Result of [`Action::PatchPod`].
    PodPatched(PodUid, Result<(), WriteError>),
    /// Result of [`Action::PatchNode`].
    NodePatched(Result<(), ShellError>),
    /// Result of [`Action::SetUnhealthy`].
    UnhealthySet(Result<(), ShellError>),
    /// Records of claims that an earlier agent has prepared. Comes before the first call of the kubelet.
    ClaimsOnDisk(Vec<PreparedClaim>),
    /// The kubelet calls `NodePrepareResources` for this claim.
    PrepareClaim(CallId, ClaimReference),
    /// The kubelet calls `NodeUnprepareResources` for this claim.
    UnprepareClaim(CallId, ClaimReference),
    /// Answer to [`Action::ReadClaim`].
    ClaimRead(ClaimReference, Result<Box<ResourceClaim>, ShellError>),
    /// Result of [`Action::StoreClaim`] for the claim with this UID.
    ClaimStored(String, Result<(), ShellError>),
    /// Result of [`Action::RemoveClaim`].
    ClaimRemoved(CallId, Result<(), ShellError>),
    /// The ResourceSlice of this node, as the watch reports it.
    Slice(Option<Box<SliceSpec>>),
    /// Result of [`Action::WriteSlice`]: the slice as the API server has stored it.
    SliceWritten(Result<Box<SliceSpec>, ShellError>),
    /// The agent shall end, and first let schedulers and the kubelet know.
    StopRequested,
    /// Time has passed.
    Tick,
}

/// A failed write to the API server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The object is gone or was replaced, so a retry cannot succeed.
    #[error("the object is gone or was replaced")]
    Gone,
    /// A retry may succeed.
    #[error("{0}")]
    Later(String),
}
