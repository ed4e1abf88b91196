//! How well each node suits, in kube-scheduler's eleven grades.

use tessera_core::units::NodeName;
use tessera_wire::extender::{Args, HostPriority, MAX_SCORE};

use super::ask::Ask;
use super::filter::take_names;
use crate::state::State;

impl State {
    /// Grades the nodes. The best ones get 10, the next best 9 and so on: grades by rank keep apart what differs little,
    /// where it matters.
    #[must_use]
    pub fn prioritize(&self, args: &mut Args) -> Vec<HostPriority> {
        let names = take_names(args);
        let Ok(ask) = Ask::of(self, &args.pod) else { return grade(names, |_| None) };
        if !ask.wants_gpu() {
            return grade(names, |_| None);
        }
        grade(names, |name| self.score(name, &ask).ok())
    }
}

fn grade(names: Vec<String>, score: impl Fn(&NodeName) -> Option<f64>) -> Vec<HostPriority> {
    let scored: Vec<(String, Option<f64>)> = names
        .into_iter()
        .map(|name| {
            let name = NodeName(name);
            let score = score(&name);
            (name.0, score)
        })
        .collect();
    let best = best_scores(scored.iter().filter_map(|(_, score)| *score));
    let grade = |score: f64| {
        let rank = best.iter().position(|better| *better <= score);
        rank.and_then(|rank| i64::try_from(rank).ok()).map_or(0, |rank| MAX_SCORE - rank)
    };
    scored.into_iter().map(|(host, score)| HostPriority { host, score: score.map_or(0, grade) }).collect()
}

/// The highest different scores, highest first, as many as there are grades above zero.
fn best_scores(scores: impl Iterator<Item = f64>) -> Vec<f64> {
    let most = usize::try_from(MAX_SCORE).unwrap_or(0);
    let mut best: Vec<f64> = Vec::with_capacity(most + 1);
    for score in scores {
        let place = best.partition_point(|better| *better > score);
        if place < most && best.get(place) != Some(&score) {
            best.insert(place, score);
            best.truncate(most);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scores: &[Option<f64>], expected: &[i64]) {
        let names = (0..scores.len()).map(|number| number.to_string()).collect();
        let graded = grade(names, |name| scores[name.0.parse::<usize>().unwrap()]);
        assert_eq!(graded.iter().map(|host| host.score).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn by_rank_among_the_nodes_of_this_call() {
        check(&[], &[]);
        check(&[None, Some(-3.0)], &[0, 10]);
        check(&[Some(0.1), Some(0.1), Some(0.100001), Some(-7.0)], &[9, 9, 10, 8]);
        let many: Vec<Option<f64>> = (0..13).map(|number| Some(f64::from(number))).collect();
        check(&many, &[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    }
}
