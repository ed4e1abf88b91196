//! A pod's question, by the policies this scheduler knows.

use tessera_core::placement::Policy;
use tessera_wire::tessera::parsed_pod::PolicyResolver;

use crate::state::State;

pub use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};

impl PolicyResolver for State {
    fn policy(&self, wished: Option<Policy>) -> Policy {
        Self::policy(self, wished)
    }
}
