//! Finding nodes by name, thousands in a row.
//!
//! kube-scheduler asks about the same nodes in the same order with every pod, or about some of them. So who was asked about after
//! whom is a good guess, and to compare one name is many times cheaper than to look one up: it goes through memory in order.

use tessera_core::ledger::{Ledger, NodePosition};

/// Nodes that may have been left out since the last time before a name is looked up after all.
const LEFT_OUT: usize = 4;

/// The order in which nodes were last asked about. Starts without any.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// By a node's position, who came after it.
    next: Vec<NodePosition>,
    last: NodePosition,
}

impl Way {
    /// Where the node of this name stands.
    pub(super) fn find(&mut self, ledger: &Ledger, name: &str) -> Option<NodePosition> {
        let mut guess = self.last;
        for _ in 0..=LEFT_OUT {
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
        /// Whatever was asked before, and whoever came and went: the same answer as the book's.
        #[test]
        fn a_guess_never_misleads(steps in prop::collection::vec((0..30u8, 0..4u8), 1..200)) {
            let (mut ledger, mut way) = (Ledger::default(), Way::default());
            for (number, what) in steps {
                match what {
                    0 => drop(ledger.set_node(node(number))),
                    1 => drop(ledger.remove_node(&NodeName(number.to_string()))),
                    _ => {
                        for number in number..30 {
                            let name = number.to_string();
                            prop_assert_eq!(way.find(&ledger, &name), ledger.position(&name));
                        }
                    }
                }
            }
        }
    }
}
