//! What a pod asks for, whatever vocabulary it used.

use crate::gpu::Model;
use crate::units::{MiB, MilliCpu, Percent};

/// What one container asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// So many GPUs that nobody else holds.
    Whole(u8),
    /// A guaranteed part of one GPU's compute and memory.
    Share {
        /// Below 100.
        compute_percent: Percent,
        /// On the same GPU.
        memory: MiB,
    },
    /// Memory of one GPU; compute as the others leave it.
    Memory(MiB),
}

/// When a container runs, which decides whether it needs its share beside the others or before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerRole {
    /// Runs to its end before the next one starts.
    Init,
    /// An init container that keeps running (`restartPolicy: Always`).
    Sidecar,
    /// Runs beside the other main containers and the sidecars.
    Main,
}

/// One container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerRequest {
    /// Its name, unique in the pod.
    pub name: String,
    /// When it runs.
    pub role: ContainerRole,
    /// What it asks of the GPUs, if anything.
    pub request: Option<Request>,
}

/// What a pod asks for as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodRequest {
    /// In the pod's order: init containers and sidecars first, as Kubernetes lists them.
    pub containers: Vec<ContainerRequest>,
    /// CPU of the whole pod.
    pub cpu: MilliCpu,
    /// Main memory of the whole pod.
    pub memory: MiB,
    /// GPU models the pod accepts; empty for any.
    pub models: Vec<Model>,
    /// Whether its GPUs exchange much data. Unknown counts as sensitive.
    pub link_sensitivity: LinkSensitivity,
}

/// How much a job with several GPUs depends on the links between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LinkSensitivity {
    /// Wants the best links that are left.
    #[default]
    Sensitive,
    /// Leaves the good links to others.
    Insensitive,
}

// === impl PodRequest ===

impl PodRequest {
    /// A pod of main containers only, one per request.
    #[must_use]
    pub fn of_mains(requests: impl IntoIterator<Item = Request>) -> Self {
        let containers = requests.into_iter().enumerate().map(|(position, request)| ContainerRequest {
            name: format!("c{position}"),
            role: ContainerRole::Main,
            request: Some(request),
        });
        Self { containers: containers.collect(), ..Self::default() }
    }

    /// Whether any container asks for a GPU.
    #[must_use]
    pub fn wants_gpu(&self) -> bool {
        self.containers.iter().any(|container| container.request.is_some())
    }

    /// Whether it asks for the same, by whatever names its containers go.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let Self { containers, cpu, memory, models, link_sensitivity } = self;
        let part = |container: &ContainerRequest| (container.role, container.request);
        (cpu, memory, link_sensitivity) == (&other.cpu, &other.memory, &other.link_sensitivity)
            && models == &other.models
            && containers.iter().map(part).eq(other.containers.iter().map(part))
    }

    /// Whether GPUs of `model` will do.
    #[must_use]
    pub fn accepts(&self, model: &Model) -> bool {
        self.models.is_empty() || self.models.contains(model)
    }
}

/// What a pod needs at its peak, when each container needs `need` of something: the sum of mains and
/// sidecars, or an init container with the sidecars started before it, whichever is more. `combine` adds two
/// needs that stand side by side, `larger` keeps the greater of two that do not.
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
    fn init_containers_count_as_kubernetes_counts_them() {
        use ContainerRole::{Init, Main, Sidecar};
        check(&[], 0);
        check(&[(Main, 2), (Main, 3)], 5);
        check(&[(Init, 7), (Main, 2), (Main, 3)], 7);
        check(&[(Sidecar, 1), (Init, 7), (Main, 2)], 8);
        check(&[(Init, 7), (Sidecar, 1), (Main, 2)], 7);
        check(&[(Init, 2), (Sidecar, 1), (Init, 3), (Main, 4)], 5);
    }
}
