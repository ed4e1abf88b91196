//! The parts of nodes and pods that matter for a migration.

use std::collections::BTreeMap;

use anyhow::Result;
use tessera_core::request::peak;
use tessera_wire::foreign::objects;
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

/// A node object as the API server has it.
#[derive(Debug)]
pub(super) struct Node(pub(super) objects::Node);

/// A pod with the images of its containers, also of init containers.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) object: objects::Pod,
    images: Vec<String>,
}

impl Objects {
    /// Adds a node or a pod. Other objects are ignored.
    pub(super) fn add(&mut self, object: serde_json::Value) -> Result<()> {
        match object["kind"].as_str() {
            Some("Node") => self.nodes.push(Node(serde_json::from_value(object)?)),
            Some("Pod") => {
                let spec = &object["spec"];
                let containers = ["initContainers", "containers"].map(|field| spec[field].as_array());
                let images = containers.into_iter().flatten().flatten();
                let images = images.filter_map(|container| container["image"].as_str().map(str::to_owned));
                self.pods.push(Pod { images: images.collect(), object: serde_json::from_value(object)? });
            }
            _ => {}
        }
        Ok(())
    }
}

impl Cluster {
    pub(super) fn new(objects: Objects) -> Self {
        let has_ended = |pod: &Pod| matches!(pod.object.status.phase.as_str(), "Succeeded" | "Failed");
        let pods = objects.pods.into_iter().filter(|pod| !has_ended(pod)).collect();
        Self { nodes: objects.nodes, pods }
    }

    /// Returns the pods that are bound to a node.
    pub(super) fn pods_of<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Pod> {
        self.pods.iter().filter(|pod| pod.object.spec.node_name == node.name())
    }
}

impl Node {
    /// Returns the name.
    pub(super) fn name(&self) -> &str {
        &self.0.metadata.name
    }

    /// Returns the amount of a resource that the node offers.
    pub(super) fn capacity(&self, resource: &str) -> u64 {
        let status = &self.0.status;
        let found = status.capacity.get(resource).or_else(|| status.allocatable.get(resource));
        found.map_or(0, |text| amount(&text.0))
    }

    /// Returns the value of a label, or an empty text.
    pub(super) fn label(&self, label: &str) -> &str {
        self.0.metadata.labels.get(label).map_or("", String::as_str)
    }

    /// Returns the value of a label as a number.
    pub(super) fn number(&self, label: &str) -> Option<u64> {
        self.label(label).parse().ok()
    }
}

impl Pod {
    /// Returns the largest amount of a resource that the pod holds at a time. Init containers run before the others.
    pub(super) fn requests(&self, resource: &str) -> u64 {
        let containers: Vec<_> = self.object.spec.containers_with_roles().collect();
        let need = |(container, _): &(&objects::Container, _)| {
            let resources = &container.resources;
            let found = resources.limits.get(resource).or_else(|| resources.requests.get(resource));
            found.map_or(0, |text| amount(&text.0))
        };
        peak(&containers, |(_, role)| *role, need, u64::saturating_add, u64::max)
    }

    /// Returns the names of the extended resources that the pod requests.
    pub(super) fn resources(&self) -> impl Iterator<Item = &str> {
        let containers = self.object.spec.containers_with_roles();
        containers.flat_map(|(container, _)| container.resources.extended())
    }

    /// Returns the names of the containers' images.
    pub(super) fn images(&self) -> impl Iterator<Item = &str> {
        self.images.iter().map(String::as_str)
    }

    /// Returns the name with the namespace.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.object.metadata.namespace, self.object.metadata.name)
    }

    /// Returns the annotations.
    pub(super) fn annotations(&self) -> &BTreeMap<String, String> {
        &self.object.metadata.annotations
    }
}

fn amount(text: &str) -> u64 {
    text.parse::<Quantity>().ok().and_then(Quantity::whole).unwrap_or_default()
}
