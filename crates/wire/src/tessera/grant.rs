//! Grants as pod annotations: Tessera's own `tessera.dev/grant`, and the keys that the tools of
//! each dialect read.
//!
//! Tessera's annotation is complete and names GPUs by UUID. If another tool placed the pod, the
//! annotation is missing, and the dialect's keys are read instead. They name GPUs by index.

mod dialects;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_core::gpu::GpuUuid;
use tessera_core::grant::{ContainerGrant, Hold};
use tessera_core::node::Node;
use tessera_core::request::{MemoryRequest, Request};
use tessera_core::units::{GpuIndex, MiB, Percent};

use crate::foreign::dialect::{Dialect, MemoryUnit};
use crate::foreign::objects::PodSpec;
use crate::foreign::pod_spec::{BadPod, Claim};

/// Key of Tessera's annotation.
pub const KEY: &str = "tessera.dev/grant";

/// Key of the annotation that says why the scheduler chose the GPUs of a pod. It outlives the log of
/// decisions.
pub const REASON_KEY: &str = "tessera.dev/placement-reason";

/// Annotations by key.
pub type Annotations = BTreeMap<String, String>;

/// Annotations that describe an impossible grant.
#[derive(Debug, thiserror::Error)]
pub enum BadGrant {
    /// Tessera's annotation is not JSON of the expected form.
    #[error("{KEY}: {0}")]
    Json(#[from] serde_json::Error),
    /// Tessera's annotation names a GPU that the node does not have.
    #[error("{KEY}: node {node} has no GPU {uuid}")]
    UnknownGpu {
        /// Name of the node.
        node: String,
        /// UUID of the GPU.
        uuid: String,
    },
    /// Tessera's annotation names a container that the pod does not have.
    #[error("{KEY}: the pod has no container {0:?}")]
    UnknownContainer(String),
    /// An annotation of a dialect cannot be parsed.
    #[error("{key}: found {found:?}, expected {expected}")]
    Dialect {
        /// Key of the annotation.
        key: String,
        /// Value of the annotation.
        found: String,
        /// Description of a valid value.
        expected: &'static str,
    },
    /// The pod's requests are invalid, so its grant cannot be read.
    #[error(transparent)]
    Pod(#[from] BadPod),
}

/// One GPU in Tessera's annotation.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct GpuEntry {
    uuid: String,
    index: u8,
    /// Percent of compute time. 100 without memory means the whole GPU.
    #[serde(rename = "cores")]
    compute_percent: u32,
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    memory_mib: Option<u64>,
}

/// Returns whether `key` belongs to a grant annotation of Tessera or of a dialect. Only schedulers
/// and agents may write these keys.
#[must_use]
pub fn is_key(key: &str) -> bool {
    key == KEY || key == REASON_KEY || dialects::is_key(key)
}

/// Returns whether only pods that a scheduler placed may have `key`.
#[must_use]
pub fn is_scheduler_mark(key: &str) -> bool {
    dialects::is_scheduler_mark(key)
}

/// Writes Tessera's annotation for these grants.
#[must_use]
pub fn print(grants: &[ContainerGrant], node: &Node) -> String {
    let entry = |(gpu, hold): &(GpuIndex, Hold)| {
        let (compute_percent, memory_mib) = match hold {
            Hold::Whole => (Percent::WHOLE.0, None),
            Hold::Share { compute_percent, memory } => (compute_percent.0, Some(memory.0)),
        };
        let uuid = node.gpu(*gpu).map(|gpu| gpu.uuid.to_string()).unwrap_or_default();
        GpuEntry { uuid, index: gpu.0, compute_percent, memory_mib }
    };
    let containers: BTreeMap<&str, Vec<GpuEntry>> = grants
        .iter()
        .map(|grant| (grant.container.as_str(), grant.holds.iter().map(entry).collect()))
        .collect();
    // Serializing numbers and strings cannot fail.
    serde_json::to_string(&containers).unwrap_or_default()
}

/// Returns all annotations of a newly placed pod: Tessera's, and those of its dialects, which mark
/// the GPUs as not yet assigned.
pub fn annotations(
    spec: &PodSpec,
    grants: &[ContainerGrant],
    node: &Node,
    unit: MemoryUnit,
    now_nanos: u128,
) -> Result<Annotations, BadGrant> {
    let mut written = Annotations::from([(KEY.to_owned(), print(grants, node))]);
    dialects::write(&mut written, &spec.claims(unit)?, grants, node, unit, now_nanos);
    Ok(written)
}

/// Returns the annotations that mark the pod's GPUs as assigned for the tools of its dialects. Marks of pods
/// that a scheduler placed need one in `present`.
pub fn assigned(spec: &PodSpec, present: &Annotations, unit: MemoryUnit) -> Result<Annotations, BadGrant> {
    let mut assigned = dialects::assigned(&spec.claims(unit)?);
    assigned.retain(|key, _| !is_scheduler_mark(key) || present.contains_key(key));
    Ok(assigned)
}

/// Parses the grants in a pod's annotations on a node. Returns `None` if there are none.
pub fn parse(
    spec: &PodSpec,
    annotations: &Annotations,
    node: &Node,
    unit: MemoryUnit,
) -> Result<Option<Vec<ContainerGrant>>, BadGrant> {
    match annotations.get(KEY) {
        Some(json) => parse_json(json, spec, node).map(Some),
        None => dialects::read(annotations, &spec.claims(unit)?, node, unit),
    }
}

/// Returns the error of each grant annotation of a pod that cannot be parsed, whether it is used or not.
#[must_use]
pub fn errors(spec: &PodSpec, annotations: &Annotations, node: &Node) -> Vec<BadGrant> {
    let own = annotations.get(KEY).and_then(|json| parse_json(json, spec, node).err());
    own.into_iter().chain(dialects::errors(annotations)).collect()
}

/// Parses the grants in a pod's annotations and returns them only if they are complete.
///
/// Complete grants give every container the number of GPUs it requests, or spread its memory over
/// several GPUs. No scheduler writes other grants, so they are ignored.
#[must_use]
pub fn complete(
    spec: &PodSpec,
    annotations: &Annotations,
    node: &Node,
    unit: MemoryUnit,
) -> Option<Vec<ContainerGrant>> {
    let grants = parse(spec, annotations, node, unit).ok().flatten()?;
    let claims = spec.claims(unit).ok()?;
    let covers = |grant: &ContainerGrant, claim: &Claim| match (claim.dialect, claim.request) {
        (Dialect::Gpushare, Request::Share(share)) if grant.holds.len() > 1 => {
            let held = grant.holds.iter().map(|(_, hold)| memory(*hold)).sum();
            share.memory == MemoryRequest::Amount(held)
        }
        _ => grant.gpus().len() == claim.request.gpu_count(),
    };
    let is_covered =
        |claim: &Claim| grants.iter().any(|grant| grant.container == claim.container && covers(grant, claim));
    claims.iter().all(is_covered).then_some(grants)
}

fn memory(hold: Hold) -> MiB {
    match hold {
        Hold::Whole => MiB::ZERO,
        Hold::Share { memory, .. } => memory,
    }
}

fn parse_json(json: &str, spec: &PodSpec, node: &Node) -> Result<Vec<ContainerGrant>, BadGrant> {
    let mut containers: BTreeMap<String, Vec<GpuEntry>> = serde_json::from_str(json)?;
    let mut grants = Vec::new();
    for (container, role) in spec.containers_with_roles() {
        let Some(entries) = containers.remove(&container.name) else { continue };
        let mut held = Vec::new();
        for entry in entries {
            let uuid = GpuUuid::from(entry.uuid.as_str());
            let gpu = node.gpus().iter().find(|gpu| gpu.uuid == uuid);
            let gpu =
                gpu.ok_or_else(|| BadGrant::UnknownGpu { node: node.name.to_string(), uuid: entry.uuid })?;
            let hold = match entry.memory_mib {
                None => Hold::Whole,
                Some(memory) => {
                    Hold::Share { compute_percent: Percent(entry.compute_percent), memory: MiB(memory) }
                }
            };
            held.push((gpu.index, hold));
        }
        held.sort_by_key(|(gpu, _)| *gpu);
        grants.push(ContainerGrant { container: container.name.clone(), role, holds: held });
    }
    match containers.into_keys().next() {
        Some(unknown) => Err(BadGrant::UnknownContainer(unknown)),
        None => Ok(grants),
    }
}

#[cfg(test)]
mod tests;
