//! Which policy a pod is placed by, and what that policy has learned.

use std::sync::Arc;

use tessera_core::forecast::{Forecast, Learner};
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

    /// A new forecast where one is due, and the learner that made it. Takes milliseconds on a large cluster, which is why
    /// it is not done where somebody waits.
    #[must_use]
    pub fn forecast(&self) -> Option<(Learner, Arc<Forecast>)> {
        let nodes: Vec<&NodeState> =
            self.ledger.nodes().filter(|state| !state.node().gpus().is_empty()).collect();
        let idle = nodes.iter().map(|state| state.cards_left()).sum();
        #[expect(clippy::cast_precision_loss, reason = "no cluster has 2^52 cards")]
        let all = nodes.iter().map(|state| state.node().gpus().len()).sum::<usize>() as f64;
        if nodes.is_empty() || !self.learner.is_due(idle, all) {
            return None;
        }
        let mut learner = self.learner.clone();
        if !learner.has_seen_any() {
            learner = Learner::new(Workload::guess(nodes.iter().map(|state| state.node())));
        }
        let forecast = learner.forecast(&nodes);
        Some((learner, Arc::new(forecast)))
    }

    /// Goes by this forecast from now on.
    pub fn adopt(&mut self, (learner, forecast): (Learner, Arc<Forecast>)) {
        self.learner = learner;
        self.forecast = forecast;
    }
}
