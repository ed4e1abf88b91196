//! Finds nodes by name for calls that name thousands of them.
//!
//! kube-scheduler names the same nodes in the same order for every pod, or a subset of them. So the node that
//! followed last time is a good guess for the next one. Comparing one name is many times cheaper than a
//! lookup in the map, because it reads memory in order.

use tessera_core::ledger::{Ledger, NodePosition};

/// Nodes that kube-scheduler may have left out since the last call before the map is used.
const MAX_SKIPPED: usize = 4;

/// The order in which a call named the nodes the last time.
#[derive(Debug, Default)]
pub(super) struct NodeHint {
    /// The position that followed, by the position of a node.
    next: Vec<NodePosition>,
    last: NodePosition,
}

impl NodeHint {
    /// Returns the position of the node with this name.
    pub(super) fn find(&mut self, ledger: &Ledger, name: &str) -> Option<NodePosition> {
        let mut guess = self.last;
        for _ in 0..=MAX_SKIPPED {
            guess = self.next.get(guess.index()).copied().unwrap_or_default();
            if ledger.is_at(guess, name) {
                self.last = guess;
                return Some(guess);
            }
        }
        let found = ledger.position(name)?;
        let last = self.last.index();
        if last >= self.next.len() {
            self.next.resize(ledger.positions().max(last + 1), NodePosition::default());
        }
        self.next[last] = found;
        self.last = found;
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_core::node::Node;
    use tessera_core::topology::Topology;
    use tessera_core::units::{MiB, MilliCpu, NodeName};

    use super::*;

    fn node(number: u8) -> Node {
        let name = NodeName(number.to_string());
        Node::new(name, Vec::new(), Topology::unknown(0), MilliCpu::ZERO, MiB::ZERO).unwrap()
    }

    proptest! {
        /// The hint finds what the ledger finds, after any sequence of lookups, additions and removals.
        #[test]
        fn finds_the_same_position_as_the_ledger(steps in prop::collection::vec((0..30u8, 0..4u8), 1..200)) {
            let (mut ledger, mut hint) = (Ledger::default(), NodeHint::default());
            for (number, step) in steps {
                match step {
                    0 => drop(ledger.set_node(node(number))),
                    1 => drop(ledger.remove_node(&NodeName(number.to_string()))),
                    _ => {
                        for number in number..30 {
                            let name = number.to_string();
                            prop_assert_eq!(hint.find(&ledger, &name), ledger.position(&name));
                        }
                    }
                }
            }
        }
    }
}
