//! The state's side of [`Admission`]: finds the node and the quota that apply to a pod.

use std::collections::HashSet;

use tessera_core::admission::{
    Admission, NodeMismatch, NodeOffer, PodQuery, QuotaState, RejectReason, Service,
};
use tessera_core::ledger::NodePosition;
use tessera_core::request::PodRequest;
use tessera_wire::tessera::parsed_pod::{ParsedPod, RequestShape};

use super::verdict_cache::{ShapeVerdicts, VerdictCache};
use crate::state::{ReadableNode, State};

impl State {
    /// Returns the node with this name, or the reason why it takes no pods.
    pub(crate) fn readable_node(&self, name: &str) -> Result<ReadableNode<'_>, RejectReason> {
        let position = self.ledger().position(name);
        let node = position.and_then(|position| self.readable_at(position));
        node.ok_or_else(|| RejectReason::of_missing_node(self.unreadable(name)))
    }

    /// Returns the admission of `pod` to `node`. `request` is the pod's request in the node's memory unit.
    pub(crate) fn admission<'a>(
        &'a self,
        node: &ReadableNode<'a>,
        pod: &'a ParsedPod<'_>,
        request: &'a PodRequest,
    ) -> Admission<'a> {
        Admission {
            offer: node.offer(self, pod),
            query: PodQuery { namespace: pod.namespace, request, policy: &pod.policy },
            quota: self.quota_state().limiting(pod.namespace),
        }
    }

    /// Starts to score nodes for `pod` with the verdicts of `cache`, which are checked out until
    /// [`NodeScorer::finish`].
    pub(super) fn node_scorer<'a>(&'a self, pod: &'a ParsedPod<'_>, cache: &VerdictCache) -> NodeScorer<'a> {
        let verdicts = cache.check_out(self, pod);
        NodeScorer { state: self, pod, quota: self.quota_state().limiting(pod.namespace), verdicts }
    }
}

impl<'a> ReadableNode<'a> {
    /// Returns whether the node serves the resources of a shape.
    pub(super) fn service(&self, state: &State, shape: &RequestShape) -> Service {
        let served = state.served_dialects(self.spec.dialects);
        served.service(shape.dialects, self.spec.is_agent_unavailable)
    }

    /// Returns the node as `pod` meets it.
    fn offer(&self, state: &State, pod: &ParsedPod<'_>) -> NodeOffer<'a> {
        NodeOffer {
            state: self.state,
            service: self.service(state, &pod.shape),
            quota_labels: self.quota_labels,
        }
    }
}

/// Scores many nodes for one pod with cached verdicts.
#[derive(Debug)]
pub(super) struct NodeScorer<'a> {
    state: &'a State,
    pod: &'a ParsedPod<'a>,
    /// The quotas, if one limits the pod's namespace.
    quota: Option<QuotaState<'a>>,
    verdicts: ShapeVerdicts,
}

impl NodeScorer<'_> {
    /// Returns how well the node suits the pod, or why the node cannot take it.
    pub(super) fn score(&mut self, name: &str) -> Result<f64, RejectReason> {
        let Some(position) = self.state.ledger().position(name) else {
            return Err(RejectReason::of_missing_node(self.state.unreadable(name)));
        };
        let cached = self.verdicts.verdict(self.state, position);
        if self.quota.is_some() { self.apply_quota(position, cached) } else { Ok(cached?) }
    }

    fn apply_quota(
        &self,
        position: NodePosition,
        cached: Result<f64, NodeMismatch>,
    ) -> Result<f64, RejectReason> {
        let node = self.state.readable_at(position).ok_or(RejectReason::UnknownNode)?;
        let request = self.pod.request(node.spec.unit);
        let query = PodQuery { namespace: self.pod.namespace, request: &request, policy: &self.pod.policy };
        Admission { offer: node.offer(self.state, self.pod), query, quota: self.quota }.score_from(cached)
    }

    /// Returns whether a node fits that is not among these, by its GPUs, CPU and memory.
    pub(super) fn fits_elsewhere<'n>(&mut self, offered: impl Iterator<Item = &'n str>) -> bool {
        let offered: HashSet<&str> = offered.collect();
        let ledger = self.state.ledger();
        ledger.positions_in(0..ledger.positions()).any(|position| {
            let Some(node) = self.state.readable_at(position) else { return false };
            let request = self.pod.request(node.spec.unit);
            let has_room = node.state.cpu_left() >= request.cpu && node.state.memory_left() >= request.memory;
            if !has_room || offered.contains(node.state.node().name.0.as_str()) {
                return false;
            }
            let cached = self.verdicts.verdict(self.state, position);
            cached.is_ok() && self.apply_quota(position, cached).is_ok()
        })
    }

    /// Returns the verdicts to the cache.
    pub(super) fn finish(self, cache: &VerdictCache) {
        cache.check_in(self.verdicts);
    }
}
