//! For every node and GPU, what stands in the way of a pod: from the same code that filters.

use tessera_core::admission::{self, PodQuery};
use tessera_core::units::NodeName;
use tessera_wire::foreign::objects::Pod;

use super::ask::{BadPodObject, ParsedPod};
use crate::state::{GpuPod, State, StateAccess};

pub use tessera_wire::tessera::explanation::{ContainerGpus, GpuReason, NodeExplanation, PodExplanation};

/// Explains a pod the watch has shown; `None` for pods nobody knows, or that ask for no GPU.
pub fn explain(
    access: &impl StateAccess,
    namespace: &str,
    name: &str,
) -> Option<Result<PodExplanation, BadPodObject>> {
    let is_it = |pod: &GpuPod| pod.namespace == namespace && pod.name == name;
    let found = |state: &State| state.gpu_pods().find(|(_, pod)| is_it(pod)).map(|(_, pod)| pod.clone());
    let pod = access.with_state(found)?;
    let ask = access.with_state(|state| ParsedPod::new(state, &pod.namespace, &pod.spec, &pod.annotations));
    let node = pod.node.as_ref().map(ToString::to_string);
    Some(ask.map(|ask| views(access, &ask, name, node)))
}

/// Explains a pod that need not exist.
pub fn what_if(access: &impl StateAccess, pod: &Pod) -> Result<PodExplanation, BadPodObject> {
    let ask = access.with_state(|state| ParsedPod::of(state, pod))?;
    Ok(views(access, &ask, &pod.metadata.name, None))
}

fn views(
    access: &impl StateAccess,
    ask: &ParsedPod<'_>,
    pod: &str,
    placed_on: Option<String>,
) -> PodExplanation {
    let mut nodes = Vec::new();
    access.for_each_node(|state, name| nodes.push(state.view(name, ask)));
    PodExplanation::new(ask.namespace, pod, placed_on, ask.policy.to_string(), nodes)
}

impl State {
    /// What one node says.
    pub(crate) fn view(&self, name: &NodeName, ask: &ParsedPod<'_>) -> NodeExplanation {
        let judged = match self.judge(name, ask) {
            Ok(judged) => judged,
            Err(reason) => return NodeExplanation::rejected(&name.0, &reason.into()),
        };
        let request = ask.request(judged.spec.unit);
        let question = PodQuery { namespace: ask.namespace, request: &request, policy: &ask.policy };
        NodeExplanation::new(&name.0, &request, admission::judge(judged.offer(ask), question, self.limits()))
    }
}
