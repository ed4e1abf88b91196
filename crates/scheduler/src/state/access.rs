//! Read access to the state in short steps, so that a bind never waits for a whole view.

use tessera_core::units::NodeName;

use super::State;

/// Nodes read per step. Writers may take the lock between two steps.
const NODES_PER_STEP: usize = 64;

/// Read access to a [`State`] that may be behind a lock. Two calls may see different states.
pub trait StateAccess {
    /// Calls `read` with the state. A lock is held only during this call.
    fn with_state<T>(&self, read: impl FnOnce(&State) -> T) -> T;

    /// Calls `visit` for every node in the order of names, a few nodes per lock. A node that is removed
    /// meanwhile is still visited by name.
    fn for_each_node(&self, mut visit: impl FnMut(&State, &NodeName)) {
        let names: Vec<NodeName> =
            self.with_state(|state| state.nodes().into_iter().map(|(name, _)| name.clone()).collect());
        for step in names.chunks(NODES_PER_STEP) {
            self.with_state(|state| step.iter().for_each(|name| visit(state, name)));
        }
    }
}

/// A state without a lock.
impl StateAccess for State {
    fn with_state<T>(&self, read: impl FnOnce(&Self) -> T) -> T {
        read(self)
    }
}
