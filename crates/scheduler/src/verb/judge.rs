//! Whether one node will do for one pod: the same code for filter, prioritize, bind and explain.

use tessera_core::admission::{NodeOffer, QuotaState};
use tessera_core::quota::{GpuAmount, OverQuota};
use tessera_core::units::NodeName;

use super::ask::ParsedPod;
use super::node_hint::NodeHint;
use super::reason::RejectReason;
use super::verdict_cache::{ShapeVerdicts, Unfit, VerdictCache};
use crate::state::{ReadableNode, State};

/// One pod's questions to many nodes, helped by what is remembered.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    state: &'a State,
    ask: &'a ParsedPod<'a>,
    /// Whether the pod's namespace has a quota.
    is_limited: bool,
    kind: ShapeVerdicts,
    hint: NodeHint,
}

impl State {
    /// Everything but the GPUs: whether the node is known, serves the pod's vocabulary, and is within the quota.
    pub(crate) fn judge(
        &self,
        name: &NodeName,
        ask: &ParsedPod<'_>,
    ) -> Result<ReadableNode<'_>, RejectReason> {
        let node = self.serving(&name.0, ask)?;
        self.check_quota(node, ask)?;
        Ok(node)
    }

    /// Who may take how much.
    pub(crate) fn limits(&self) -> QuotaState<'_> {
        let (quota, accounts) = self.quota();
        QuotaState { quota, usage: accounts }
    }

    /// Whether the node is known and serves the pod's vocabulary.
    pub(super) fn serving(&self, name: &str, ask: &ParsedPod<'_>) -> Result<ReadableNode<'_>, RejectReason> {
        let position = self.ledger().position(name).ok_or_else(|| self.unknown(name))?;
        let node = self.readable_at(position).ok_or(RejectReason::UnknownNode)?;
        if node.spec.serves(ask.shape.dialects) { Ok(node) } else { Err(RejectReason::NotServed) }
    }

    /// Why a node is not in the book.
    fn unknown(&self, name: &str) -> RejectReason {
        self.unreadable(name)
            .map_or(RejectReason::UnknownNode, |error| RejectReason::BadNode(error.to_owned()))
    }

    fn check_quota(&self, node: ReadableNode<'_>, ask: &ParsedPod<'_>) -> Result<(), OverQuota> {
        let (quota, accounts) = self.quota();
        if !ask.wants_gpu() || !quota.limits(ask.namespace) {
            return Ok(());
        }
        let more = GpuAmount::upper_bound(&ask.request(node.spec.unit), &node.spec.node);
        quota.allows(ask.namespace, accounts, node.place, more)
    }

    /// Begins to ask nodes. What is remembered is taken out of `memory` until the end.
    pub(super) fn survey<'a>(&'a self, ask: &'a ParsedPod<'_>, memory: &VerdictCache) -> Survey<'a> {
        let (kind, hint) = memory.take(self, ask);
        Survey { state: self, ask, is_limited: self.quota().0.limits(ask.namespace), kind, hint }
    }
}

impl Survey<'_> {
    /// How well the node suits, or why it does not.
    pub(super) fn verdict(&mut self, name: &str) -> Result<f64, RejectReason> {
        let Some(position) = self.hint.find(self.state.ledger(), name) else {
            return Err(self.state.unknown(name));
        };
        let verdict = self.kind.verdict(self.state, position);
        if self.is_limited && verdict != Err(Unfit::NotServed) {
            let node = self.state.readable_at(position).ok_or(RejectReason::UnknownNode)?;
            self.state.check_quota(node, self.ask)?;
        }
        Ok(verdict?)
    }

    /// Puts back what was taken out, and what was learned.
    pub(super) fn end(self, memory: &VerdictCache) {
        memory.put_back(self.kind, self.hint);
    }
}

impl<'a> ReadableNode<'a> {
    /// The node as the pod meets it.
    pub(crate) fn offer(&self, ask: &ParsedPod<'_>) -> NodeOffer<'a> {
        NodeOffer {
            state: self.state,
            serves: self.spec.dialects.covers(ask.shape.dialects),
            quota_labels: self.place,
        }
    }
}
