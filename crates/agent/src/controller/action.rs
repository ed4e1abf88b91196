//! What an agent can want done.

use std::collections::BTreeMap;

use tessera_core::units::PodUid;
use tessera_node::device_plugin::{Allocation, PluginDevice};
use tessera_wire::kubelet::device_id::Resource;

use super::{CallId, ContainerLimits, NodePatch};

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Tell the kubelet the devices of a resource.
    PublishDevices(Resource, Vec<PluginDevice>),
    /// Ask the kubelet's podresources once.
    ListPodResources,
    /// Read the pods of this node afresh, then report.
    ReadPods,
    /// CallAnswer a question of the kubelet.
    Answer(CallId, CallAnswer),
    /// Make the grants of containers that are about to start, with nothing used yet; then report.
    CreateGrants(CallId, Vec<ContainerLimits>),
    /// Put other limits in force for a container that runs; then report.
    UpdateGrant(Box<ContainerLimits>),
    /// Tell a container how much of a GPU it uses beyond what its processes know of.
    SetUncharged {
        /// The pod's UID.
        pod: PodUid,
        /// The container.
        container: String,
        /// The GPU's place in the container's limits.
        gpu: usize,
        /// How much.
        bytes: u64,
        /// As of when, on the clock that agent and library share.
        at: u64,
    },
    /// End a process, if it still is the one that started then.
    Kill {
        /// Its number.
        pid: u32,
        /// When it started, in ticks.
        started: u64,
    },
    /// Remove the grant directory of a pod that has ended.
    RemoveGrants(PodUid),
    /// Set annotations of a pod, if it still is the one with this UID.
    PatchPod {
        /// Its UID.
        uid: PodUid,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// The annotations.
        annotations: BTreeMap<String, String>,
    },
    /// Set annotations and labels of the node, and resources in its status.
    PatchNode(NodePatch),
    /// Tell gpushare which GPUs are broken.
    SetUnhealthy(Vec<u8>),
    /// Worth a line in the log.
    Warn(String),
    /// Worth telling the owner of a pod: an event of Kubernetes.
    RecordPodEvent {
        /// The pod's UID.
        uid: PodUid,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// One word, for machines.
        reason: &'static str,
        /// What happened, for people.
        message: String,
    },
}

/// What the kubelet is answered. An error's text reaches the pod's owner.
#[derive(Clone, Debug, PartialEq)]
pub enum CallAnswer {
    /// Take these devices.
    Preferred(Result<Vec<String>, String>),
    /// The container gets this.
    Allocated(Result<Box<Allocation>, String>),
    /// The container may start.
    Started(Result<(), String>),
}
