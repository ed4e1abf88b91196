//! The data of `top`: measured use of each grant.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_core::grant::GpuUsage;
use tessera_core::units::{MiB, Percent};
use tessera_wire::tessera::node_use::{NodeUse, ShareUse};

use crate::usage::UsageError;

/// Measured use of all nodes, sorted by name.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ClusterUse {
    pub(crate) nodes: Vec<NodeUseRow>,
    /// Memory of each GPU by UUID.
    #[serde(skip)]
    pub(crate) gpu_memory: BTreeMap<String, MiB>,
}

/// Measured use of one node, or the error of its agent.
#[derive(Debug, Serialize)]
pub(crate) struct NodeUseRow {
    pub(crate) node: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) used: Option<NodeUse>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

impl ClusterUse {
    pub(crate) fn new(
        answers: BTreeMap<String, Result<NodeUse, UsageError>>,
        gpu_memory: BTreeMap<String, MiB>,
    ) -> Self {
        let node = |(node, answer): (String, Result<NodeUse, UsageError>)| match answer {
            Ok(used) => NodeUseRow { node, used: Some(used), error: None },
            Err(error) => NodeUseRow { node, used: None, error: Some(error.to_string()) },
        };
        Self { nodes: answers.into_iter().map(node).collect(), gpu_memory }
    }

    /// Returns the percentage of a GPU that a container holds and does not use, or `None` if its grant or its use is
    /// unknown. The dashboard counts alike: the larger of compute and memory is held.
    pub(crate) fn waste(&self, share: &ShareUse) -> Option<f64> {
        let memory = share.granted_mib.zip(self.gpu_memory.get(&share.uuid));
        let (held_memory, gpu_memory) = memory.map_or((MiB::ZERO, MiB(1)), |(held, gpu)| (MiB(held), *gpu));
        let held = GpuUsage {
            compute_percent: Percent(share.granted_percent?),
            memory: held_memory,
            ..GpuUsage::default()
        };
        Some((100.0 * held.part_of(gpu_memory) - share.busy_percent?).max(0.0))
    }

    /// Returns the nodes without measurements, with the error of their agents.
    pub(crate) fn silent(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nodes.iter().filter_map(|row| Some((row.node.as_str(), row.error.as_deref()?)))
    }
}
