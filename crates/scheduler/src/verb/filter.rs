//! Which nodes will do, and why the others will not.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeStruct as _, Serializer};
use tessera_wire::extender::Args;

use super::ask::Ask;
use super::memory::Memory;
use super::reason::Reason;
use crate::state::State;

/// The verdict on every node that was asked about. Written as kube-scheduler reads the answer to a question by names.
#[derive(Clone, Debug, Default)]
pub struct Verdicts<'a> {
    /// Those that fit and are passed on, in the order asked.
    pub fitting: Vec<&'a str>,
    /// How many fit in all.
    pub fit: usize,
    /// The others, and where in `told` their reason stands.
    refused: Vec<(&'a str, usize)>,
    told: Vec<Told>,
    /// How often each kind of reason came up.
    pub reasons: BTreeMap<&'static str, u64>,
}

/// A reason that may hold for many nodes, put into words once.
#[derive(Clone, Debug)]
struct Told {
    /// `None` where the question itself is at fault.
    reason: Option<Reason>,
    words: String,
    may_resolve: bool,
}

/// Which of the nodes that fit are passed on to kube-scheduler, to choose among.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassOn {
    /// Those on which the cards suit best. Where the pod has preferences of its own, the best hundred, for prioritize and
    /// kube-scheduler's own scores to weigh.
    #[default]
    Best,
    /// All.
    All,
}

/// Passed on at most: what kube-scheduler itself takes for enough in a large cluster.
const PASSED_ON: usize = 100;

/// Nodes mostly fail alike. Past so many reasons a new one is no longer compared with all of them.
const COMPARED: usize = 16;

impl State {
    /// Judges every node.
    #[must_use]
    pub fn filter<'a, N: AsRef<str>>(&self, args: &'a Args<N>, memory: &Memory) -> Verdicts<'a> {
        let mut verdicts = Verdicts::default();
        let ask = match Ask::of(self, &args.pod) {
            Ok(ask) => ask,
            Err(bad) => {
                verdicts.told.push(Told { reason: None, words: bad.to_string(), may_resolve: false });
                verdicts.refused.extend(args.names().map(|name| (name, 0)));
                verdicts.reasons.insert("bad-request", verdicts.refused.len() as u64);
                return verdicts;
            }
        };
        if !ask.wants_gpu() {
            verdicts.fitting.extend(args.names());
            verdicts.fit = verdicts.fitting.len();
            return verdicts;
        }
        let mut fitting = Vec::with_capacity(args.node_names.as_ref().map_or(0, Vec::len));
        let mut kinds = memory.kinds();
        for name in args.names() {
            match self.verdict(name, &ask, &mut kinds) {
                Ok(score) => fitting.push((name, score)),
                Err(reason) => verdicts.refuse(name, reason),
            }
        }
        kinds.remember();
        verdicts.fit = fitting.len();
        let worst = match self.pass_on() {
            PassOn::All => f64::NEG_INFINITY,
            PassOn::Best if args.pod.spec.prefers_nodes || args.pod.spec.prefers_spreading => {
                score_of_rank(&fitting, PASSED_ON)
            }
            PassOn::Best => score_of_rank(&fitting, 1),
        };
        let most = if self.pass_on() == PassOn::All { usize::MAX } else { PASSED_ON };
        verdicts.fitting = passed_on(&fitting, worst, most);
        verdicts
    }
}

/// The score of the last one, were only so many nodes passed on.
fn score_of_rank(fitting: &[(&str, f64)], rank: usize) -> f64 {
    let mut scores: Vec<f64> = fitting.iter().map(|(_, score)| *score).collect();
    if scores.len() <= rank {
        return f64::NEG_INFINITY;
    }
    *scores.select_nth_unstable_by(rank - 1, |a, b| b.total_cmp(a)).1
}

/// The nodes at least that good, the better ones first to be taken where there are too many, in the order asked.
fn passed_on<'a>(fitting: &[(&'a str, f64)], worst: f64, most: usize) -> Vec<&'a str> {
    let better = fitting.iter().filter(|(_, score)| *score > worst).count();
    let mut equal = most.saturating_sub(better);
    let mut is_taken = |score: f64| {
        if score > worst {
            return true;
        }
        let is_room = score.total_cmp(&worst).is_eq() && equal > 0;
        equal -= usize::from(is_room);
        is_room
    };
    fitting.iter().filter(|(_, score)| is_taken(*score)).map(|(name, _)| *name).collect()
}

impl<'a> Verdicts<'a> {
    fn refuse(&mut self, name: &'a str, reason: Reason) {
        *self.reasons.entry(reason.kind()).or_default() += 1;
        let compared = self.told.iter().take(COMPARED);
        let known = compared.enumerate().find(|(_, told)| told.reason.as_ref() == Some(&reason));
        let place = known.map(|(place, _)| place).unwrap_or_else(|| {
            let (words, may_resolve) = (reason.to_string(), reason.may_resolve());
            self.told.push(Told { reason: Some(reason), words, may_resolve });
            self.told.len() - 1
        });
        self.refused.push((name, place));
    }

    /// Why others do not; evictions might help.
    pub fn failed(&self) -> impl Iterator<Item = (&'a str, &str)> {
        self.refused_where(true)
    }

    /// Why others do not, whoever goes.
    pub fn unresolvable(&self) -> impl Iterator<Item = (&'a str, &str)> {
        self.refused_where(false)
    }

    fn refused_where(&self, may_resolve: bool) -> impl Iterator<Item = (&'a str, &str)> {
        let told = self.refused.iter().map(|(name, place)| (*name, &self.told[*place]));
        told.filter(move |(_, told)| told.may_resolve == may_resolve).map(|(name, told)| (name, &*told.words))
    }

    /// Writes the answer with these whole nodes in it.
    pub(crate) fn serialize_with<S: Serializer>(
        &self,
        nodes: Option<&impl Serialize>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut answer = serializer.serialize_struct("FilterResult", 5)?;
        answer.serialize_field("Nodes", &nodes)?;
        answer.serialize_field("NodeNames", &self.fitting)?;
        answer.serialize_field("FailedNodes", &Reasons(self, true))?;
        answer.serialize_field("FailedAndUnresolvableNodes", &Reasons(self, false))?;
        answer.serialize_field("Error", "")?;
        answer.end()
    }
}

impl Serialize for Verdicts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize_with(None::<&()>, serializer)
    }
}

/// A map of nodes to words.
struct Reasons<'a>(&'a Verdicts<'a>, bool);

impl Serialize for Reasons<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.refused_where(self.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scores: &[f64], rank: usize, most: usize, expected: &[&str]) {
        const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
        let fitting: Vec<(&str, f64)> = NAMES.into_iter().zip(scores.iter().copied()).collect();
        let worst = score_of_rank(&fitting, rank);
        assert_eq!(passed_on(&fitting, worst, most), expected, "{scores:?}");
    }

    #[test]
    fn the_best_are_passed_on_in_the_order_asked() {
        check(&[], 1, 3, &[]);
        check(&[0.5], 1, 3, &["a"]);
        check(&[0.1, 0.3, 0.2, 0.3], 1, 3, &["b", "d"]);
        check(&[0.1, 0.3, 0.2, 0.3], 3, 3, &["b", "c", "d"]);
        // Equals beyond the number: the first of them.
        check(&[0.0; 6], 1, 3, &["a", "b", "c"]);
        check(&[0.0, 0.0, 7.0, 0.0, 0.0, 0.0], 3, 3, &["a", "b", "c"]);
        check(&[-1.0, -2.0], 5, 5, &["a", "b"]);
    }
}
