//! The placement policy of a pod and the forecast that policy `tessera` uses.

use std::sync::Arc;

use tessera_core::forecast::{Forecast, FreeCapacity};
use tessera_core::node::NodeState;
use tessera_core::placement::Policy;
use tessera_core::workload::Workload;
use tessera_wire::tessera::parsed_pod::PolicyResolver;

use super::State;

/// The policy of pods without the annotation `tessera.dev/policy`.
#[derive(Clone, Debug)]
pub struct DefaultPolicy(pub Policy);

impl Default for DefaultPolicy {
    fn default() -> Self {
        Self(Policy::Tessera(Arc::default()))
    }
}

impl PolicyResolver for State {
    fn policy(&self, wished: Option<Policy>) -> Policy {
        Self::policy(self, wished)
    }
}

impl State {
    /// Returns the requested policy, or the default one, with the current forecast or table.
    pub(crate) fn policy(&self, wished: Option<Policy>) -> Policy {
        match wished.unwrap_or_else(|| self.settings.policy.0.clone()) {
            Policy::Tessera(_) => Policy::Tessera(Arc::clone(&self.forecast)),
            Policy::Static(_) => Policy::Static(Arc::clone(&self.table)),
            other => other,
        }
    }

    /// Returns the expected workload, learned from the pods seen so far.
    pub(crate) fn workload(&self) -> Workload {
        self.learner.workload()
    }

    /// Returns the free capacity if a new forecast is due. The next steps are [`State::begin_forecast`] and
    /// [`State::adopt_forecast`]. The long computation in between does not need the state.
    #[must_use]
    pub fn free_capacity_if_due(&self) -> Option<FreeCapacity> {
        let capacity: FreeCapacity = self.ledger().nodes().collect();
        let due = !capacity.is_empty() && self.learner.is_due(capacity.summary());
        due.then_some(capacity)
    }

    /// Returns the workload for a new forecast. Pods that arrive from now on count for the next one.
    pub fn begin_forecast(&mut self, capacity: &FreeCapacity) -> Workload {
        let with_gpus = self.ledger().nodes().map(NodeState::node).filter(|node| !node.gpus().is_empty());
        let assumed = Workload::guess(with_gpus);
        self.learner.assume(assumed);
        self.learner.begin_forecast(capacity.summary())
    }

    /// Replaces the forecast.
    pub fn adopt_forecast(&mut self, forecast: Arc<Forecast>) {
        self.forecast = forecast;
    }
}
