//! Grants: which GPUs a pod holds, and how much of each.

use crate::gpu_set::GpuSet;
use crate::request::{ContainerRole, Request, Share, peak};
use crate::units::{GpuIndex, MiB, MilliCpu, NodeName, Percent, PodUid};

/// The amount of one GPU that a container holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hold {
    /// The whole GPU, whatever its size.
    Whole,
    /// A share of the GPU.
    Share {
        /// The guaranteed compute; zero for a grant of memory alone.
        compute_percent: Percent,
        /// The guaranteed memory.
        memory: MiB,
    },
}

/// The GPUs of one container.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerGrant {
    /// The name of the container.
    pub container: String,
    /// The role of the container.
    pub role: ContainerRole,
    /// The GPUs and the amounts held, by ascending index; each GPU once.
    pub holds: Vec<(GpuIndex, Hold)>,
}

/// Everything that one pod holds on its node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodGrant {
    /// The UID of the pod.
    pub pod: PodUid,
    /// The node of the pod.
    pub node: NodeName,
    /// The CPU of the whole pod.
    pub cpu: MilliCpu,
    /// The main memory of the whole pod.
    pub memory: MiB,
    /// The grants of the containers in the pod's order; containers without a GPU may be left out.
    pub containers: Vec<ContainerGrant>,
}

/// The used part of a GPU: of one pod at its peak, or of all pods together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GpuUsage {
    /// True if a pod holds the whole GPU.
    pub whole: bool,
    /// The compute that shares hold.
    pub compute_percent: Percent,
    /// The memory that shares hold.
    pub memory: MiB,
    /// True if one pod holds the whole GPU while another holds it too. No placement leads to this.
    pub contended: bool,
}

// === impl GpuUsage ===

impl GpuUsage {
    /// Returns the part of a GPU with this much memory that the usage takes: the larger of its parts of compute and
    /// memory, at most 1.
    #[must_use]
    pub fn part_of(self, gpu_memory: MiB) -> f64 {
        if self.whole {
            return 1.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "no GPU has 2^52 MiB")]
        let memory = self.memory.0 as f64 / gpu_memory.0.max(1) as f64;
        (f64::from(self.compute_percent.0) / 100.0).max(memory).min(1.0)
    }
}

// === impl Hold ===

impl Hold {
    /// Returns what a request holds on one of its GPUs, which has this much memory.
    #[must_use]
    pub fn of(request: Request, gpu_memory: MiB) -> Self {
        match request {
            Request::Whole(_) => Self::Whole,
            Request::Share(Share { compute_percent, memory, .. }) => {
                Self::Share { compute_percent, memory: memory.on(gpu_memory) }
            }
        }
    }

    /// Returns the part of `free` that this hold takes, or `None` if nothing is free.
    #[must_use]
    pub fn limited_to(self, free: Self) -> Option<Self> {
        let part = match (self, free) {
            (wanted, Self::Whole) => wanted,
            (Self::Whole, free) => free,
            (
                Self::Share { compute_percent, memory },
                Self::Share { compute_percent: free_percent, memory: free_memory },
            ) => Self::Share {
                compute_percent: compute_percent.min(free_percent),
                memory: memory.min(free_memory),
            },
        };
        let nothing = Self::Share { compute_percent: Percent::ZERO, memory: MiB::ZERO };
        (part != nothing).then_some(part)
    }
}

// === impl ContainerGrant ===

impl ContainerGrant {
    /// Returns the GPUs without the amounts.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        self.holds.iter().map(|(gpu, _)| *gpu).collect()
    }

    /// Returns what the container uses of one GPU.
    pub(crate) fn usage(&self, gpu: GpuIndex) -> GpuUsage {
        let held = self.holds.iter().filter(|(held, _)| *held == gpu);
        held.fold(GpuUsage::default(), |usage, (_, hold)| usage.plus(GpuUsage::of(*hold)))
    }
}

// === impl PodGrant ===

impl PodGrant {
    /// Returns the GPUs of all containers.
    #[must_use]
    pub fn gpus(&self) -> GpuSet {
        gpus(&self.containers)
    }

    /// Returns what the pod takes of each of its GPUs at its peak. Main containers reuse the GPUs
    /// of init containers of the same pod.
    pub fn footprint(&self) -> impl Iterator<Item = (GpuIndex, GpuUsage)> {
        footprint(&self.containers)
    }
}

/// Returns the GPUs of these containers.
#[must_use]
pub fn gpus(containers: &[ContainerGrant]) -> GpuSet {
    containers.iter().map(ContainerGrant::gpus).fold(GpuSet::EMPTY, GpuSet::union)
}

/// Returns what these containers of one pod take of each GPU at their peak.
pub(crate) fn footprint(containers: &[ContainerGrant]) -> impl Iterator<Item = (GpuIndex, GpuUsage)> {
    gpus(containers).iter().map(|gpu| {
        let usage = peak(containers, |c| c.role, |c| c.usage(gpu), GpuUsage::plus, GpuUsage::larger);
        (gpu, usage)
    })
}

// === impl GpuUsage ===

impl GpuUsage {
    /// Returns the usage of one hold.
    #[must_use]
    pub fn of(hold: Hold) -> Self {
        match hold {
            Hold::Whole => Self { whole: true, ..Self::default() },
            Hold::Share { compute_percent, memory } => Self { compute_percent, memory, ..Self::default() },
        }
    }

    /// Returns whether nothing is used.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::default()
    }

    /// Returns whether the usage exceeds a GPU with this much memory.
    #[must_use]
    pub fn exceeds(self, memory: MiB) -> bool {
        self.contended || self.compute_percent > Percent::WHOLE || self.memory > memory
    }

    /// Returns the usage of both at the same time.
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

    /// Returns the peak of two usages that never occur at the same time.
    fn larger(self, other: Self) -> Self {
        Self {
            whole: self.whole || other.whole,
            compute_percent: self.compute_percent.max(other.compute_percent),
            memory: self.memory.max(other.memory),
            contended: self.contended || other.contended,
        }
    }
}
