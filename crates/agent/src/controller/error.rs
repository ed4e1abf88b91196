//! Errors of the controller. Texts of [`CallError`] reach the kubelet and the events of the pod.

use tessera_core::{
    gpu_set::GpuSet,
    placement::PlacementError,
    units::{Count, GpuIndex, NodeName, PodUid},
};
use tessera_wire::{
    foreign::{dialect::vcuda::BadCeiling, pod_spec::BadPod},
    kubelet::device_id::Resource,
    tessera::gpu_wishes::BadWish,
};

/// A failed operation of the shell.
///
/// The shell renders the error with its sources. That text names the object and the cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShellError {
    /// The GPUs cannot be discovered.
    #[error("{0}")]
    GpuDiscovery(String),
    /// The API server refused a request or did not answer.
    #[error("{0}")]
    ApiServer(String),
    /// The kubelet did not list its podresources.
    #[error("{0}")]
    PodResources(String),
    /// A file of a grant cannot be written.
    #[error("{0}")]
    GrantFile(String),
}

/// Why `libtessera.so` is not installed on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// The agent does not know its own path, so it cannot find the library beside itself.
    #[error("cannot find the directory of this program: {0}")]
    OwnPath(String),
    /// The file cannot be read.
    #[error("the library {path} cannot be read: {cause}")]
    Read {
        /// Path of the file.
        path: String,
        /// Text of the I/O error.
        cause: String,
    },
    /// The file is not an ELF file.
    #[error("{path} is not a shared library")]
    NotALibrary {
        /// Path of the file.
        path: String,
    },
    /// The library cannot be copied to the grants directory.
    #[error("the library cannot be put into {directory}: {cause}")]
    Install {
        /// Target directory.
        directory: String,
        /// Text of the I/O error.
        cause: String,
    },
}

/// Why a share of a GPU is not served on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotEnforceable {
    /// Nothing could enforce the share.
    #[error(
        "this node cannot hold a container to its share of a GPU: {0}; \
         ask for whole GPUs, or have its administrator install the library"
    )]
    NoLibrary(LibraryError),
    /// The agent runs with `--share-mode=false`.
    #[error("share mode is not enabled on this node (--share-mode=false); ask for whole GPUs")]
    SharesOff,
}

