//! For every node and card, what stands in the way of a pod: from the same code that filters.

use tessera_core::units::NodeName;
use tessera_core::verdict::{self, Question};
use tessera_wire::objects::Pod;

use super::ask::{Ask, BadAsk};
use crate::state::{GpuPod, State};

pub use tessera_wire::explanation::{CardView, ContainerView, Explanation, NodeView};

impl State {
    /// Explains a pod the watch has shown; `None` for pods nobody knows, or that ask for no card.
    #[must_use]
    pub fn explain(&self, namespace: &str, name: &str) -> Option<Result<Explanation, BadAsk>> {
        let is_it = |pod: &GpuPod| pod.namespace == namespace && pod.name == name;
        let (_, pod) = self.gpu_pods().find(|(_, pod)| is_it(pod))?;
        Some(Ask::new(self, &pod.namespace, &pod.spec, &pod.annotations).map(|ask| {
            let node = pod.node.as_ref().map(ToString::to_string);
            self.views(&ask, namespace, name, node)
        }))
    }

    /// Explains a pod that need not exist.
    pub fn what_if(&self, pod: &Pod) -> Result<Explanation, BadAsk> {
        let ask = Ask::of(self, pod)?;
        Ok(self.views(&ask, &pod.metadata.namespace, &pod.metadata.name, None))
    }

    fn views(&self, ask: &Ask<'_>, namespace: &str, pod: &str, placed_on: Option<String>) -> Explanation {
        let nodes = self.nodes().into_iter().map(|(name, _)| self.view(name, ask)).collect();
        Explanation::new(namespace, pod, placed_on, ask.policy.to_string(), nodes)
    }

    /// What one node says.
    pub(crate) fn view(&self, name: &NodeName, ask: &Ask<'_>) -> NodeView {
        let judged = match self.judge(name, ask) {
            Ok(judged) => judged,
            Err(reason) => return NodeView::refused(&name.0, &reason.into()),
        };
        let request = ask.request(judged.spec.unit);
        let question = Question { namespace: ask.namespace, request: &request, policy: &ask.policy };
        NodeView::new(&name.0, &request, verdict::judge(judged.offer(ask), question, self.limits()))
    }
}
