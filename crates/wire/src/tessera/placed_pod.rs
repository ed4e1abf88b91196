//! A pod on a node as the core's view of the cluster takes it.

use std::collections::BTreeMap;

use tessera_core::cluster_view::{PlacedPod, PodGpus};
use tessera_core::node::Node;
use tessera_core::units::{NodeName, PodUid};

use super::grant;
use crate::foreign::dialect::MemoryUnit;
use crate::foreign::objects::{Metadata, Pod, PodSpec};

/// Returns whether all containers of a pod have ended. Such a pod holds nothing, though its object
/// may stay for days.
#[must_use]
pub fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase.as_str(), "Succeeded" | "Failed")
}

/// Returns what a pod holds of its node, or `None` for a pod that has ended or has no node.
///
/// `node` is the node of the pod where it is known; `unit` is the unit in which that node counts
/// `aliyun.com/gpu-mem`.
#[must_use]
pub fn placed_pod(pod: &Pod, node: Option<&Node>, unit: MemoryUnit) -> Option<PlacedPod> {
    if has_ended(pod) || pod.spec.node_name.is_empty() {
        return None;
    }
    let Metadata { uid, namespace, annotations, .. } = &pod.metadata;
    let (uid, on) = (PodUid(uid.clone()), NodeName(pod.spec.node_name.clone()));
    Some(PodParts { uid, namespace, node: on, spec: &pod.spec, annotations }.placed(node, unit))
}

/// The parts of a pod object that say what the pod holds of its node, for callers that keep no whole
/// objects.
#[derive(Clone, Debug)]
pub struct PodParts<'a> {
    /// The UID of the pod.
    pub uid: PodUid,
    /// The namespace of the pod.
    pub namespace: &'a str,
    /// The node of the pod.
    pub node: NodeName,
    /// The containers of the pod.
    pub spec: &'a PodSpec,
    /// The annotations of the pod; those with its grant suffice.
    pub annotations: &'a BTreeMap<String, String>,
}

impl PodParts<'_> {
    /// Returns what the pod holds of its node, with the arguments of [`placed_pod`].
    #[must_use]
    pub fn placed(self, node: Option<&Node>, unit: MemoryUnit) -> PlacedPod {
        let Self { uid, namespace, node: on, spec, annotations } = self;
        let (cpu, memory) = spec.host_needs();
        let gpus = if spec.asks_for_gpus() {
            let granted = node.and_then(|node| grant::complete(spec, annotations, node, unit));
            let unknown = || PodGpus::Unknown(spec.request(unit).unwrap_or_default());
            granted.map_or_else(unknown, PodGpus::Granted)
        } else {
            PodGpus::NotRequested
        };
        PlacedPod { uid, namespace: namespace.to_owned(), node: on, cpu, memory, gpus }
    }
}

#[cfg(test)]
mod tests {
    use tessera_core::gpu::Gpu;
    use tessera_core::topology::Topology;
    use tessera_core::units::{GpuIndex, MiB, MilliCpu};

    use super::*;

    fn read(pod: serde_json::Value) -> Option<PlacedPod> {
        let gpu = Gpu::new(GpuIndex(0), "GPU-0".into(), "T4".into(), MiB(15_360));
        let node =
            Node::new("n".into(), vec![gpu], Topology::unknown(1), MilliCpu(8000), MiB(32_768)).unwrap();
        placed_pod(&serde_json::from_value(pod).unwrap(), Some(&node), MemoryUnit::GiB)
    }

    fn pod(resource: &str, annotations: serde_json::Value, phase: &str) -> serde_json::Value {
        serde_json::json!({
            "metadata": {"name": "p", "namespace": "team", "uid": "u", "annotations": annotations},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "resources": {"limits": {resource: "1"}}}]},
            "status": {"phase": phase},
        })
    }

    #[test]
    fn knows_granted_and_unknown_gpus_apart() {
        let plain = read(pod("cpu", serde_json::json!({}), "Running")).unwrap();
        assert_eq!((plain.gpus, plain.cpu), (PodGpus::NotRequested, MilliCpu(1000)));
        let bypassed = read(pod("nvidia.com/gpu", serde_json::json!({}), "Running")).unwrap();
        assert!(matches!(bypassed.gpus, PodGpus::Unknown(request) if request.wants_gpu()));
        let annotations =
            serde_json::json!({"tessera.dev/grant": r#"{"c":[{"uuid":"GPU-0","index":0,"cores":100}]}"#});
        let granted = read(pod("nvidia.com/gpu", annotations, "Running")).unwrap();
        assert!(matches!(granted.gpus, PodGpus::Granted(containers) if containers.len() == 1));
    }

    #[test]
    fn a_pod_that_has_ended_or_waits_holds_nothing() {
        assert_eq!(read(pod("nvidia.com/gpu", serde_json::json!({}), "Succeeded")), None);
        let mut waiting = pod("nvidia.com/gpu", serde_json::json!({}), "Pending");
        waiting["spec"]["nodeName"] = "".into();
        assert_eq!(read(waiting), None);
    }
}
