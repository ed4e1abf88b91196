//! How well each node suits, in kube-scheduler's eleven grades.

use tessera_wire::foreign::extender::{ExtenderArgs, HostPriority, MAX_SCORE};

use super::ask::ParsedPod;
use super::verdict_cache::VerdictCache;
use crate::state::State;

impl State {
    /// Grades the nodes by rank: a node is worth one grade more than those of the next rank, up to ten grades. Ranks keep
    /// apart what differs little, where it matters. Those of the lowest grade have 0 and are left out, which to
    /// kube-scheduler is the same, and spares it most of a list that it would read for every pod.
    #[must_use]
    pub fn prioritize<'a, N: AsRef<str>>(
        &self,
        args: &'a ExtenderArgs<N>,
        memory: &VerdictCache,
    ) -> Vec<HostPriority<&'a str>> {
        let Ok(ask) = ParsedPod::of(self, &args.pod) else { return Vec::new() };
        if !ask.wants_gpu() {
            return Vec::new();
        }
        let mut scores = Vec::with_capacity(args.node_names.as_ref().map_or(0, Vec::len));
        let mut survey = self.survey(&ask, memory);
        scores.extend(args.names().map(|name| survey.verdict(name).unwrap_or(UNFIT)));
        survey.end(memory);
        grade(args.names(), &scores)
    }
}

/// The score of nodes that will not do: below all others.
const UNFIT: f64 = f64::NEG_INFINITY;

fn grade<'a>(names: impl Iterator<Item = &'a str>, scores: &[f64]) -> Vec<HostPriority<&'a str>> {
    let best = best_scores(scores);
    let grade = |score: f64| {
        let rank = best.iter().position(|better| *better <= score);
        rank.and_then(|rank| i64::try_from(rank).ok()).map_or(0, |rank| MAX_SCORE - rank)
    };
    let lowest = scores.iter().copied().reduce(f64::min).map_or(0, grade);
    let graded = names.zip(scores).map(|(host, score)| HostPriority { host, score: grade(*score) - lowest });
    graded.filter(|host| host.score > 0).collect()
}

/// The highest different scores, highest first, as many as there are grades above zero.
fn best_scores(scores: &[f64]) -> Vec<f64> {
    let most = usize::try_from(MAX_SCORE).unwrap_or(0);
    let mut best: Vec<f64> = Vec::with_capacity(most + 1);
    for score in scores.iter().copied().filter(|score| *score > UNFIT) {
        // Most are not among the best.
        if best.len() == most && best.last().is_some_and(|worst| score <= *worst) {
            continue;
        }
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

    fn check(scores: &[f64], expected: &[(&str, i64)]) {
        const NAMES: [&str; 13] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"];
        let graded = grade(NAMES.into_iter(), scores);
        assert_eq!(graded.iter().map(|host| (host.host, host.score)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn by_rank_among_the_nodes_of_this_call() {
        check(&[], &[]);
        check(&[3.0, 3.0], &[]);
        check(&[UNFIT, UNFIT], &[]);
        check(&[UNFIT, -3.0], &[("b", 10)]);
        check(&[0.1, 0.1, 0.100001, -7.0], &[("a", 1), ("b", 1), ("c", 2)]);
        let many: Vec<f64> = (0..13).map(f64::from).collect();
        let names = ["d", "e", "f", "g", "h", "i", "j", "k", "l", "m"];
        check(&many, &names.into_iter().zip(1..).collect::<Vec<_>>());
    }
}
