//! Whether one node will do for one pod: the same code for filter, prioritize, bind and explain.

use tessera_core::ledger::Position;
use tessera_core::node::NodeState;
use tessera_core::quota::{Place, Taken};
use tessera_core::units::NodeName;
use tessera_core::verdict::{Limits, Offer};
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
    place: &'a Place,
}

impl State {
    /// Everything but the cards: whether the node is known, serves the pod's vocabulary, and is within the quota.
    pub(crate) fn judge(&self, name: &NodeName, ask: &Ask<'_>) -> Result<Judged<'_>, Reason> {
        let (record, spec, position) = self.admit(&name.0, ask)?;
        let state = self.ledger().at(position).ok_or(Reason::UnknownNode)?;
        Ok(Judged { spec, state, place: &record.place })
    }

    /// How well the node suits, or why it does not.
    pub(super) fn verdict(&self, name: &str, ask: &Ask<'_>, kinds: &mut Kinds<'_>) -> Result<f64, Reason> {
        let (_, spec, position) = self.admit(name, ask)?;
        Ok(kinds.verdict(self, ask, position, spec.unit)?)
    }

    /// Who may take how much.
    pub(crate) fn limits(&self) -> Limits<'_> {
        let (quota, accounts) = self.quota();
        Limits { quota, accounts }
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

    fn admit(&self, name: &str, ask: &Ask<'_>) -> Result<(&NodeRecord, &NodeSpec, Position), Reason> {
        let (record, position) = self.serving(name, ask)?;
        let spec = record.spec.as_ref().map_err(|error| Reason::BadNode(error.clone()))?;
        let (quota, accounts) = self.quota();
        if ask.wants_gpu() && quota.namespaces.contains_key(ask.namespace) {
            let more = Taken::at_most(&ask.request(spec.unit), &spec.node);
            quota.allows(ask.namespace, accounts, &record.place, more)?;
        }
        Ok((record, spec, position))
    }
}

impl<'a> Judged<'a> {
    /// The node as the pod meets it.
    pub(crate) fn offer(&self, ask: &Ask<'_>) -> Offer<'a> {
        Offer { state: self.state, serves: self.spec.serves.covers(ask.dialects), place: self.place }
    }
}
