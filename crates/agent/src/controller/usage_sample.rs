//! One sample of what containers use, by the driver and by their memory accounts.

use std::collections::BTreeSet;

use tessera_core::{gpu::GpuUuid, units::PodUid};

/// UID of a pod and name of one of its containers.
pub type PodContainer = (PodUid, String);

/// One sample of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSample {
    /// Start of the sample in nanoseconds, on the clock that agent and library share.
    pub at: u64,
    /// GPUs whose processes the driver reported.
    pub sampled_gpus: BTreeSet<GpuUuid>,
    /// Processes of containers, as the driver reports them.
    pub processes: Vec<GpuProcess>,
    /// Memory accounts of containers with shares.
    pub accounts: Vec<AccountSample>,
}

/// A process of a container on a GPU, as the driver reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// GPU that the process uses.
    pub gpu: GpuUuid,
    /// Process ID on the node.
    pub pid: u32,
    /// Start time in clock ticks. Together with the process ID it identifies the process for good.
    pub started: u64,
    /// Process ID in the container.
    pub own_pid: Option<u32>,
    /// Container of the process.
    pub container: PodContainer,
    /// GPU memory in bytes, if the driver reports it.
    pub bytes: Option<u64>,
}

/// Content of a container's memory account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountSample {
    /// Container of the account.
    pub container: PodContainer,
    /// Registered processes, by their IDs in the container.
    pub processes: BTreeSet<u32>,
    /// Processes that were registered and have ended. The driver may still report their memory.
    pub ended: BTreeSet<u32>,
    /// Bytes that living processes hold of each GPU, in the order of the limits.
    ///
    /// `None` if the amount changed during the sample, so it cannot be compared with the driver's.
    pub held: Vec<Option<u64>>,
}

/// Use of something that was not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Escape {
    /// A process uses a GPU that its container was not granted.
    NotGranted,
    /// A process uses a GPU without the library.
    WithoutLibrary,
    /// A container uses more memory than it was granted.
    OverMemory,
}

impl Escape {
    /// All kinds of escapes.
    pub const ALL: [Self; 3] = [Self::NotGranted, Self::WithoutLibrary, Self::OverMemory];

    /// Returns the name of the kind, as metrics label it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotGranted => "not-granted",
            Self::WithoutLibrary => "without-library",
            Self::OverMemory => "over-memory",
        }
    }
}