/// Why a call of the kubelet is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No GPUs have been discovered.
    #[error("this node's GPUs are not known yet")]
    GpusUnknown,
    /// The pod was deleted while the call was pending.
    #[error("pod {0} is gone")]
    PodGone(PodUid),
    /// The pod's requests cannot be parsed.
    #[error(transparent)]
    BadPod(#[from] BadPod),
    /// The ceiling of the pod's shares cannot be parsed.
    #[error(transparent)]
    BadCeiling(#[from] BadCeiling),
    /// The pod's annotations about the choice of GPUs cannot be parsed.
    #[error(transparent)]
    BadWish(#[from] BadWish),
    /// The container requests no GPU.
    #[error("container {0} asks for no GPU")]
    NoGpuRequested(String),
    /// A device ID does not belong to this node.
    #[error("this node has no {resource} {id}")]
    UnknownDevice {
        /// Resource of the device.
        resource: Resource,
        /// Device ID.
        id: String,
    },
    /// A GPU index does not belong to this node.
    #[error("this node has no GPU {0}")]
    UnknownGpu(GpuIndex),
    /// The GPUs of the container have too few free devices.
    #[error(
        "pod {pod}: container {container} must use GPU {gpus}, where the kubelet has fewer than {count} free \
         {resource}"
    )]
    TooFewDevices {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Number of devices the container requests.
        count: usize,
        /// Resource of the devices.
        resource: Resource,
        /// GPUs that the container must use.
        gpus: GpuSet,
    },
    /// No GPU of the node fits the container.
    #[error("pod {pod}, container {container}: {refusal} on node {node}")]
    DoesNotFit {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Reason from the placement.
        refusal: PlacementError,
        /// Name of the node.
        node: NodeName,
    },
    /// The kubelet chose a GPU that cannot be granted.
    #[error("pod {pod}, container {container}: GPU {gpu} is {problem}")]
    Unhealthy {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Index of the GPU.
        gpu: GpuIndex,
        /// Why the GPU cannot be granted.
        problem: &'static str,
    },
    /// The kubelet chose a GPU that lacks room for the container.
    #[error(
        "pod {pod}, container {container}: the kubelet chose GPU {gpu}, of which other pods hold too much"
    )]
    GpuIsFull {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Index of the GPU.
        gpu: GpuIndex,
    },
    /// The kubelet chose a GPU that the pod's annotations exclude.
    #[error(
        "pod {pod}, container {container}: the kubelet chose GPU {gpu}, which the pod's annotations exclude"
    )]
    NotSelected {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Index of the GPU.
        gpu: GpuIndex,
    },
    /// The kubelet chose devices that do not form what the container requests.
    #[error(
        "pod {pod}, container {container}: the kubelet chose {resource} of GPU {gpus}, {mismatch}; \
         request the same in init containers and in the containers after them, or no GPUs in init containers"
    )]
    WrongDevices {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the container.
        container: String,
        /// Resource of the devices.
        resource: Resource,
        /// GPUs of the devices.
        gpus: GpuSet,
        /// What is wrong with the devices.
        mismatch: DeviceMismatch,
    },
    /// The container's share cannot be enforced.
    #[error("pod {pod}: {reason}")]
    NotEnforceable {
        /// Namespace and name of the pod.
        pod: String,
        /// Missing library.
        reason: NotEnforceable,
    },
    /// A GPU has no UUID of the usual form, so the library cannot identify it.
    #[error("GPU {0} has no valid UUID, so a container cannot be held to a share of it")]
    NoUuid(GpuIndex),
    /// More than one pod holds the devices of a starting container.
    #[error("several pods seem to hold these {0}")]
    SeveralHolders(Resource),
    /// The pod that is being admitted cannot be identified.
    #[error("cannot tell which pod asks for {resource}: {cause}")]
    UnknownPod {
        /// Resource of the call.
        resource: Resource,
        /// Missing information.
        cause: Undecided,
    },
    /// The container that is about to start cannot be identified. The kubelet tries again.
    #[error("cannot tell yet which container holds these {resource}: {cause}")]
    UnknownContainer {
        /// Resource of the call.
        resource: Resource,
        /// Missing information.
        cause: Undecided,
    },
    /// Other containers still use memory that they had borrowed. The kubelet tries again.
    #[error("waits until pod {pod} has returned memory of GPU {gpu} that it had borrowed")]
    MemoryBorrowed {
        /// Index of the GPU.
        gpu: GpuIndex,
        /// Namespace and name of the pod that has borrowed most.
        pod: String,
    },
    /// The limits of the container cannot be written.
    #[error("cannot write the limits of the container: {0}")]
    Limits(ShellError),
}

/// How the devices that the kubelet chose differ from what the container needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceMismatch {
    /// Another resource of the container is on other GPUs.
    #[error("but the container's other resources are on GPU {0}")]
    OtherGpus(GpuSet),
    /// The devices are on more GPUs than requested.
    #[error("which are on more than {}", Count(*.0, "GPU"))]
    TooManyGpus(usize),
    /// The devices are not evenly distributed over the requested number of GPUs.
    #[error("which do not make {}", Count(*.0, "GPU"))]
    WrongCount(usize),
    /// The container's memory is on GPUs without any of the devices.
    #[error("but the container's memory is on GPU {0}")]
    MemoryElsewhere(GpuSet),
}

/// Information that was missing when a call of the kubelet timed out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Undecided {
    /// The kubelet's last list failed.
    #[error("{0}")]
    NoList(ShellError),
    /// The watch has not reported the node's pods.
    #[error("the API server has not sent the pods of this node yet")]
    NoPods,
    /// None or several of the listed pods match the call.
    #[error("no single pod matches what the kubelet lists")]
    NoMatch,
}

/// What the agent waits for before it can serve pods.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// GPU discovery failed.
    #[error("no GPUs: {0}")]
    NoGpus(ShellError),
    /// GPU discovery has not finished.
    #[error("looking for GPUs")]
    GpusPending,
    /// The cluster has no node of the configured name.
    #[error("the cluster has no node named {0}")]
    NoNode(NodeName),
    /// The watch has not reported the node's pods.
    #[error("the API server has not sent the pods of this node yet")]
    PodsPending,
    /// The kubelet has not listed its podresources.
    #[error("the kubelet has not listed its pod resources yet")]
    ListPending,
    /// The kubelet has not opened the device stream of a resource, so it rejects pods that request
    /// the resource.
    #[error("the kubelet has not asked for the devices of {0} yet")]
    StreamPending(String),
}
