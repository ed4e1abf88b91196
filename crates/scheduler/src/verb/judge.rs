//! Whether one node will do for one pod: the same code for filter, prioritize, bind and explain.

use std::borrow::Cow;

use tessera_core::ledger::Position;
use tessera_core::node::NodeState;
use tessera_core::quota::Taken;
use tessera_core::request::PodRequest;
use tessera_core::units::NodeName;
use tessera_wire::node_spec::NodeSpec;

use super::ask::Ask;
use super::memory::Kinds;
use super::reason::Reason;
use crate::state::{NodeRecord, State};

/// A node that will do, as far as its cards are not looked at yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judged<'a> {
    pub(crate) spec: &'a NodeSpec,
    pub(crate) state: &'a NodeState,
}

impl State {
    /// Everything but the cards: whether the node is known, serves the pod's vocabulary, and is within the quota.
    pub(crate) fn judge(&self, name: &NodeName, ask: &Ask<'_>) -> Result<Judged<'_>, Reason> {
        let (spec, position) = self.admit(&name.0, ask)?;
        let state = self.ledger().at(position).ok_or(Reason::UnknownNode)?;
        Ok(Judged { spec, state })
    }

    /// How well the node suits, or why it does not.
    pub(super) fn verdict(&self, name: &str, ask: &Ask<'_>, kinds: &mut Kinds) -> Result<f64, Reason> {
        let (spec, position) = self.admit(name, ask)?;
        Ok(kinds.verdict(self.ledger(), position, spec.unit)?)
    }

    /// Whether the node is known and serves the pod's vocabulary.
    pub(super) fn serving(&self, name: &str, ask: &Ask<'_>) -> Result<(&NodeRecord, Position), Reason> {
        let (record, position) = self.known(name).ok_or(Reason::UnknownNode)?;
        let spec = record.spec.as_ref().map_err(|error| Reason::BadNode(error.clone()))?;
        let position = position.ok_or(Reason::UnknownNode)?;
        if !spec.serves.covers(ask.dialects) && !spec.node.gpus().is_empty() {
            return Err(Reason::NotServed);
        }
        Ok((record, position))
    }

    fn admit(&self, name: &str, ask: &Ask<'_>) -> Result<(&NodeSpec, Position), Reason> {
        let (record, position) = self.serving(name, ask)?;
        let spec = record.spec.as_ref().map_err(|error| Reason::BadNode(error.clone()))?;
        let (quota, accounts) = self.quota();
        if ask.wants_gpu() && quota.namespaces.contains_key(ask.namespace) {
            let more = Taken::at_most(ask.request(spec.unit), &spec.node);
            quota.allows(ask.namespace, accounts, &record.place, more)?;
        }
        Ok((spec, position))
    }
}

/// The request with no more CPU and memory than the node has left by our book. Whether those suffice is
/// kube-scheduler's to say, which has newer news of pods without cards; we only weigh them.
pub(crate) fn weigh<'r>(node: &NodeState, request: &'r PodRequest) -> Cow<'r, PodRequest> {
    let (cpu, memory) = (node.cpu_left(), node.memory_left());
    if request.cpu <= cpu && request.memory <= memory {
        return Cow::Borrowed(request);
    }
    let (cpu, memory) = (request.cpu.min(cpu), request.memory.min(memory));
    Cow::Owned(PodRequest { cpu, memory, ..request.clone() })
}
