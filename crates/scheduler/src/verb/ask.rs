//! A pod's question, by the policies this scheduler knows.

use tessera_core::placement::Policy;
use tessera_wire::ask::Policies;

use crate::state::State;

pub use tessera_wire::ask::{Ask, BadAsk};

impl Policies for State {
    fn policy(&self, wished: Option<Policy>) -> Policy {
        Self::policy(self, wished)
    }
}
