//! Serves devices to the kubelet.
//!
//! Implement [`DevicePlugin`] and run it with [`serve`], which opens the socket, registers the
//! plugin, and does so again after each restart of the kubelet.

mod connection;
pub(crate) mod directory;
pub(crate) mod endpoint;
mod registration;
mod service;

use std::{fmt, future::Future};

use tessera_wire::kubelet::device_plugin as proto;
use tokio::sync::watch;

pub use self::registration::{RegistrationMode, ServeError, ServedPlugin, serve};

/// Answer to the kubelet's Allocate call for one container: environment, mounts, device nodes and
/// CDI names.
pub type Allocation = proto::ContainerAllocateResponse;

/// The devices of one resource, and the answers to the kubelet's calls.
///
/// The kubelet admits pods one at a time. `prefer` and `allocate` have no deadline, but no other
/// pod of the node is admitted while they run. An error from either is final for the pod, and its
/// text is shown to the user. `pre_start` delays only its own container, has a deadline of 30
/// seconds, and is retried after an error.
pub trait DevicePlugin: Send + Sync + 'static {
    /// Returns all devices, with updates after every change.
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>>;

    /// Answers GetPreferredAllocation: returns the devices to choose. If the answer has too few
    /// devices or unavailable ones, the kubelet silently adds arbitrary others.
    fn prefer(
        &self,
        wish: PreferenceRequest,
    ) -> impl Future<Output = Result<Vec<String>, PluginRefusal>> + Send;

    /// Answers Allocate: returns how these devices are made available to a container.
    fn allocate(&self, ids: Vec<String>) -> impl Future<Output = Result<Allocation, PluginRefusal>> + Send;

    /// Answers PreStartContainer, before each start of a container that holds these devices.
    fn pre_start(&self, ids: Vec<String>) -> impl Future<Output = Result<(), PluginRefusal>> + Send;
}

/// One device of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginDevice {
    /// ID that is unique in its resource, with at most 63 characters. The status of the pod that
    /// holds it repeats it.
    pub id: String,
    /// True if the device may be allocated.
    pub healthy: bool,
    /// NUMA node of the device, if it matters.
    pub numa_node: Option<i64>,
}

/// A request of the kubelet for preferred devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreferenceRequest {
    /// Devices that are available.
    pub available: Vec<String>,
    /// Devices of `available` that must be part of the answer.
    pub required: Vec<String>,
    /// Total number of devices to return.
    pub count: usize,
}

/// Reason why a plugin rejected a call, shown to the owner of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginRefusal(pub String);

impl fmt::Display for PluginRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
