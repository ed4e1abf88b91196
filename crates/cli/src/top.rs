//! What is used of what was granted.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_wire::tessera::node_use::NodeUse;

/// The nodes, by name.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) nodes: Vec<NodeUsage>,
}

/// One node: what its agent measures, or why it does not tell.
#[derive(Debug, Serialize)]
pub(crate) struct NodeUsage {
    pub(crate) node: String,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) used: Option<NodeUse>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

impl Usage {
    pub(crate) fn new(answers: BTreeMap<String, Result<NodeUse, String>>) -> Self {
        let node = |(node, answer): (String, Result<NodeUse, String>)| match answer {
            Ok(used) => NodeUsage { node, used: Some(used), error: None },
            Err(error) => NodeUsage { node, used: None, error: Some(error) },
        };
        Self { nodes: answers.into_iter().map(node).collect() }
    }
}
