//! Everything there is to tell at one moment: what the pages are written from.

mod assemble;

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::{
    gpu::Gpu,
    grant::Hold,
    units::{MiB, Percent},
};
use tessera_node::gpus::{GpuMemory, MigInstance, Sensors};
use tessera_wire::foreign::dialect::Dialect;

use super::{ContainerKey, ShareReport, Split, Tally};
use crate::controller::Escape;

/// A node at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Its name.
    pub node: String,
    /// Its address, where it is known.
    pub host_ip: String,
    /// The driver's version, where there is one.
    pub driver: Option<String>,
    /// Its GPUs by index.
    pub cards: Vec<GpuSnapshot>,
    /// Containers with a grant or a process on a GPU, by namespace, pod and name.
    pub containers: Vec<ContainerSnapshot>,
    /// Processes on GPUs, by GPU and number.
    pub processes: Vec<ProcessSnapshot>,
    /// What could be asked.
    pub sources: Sources,
}

/// Which sources answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// The GPUs were found.
    pub gpus: bool,
    /// The kubelet has told its books.
    pub kubelet: bool,
    /// The API server has told the pods.
    pub pods: bool,
    /// Processes of the whole machine can be seen.
    pub processes: bool,
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct GpuSnapshot {
    /// Which.
    pub gpu: Gpu,
    /// Its PCI address.
    pub pci: String,
    /// Compute that nobody holds.
    pub free_cores: Percent,
    /// Memory that nobody holds.
    pub free_memory: MiB,
    /// Whether it carries more than it has.
    pub overbooked: bool,
    /// The last look at it; `None` where it failed or is too long ago.
    pub look: Option<GpuReading>,
    /// What it spent so far.
    pub total: Tally,
    /// Of that, the machine itself.
    pub host: Tally,
    /// Of that, nobody known.
    pub unknown: Tally,
    /// Energy while nobody computed.
    pub idle_energy: f64,
    /// Whether its busy time is measured at all.
    pub measured: bool,
    /// Whether it tells its energy.
    pub has_energy: bool,
    /// Seconds in which each of its parts was busy, by name, if it is cut up.
    pub instances: BTreeMap<String, f64>,
    /// Looks so far.
    pub passes: u64,
    /// Looks that failed.
    pub failures: u64,
    /// When a look last went well, in seconds since 1970.
    pub last_success: Option<f64>,
    /// Errors of the driver: how often, and when last.
    pub xids: BTreeMap<u64, (u64, f64)>,
}

/// What a look at a GPU showed.
#[derive(Clone, Debug, Default)]
pub struct GpuReading {
    /// How long it took, in seconds.
    pub took: f64,
    /// The GPU's memory.
    pub memory: Option<GpuMemory>,
    /// Whose the used memory is; `None` where the processes are not known.
    pub used: Option<Split<u64>>,
    /// Whose the time of the last interval was.
    pub busy: Option<Split<f64>>,
    /// Millijoules since the driver was loaded.
    pub energy: Option<u64>,
    /// All else.
    pub sensors: Sensors,
    /// Its parts, if it is cut up.
    pub instances: Vec<MigInstance>,
    /// The processes on it.
    pub pids: BTreeSet<u32>,
}

/// One container.
#[derive(Clone, Debug)]
pub struct ContainerSnapshot {
    /// Which.
    pub key: ContainerKey,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The annotation `clusterName`, which gpu-manager shows.
    pub cluster: String,
    /// The vocabulary it asked in.
    pub dialect: Option<Dialect>,
    /// Its GPUs by index.
    pub shares: Vec<ShareSnapshot>,
    /// How something in it used what it was not given, and how often.
    pub escapes: Vec<(Escape, u64)>,
}

/// What a container holds and uses of a GPU.
#[derive(Clone, Debug, Default)]
pub struct ShareSnapshot {
    /// The GPU's place in [`Snapshot::cards`].
    pub card: usize,
    /// What it holds; `None` for a GPU it was not given.
    pub hold: Option<Hold>,
    /// Bytes its processes use; `None` where that is not known.
    pub used: Option<u64>,
    /// The part of the last interval in which its kernels ran; `None` where that is not known.
    pub busy: Option<f64>,
    /// What it spent so far.
    pub total: Tally,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Whether these run on a GPU that the container was not given.
    pub escaped: bool,
    /// What its library reports.
    pub throttle: Option<ShareReport>,
    /// The part of the last interval in which it waited for its share.
    pub throttled: Option<f64>,
}

/// A process on a GPU.
#[derive(Clone, Debug)]
pub struct ProcessSnapshot {
    /// The GPU's place in [`Snapshot::cards`].
    pub card: usize,
    /// Its number.
    pub pid: u32,
    /// Its name, as it chose itself.
    pub command: String,
    /// Whose it is.
    pub owner: ProcessOwner,
    /// Bytes it uses, where the driver tells.
    pub bytes: Option<u64>,
    /// The part of the last interval in which its kernels ran.
    pub busy: Option<f64>,
    /// The part of the GPU it runs on, if that is cut up.
    pub instance: Option<u32>,
}

/// Whose a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessOwner {
    /// The container at this place in [`Snapshot::containers`].
    Container(usize),
    /// A container that belongs to no pod.
    OutsideContainer,
    /// The machine's own.
    Host,
    /// Nobody can tell.
    Unknown,
}

impl Snapshot {
    /// Which containers are on which parts of GPUs that are cut up.
    #[must_use]
    pub fn on_instances(&self) -> Vec<(&ContainerSnapshot, &GpuSnapshot, &MigInstance)> {
        let places = |process: &ProcessSnapshot| match (process.owner, process.instance) {
            (ProcessOwner::Container(container), Some(part)) => Some((container, process.card, part)),
            _ => None,
        };
        let all: BTreeSet<(usize, usize, u32)> = self.processes.iter().filter_map(places).collect();
        let found = |(container, card, number): (usize, usize, u32)| {
            let card = self.cards.get(card)?;
            let parts = &card.look.as_ref()?.instances;
            let part = parts.iter().find(|part| part.gpu_instance == Some(number))?;
            Some((self.containers.get(container)?, card, part))
        };
        all.into_iter().filter_map(found).collect()
    }
}

impl GpuReading {
    /// Bytes in use: what the parts add up to, where they are known.
    #[must_use]
    pub fn used_bytes(&self) -> Option<u64> {
        let parts = self.used.as_ref().map(|split| split.whole);
        parts.or_else(|| self.memory.map(|memory| memory.used))
    }
}

/// What a container may use of a GPU: percent of its compute, and bytes.
#[must_use]
pub(super) fn granted(hold: Hold, card: &GpuSnapshot) -> (Percent, u64) {
    match hold {
        Hold::Whole => (Percent::WHOLE, card.gpu.memory.0 << 20),
        Hold::Share { compute_percent, memory } => (compute_percent, memory.0 << 20),
    }
}
