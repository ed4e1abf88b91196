//! Serving devices to the kubelet.
//!
//! Implement [`DevicePlugin`] and run it with [`serve`], which opens the socket, gets it registered, and does so again
//! whenever the kubelet restarts.

mod connection;
mod directory;
mod endpoint;
mod registration;
mod service;

use std::{fmt, future::Future};

use tessera_wire::kubelet::device_plugin as proto;
use tokio::sync::watch;

pub use self::registration::{RegistrationMode, ServeError, ServedPlugin, serve};

/// What a container is given besides its device IDs: environment, mounts, device nodes, CDI names.
pub type Allocation = proto::ContainerAllocateResponse;

/// The devices of one resource, and what happens when containers take them.
///
/// The kubelet admits pods one at a time: `prefer` and `allocate` have no deadline, but while they run no other pod of the
/// node is admitted. An error from either is final for the pod, and its text is shown to the user. `pre_start` delays only
/// its own container, is given 30 seconds, and is tried again after an error.
pub trait DevicePlugin: Send + Sync + 'static {
    /// All devices, now and after every change.
    fn devices(&self) -> watch::Receiver<Vec<PluginDevice>>;

    /// Which devices to take. An answer that is short or names unavailable devices is silently filled up by the kubelet
    /// with any others.
    fn prefer(
        &self,
        wish: PreferenceRequest,
    ) -> impl Future<Output = Result<Vec<String>, PluginRefusal>> + Send;

    /// A container is about to get these devices.
    fn allocate(&self, ids: Vec<String>) -> impl Future<Output = Result<Allocation, PluginRefusal>> + Send;

    /// A container that holds these devices is about to start, for the first time or again.
    fn pre_start(&self, ids: Vec<String>) -> impl Future<Output = Result<(), PluginRefusal>> + Send;
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginDevice {
    /// Unique in its resource, at most 63 characters; repeated in the status of the pod that holds it.
    pub id: String,
    /// Whether new containers may have it.
    pub healthy: bool,
    /// The NUMA node it hangs on, where it matters.
    pub numa_node: Option<i64>,
}

/// What the kubelet asks a preference for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreferenceRequest {
    /// To choose from.
    pub available: Vec<String>,
    /// Of these, already decided.
    pub required: Vec<String>,
    /// How many to name in all.
    pub count: usize,
}

/// Why a plugin said no, in words for the pod's owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PluginRefusal(pub String);

impl fmt::Display for PluginRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
