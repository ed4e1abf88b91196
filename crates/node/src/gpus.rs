//! The GPUs of this machine: what they are, what joins them, what runs on them, and what breaks.
//!
//! One port, [`Gpus`], with two ways behind it: [`Nvml`], which asks NVIDIA's driver, and [`Simulated`], which reads a
//! description from a file and so needs no GPU at all.

mod nvml;
mod sample;
mod simulated;

use std::{ops::ControlFlow, path::PathBuf, str::FromStr};

use tessera_core::{
    gpu::{Gpu, GpuUuid},
    topology::Topology,
};

pub use self::{
    nvml::Nvml,
    sample::{
        BusyTime, GpuMemory, GpuSample, MigInstance, ProcessMemory, ProfilingCounters, RemappedRows,
        SampleInterval, SampleProgress, Sensors,
    },
    simulated::{Simulated, describe},
};

/// What can be learned about the GPUs of a machine. Calls block; run them on a thread of their own.
pub trait Gpus: Send + Sync + 'static {
    /// All GPUs, as they are now.
    fn discover(&self) -> Result<DiscoveredGpus, GpusError>;

    /// One look at a GPU: what runs on it, and what it computed since the last look.
    fn sample(&self, gpu: &GpuUuid, window: SampleInterval) -> Result<GpuSample, GpusError>;

    /// The processes on a GPU and no more: a quick look.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError>;

    /// What a GPU draws, where the driver tells.
    fn power(&self, _gpu: &GpuUuid) -> Option<GpuPower> {
        None
    }

    /// Reports what happens to the GPUs until told to stop. Every few seconds without news it reports `None`, so that
    /// whoever listens can leave.
    fn watch(
        &self,
        report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, GpusError>;

    /// Whether `/dev/nvidia*` stand for these GPUs.
    fn have_device_nodes(&self) -> bool;
}

/// The GPUs of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveredGpus {
    /// By index, without gaps. A GPU that does not answer any more is unhealthy, and may have lost its name.
    pub gpus: Vec<Gpu>,
    /// What joins them.
    pub topology: Topology,
    /// The PCI address of each GPU; empty where unknown.
    pub pci: Vec<String>,
    /// The driver's version, where there is one.
    pub driver: Option<String>,
}

/// What a GPU draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuPower {
    /// Watts over the last second, on average.
    pub average: f64,
    /// Watts it may draw at most.
    pub limit: f64,
}

/// Something happened to a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    /// Which GPU; all of them where the driver does not tell.
    pub gpu: Option<GpuUuid>,
    /// What.
    pub kind: IncidentKind,
}

/// What happened to a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncidentKind {
    /// The driver reported an error of this number.
    Xid(u64),
    /// Memory was damaged beyond correction.
    DoubleBitEcc,
    /// The GPU does not answer any more.
    Lost,
    /// It answers again.
    Back,
}

/// The GPUs could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum GpusError {
    /// No driver, or one that does not work.
    #[error("no NVIDIA driver answers ({0}); is it installed and are its libraries visible here?")]
    NoDriver(String),
    /// There is no GPU of this name (any more).
    #[error("there is no GPU {0}")]
    UnknownGpu(GpuUuid),
    /// The driver has no GPU.
    #[error("the NVIDIA driver knows no GPU")]
    NoGpu,
    /// The driver failed at something.
    #[error("the NVIDIA driver cannot tell {what}: {reason}")]
    Driver {
        /// What was asked.
        what: &'static str,
        /// What it said.
        reason: String,
    },
    /// A description that cannot be read.
    #[error("cannot read the description of simulated GPUs {}: {reason}", path.display())]
    Description {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Where the GPUs come from, as users write it: `nvml` or `simulated:FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuSource {
    /// NVIDIA's driver.
    Nvml,
    /// A description.
    Simulated(PathBuf),
}

/// A text that names no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown source of GPUs {0:?}; write nvml or simulated:FILE")]
pub struct UnknownGpuSource(String);

impl GpuSource {
    /// The port behind it.
    #[must_use]
    pub fn open(&self) -> Box<dyn Gpus> {
        match self {
            Self::Nvml => Box::new(Nvml::default()),
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
