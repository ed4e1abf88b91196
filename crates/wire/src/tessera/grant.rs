//! Grants as pod annotations: our own `tessera.dev/grant`, and the keys each dialect's old tools read.
//!
//! Ours is complete and names GPUs by UUID. Where a pod lacks it, because another tool placed it, the dialect's keys are
//! read instead, which name GPUs by index.

mod dialects;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_core::gpu::GpuUuid;
use tessera_core::grant::{ContainerGrant, Hold};
use tessera_core::node::Node;
use tessera_core::request::Request;
use tessera_core::units::{GpuIndex, MiB, Percent};

use crate::foreign::dialect::MemoryUnit;
use crate::foreign::objects::PodSpec;
use crate::foreign::pod_spec::{BadPod, Claim};

/// The key of our own annotation.
pub const KEY: &str = "tessera.dev/grant";

/// Annotations by key.
pub type Annotations = BTreeMap<String, String>;

/// Annotations that grant nothing that can be.
#[derive(Debug, thiserror::Error)]
pub enum BadGrant {
    /// Our annotation is not JSON of the expected form.
    #[error("{KEY}: {0}")]
    Json(#[from] serde_json::Error),
    /// It names a GPU the node does not have.
    #[error("{KEY}: node {node} has no GPU {uuid}")]
    UnknownGpu {
        /// Which node.
        node: String,
        /// Which GPU.
        uuid: String,
    },
    /// It names a container the pod does not have.
    #[error("{KEY}: the pod has no container {0:?}")]
    UnknownContainer(String),
    /// A dialect's annotation that cannot be read.
    #[error("{key}: found {found:?}, expected {expected}")]
    Dialect {
        /// The annotation's key.
        key: String,
        /// What stands there.
        found: String,
        /// What should.
        expected: &'static str,
    },
    /// A pod whose requests cannot be read has no grant either.
    #[error(transparent)]
    Pod(#[from] BadPod),
}

/// What our annotation holds for one GPU.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Card {
    uuid: String,
    index: u8,
    /// 100 and no memory mean the whole GPU.
    #[serde(rename = "cores")]
    compute_percent: u32,
    #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
    memory_mib: Option<u64>,
}

/// Whether an annotation tells of a grant: ours, or one of a dialect's. Nobody but a scheduler or an agent may write it.
#[must_use]
pub fn is_key(key: &str) -> bool {
    key == KEY || dialects::is_key(key)
}

/// Our annotation for these grants.
#[must_use]
pub fn print(grants: &[ContainerGrant], node: &Node) -> String {
    let card = |(gpu, hold): &(GpuIndex, Hold)| {
        let (compute_percent, memory_mib) = match hold {
            Hold::Whole => (Percent::WHOLE.0, None),
            Hold::Share { compute_percent, memory } => (compute_percent.0, Some(memory.0)),
        };
        let uuid = node.gpu(*gpu).map(|card| card.uuid.to_string()).unwrap_or_default();
        Card { uuid, index: gpu.0, compute_percent, memory_mib }
    };
    let containers: BTreeMap<&str, Vec<Card>> = grants
        .iter()
        .map(|grant| (grant.container.as_str(), grant.holds.iter().map(card).collect()))
        .collect();
    // Numbers and texts always have a JSON form.
    serde_json::to_string(&containers).unwrap_or_default()
}

/// All annotations for a pod placed now: ours, and those of the dialects it asks in, not yet handed over.
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

/// The annotations that tell old tools that a pod's GPUs were handed over.
pub fn assigned(spec: &PodSpec, unit: MemoryUnit) -> Result<Annotations, BadGrant> {
    Ok(dialects::assigned(&spec.claims(unit)?))
}

/// What a pod's annotations grant on a node; `None` where they say nothing.
pub fn parse(
    spec: &PodSpec,
    annotations: &Annotations,
    node: &Node,
    unit: MemoryUnit,
) -> Result<Option<Vec<ContainerGrant>>, BadGrant> {
    match annotations.get(KEY) {
        Some(json) => parse_ours(json, spec, node).map(Some),
        None => dialects::read(annotations, &spec.claims(unit)?, unit),
    }
}

/// What a pod's annotations grant, provided they cover every container that asks, with as many GPUs as it asks for, or with its
/// memory spread over several. Others were not written by anybody who places pods.
#[must_use]
pub fn complete(
    spec: &PodSpec,
    annotations: &Annotations,
    node: &Node,
    unit: MemoryUnit,
) -> Option<Vec<ContainerGrant>> {
    let grants = parse(spec, annotations, node, unit).ok().flatten()?;
    let claims = spec.claims(unit).ok()?;
    let covers = |grant: &ContainerGrant, request: Request| match request {
        Request::Whole(count) => grant.holds.len() == usize::from(count),
        Request::Memory(asked) if grant.holds.len() > 1 => {
            grant.holds.iter().map(|(_, hold)| memory(*hold)).sum::<MiB>() == asked
        }
        Request::Share { .. } | Request::Memory(_) => grant.holds.len() == 1,
    };
    let is_covered = |claim: &Claim| {
        grants.iter().any(|grant| grant.container == claim.container && covers(grant, claim.request))
    };
    claims.iter().all(is_covered).then_some(grants)
}

fn memory(hold: Hold) -> MiB {
    match hold {
        Hold::Whole => MiB::ZERO,
        Hold::Share { memory, .. } => memory,
    }
}

fn parse_ours(json: &str, spec: &PodSpec, node: &Node) -> Result<Vec<ContainerGrant>, BadGrant> {
    let mut containers: BTreeMap<String, Vec<Card>> = serde_json::from_str(json)?;
    let mut grants = Vec::new();
    for (container, role) in spec.containers_with_roles() {
        let Some(cards) = containers.remove(&container.name) else { continue };
        let mut held = Vec::new();
        for card in cards {
            let uuid = GpuUuid::from(card.uuid.as_str());
            let gpu = node.gpus().iter().find(|gpu| gpu.uuid == uuid);
            let gpu =
                gpu.ok_or_else(|| BadGrant::UnknownGpu { node: node.name.to_string(), uuid: card.uuid })?;
            let hold = match card.memory_mib {
                None => Hold::Whole,
                Some(memory) => {
                    Hold::Share { compute_percent: Percent(card.compute_percent), memory: MiB(memory) }
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
