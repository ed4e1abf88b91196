//! The data of `top`: measured use of each grant.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_wire::tessera::node_use::NodeUse;

use crate::usage::UsageError;

/// Measured use of all nodes, sorted by name.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ClusterUse {
    pub(crate) nodes: Vec<NodeUseRow>,
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
    pub(crate) fn new(answers: BTreeMap<String, Result<NodeUse, UsageError>>) -> Self {
        let node = |(node, answer): (String, Result<NodeUse, UsageError>)| match answer {
            Ok(used) => NodeUseRow { node, used: Some(used), error: None },
            Err(error) => NodeUseRow { node, used: None, error: Some(error.to_string()) },
        };
        Self { nodes: answers.into_iter().map(node).collect() }
    }

    /// Returns the nodes without measurements, with the error of their agents.
    pub(crate) fn silent(&self) -> impl Iterator<Item = (&str, &str)> {
        self.nodes.iter().filter_map(|row| Some((row.node.as_str(), row.error.as_deref()?)))
    }
}
