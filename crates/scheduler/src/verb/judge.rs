//! Whether one node will do for one pod: the same code for filter, prioritize, bind and explain.

use std::borrow::Cow;

use tessera_core::node::NodeState;
use tessera_core::placement;
use tessera_core::quota::Place;
use tessera_core::request::PodRequest;
use tessera_core::units::NodeName;
use tessera_core::verdict::{self, Limits, Offer, Question};
use tessera_wire::node_spec::NodeSpec;

use super::ask::Ask;
use super::reason::Reason;
use crate::state::State;

/// A node that will do, as far as its cards are not looked at yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Judged<'a> {
    pub(crate) spec: &'a NodeSpec,
    pub(crate) state: &'a NodeState,
    place: &'a Place,
}

impl State {
    /// Everything but the cards: whether the node is known, serves the pod's vocabulary, and is within the quota.
    pub(crate) fn judge(&self, name: &NodeName, ask: &Ask<'_>) -> Result<Judged<'_>, Reason> {
        let (record, state) = self.node(name).ok_or(Reason::UnknownNode)?;
        let spec = record.spec.as_ref().map_err(|error| Reason::BadNode(error.clone()))?;
        let state = state.ok_or(Reason::UnknownNode)?;
        let judged = Judged { spec, state, place: &record.place };
        let question =
            Question { namespace: ask.namespace, request: &ask.request(spec.unit), policy: &ask.policy };
        verdict::admit(judged.offer(ask), question, self.limits())?;
        Ok(judged)
    }

    /// Who may take how much.
    pub(crate) fn limits(&self) -> Limits<'_> {
        let (quota, accounts) = self.quota();
        Limits { quota, accounts }
    }

    /// Whether the pod fits on the node.
    pub(crate) fn fits(&self, name: &NodeName, ask: &Ask<'_>) -> Result<(), Reason> {
        let judged = self.judge(name, ask)?;
        let asked = ask.request(judged.spec.unit);
        let request = judged.weigh(&asked);
        Ok(placement::filter(judged.state, &request, &ask.policy)?)
    }

    /// How well the node suits, where it fits.
    pub(crate) fn score(&self, name: &NodeName, ask: &Ask<'_>) -> Result<f64, Reason> {
        let judged = self.judge(name, ask)?;
        let asked = ask.request(judged.spec.unit);
        let request = judged.weigh(&asked);
        Ok(placement::score(judged.state, &request, &ask.policy)?)
    }
}

impl<'a> Judged<'a> {
    /// The node as the pod meets it.
    pub(crate) fn offer(&self, ask: &Ask<'_>) -> Offer<'a> {
        Offer { state: self.state, serves: self.spec.serves.covers(ask.dialects), place: self.place }
    }

    /// The request as this node weighs it.
    pub(crate) fn weigh<'r>(&self, request: &'r PodRequest) -> Cow<'r, PodRequest> {
        verdict::weigh(self.state, request)
    }
}
