//! The parts of nodes and pods that matter for a migration.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Deserialize;
use tessera_wire::foreign::quantity::Quantity;

/// Nodes and pods as they were read.
#[derive(Debug, Default)]
pub(super) struct Objects {
    nodes: Vec<Node>,
    pods: Vec<Pod>,
}

/// A cluster as the check sees it. Pods that have ended do not count.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) nodes: Vec<Node>,
    pub(super) pods: Vec<Pod>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Node {
    pub(super) metadata: Metadata,
    #[serde(default)]
    status: NodeStatus,
}

#[derive(Debug, Default, Deserialize)]
struct NodeStatus {
    #[serde(default)]
    capacity: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Metadata {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) annotations: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Pod {
    pub(super) metadata: Metadata,
    pub(super) spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodSpec {
    #[serde(default)]
    pub(super) node_name: String,
    #[serde(default)]
    pub(super) scheduler_name: String,
    #[serde(default)]
    pub(super) containers: Vec<Container>,
}

#[derive(Debug, Default, Deserialize)]
struct PodStatus {
    #[serde(default)]
    phase: String,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Container {
    #[serde(default)]
    pub(super) image: String,
    #[serde(default)]
    resources: Resources,
}

#[derive(Debug, Default, Deserialize)]
struct Resources {
    #[serde(default)]
    limits: BTreeMap<String, String>,
}

impl Objects {
    /// Adds a node or a pod. Other objects are ignored.
    pub(super) fn add(&mut self, object: serde_json::Value) -> Result<()> {
        match object["kind"].as_str() {
            Some("Node") => self.nodes.push(serde_json::from_value(object)?),
            Some("Pod") => self.pods.push(serde_json::from_value(object)?),
            _ => {}
        }
        Ok(())
    }
}

impl Cluster {
    pub(super) fn new(objects: Objects) -> Self {
        let has_ended = |pod: &Pod| matches!(pod.status.phase.as_str(), "Succeeded" | "Failed");
        let pods = objects.pods.into_iter().filter(|pod| !has_ended(pod)).collect();
        Self { nodes: objects.nodes, pods }
    }
}

impl Node {
    /// Returns the amount of a resource that the node offers.
    pub(super) fn capacity(&self, resource: &str) -> u64 {
        self.status.capacity.get(resource).map_or(0, |text| amount(text))
    }

    /// Returns the value of a label as a number.
    pub(super) fn number(&self, label: &str) -> Option<u64> {
        self.metadata.labels.get(label)?.parse().ok()
    }
}

impl Pod {
    /// Returns the amount of a resource that all containers request.
    pub(super) fn requests(&self, resource: &str) -> u64 {
        let limits =
            self.spec.containers.iter().filter_map(|container| container.resources.limits.get(resource));
        limits.map(|text| amount(text)).sum()
    }

    /// Returns the name with the namespace.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }
}

fn amount(text: &str) -> u64 {
    text.parse::<Quantity>().ok().and_then(|quantity| quantity.whole()).unwrap_or_default()
}
