//! The objects that scenarios create.

use k8s_openapi::{
    api::core::v1::{Node, NodeCondition, NodeStatus, Pod, PodSpec, ResourceRequirements},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::api::ObjectMeta;

use super::IMAGE;

/// Name of the only container of our pods.
pub(crate) const CONTAINER: &str = "main";

/// Returns a pod that runs a line of shell and requests these resources.
pub(crate) fn pod(name: &str, script: &str, resources: &[(&str, &str)]) -> Pod {
    let quantities = || {
        let pairs =
            resources.iter().map(|(name, amount)| ((*name).to_owned(), Quantity((*amount).to_owned())));
        Some(pairs.collect())
    };
    let container = k8s_openapi::api::core::v1::Container {
        name: CONTAINER.into(),
        image: Some(IMAGE.into()),
        image_pull_policy: Some("Never".into()),
        command: Some(["sh", "-c", script].map(str::to_owned).to_vec()),
        resources: Some(ResourceRequirements {
            limits: quantities(),
            requests: quantities(),
            ..ResourceRequirements::default()
        }),
        ..k8s_openapi::api::core::v1::Container::default()
    };
    Pod {
        metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
        spec: Some(PodSpec {
            containers: vec![container],
            restart_policy: Some("Never".into()),
            termination_grace_period_seconds: Some(1),
            ..PodSpec::default()
        }),
        status: None,
    }
}

/// Returns a ready node with room for many pods.
pub(crate) fn virtual_node(name: &str) -> Node {
    let capacity = [("cpu", "64"), ("memory", "256Gi"), ("pods", "110")];
    let capacity = capacity.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())));
    let ready = NodeCondition { type_: "Ready".into(), status: "True".into(), ..NodeCondition::default() };
    Node {
        metadata: ObjectMeta {
            name: Some(name.into()),
            labels: Some([("kubernetes.io/hostname".to_owned(), name.to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: None,
        status: Some(NodeStatus {
            capacity: Some(capacity.clone().into()),
            allocatable: Some(capacity.into()),
            conditions: Some(vec![ready]),
            ..NodeStatus::default()
        }),
    }
}
