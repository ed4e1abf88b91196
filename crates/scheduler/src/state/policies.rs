//! Which policy a pod is placed by, and what that policy has learned.

use std::sync::Arc;

use tessera_core::forecast::{Forecast, FreeCapacity, Learner};
use tessera_core::node::NodeState;
use tessera_core::placement::Policy;
use tessera_core::workload::Workload;

use super::State;

/// The policy of pods that name none.
#[derive(Clone, Debug)]
pub struct DefaultPolicy(pub Policy);

impl Default for DefaultPolicy {
    fn default() -> Self {
        Self(Policy::Tessera(Arc::default()))
    }
}

impl State {
    /// The policy of this name, with what the cluster has taught it.
    pub(crate) fn policy(&self, wished: Option<Policy>) -> Policy {
        match wished.unwrap_or_else(|| self.settings.policy.0.clone()) {
            Policy::Tessera(_) => Policy::Tessera(Arc::clone(&self.forecast)),
            Policy::Static(_) => Policy::Static(Arc::clone(&self.table)),
            other => other,
        }
    }

    /// The pods that are expected, by those seen.
    pub(crate) fn workload(&self) -> &Workload {
        self.learner.workload()
    }

    /// What a new forecast is to be made from, where one is due. [`State::begin_forecast`] and [`State::adopt`] are the next steps; the
    /// long one, making it, needs nothing of the state and so keeps nobody waiting.
    #[must_use]
    pub fn free_capacity_if_due(&self) -> Option<FreeCapacity> {
        let remains: FreeCapacity = self.ledger.nodes().collect();
        let due = !remains.is_empty() && self.learner.is_due(remains.gpus_left(), remains.all_gpus());
        due.then_some(remains)
    }

    /// The pods to expect, for a forecast from what is left. Pods that arrive while it is made are news to it.
    pub fn begin_forecast(&mut self, remains: &FreeCapacity) -> Workload {
        if !self.learner.has_seen_any() {
            let with_gpus = self.ledger.nodes().map(NodeState::node).filter(|node| !node.gpus().is_empty());
            self.learner = Learner::new(Workload::guess(with_gpus));
        }
        self.learner.begin_forecast(remains).clone()
    }

    /// Goes by this forecast from now on.
    pub fn adopt_forecast(&mut self, forecast: Arc<Forecast>) {
        self.forecast = forecast;
    }
}
