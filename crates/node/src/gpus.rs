//! The GPUs of this host: discovery, links, processes, samples and errors.
//!
//! The trait [`Gpus`] has two implementations: [`Nvml`] uses NVIDIA's driver, and [`Simulated`]
//! reads a description from a file and needs no GPU.

mod instance;
mod nvml;
mod sample;
mod simulated;

use std::{ops::ControlFlow, path::PathBuf, str::FromStr};

use tessera_core::{
    gpu::{Gpu, GpuUuid},
    topology::Topology,
};
use tessera_wire::{foreign::smi_matrix::BadMatrix, tessera::inventory::BadInventory};

pub use self::{
    instance::GpuInstance,
    nvml::Nvml,
    sample::{
        BusyTime, GpuMemory, GpuSample, MigInstance, ProcessMemory, ProfilingCounters, RemappedRows,
        SampleInterval, SampleProgress, Sensors,
    },
    simulated::{Simulated, describe},
};

/// Access to the GPUs of a host. All calls may block, so run them on a separate thread.
pub trait Gpus: Send + Sync + 'static {
    /// Returns all GPUs in their current state.
    fn discover(&self) -> Result<DiscoveredGpus, GpusError>;

    /// Samples a GPU: its processes, its sensors, and its busy time in `interval`.
    fn sample(&self, gpu: &GpuUuid, interval: SampleInterval) -> Result<GpuSample, GpusError>;

    /// Returns only the processes on a GPU, which is faster than a full sample.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError>;

    /// Returns the power draw of a GPU, if the driver reports it.
    fn power(&self, _gpu: &GpuUuid) -> Option<GpuPower> {
        None
    }

    /// Calls `report` for each incident until it returns `Break`. Without incidents it calls
    /// `report(None)` every few seconds, so that the caller can stop the watch.
    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError>;

    /// Returns whether these GPUs have device nodes `/dev/nvidia*`.
    fn have_device_nodes(&self) -> bool;
}

/// The GPUs of a host, as discovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveredGpus {
    /// GPUs by index, without gaps. A GPU that no longer answers is unhealthy and may have a
    /// placeholder UUID.
    pub gpus: Vec<Gpu>,
    /// Links between the GPUs.
    pub topology: Topology,
    /// MIG instances of all GPUs, by GPU.
    pub instances: Vec<GpuInstance>,
    /// PCI address of each GPU, or empty if unknown.
    pub pci: Vec<String>,
    /// Version of the driver, if there is one.
    pub driver: Option<String>,
}

/// Power draw of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuPower {
    /// Average of the last second in watts.
    pub average: f64,
    /// Enforced power limit in watts.
    pub limit: f64,
}

/// An error or state change of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    /// UUID of the GPU, or `None` for all GPUs if the driver does not say.
    pub gpu: Option<GpuUuid>,
    /// Kind of the incident.
    pub kind: IncidentKind,
}

/// Kind of an incident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncidentKind {
    /// XID error of this number.
    Xid(u64),
    /// Uncorrectable memory error.
    DoubleBitEcc,
    /// The GPU stopped answering.
    Lost,
    /// The GPU answers again.
    Back,
}

/// Reason why a call to the GPUs failed.
#[derive(Debug, thiserror::Error)]
pub enum GpusError {
    /// The driver is missing or does not work.
    #[error(
        "no NVIDIA driver answers ({0}); install the driver, and make libnvidia-ml.so.1 visible to this process"
    )]
    NoDriver(String),
    /// No GPU has this UUID.
    #[error("GPU {0} does not exist")]
    UnknownGpu(GpuUuid),
    /// The driver lists no GPU.
    #[error("the NVIDIA driver lists no GPU")]
    NoGpu,
    /// A call to the driver failed.
    #[error("the NVIDIA driver cannot read {what}: {reason}")]
    Driver {
        /// Subject of the call.
        what: &'static str,
        /// Error of the driver.
        reason: String,
    },
    /// The description of simulated GPUs cannot be read.
    #[error("cannot read the description of simulated GPUs {}: {reason}", path.display())]
    Description {
        /// Path of the description.
        path: PathBuf,
        /// Error of the file system or of the parser.
        reason: BadDescription,
    },
}

/// Reason why a description of simulated GPUs cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadDescription {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] std::io::Error),
    /// The JSON of the file does not describe GPUs.
    #[error(transparent)]
    Inventory(#[from] BadInventory),
    /// The file is neither JSON nor a matrix of links.
    #[error(transparent)]
    Matrix(#[from] BadMatrix),
}

/// Source of the GPUs, written as `nvml` or `simulated:FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuSource {
    /// NVIDIA's driver.
    Nvml,
    /// Description in a file.
    Simulated(PathBuf),
}

/// A text that is not a [`GpuSource`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown source of GPUs {0:?}; write nvml or simulated:FILE")]
pub struct UnknownGpuSource(String);

impl GpuSource {
    /// Opens the source. `libraries` is a directory in which NVML is searched if the loader does not find
    /// it.
    #[must_use]
    pub fn open(&self, libraries: Option<PathBuf>) -> Box<dyn Gpus> {
        match self {
            Self::Nvml => Box::new(Nvml::searched_in(libraries)),
            Self::Simulated(file) => Box::new(Simulated::new(file.clone())),
        }
    }
}

impl FromStr for GpuSource {
    type Err = UnknownGpuSource;

    fn from_str(text: &str) -> Result<Self, UnknownGpuSource> {
        match text.split_once(':') {
            None if text == "nvml" => Ok(Self::Nvml),
            Some(("simulated", file)) if !file.is_empty() => Ok(Self::Simulated(file.into())),
            _ => Err(UnknownGpuSource(text.to_owned())),
        }
    }
}
