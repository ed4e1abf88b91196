//! The answer to a request: which GPUs, and how much of each.

use crate::gpu_set::GpuSet;
use crate::request::{ContainerRole, Request, peak};
use crate::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid};

/// What one container holds on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hold {
    /// All of it, whatever its size.
    Whole,
    /// A part of it.
    Share {
        /// Compute guaranteed; zero for a memory-only grant.
        compute_percent: Percent,
        /// Memory guaranteed.
        memory: MiB,
    },
}

/// The GPUs of one container.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerGrant {
    /// The container's name.
    pub container: String,
    /// When it runs.
    pub role: ContainerRole,
    /// What it holds, by ascending index; each GPU once.
    pub holds: Vec<(GpuIndex, Hold)>,
}

/// Everything one pod holds on its node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodGrant {
    /// Whose.
    pub pod: PodUid,
    /// Where.
    pub node: NodeName,
    /// CPU of the whole pod.
    pub cpu: MilliCpu,
    /// Main memory of the whole pod.
    pub memory: MiB,
    /// In the pod's order; containers without a GPU may be left out.
    pub containers: Vec<ContainerGrant>,
}

/// How much of a GPU is taken: by one pod at its peak, or by all pods together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GpuUsage {
    /// Whether somebody holds the whole GPU.
    pub whole: bool,
    /// Compute promised to shares.
    pub compute_percent: Percent,
    /// Memory promised to shares.
    pub memory: MiB,
    /// Whether somebody holds the whole GPU while another holds it too: never by a decision of ours.
    pub contended: bool,
}

// === impl Hold ===

impl Hold {
    /// What a request holds on each of its GPUs.
    #[must_use]
    pub fn of(request: Request) -> Self {
        match request {
            Request::Whole(_) => Self::Whole,
            Request::Share { compute_percent, memory } => Self::Share { compute_percent, memory },
            Request::Memory(memory) => Self::Share { compute_percent: Percent::ZERO, memory },
        }
    }
}

// === impl ContainerGrant ===

impl ContainerGrant {
    /// The GPUs held, without the amounts.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        self.holds.iter().map(|(gpu, _)| *gpu).collect()
    }

    fn usage(&self, gpu: GpuIndex) -> GpuUsage {
        let held = self.holds.iter().filter(|(held, _)| *held == gpu);
        held.fold(GpuUsage::default(), |usage, (_, hold)| usage.plus(GpuUsage::of(*hold)))
    }
}

// === impl PodGrant ===

impl PodGrant {
    /// What the pod takes of each of its GPUs at its peak: an init container's share is free again for the
    /// main containers of the same pod.
    pub fn footprint(&self) -> impl Iterator<Item = (GpuIndex, GpuUsage)> {
        footprint(&self.containers)
    }
}

/// What these containers of one pod take of each GPU at their peak.
pub(crate) fn footprint(containers: &[ContainerGrant]) -> impl Iterator<Item = (GpuIndex, GpuUsage)> {
    let gpus = containers.iter().map(ContainerGrant::gpus).fold(GpuSet::EMPTY, GpuSet::union);
    gpus.iter().map(|gpu| {
        let usage = peak(containers, |c| c.role, |c| c.usage(gpu), GpuUsage::plus, GpuUsage::larger);
        (gpu, usage)
    })
}

// === impl GpuUsage ===

impl GpuUsage {
    /// What one hold takes.
    #[must_use]
    pub fn of(hold: Hold) -> Self {
        match hold {
            Hold::Whole => Self { whole: true, ..Self::default() },
            Hold::Share { compute_percent, memory } => Self { compute_percent, memory, ..Self::default() },
        }
    }

    /// Whether nobody takes anything.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    /// Whether a GPU of `memory` cannot carry this.
    #[must_use]
    pub fn exceeds(self, memory: MiB) -> bool {
        self.contended || self.compute_percent > Percent::WHOLE || self.memory > memory
    }

    /// Both side by side.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let meet = (self.whole && !other.is_none()) || (other.whole && !self.is_none());
        Self {
            whole: self.whole || other.whole,
            compute_percent: self.compute_percent + other.compute_percent,
            memory: self.memory + other.memory,
            contended: self.contended || other.contended || meet,
        }
    }

    /// The peak of two that never stand side by side.
    fn larger(self, other: Self) -> Self {
        Self {
            whole: self.whole || other.whole,
            compute_percent: self.compute_percent.max(other.compute_percent),
            memory: self.memory.max(other.memory),
            contended: self.contended || other.contended,
        }
    }
}
