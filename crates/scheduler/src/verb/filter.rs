//! Filters the nodes that can take a pod and gives the reason for each other node.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeStruct as _, Serializer};
use tessera_core::admission::RejectReason;
use tessera_core::units::PodUid;
use tessera_wire::foreign::extender::ExtenderArgs;
use tessera_wire::foreign::objects::PodSpec;
use tessera_wire::tessera::excerpt::excerpt;
use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};

use super::sample::MIN_SAMPLE;
use super::verdict_cache::VerdictCache;
use crate::state::State;

/// The verdicts on all nodes of a call. The serialized form is the extender's answer to a call by node names.
#[derive(Clone, Debug, Default)]
pub struct FilterVerdicts<'a> {
    /// The fitting nodes that are passed on to kube-scheduler, in the order of the call.
    pub fitting: Vec<&'a str>,
    /// Number of fitting nodes, including those that are not passed on.
    pub fit: usize,
    /// The first of the nodes with the highest score.
    pub best: Option<&'a str>,
    /// The best node, if filter may pass it alone and should reserve GPUs there until bind is called.
    pub to_reserve: Option<&'a str>,
    /// The rejected nodes, each with the index of its reason in `reason_texts`.
    rejected: Vec<(&'a str, usize)>,
    reason_texts: Vec<ReasonText>,
    /// Number of rejected nodes by kind of reason.
    pub reasons: BTreeMap<&'static str, u64>,
    /// Error of the answer, after which kube-scheduler offers other nodes. Empty if it need not.
    error: String,
}

/// The text of a reason, formatted once for all nodes that share it.
#[derive(Clone, Debug)]
struct ReasonText {
    /// `None` if the pod itself cannot be parsed.
    reason: Option<RejectReason>,
    text: String,
    may_resolve: bool,
}

/// The fitting nodes that kube-scheduler may choose from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassOn {
    /// The nodes with the highest score, so that kube-scheduler need not score the others. All fitting nodes
    /// if the pod has node or spreading preferences, or if soft taints keep it away from the best nodes.
    #[default]
    Best,
    /// All fitting nodes.
    All,
}

/// Nodes of equal score passed on. kube-scheduler itself considers 100 nodes enough in a large cluster.
const MAX_PASSED_ON: usize = 100;

/// Reasons compared with a new one. Most nodes share a few reasons, so the search stays short.
const MAX_COMPARED: usize = 16;

impl State {
    /// Returns the verdict on every node of the call.
    #[must_use]
    pub fn filter<'a, N: AsRef<str>>(
        &self,
        args: &'a ExtenderArgs<N>,
        cache: &VerdictCache,
    ) -> FilterVerdicts<'a> {
        let mut verdicts = FilterVerdicts::default();
        if let Err(bad) = self.check_containers(&args.pod) {
            return FilterVerdicts::of_bad_pod(&args.names().collect::<Vec<_>>(), &bad);
        }
        let pod = match ParsedPod::of(self, &args.pod) {
            Ok(pod) => pod.with_claims(&self.waiting_claims(&args.pod)),
            Err(bad) => return FilterVerdicts::of_bad_pod(&args.names().collect::<Vec<_>>(), &bad),
        };
        let stale = self.stale_claims(&args.pod);
        if !pod.wants_gpu() {
            for name in args.names() {
                match stale.iter().find(|(node, _)| node.0 == name) {
                    Some((_, reason)) => verdicts.reject(name, reason.clone()),
                    None => verdicts.fitting.push(name),
                }
            }
            verdicts.fit = verdicts.fitting.len();
            return verdicts;
        }
        let asked = args.node_names.as_ref().map_or(0, Vec::len);
        let (mut fitting, mut scores) = (Vec::with_capacity(asked), Vec::with_capacity(asked));
        let mut scorer = self.node_scorer(&pod, cache);
        for name in args.names() {
            match scorer.score(name) {
                Ok(score) => {
                    fitting.push(name);
                    scores.push(score);
                }
                Err(reason) => verdicts.reject(name, reason),
            }
        }
        let offered = verdicts.rejected.len();
        if fitting.is_empty()
            && offered >= MIN_SAMPLE
            && scorer.fits_elsewhere(args.names())
            && cache.should_search_on(&PodUid(args.pod.metadata.uid.clone()))
        {
            verdicts.error = format!(
                "none of the {offered} nodes that kube-scheduler offered has suitable GPUs, but another node has; \
                 kube-scheduler will try other nodes"
            );
        }
        scorer.finish(cache);
        verdicts.fit = fitting.len();
        verdicts.best = first_best(&fitting, &scores);
        match self.narrowed(&args.pod.spec, &fitting, &scores) {
            Some(best) => {
                verdicts.to_reserve = best.first().copied().filter(|node| self.is_uncounted(&pod, node));
                verdicts.fitting = best;
            }
            None => verdicts.fitting = fitting,
        }
        verdicts
    }

    /// Returns the best nodes in the order of the call, or `None` if kube-scheduler may choose from all that fit.
    fn narrowed<'a>(&self, pod: &PodSpec, fitting: &[&'a str], scores: &[f64]) -> Option<Vec<&'a str>> {
        if self.pass_on() == PassOn::All || pod.affinity.has_preferred || pod.spreading.has_preferred {
            return None;
        }
        let best = best(fitting, scores);
        let is_tainted = self.has_soft_taints() && self.are_tainted(pod, &best, fitting);
        (!is_tainted).then_some(best)
    }

    /// Returns whether another node has fewer untolerated soft taints than all of the best nodes.
    fn are_tainted(&self, pod: &PodSpec, best: &[&str], fitting: &[&str]) -> bool {
        let least = best.iter().map(|name| self.untolerated_taints(pod, name)).min().unwrap_or(0);
        fitting.iter().any(|name| self.untolerated_taints(pod, name) < least)
    }
}

