//! State of the node at one moment, from which all pages are written.

mod assemble;

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    gpu::Gpu,
    grant::Hold,
    units::{MiB, Percent},
};
use tessera_node::gpus::{GpuMemory, MigInstance, Sensors};
use tessera_serve::CertificateExpiry;
use tessera_wire::foreign::dialect::Dialect;

use super::{ContainerKey, MemorySplit, ShareReport, Tally, TimeSplit};
use crate::controller::Escape;

/// State of a node at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Name of the node.
    pub node: String,
    /// Address of the node, or empty if unknown.
    pub host_ip: String,
    /// Version of the NVIDIA driver, if there is one.
    pub driver: Option<String>,
    /// GPUs in the order of their index.
    pub gpus: Vec<GpuSnapshot>,
    /// Containers with a grant or a process on a GPU, sorted by namespace, pod and name.
    pub containers: Vec<ContainerSnapshot>,
    /// Claims that are prepared, sorted by namespace and name.
    pub claims: Vec<ClaimSnapshot>,
    /// Processes on GPUs, sorted by GPU and PID.
    pub processes: Vec<ProcessSnapshot>,
    /// Availability of the data sources.
    pub sources: Sources,
    /// Ends of the certificates with which the pages are served.
    pub certificates: Vec<CertificateExpiry>,
}

/// Data sources that have answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// The GPUs were discovered.
    pub gpus: bool,
    /// The kubelet has listed its pod resources.
    pub kubelet: bool,
    /// The API server has listed the pods.
    pub pods: bool,
    /// All processes of the host are visible.
    pub processes: bool,
}

/// State of one GPU.
#[derive(Clone, Debug)]
pub struct GpuSnapshot {
    /// Identity, model and memory of the GPU.
    pub info: Gpu,
    /// PCI address.
    pub pci: String,
    /// What the grants leave, or `None` while the kubelet or the API server has not listed the pods.
    pub room: Option<Room>,
    /// Last sample, or `None` if it failed or is too old.
    pub reading: Option<GpuReading>,
    /// Usage so far.
    pub total: Tally,
    /// Usage of the host's own processes, contained in `total`.
    pub host: Tally,
    /// Usage of unidentified processes, contained in `total`.
    pub unknown: Tally,
    /// Energy in joules of intervals without any kernel.
    pub idle_energy: f64,
    /// True if busy time is measured.
    pub measured: bool,
    /// True if energy is measured.
    pub has_energy: bool,
    /// Busy seconds of each MIG instance, by UUID.
    pub instances: BTreeMap<String, f64>,
    /// Number of samples.
    pub samples: u64,
    /// Number of failed samples.
    pub failures: u64,
    /// Time of the last successful sample in seconds since 1970.
    pub last_success: Option<f64>,
    /// XID errors by number: count, and time of the last one in seconds since 1970.
    pub xids: BTreeMap<u64, (u64, f64)>,
}

/// What the grants on a GPU leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Compute without a grant.
    pub compute: Percent,
    /// Memory without a grant.
    pub memory: MiB,
    /// True if grants exceed the capacity of the GPU.
    pub overbooked: bool,
}

/// Values of one sample of a GPU.
#[derive(Clone, Debug, Default)]
pub struct GpuReading {
    /// Duration of the sample in seconds.
    pub duration_seconds: f64,
    /// Memory of the GPU.
    pub memory: Option<GpuMemory>,
    /// Division of the used memory, or `None` if the processes are not known.
    pub used: Option<MemorySplit>,
    /// Division of the busy time of the last interval.
    pub busy: Option<TimeSplit>,
    /// Energy in millijoules since the driver was loaded.
    pub energy: Option<u64>,
    /// Other measurements.
    pub sensors: Sensors,
    /// MIG instances of the GPU.
    pub instances: Vec<MigInstance>,
    /// PIDs of the processes on the GPU, or `None` if they are not known.
    pub pids: Option<BTreeSet<u32>>,
}

/// State of one container.
#[derive(Clone, Debug)]
pub struct ContainerSnapshot {
    /// Pod and name of the container.
    pub key: ContainerKey,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Value of the annotation `clusterName`, which gpu-manager reports.
    pub cluster: String,
    /// Person who submitted the pod, which gpu-manager reports.
    pub user: String,
    /// Dialect of the container's request.
    pub dialect: Option<Dialect>,
    /// GPUs of the container in the order of their index.
    pub shares: Vec<ShareSnapshot>,
    /// Detected escapes from the grant, with their number.
    pub escapes: Vec<(Escape, u64)>,
}

/// State of one claim on one of its GPUs.
#[derive(Clone, Debug)]
pub struct ClaimSnapshot {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// Position of the GPU in [`Snapshot::gpus`].
    pub gpu: usize,
    /// What the claim holds of the GPU.
    pub hold: Hold,
    /// Containers that use the claim on this GPU: name of the pod, and name of the container.
    pub users: Vec<(String, String)>,
    /// Totals that the library and the arbiter report for all these containers together.
    pub report: Option<ShareReport>,
}

