//! Explains for every node and GPU why it can or cannot take a pod. Filter decides with the same code.

use tessera_core::units::NodeName;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};

use crate::state::{GpuPod, State, StateAccess};

pub use tessera_wire::tessera::explanation::{ContainerGpus, GpuReason, NodeExplanation, PodExplanation};

/// Explains a pod that the watch has shown. Returns `None` if no GPU pod of this name is known.
pub fn explain(
    access: &impl StateAccess,
    namespace: &str,
    name: &str,
) -> Option<Result<PodExplanation, BadPodObject>> {
    let matches = |pod: &GpuPod| pod.namespace == namespace && pod.name == name;
    let find = |state: &State| state.gpu_pods().find(|(_, pod)| matches(pod)).map(|(_, pod)| pod.clone());
    let pod = access.with_state(find)?;
    let parsed =
        access.with_state(|state| ParsedPod::new(state, &pod.namespace, &pod.spec, &pod.annotations));
    let node = pod.node.as_ref().map(ToString::to_string);
    Some(parsed.map(|parsed| explain_on_all_nodes(access, &parsed, name, node)))
}

/// Explains a pod that need not exist.
pub fn what_if(access: &impl StateAccess, pod: &Pod) -> Result<PodExplanation, BadPodObject> {
    let parsed = access.with_state(|state| ParsedPod::of(state, pod))?;
    Ok(explain_on_all_nodes(access, &parsed, &pod.metadata.name, None))
}

fn explain_on_all_nodes(
    access: &impl StateAccess,
    pod: &ParsedPod<'_>,
    name: &str,
    placed_on: Option<String>,
) -> PodExplanation {
    let mut nodes = Vec::new();
    access.for_each_node(|state, node| nodes.push(state.explain_on(node, pod)));
    PodExplanation::new(pod.namespace, name, placed_on, pod.policy.to_string(), nodes)
}

impl State {
    /// Explains whether one node can take the pod.
    pub(crate) fn explain_on(&self, name: &NodeName, pod: &ParsedPod<'_>) -> NodeExplanation {
        let node = match self.readable_node(&name.0) {
            Ok(node) => node,
            Err(reason) => return NodeExplanation::rejected(&name.0, &reason.into()),
        };
        let request = pod.request(node.spec.unit);
        NodeExplanation::new(&name.0, &request, self.admission(&node, pod, &request).verdict())
    }
}