/// Returns the first of the nodes with the highest score.
fn first_best<'a>(fitting: &[&'a str], scores: &[f64]) -> Option<&'a str> {
    let scored = fitting.iter().zip(scores).rev();
    scored.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(name, _)| *name)
}

/// Returns the nodes with the highest score, at most [`MAX_PASSED_ON`].
fn best<'a>(fitting: &[&'a str], scores: &[f64]) -> Vec<&'a str> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let best = fitting.iter().zip(scores).filter(|(_, score)| **score >= highest);
    best.map(|(name, _)| *name).take(MAX_PASSED_ON).collect()
}

impl<'a> FilterVerdicts<'a> {
    fn reject(&mut self, name: &'a str, reason: RejectReason) {
        *self.reasons.entry(reason.kind()).or_default() += 1;
        let compared = self.reason_texts.iter().take(MAX_COMPARED);
        let known = compared.enumerate().find(|(_, told)| told.reason.as_ref() == Some(&reason));
        let place = known.map(|(place, _)| place).unwrap_or_else(|| {
            let (text, may_resolve) = (reason.to_string(), reason.may_resolve());
            self.reason_texts.push(ReasonText { reason: Some(reason), text, may_resolve });
            self.reason_texts.len() - 1
        });
        self.rejected.push((name, place));
    }

    /// Rejects all nodes, because the pod cannot be parsed.
    pub(super) fn of_bad_pod(nodes: &[&'a str], bad: &BadPodObject) -> Self {
        // The answer repeats the text for each node.
        let text = ReasonText { reason: None, text: excerpt(bad.to_string()), may_resolve: false };
        Self {
            rejected: nodes.iter().map(|name| (*name, 0)).collect(),
            reason_texts: vec![text],
            reasons: BTreeMap::from([("bad-request", nodes.len() as u64)]),
            ..Self::default()
        }
    }

    /// Rejects all nodes for one reason.
    pub(super) fn all_rejected(nodes: &[&'a str], reason: &RejectReason) -> Self {
        let mut verdicts = Self::default();
        nodes.iter().for_each(|name| verdicts.reject(name, reason.clone()));
        verdicts
    }

    /// Passes on one node of a call whose other nodes were not judged.
    pub(crate) fn only(node: &'a str) -> Self {
        Self { fitting: vec![node], fit: 1, best: Some(node), ..Self::default() }
    }

    /// Passes on only this node.
    pub(crate) fn narrow_to(&mut self, node: &'a str) {
        self.fitting = vec![node];
    }

    /// Passes on no node. kube-scheduler retries the pod because of the error.
    pub(crate) fn fail(&mut self, error: String) {
        self.fitting.clear();
        self.error = error;
    }

    /// Returns the rejected nodes with their reasons, where evictions might help.
    pub fn failed(&self) -> impl Iterator<Item = (&'a str, &str)> {
        self.rejected_where(true)
    }

    /// Returns the rejected nodes with their reasons, where evictions cannot help.
    pub fn unresolvable(&self) -> impl Iterator<Item = (&'a str, &str)> {
        self.rejected_where(false)
    }

    fn rejected_where(&self, may_resolve: bool) -> impl Iterator<Item = (&'a str, &str)> {
        let told = self.rejected.iter().map(|(name, place)| (*name, &self.reason_texts[*place]));
        told.filter(move |(_, told)| told.may_resolve == may_resolve).map(|(name, told)| (name, &*told.text))
    }

    /// Serializes the answer together with whole node objects.
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
        answer.serialize_field("Error", &self.error)?;
        answer.end()
    }
}

impl Serialize for FilterVerdicts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize_with(None::<&()>, serializer)
    }
}

/// The map from rejected nodes to reasons in the answer.
struct Reasons<'a> {
    of: &'a FilterVerdicts<'a>,
    /// Selects the nodes where evictions might help, or the others.
    may_resolve: bool,
}

impl Serialize for Reasons<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.of.rejected_where(self.may_resolve))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scores: &[f64], expected: &[&str]) {
        const NAMES: [&str; 4] = ["a", "b", "c", "d"];
        assert_eq!(best(&NAMES[..scores.len()], scores), expected, "{scores:?}");
        assert_eq!(first_best(&NAMES[..scores.len()], scores), expected.first().copied(), "{scores:?}");
    }

    #[test]
    fn passes_on_the_best_nodes_in_the_order_of_the_call() {
        check(&[], &[]);
        check(&[0.5], &["a"]);
        check(&[0.1, 0.3, 0.2, 0.3], &["b", "d"]);
        check(&[-1.0, -2.0], &["a"]);
        assert_eq!(best(&["n"; MAX_PASSED_ON + 1], &[0.0; MAX_PASSED_ON + 1]).len(), MAX_PASSED_ON);
    }
}