/// Grant and usage of one container on one GPU.
#[derive(Clone, Debug, Default)]
pub struct ShareSnapshot {
    /// Position of the GPU in [`Snapshot::gpus`].
    pub gpu: usize,
    /// Grant, or `None` if the container was not granted this GPU.
    pub hold: Option<Hold>,
    /// Bytes that the container may use now, including what it may borrow, if that is limited.
    pub memory_limit: Option<u64>,
    /// Reason why the memory that the container uses is unknown, or `None` if it is known.
    pub unknown_memory: Option<UnknownUse>,
    /// Reason why the busy time of the container is unknown, or `None` if it is known.
    pub unknown_time: Option<UnknownUse>,
    /// Bytes used by the container's processes, if known.
    pub used: Option<u64>,
    /// Fraction of the last interval in which the container's kernels ran, if known.
    pub busy: Option<f64>,
    /// Usage so far, if known.
    pub total: Option<Tally>,
    /// PIDs of the container's processes, or `None` if they are not known.
    pub pids: Option<Vec<u32>>,
    /// Number of these processes that use the GPU beyond what the container was granted.
    pub escaped_processes: usize,
    /// Totals that the library and the arbiter report.
    pub report: Option<ShareReport>,
    /// Fraction of the last interval in which the container was throttled.
    pub throttled: Option<f64>,
}

/// Reason why it is unknown what a container uses of a GPU. Unknown use is not reported as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnknownUse {
    /// The GPU was not sampled lately.
    GpuNotSampled,
    /// The driver does not list the processes on the GPU.
    ProcessesNotListed,
    /// The agent does not see the processes of the host, because it runs without `hostPID`.
    ProcessesHidden,
    /// The API server has not listed the pods, so that no process can be attributed to one.
    PodsUnknown,
    /// The driver does not report the memory of the GPU or of one of the container's processes.
    MemoryNotReported,
    /// The driver does not report the busy time of processes.
    TimeNotReported,
    /// No interval that began after the container was known has been measured yet.
    NotMeasuredYet,
}

impl UnknownUse {
    /// Returns the reason as the value of a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GpuNotSampled => "gpu-not-sampled",
            Self::ProcessesNotListed => "processes-not-listed",
            Self::ProcessesHidden => "processes-hidden",
            Self::PodsUnknown => "pods-unknown",
            Self::MemoryNotReported => "memory-not-reported",
            Self::TimeNotReported => "time-not-reported",
            Self::NotMeasuredYet => "not-measured-yet",
        }
    }
}

/// State of one process on a GPU.
#[derive(Clone, Debug)]
pub struct ProcessSnapshot {
    /// Position of the GPU in [`Snapshot::gpus`].
    pub gpu: usize,
    /// PID on the host.
    pub pid: u32,
    /// Command name, which the process can choose freely.
    pub command: String,
    /// Owner of the process.
    pub owner: ProcessOwner,
    /// Bytes used, if the driver reports them.
    pub bytes: Option<u64>,
    /// Fraction of the last interval in which the process's kernels ran.
    pub busy: Option<f64>,
    /// GPU instance ID on a GPU in MIG mode.
    pub instance: Option<u32>,
}

/// Owner of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessOwner {
    /// Container at this position in [`Snapshot::containers`].
    Container(usize),
    /// Container that belongs to no pod.
    OutsideContainer,
    /// Process of the host.
    Host,
    /// Owner that could not be determined.
    Unknown,
}

impl Snapshot {
    /// Returns the containers that run on MIG instances, with the GPU and the instance.
    #[must_use]
    pub fn on_instances(&self) -> Vec<(&ContainerSnapshot, &GpuSnapshot, &MigInstance)> {
        let places = |process: &ProcessSnapshot| match (process.owner, process.instance) {
            (ProcessOwner::Container(container), Some(instance)) => Some((container, process.gpu, instance)),
            _ => None,
        };
        let all: BTreeSet<(usize, usize, u32)> = self.processes.iter().filter_map(places).collect();
        let found = |(container, gpu, number): (usize, usize, u32)| {
            let gpu = self.gpus.get(gpu)?;
            let instances = &gpu.reading.as_ref()?.instances;
            let instance = instances.iter().find(|instance| instance.gpu_instance == Some(number))?;
            Some((self.containers.get(container)?, gpu, instance))
        };
        all.into_iter().filter_map(found).collect()
    }
}

impl GpuReading {
    /// Returns the bytes in use: the sum of the parts if they are known, else the GPU's own value.
    #[must_use]
    pub fn used_bytes(&self) -> Option<u64> {
        let parts = self.used.as_ref().map(|split| split.whole);
        parts.or_else(|| self.memory.map(|memory| memory.used))
    }
}

/// Returns what a grant allows on a GPU: percent of its compute, and bytes.
#[must_use]
pub(super) fn granted(hold: Hold, gpu: &GpuSnapshot) -> (Percent, u64) {
    match hold {
        Hold::Whole => (Percent::WHOLE, gpu.info.memory.0 << 20),
        Hold::Share { compute_percent, memory } => (compute_percent, memory.0 << 20),
    }
}
