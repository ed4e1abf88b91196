//! Scores each node in kube-scheduler's range from 0 to 10.

use tessera_wire::foreign::extender::{ExtenderArgs, HostPriority, MAX_SCORE};
use tessera_wire::tessera::parsed_pod::ParsedPod;

use super::verdict_cache::VerdictCache;
use crate::state::State;

impl State {
    /// Scores the nodes by rank: each rank is one point below the better one, down to zero. Ranks separate
    /// scores that differ little. Nodes with zero points are left out, which means the same to kube-scheduler
    /// and spares it most of a list that it would parse for every pod.
    #[must_use]
    pub fn prioritize<'a, N: AsRef<str>>(
        &self,
        args: &'a ExtenderArgs<N>,
        cache: &VerdictCache,
    ) -> Vec<HostPriority<&'a str>> {
        let Ok(pod) = ParsedPod::of(self, &args.pod) else { return Vec::new() };
        let pod = pod.with_claims(&self.waiting_claims(&args.pod));
        if !pod.wants_gpu() {
            return Vec::new();
        }
        let mut scores = Vec::with_capacity(args.node_names.as_ref().map_or(0, Vec::len));
        let mut scorer = self.node_scorer(&pod, cache);
        scores.extend(args.names().map(|name| scorer.score(name).unwrap_or(UNFIT)));
        scorer.finish(cache);
        grade(args.names(), &scores)
    }
}

/// The score of nodes that cannot take the pod, below all others.
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

/// Returns the highest distinct scores in descending order, one for each point above zero.
fn best_scores(scores: &[f64]) -> Vec<f64> {
    let most = usize::try_from(MAX_SCORE).unwrap_or(0);
    let mut best: Vec<f64> = Vec::with_capacity(most + 1);
    for score in scores.iter().copied().filter(|score| *score > UNFIT) {
        // Most scores are not among the best, so this check comes first.
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
    fn scores_by_rank_among_the_nodes_of_one_call() {
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
