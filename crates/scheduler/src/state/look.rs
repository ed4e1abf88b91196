//! Looking at the state without keeping others from it: a bind must not wait for a whole view.

use tessera_core::units::NodeName;

use super::State;

/// Nodes looked at before others may change the state.
const AT_A_TIME: usize = 64;

/// Lends the state, for a moment each time. What is seen in two looks need not belong together.
pub trait Look {
    /// One look.
    fn look<T>(&self, at: impl FnOnce(&State) -> T) -> T;

    /// Looks at every node, some at a time, by name. Those that go meanwhile are left out.
    fn each_node(&self, mut at: impl FnMut(&State, &NodeName)) {
        let names: Vec<NodeName> =
            self.look(|state| state.nodes().into_iter().map(|(name, _)| name.clone()).collect());
        for some in names.chunks(AT_A_TIME) {
            self.look(|state| some.iter().for_each(|name| at(state, name)));
        }
    }
}

/// A state that nobody else uses.
impl Look for State {
    fn look<T>(&self, at: impl FnOnce(&Self) -> T) -> T {
        at(self)
    }
}
