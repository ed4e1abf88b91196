//! Which nodes will do, and why the others will not.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeStruct as _, Serializer};
use tessera_wire::foreign::extender::ExtenderArgs;
use tessera_wire::foreign::objects::PodSpec;

use super::ask::ParsedPod;
use super::reason::RejectReason;
use super::verdict_cache::VerdictCache;
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
    reason: Option<RejectReason>,
    words: String,
    may_resolve: bool,
}

/// Which of the nodes that fit are passed on to kube-scheduler, to choose among.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassOn {
    /// Those on which the GPUs suit best, so that kube-scheduler need not score the others. All of them where there is more to weigh:
    /// the pod has preferences of its own, or taints ask it to stay away from the best.
    #[default]
    Best,
    /// All.
    All,
}

/// Equally good ones passed on at most: what kube-scheduler itself takes for enough in a large cluster.
const PASSED_ON: usize = 100;

/// Nodes mostly fail alike. Past so many reasons a new one is no longer compared with all of them.
const COMPARED: usize = 16;

impl State {
    /// Judges every node.
    #[must_use]
    pub fn filter<'a, N: AsRef<str>>(
        &self,
        args: &'a ExtenderArgs<N>,
        memory: &VerdictCache,
    ) -> Verdicts<'a> {
        let mut verdicts = Verdicts::default();
        let ask = match ParsedPod::of(self, &args.pod) {
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
        let asked = args.node_names.as_ref().map_or(0, Vec::len);
        let (mut fitting, mut scores) = (Vec::with_capacity(asked), Vec::with_capacity(asked));
        let mut survey = self.survey(&ask, memory);
        for name in args.names() {
            match survey.verdict(name) {
                Ok(score) => {
                    fitting.push(name);
                    scores.push(score);
                }
                Err(reason) => verdicts.refuse(name, reason),
            }
        }
        survey.end(memory);
        verdicts.fit = fitting.len();
        verdicts.fitting = self.passed_on(&args.pod.spec, fitting, &scores);
        verdicts
    }

    /// Those of the nodes that fit among which kube-scheduler shall choose, in the order asked.
    fn passed_on<'a>(&self, pod: &PodSpec, fitting: Vec<&'a str>, scores: &[f64]) -> Vec<&'a str> {
        if self.pass_on() == PassOn::All || pod.prefers_nodes || pod.prefers_spreading {
            return fitting;
        }
        let best = best(&fitting, scores);
        if self.has_soft_taints() && self.are_shunned(pod, &best, &fitting) { fitting } else { best }
    }

    /// Whether taints ask the pod to stay away from all the best nodes, and less so from others.
    fn are_shunned(&self, pod: &PodSpec, best: &[&str], fitting: &[&str]) -> bool {
        let least = best.iter().map(|name| self.shunned_by(pod, name)).min().unwrap_or(0);
        fitting.iter().any(|name| self.shunned_by(pod, name) < least)
    }
}

/// The nodes with the highest score, the first of them where there are too many.
fn best<'a>(fitting: &[&'a str], scores: &[f64]) -> Vec<&'a str> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let best = fitting.iter().zip(scores).filter(|(_, score)| **score >= highest);
    best.map(|(name, _)| *name).take(PASSED_ON).collect()
}

impl<'a> Verdicts<'a> {
    fn refuse(&mut self, name: &'a str, reason: RejectReason) {
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
        let failed = Reasons { of: self, may_resolve: true };
        let unresolvable = Reasons { of: self, may_resolve: false };
        answer.serialize_field("FailedNodes", &failed)?;
        answer.serialize_field("FailedAndUnresolvableNodes", &unresolvable)?;
        answer.serialize_field("Error", "")?;
        answer.end()
    }
}

impl Serialize for Verdicts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize_with(None::<&()>, serializer)
    }
}

/// A map of refused nodes to words.
struct Reasons<'a> {
    of: &'a Verdicts<'a>,
    /// Of those that evictions might help, or of those they cannot.
    may_resolve: bool,
}

impl Serialize for Reasons<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.of.refused_where(self.may_resolve))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scores: &[f64], expected: &[&str]) {
        const NAMES: [&str; 4] = ["a", "b", "c", "d"];
        assert_eq!(best(&NAMES[..scores.len()], scores), expected, "{scores:?}");
    }

    #[test]
    fn the_best_are_passed_on_in_the_order_asked() {
        check(&[], &[]);
        check(&[0.5], &["a"]);
        check(&[0.1, 0.3, 0.2, 0.3], &["b", "d"]);
        check(&[-1.0, -2.0], &["a"]);
        assert_eq!(best(&["n"; PASSED_ON + 1], &[0.0; PASSED_ON + 1]).len(), PASSED_ON);
    }
}
