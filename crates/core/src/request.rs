//! Requests: what a pod requests, in whatever dialect.

use std::fmt;

use crate::gpu::Model;
use crate::selection::GpuSelection;
use crate::units::{MiB, MilliCpu, Percent};

/// The GPU request of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// This number of GPUs for the container alone.
    Whole(u8),
    /// The same share of each of one or several GPUs.
    Share(Share),
}

/// A share of each of `count` different GPUs of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share {
    /// The number of GPUs; at least 1.
    pub count: u8,
    /// The guaranteed part of each GPU's compute; below 100. Zero is whatever compute the other pods
    /// leave.
    pub compute_percent: Percent,
    /// The memory of each GPU.
    pub memory: MemoryRequest,
}

/// The memory of one GPU, as a request names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryRequest {
    /// An amount, whatever the GPU has.
    Amount(MiB),
    /// A part of the memory that the GPU has; at most 100.
    PartOfGpu(Percent),
}

/// The phase in which a container runs, which decides whose GPUs it can reuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerRole {
    /// An init container: it ends before the next container starts.
    Init,
    /// An init container that keeps running (`restartPolicy: Always`).
    Sidecar,
    /// A main container: it runs beside the other main containers and the sidecars.
    Main,
}

/// One container of a pod and its request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerRequest {
    /// The name, unique in the pod.
    pub name: String,
    /// The role of the container.
    pub role: ContainerRole,
    /// The GPU request, if any.
    pub request: Option<Request>,
}

/// The requests of a whole pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodRequest {
    /// The containers in the pod's order: init containers and sidecars first.
    pub containers: Vec<ContainerRequest>,
    /// The CPU of the whole pod.
    pub cpu: MilliCpu,
    /// The main memory of the whole pod.
    pub memory: MiB,
    /// The accepted GPU models; empty for any.
    pub models: Vec<Model>,
    /// How much the job depends on the links between its GPUs.
    pub link_sensitivity: LinkSensitivity,
    /// The GPUs that the pod accepts beside the models.
    pub selection: GpuSelection,
}

/// How much a job with several GPUs depends on the links between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LinkSensitivity {
    /// The job gets the best links that are free.
    #[default]
    Sensitive,
    /// The job leaves the good links to other jobs.
    Insensitive,
}

// === impl Request ===

impl Request {
    /// Returns a request for a share of one GPU.
    #[must_use]
    pub fn share(compute_percent: Percent, memory: MiB) -> Self {
        Self::Share(Share { count: 1, compute_percent, memory: MemoryRequest::Amount(memory) })
    }

    /// Returns a request for memory of one GPU, with whatever compute the other pods leave.
    #[must_use]
    pub fn memory(memory: MiB) -> Self {
        Self::share(Percent::ZERO, memory)
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn gpu_count(self) -> usize {
        usize::from(match self {
            Self::Whole(count) => count,
            Self::Share(share) => share.count,
        })
    }
}

// === impl Share ===

impl Share {
    /// Returns whether the share guarantees compute.
    #[must_use]
    pub fn has_compute(self) -> bool {
        self.compute_percent > Percent::ZERO
    }
}

/// `30% and 4096 MiB`, or `4096 MiB` for a share without guaranteed compute
impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.has_compute() {
            write!(f, "{} and ", self.compute_percent)?;
        }
        self.memory.fmt(f)
    }
}

// === impl MemoryRequest ===

impl MemoryRequest {
    /// Returns the memory on a GPU that has this much.
    #[must_use]
    pub fn on(self, gpu_memory: MiB) -> MiB {
        match self {
            Self::Amount(memory) => memory,
            Self::PartOfGpu(part) => MiB(gpu_memory.0.saturating_mul(u64::from(part.0)) / 100),
        }
    }
}

/// `4096 MiB` or `50% of the memory`
impl fmt::Display for MemoryRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(memory) => memory.fmt(f),
            Self::PartOfGpu(part) => write!(f, "{part} of the memory"),
        }
    }
}

// === impl PodRequest ===

impl PodRequest {
    /// Returns a pod of main containers only, one per request.
    #[must_use]
    pub fn of_mains(requests: impl IntoIterator<Item = Request>) -> Self {
        let containers = requests.into_iter().enumerate().map(|(position, request)| ContainerRequest {
            name: format!("c{position}"),
            role: ContainerRole::Main,
            request: Some(request),
        });
        Self { containers: containers.collect(), ..Self::default() }
    }

    /// Returns whether any container requests a GPU.
    #[must_use]
    pub fn wants_gpu(&self) -> bool {
        self.containers.iter().any(|container| container.request.is_some())
    }

    /// Returns whether any container requests a share of a GPU.
    #[must_use]
    pub fn wants_share(&self) -> bool {
        self.containers.iter().any(|container| matches!(container.request, Some(Request::Share(_))))
    }

    /// Returns whether both pods request the same, whatever their containers are called.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let Self { containers, cpu, memory, models, link_sensitivity, selection } = self;
        let part = |container: &ContainerRequest| (container.role, container.request);
        (cpu, memory, link_sensitivity) == (&other.cpu, &other.memory, &other.link_sensitivity)
            && (models, selection) == (&other.models, &other.selection)
            && containers.iter().map(part).eq(other.containers.iter().map(part))
    }

    /// Returns whether the pod accepts GPUs of `model`.
    #[must_use]
    pub fn accepts(&self, model: &Model) -> bool {
        self.models.is_empty() || self.models.contains(model)
    }
}

/// Returns the peak need of a pod, where `need` returns the need of one container.
///
/// The peak is the sum over main containers and sidecars, or the need of an init container together
/// with the earlier sidecars, whichever is more. `combine` adds two needs at the same time,
/// `larger` returns the greater of two needs at different times.
pub fn peak<C, N: Copy + Default>(
    containers: &[C],
    role: impl Fn(&C) -> ContainerRole,
    need: impl Fn(&C) -> N,
    combine: impl Fn(N, N) -> N,
    larger: impl Fn(N, N) -> N,
) -> N {
    let mut sidecars = N::default();
    let mut mains = N::default();
    let mut highest_init = N::default();
    for container in containers {
        let own = need(container);
        match role(container) {
            ContainerRole::Sidecar => sidecars = combine(sidecars, own),
            ContainerRole::Main => mains = combine(mains, own),
            ContainerRole::Init => highest_init = larger(highest_init, combine(sidecars, own)),
        }
    }
    larger(highest_init, combine(mains, sidecars))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(containers: &[(ContainerRole, u32)], expected: u32) {
        assert_eq!(peak(containers, |c| c.0, |c| c.1, |a, b| a + b, u32::max), expected, "{containers:?}");
    }

    #[test]
    fn counts_init_containers_as_kubernetes_does() {
        use ContainerRole::{Init, Main, Sidecar};
        check(&[], 0);
        check(&[(Main, 2), (Main, 3)], 5);
        check(&[(Init, 7), (Main, 2), (Main, 3)], 7);
        check(&[(Sidecar, 1), (Init, 7), (Main, 2)], 8);
        check(&[(Init, 7), (Sidecar, 1), (Main, 2)], 7);
        check(&[(Init, 2), (Sidecar, 1), (Init, 3), (Main, 4)], 5);
    }
}
