//! One sample of what containers use, by the driver, the kernel and their memory accounts.

use std::{collections::BTreeSet, time::Duration};

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
    /// GPU time of containers so far.
    pub times: Vec<ContainerTime>,
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
    /// State of the process, as the kernel reports it.
    pub state: ProcessState,
    /// Whether the process has mapped the library that the agent mounts, as the kernel reports it.
    pub library: LibraryMapping,
}

/// State of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProcessState {
    /// The process runs or sleeps.
    #[default]
    Alive,
    /// A signal has stopped the process.
    Stopped,
    /// The process has ended. The driver may still list it.
    Ended,
}

/// Whether a process has mapped the library, by device and inode of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LibraryMapping {
    /// The mappings of the process could not be read.
    #[default]
    Unknown,
    /// The process has mapped the library as code.
    Mapped,
    /// The process has not mapped the library.
    NotMapped,
    /// The process has no memory, so it cannot use a GPU. Simulated processes have none.
    NoMemory,
}

/// GPU time of a container on one GPU since the agent started. All values only grow, and belong to the
/// same stretch of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerTime {
    /// Container that used the GPU or had windows on it.
    pub container: PodContainer,
    /// GPU of these values.
    pub gpu: GpuUuid,
    /// Values so far.
    pub totals: TimeTotals,
}

/// GPU time that was used and granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeTotals {
    /// Time for which the driver has reported the busy time of processes.
    pub measured: Duration,
    /// Busy time of the container's processes, by the driver's samples.
    pub busy: Duration,
    /// Time in windows that the arbiter has charged to the container.
    pub window: Duration,
    /// Number of those windows.
    pub windows: u64,
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
    /// Processes that held a context of a GPU and nothing else while the driver was asked, and wait for
    /// the result: ID in the container, and place of the GPU in the limits.
    pub context_only: BTreeSet<(u32, usize)>,
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
    /// A container uses more time of a GPU than its windows and its share allow.
    OverTime,
}

impl Escape {
    /// All kinds of escapes.
    pub const ALL: [Self; 4] = [Self::NotGranted, Self::WithoutLibrary, Self::OverMemory, Self::OverTime];

    /// Returns the name of the kind, as metrics label it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotGranted => "not-granted",
            Self::WithoutLibrary => "without-library",
            Self::OverMemory => "over-memory",
            Self::OverTime => "over-time",
        }
    }
}
