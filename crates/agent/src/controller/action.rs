//! Actions that the controller requests from the shell.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::units::PodUid;
use tessera_node::{
    device_plugin::{Allocation, PluginDevice},
    dra::{ClaimReference, DeviceHealth, PreparedDevice},
};
use tessera_wire::{foreign::dra::SliceSpec, kubelet::device_id::Resource};

use super::{
    CallError, CallId, ClaimError, ClaimFiles, ContainerLimits, DutyCycle, InstanceOffer, NodePatch, Warning,
};

/// Work for the shell. The shell carries out the actions of one event in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// End the agent.
    Stop,
    /// Send the devices of a resource to the kubelet.
    PublishDevices(Resource, Vec<PluginDevice>),
    /// Send the devices of all resources of MIG instances to the kubelet.
    PublishInstances(Vec<InstanceOffer>),
    /// List the kubelet's podresources once.
    ListPodResources,
    /// Read which devices of these resources the kubelet offers, from whatever plugin.
    ReadOfferedDevices(BTreeSet<Resource>),
    /// Read the pods of this node from the API server.
    ReadPods,
    /// Answer a call of the kubelet.
    Answer(CallId, CallAnswer),
    /// Create the grants of containers that are about to start, with empty memory accounts.
    CreateGrants(CallId, Vec<ContainerLimits>),
    /// Replace the limits of a running container.
    UpdateGrant(Box<ContainerLimits>),
    /// Publish to a container how much memory the driver counts beyond the container's account.
    SetUncharged {
        /// UID of the pod.
        pod: PodUid,
        /// Name of the container.
        container: String,
        /// Position of the GPU in the container's limits.
        gpu: usize,
        /// Memory that no process of the container has charged.
        bytes: u64,
        /// Time of the sample in nanoseconds, on the clock that agent and library share.
        at: u64,
    },
    /// Kill a process, unless another process has got its number since.
    Kill {
        /// Process ID on the node.
        pid: u32,
        /// Start time of the process in clock ticks.
        started: u64,
    },
    /// Let a process run only for a part of the time from now on, until it ends. Replaces an earlier
    /// cycle of the same process.
    Throttle {
        /// Process ID on the node.
        pid: u32,
        /// Start time of the process in clock ticks.
        started: u64,
        /// Lengths of the two phases.
        cycle: DutyCycle,
    },
    /// Let a process run that an earlier agent has stopped.
    Resume {
        /// Process ID on the node.
        pid: u32,
        /// Start time of the process in clock ticks.
        started: u64,
    },
    /// Remove the grant directory of a pod that has ended.
    RemoveGrants(PodUid),
    /// Set annotations of a pod, if the pod of that name still has this UID.
    PatchPod {
        /// UID of the pod.
        uid: PodUid,
        /// Namespace of the pod.
        namespace: String,
        /// Name of the pod.
        name: String,
        /// Annotations to set.
        annotations: BTreeMap<String, String>,
    },
    /// Set annotations, labels and status resources of the node.
    PatchNode(NodePatch),
    /// Publish the indexes of the unhealthy GPUs, in the ConfigMap that gpushare reads.
    SetUnhealthy(Vec<u8>),
    /// Write the ResourceSlice of this node, which its node's object owns.
    WriteSlice {
        /// UID of the node's object.
        node_uid: String,
        /// The slice.
        spec: Box<SliceSpec>,
    },
    /// Send the health of all devices to the kubelet. The driver of claims is served from the first time on.
    PublishHealth(Vec<DeviceHealth>),
    /// Read a claim from the API server.
    ReadClaim(ClaimReference),
    /// Write the record, the grants and the CDI devices of a claim. Existing accounts stay.
    StoreClaim(Box<ClaimFiles>),
    /// Remove all files of the claim with this UID.
    RemoveClaim(CallId, String),
    /// Log a warning.
    Warn(Warning),
    /// Record a Kubernetes event for a pod.
    RecordPodEvent {
        /// UID of the pod.
        uid: PodUid,
        /// Namespace of the pod.
        namespace: String,
        /// Name of the pod.
        name: String,
        /// Reason in one word, for programs.
        reason: &'static str,
        /// Description for people.
        message: String,
    },
}

/// Answer to a call of the kubelet. The text of an error reaches the events of the pod.
#[derive(Clone, Debug, PartialEq)]
pub enum CallAnswer {
    /// Devices the kubelet should choose.
    Preferred(Result<Vec<String>, CallError>),
    /// Environment, mounts and device nodes of the container.
    Allocated(Result<Box<Allocation>, CallError>),
    /// Permission to start the container.
    Started(Result<(), CallError>),
    /// Devices of a claim that is ready for containers.
    Prepared(Result<Vec<PreparedDevice>, ClaimError>),
    /// A claim was released.
    Unprepared(Result<(), ClaimError>),
}
