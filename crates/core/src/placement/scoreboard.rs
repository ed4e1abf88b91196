//! Scores remembered: a node is scored anew for a kind of pod only after the node has changed.

use std::collections::HashMap;

use crate::request::PodRequest;

/// The scores of nodes, known by their position, for each kind of pod.
#[derive(Clone, Debug, Default)]
pub struct Scoreboard {
    boards: HashMap<PodRequest, Board>,
    /// By node: when it last changed.
    changed: Vec<u64>,
    /// Counts changes.
    now: u64,
}

#[derive(Clone, Debug)]
struct Board {
    /// By node; `None` where it refuses the pod.
    scores: Vec<Option<f64>>,
    /// Up to which change the scores are right.
    seen: u64,
}

/// Kinds remembered at most; past that all are forgotten, which costs one scoring of every node per kind.
const MOST_KINDS: usize = 1024;

impl Scoreboard {
    /// A board for so many nodes.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        Self { boards: HashMap::new(), changed: vec![1; nodes], now: 1 }
    }

    /// The node with the highest score, the first of equals; `score` tells what a node that has changed scores now.
    pub fn best(&mut self, pod: &PodRequest, score: impl Fn(usize) -> Option<f64>) -> Option<usize> {
        if !self.boards.contains_key(pod) {
            if self.boards.len() >= MOST_KINDS {
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

    /// A node has changed.
    pub fn touch(&mut self, node: usize) {
        self.now += 1;
        if let Some(changed) = self.changed.get_mut(node) {
            *changed = self.now;
        }
    }

    /// The way to score has changed.
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
    fn only_what_changed_is_scored_anew_and_the_first_of_equals_wins() {
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
