//! The parts of a pod on a node that constraints of other pods refer to.

use std::collections::BTreeMap;

use tessera_core::constraint::other_pods::{HostPort, OtherPod, PodTerm};
use tessera_core::units::NodeName;
use tessera_wire::foreign::objects::Pod;

/// A pod on a node, reduced to its labels, anti-affinity and ports.
#[derive(Debug)]
pub(crate) struct KnownPod {
    node: NodeName,
    namespace: String,
    labels: BTreeMap<String, String>,
    excluded: Box<[PodTerm]>,
    ports: Vec<HostPort>,
}

impl KnownPod {
    pub(crate) fn new(pod: &Pod) -> Self {
        let Pod { metadata, spec, .. } = pod;
        let OtherPod { ports, .. } = spec.as_other_pod(&metadata.namespace, &metadata.labels);
        Self {
            node: NodeName(spec.node_name.clone()),
            namespace: metadata.namespace.clone(),
            labels: metadata.labels.clone(),
            excluded: spec.affinity.excluded.clone(),
            ports: ports.into_iter().cloned().collect(),
        }
    }

    /// Returns the node and the pod as the constraints of other pods meet it.
    pub(crate) fn as_other_pod(&self) -> (&NodeName, OtherPod<'_>) {
        let Self { node, namespace, labels, excluded, ports } = self;
        (node, OtherPod { namespace, labels, excluded, ports: ports.iter().collect() })
    }
}
