//! A cache of scores: a node is scored again for a class of pod only after the node has changed.

use std::collections::HashMap;

use crate::request::PodRequest;

/// The scores of all nodes for each class of pod. A node is identified by its position.
#[derive(Clone, Debug, Default)]
pub struct Scoreboard {
    boards: HashMap<PodRequest, Board>,
    /// The change at which each node last changed.
    changed: Vec<u64>,
    /// The number of changes so far.
    now: u64,
}

#[derive(Clone, Debug)]
struct Board {
    /// The score of each node; `None` where the pod does not fit.
    scores: Vec<Option<f64>>,
    /// The last change that the scores include.
    seen: u64,
}

/// Upper bound for the cached classes of pods. Beyond it the cache is cleared, which costs one
/// scoring of every node per class.
const MAX_CLASSES: usize = 1024;

impl Scoreboard {
    /// Creates an empty cache for this number of nodes.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        Self { boards: HashMap::new(), changed: vec![1; nodes], now: 1 }
    }

    /// Returns the node with the highest score, the first among equals. `score` computes the score
    /// of a changed node.
    pub fn best(&mut self, pod: &PodRequest, score: impl Fn(usize) -> Option<f64>) -> Option<usize> {
        if !self.boards.contains_key(pod) {
            if self.boards.len() >= MAX_CLASSES {
                self.boards.clear();
            }
            let fresh = Board { scores: vec![None; self.changed.len()], seen: 0 };
            self.boards.insert(pod.clone(), fresh);
        }
        let board = self.boards.get_mut(pod)?;
        let mut best: Option<(usize, f64)> = None;
        for (node, (known, changed)) in board.scores.iter_mut().zip(&self.changed).enumerate() {
            if *changed > board.seen {
                *known = score(node);
            }
            if let Some(score) = *known
                && best.is_none_or(|(_, highest)| score > highest)
            {
                best = Some((node, score));
            }
        }
        board.seen = self.now;
        best.map(|(node, _)| node)
    }

    /// Marks a node as changed.
    pub fn touch(&mut self, node: usize) {
        self.now += 1;
        if let Some(changed) = self.changed.get_mut(node) {
            *changed = self.now;
        }
    }

    /// Drops all scores, because the policy has changed.
    pub fn clear(&mut self) {
        self.boards.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::request::Request;

    #[test]
    fn scores_only_changed_nodes_and_prefers_the_first_of_equals() {
        let scored = RefCell::new(Vec::new());
        let mut board = Scoreboard::new(4);
        let pod = PodRequest::of_mains([Request::Whole(1)]);
        let query = |board: &mut Scoreboard, scores: [Option<f64>; 4]| {
            let best = board.best(&pod, |node| {
                scored.borrow_mut().push(node);
                scores[node]
            });
            (best, scored.take())
        };
        let first = [None, Some(1.0), Some(2.0), Some(2.0)];
        assert_eq!(query(&mut board, first), (Some(2), vec![0, 1, 2, 3]));
        assert_eq!(query(&mut board, first), (Some(2), vec![]));
        board.touch(2);
        assert_eq!(query(&mut board, [None, Some(1.0), None, Some(2.0)]), (Some(3), vec![2]));
        board.clear();
        assert_eq!(query(&mut board, [None; 4]), (None, vec![0, 1, 2, 3]));
    }
}
