//! Limits of containers with shares of GPUs.

use tessera_core::{
    grant::Hold,
    units::{GpuIndex, Percent, PodUid},
};
use tessera_limits::{Bytes, GpuLimit, UuidBytes, limits::ShareMeaning};
use tessera_wire::foreign::{dialect::vcuda, objects::Pod};

use super::{CallError, holdings::Holding, inventory::NodeGpus};

/// What a container with shares of GPUs may use. Containers with whole GPUs have no limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerLimits {
    /// UID of the pod.
    pub pod: PodUid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Name of the container.
    pub container: String,
    /// Meaning of a percentage of compute.
    pub meaning: ShareMeaning,
    /// Limits by ascending GPU index.
    pub gpus: Vec<GpuLimit>,
}

impl ContainerLimits {
    /// Returns the UID of the pod and the name of the container.
    pub(super) fn key(&self) -> (PodUid, String) {
        (self.pod.clone(), self.container.clone())
    }

    /// Returns the same limits with the sizes of contexts that were measured in the container.
    pub(super) fn with_contexts_of(mut self, known: &Self) -> Self {
        for gpu in &mut self.gpus {
            if let Some(before) = known.gpus.iter().find(|before| before.uuid == gpu.uuid) {
                gpu.context = before.context;
            }
        }
        self
    }

    /// Returns the same limits with the memory that was lent to the container. Only the rules of loans change it.
    pub(super) fn with_loans_of(mut self, known: &Self) -> Self {
        for gpu in &mut self.gpus {
            if let Some(before) = known.gpus.iter().find(|before| before.uuid == gpu.uuid) {
                gpu.memory = gpu.memory.max(before.memory);
            }
        }
        self
    }

    /// Returns the same limits with the ceilings that were granted before. GPUs without earlier
    /// limits keep theirs.
    pub(super) fn with_ceilings_of(mut self, granted: &Self) -> Self {
        for gpu in &mut self.gpus {
            if let Some(before) = granted.gpus.iter().find(|before| before.uuid == gpu.uuid) {
                gpu.compute_ceiling_percent = before.compute_ceiling_percent.max(gpu.compute_percent);
            }
        }
        self
    }
}

/// Returns the limits of a container, or `None` if it has whole GPUs.
pub(super) fn container_limits(
    meaning: ShareMeaning,
    gpus: Option<&NodeGpus>,
    uid: &PodUid,
    pod: &Pod,
    held: &Holding,
) -> Result<Option<ContainerLimits>, CallError> {
    // A new container with a bad ceiling is refused. One that already runs has no ceiling.
    let ceiling = vcuda::ceiling(&pod.metadata.annotations).ok().flatten();
    let gpu_limit = |index: GpuIndex, compute_percent: Percent, memory: Bytes| {
        let gpu = gpus.and_then(|gpus| gpus.node.gpu(index));
        let uuid = gpu.and_then(|gpu| UuidBytes::parse(&gpu.uuid.0)).ok_or(CallError::NoUuid(index))?;
        let most = ceiling.map_or(compute_percent, |limit| limit.max(compute_percent));
        // The size of a context is measured when the container has one.
        Ok(GpuLimit {
            uuid,
            memory,
            context: Bytes::ZERO,
            compute_percent: compute_percent.0,
            compute_ceiling_percent: most.0,
        })
    };
    let shares = held.grant.holds.iter().filter_map(|(index, hold)| match hold {
        Hold::Whole => None,
        Hold::Share { compute_percent, memory } => {
            Some(gpu_limit(*index, *compute_percent, Bytes::from_mib(memory.0)))
        }
    });
    let gpus: Vec<GpuLimit> = shares.collect::<Result<_, CallError>>()?;
    Ok((!gpus.is_empty()).then(|| ContainerLimits {
        pod: uid.clone(),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        container: held.grant.container.clone(),
        meaning,
        gpus,
    }))
}
