//! The usage of every GPU, summed up from the grants of the pods without code of the product.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tessera_cluster::LeanPod;

use super::pods::GPU_MEMORY_MIB;

/// Holdings of each pod by UID: GPU, compute and memory. A whole GPU counts as 100 % and all
/// memory.
#[derive(Debug)]
pub(super) struct Audit {
    /// Memory of each GPU in MiB.
    memory_mib: u64,
    /// Whether the UUID of a GPU names its node, as those of virtual nodes do.
    uuids_name_nodes: bool,
    pods: BTreeMap<String, Vec<(String, u64, u64)>>,
    gpus: BTreeMap<String, (u64, u64)>,
}

impl Default for Audit {
    /// Returns an audit of virtual nodes.
    fn default() -> Self {
        Self { uuids_name_nodes: true, ..Self::of_memory(GPU_MEMORY_MIB) }
    }
}

impl Audit {
    /// Returns an audit of GPUs with this much memory.
    pub(super) fn of_memory(memory_mib: u64) -> Self {
        Self { memory_mib, uuids_name_nodes: false, pods: BTreeMap::new(), gpus: BTreeMap::new() }
    }

    /// Applies a pod and checks its GPUs.
    pub(super) fn see(&mut self, pod: &LeanPod) -> Result<()> {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let ended = matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
        self.forget(&uid);
        if pod.spec.node_name.is_empty() || ended {
            return Ok(());
        }
        let name = pod.metadata.name.clone().unwrap_or_default();
        let annotations = pod.metadata.annotations.clone().unwrap_or_default();
        let grant = annotations
            .get("tessera.dev/grant")
            .with_context(|| format!("{name} is bound without a grant"))?;
        let containers: BTreeMap<String, Vec<Value>> = serde_json::from_str(grant)?;
        for gpu in containers.into_values().flatten() {
            let uuid = gpu["uuid"].as_str().unwrap_or_default().to_owned();
            ensure!(
                !self.uuids_name_nodes || uuid.starts_with(&format!("GPU-{}-", pod.spec.node_name)),
                "{name} holds {uuid}, which is elsewhere"
            );
            let compute_percent = gpu["cores"].as_u64().unwrap_or_default();
            let memory = gpu["memoryMiB"].as_u64().unwrap_or(self.memory_mib);
            let held = self.gpus.entry(uuid.clone()).or_default();
            *held = (held.0 + compute_percent, held.1 + memory);
            ensure!(
                held.0 <= 100 && held.1 <= self.memory_mib,
                "{uuid} holds {} % and {} MiB including {name}",
                held.0,
                held.1
            );
            self.pods.entry(uid.clone()).or_default().push((uuid, compute_percent, memory));
        }
        Ok(())
    }

    pub(super) fn forget(&mut self, uid: &str) {
        for (uuid, compute_percent, memory) in self.pods.remove(uid).unwrap_or_default() {
            if let Some(held) = self.gpus.get_mut(&uuid) {
                *held = (held.0 - compute_percent, held.1 - memory);
            }
        }
    }

    pub(super) fn pods(&self) -> usize {
        self.pods.len()
    }
}
