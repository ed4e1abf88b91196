//! What can happen to an agent.

use std::{collections::BTreeSet, time::Duration};

use tessera_core::units::PodUid;
use tessera_node::{
    device_plugin::PreferenceRequest,
    gpus::{DiscoveredGpus, Incident},
    pod_resources::PodDevices,
};
use tessera_wire::{
    foreign::objects::{self, Pod},
    kubelet::device_id::Resource,
};

#[cfg(doc)]
use super::Action;
use super::{ContainerLimits, UsageSample};

/// The time of an event: since some fixed moment, and by the calendar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventTime {
    /// Only ever grows.
    pub elapsed: Duration,
    /// Nanoseconds since 1970.
    pub unix_nanos: u128,
}

/// Names a question of the kubelet until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The GPUs were looked for: found, or the reason why not.
    Gpus(Result<DiscoveredGpus, String>),
    /// Something happened to a GPU.
    Incident(Incident),
    /// A kubelet has opened the device stream of a resource: it is there, perhaps anew.
    StreamOpened(Resource),
    /// The plugin of a resource cannot make its socket, and why; it tries again.
    PluginSocketFailed(Resource, String),
    /// All pods of this node, as the API server's watch tells them when it begins, or begins anew.
    Pods(Vec<Pod>),
    /// All pods of this node, read in between: answers [`Action::ReadPods`]. What the watch has told meanwhile may be newer.
    PodsRead(Result<Vec<Pod>, String>),
    /// A pod of this node is new or has changed.
    PodApplied(Box<Pod>),
    /// A pod of this node is gone.
    PodDeleted(PodUid),
    /// The node's object, as it is now.
    Node(Box<objects::Node>),
    /// The API server has no object of the node: not yet, or not any more.
    NodeMissing,
    /// What the kubelet's podresources said, or why it said nothing: answers [`Action::List`].
    PodResourcesListed(Result<Vec<PodDevices>, String>),
    /// The kubelet asks which devices to take.
    Prefer(CallId, Resource, PreferenceRequest),
    /// The kubelet gives a container these devices.
    Allocate(CallId, Resource, BTreeSet<String>),
    /// The kubelet is about to start a container that holds these devices.
    PreStart(CallId, Resource, BTreeSet<String>),
    /// What was found on disk when the agent started: pods with a grant directory, and the limits in them.
    GrantsOnDisk(BTreeSet<PodUid>, Vec<ContainerLimits>),
    /// How making the grants for a start went: answers [`Action::CreateGrants`].
    GrantsCreated(CallId, Result<(), String>),
    /// How changing limits went: answers [`Action::UpdateGrant`].
    GrantUpdated(Box<ContainerLimits>, Result<(), String>),
    /// What containers really use.
    UsageSampled(Box<UsageSample>),
    /// How [`Action::PatchPod`] went.
    PodPatched(PodUid, Result<(), WriteError>),
    /// How [`Action::PatchNode`] went.
    NodePatched(Result<(), String>),
    /// How [`Action::SetUnhealthy`] went.
    UnhealthySet(Result<(), String>),
    /// Time has passed.
    Tick,
}

/// A write to the API server that did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// The object is gone or is another one by now: no point in trying again.
    Gone,
    /// It may work later.
    Later(String),
}
