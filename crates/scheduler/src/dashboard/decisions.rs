//! The most recent answers to kube-scheduler about GPU pods, with their reasons.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use tessera_core::units::PodUid;
use tessera_wire::foreign::extender::{BindingArgs, PreemptionResult};
use tessera_wire::foreign::objects::Pod;

use crate::state::{State, Timestamp};
use crate::verb::filter::FilterVerdicts;

/// Number of decisions kept.
pub const KEPT: usize = 500;

/// Nodes with victims kept of one answer.
const MOST_NODES: usize = 8;

/// The most recent decisions.
#[derive(Debug, Default)]
pub struct Decisions(Mutex<Ring>);

#[derive(Debug, Default)]
struct Ring {
    /// Decisions by ascending sequence number.
    kept: VecDeque<Decision>,
    last: u64,
}

/// One decision about a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// Sequence number, which grows with every decision.
    pub sequence: u64,
    /// Time of the decision in milliseconds since 1970.
    pub unix_millis: u64,
    /// Number of times in a row that the same was decided about the pod.
    pub times: u32,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Outcome of the decision.
    #[serde(flatten)]
    pub outcome: DecisionOutcome,
}

/// Outcome of a decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum DecisionOutcome {
    /// Filter found nodes on which the pod fits.
    Fits {
        /// Number of fitting nodes.
        nodes: usize,
        /// Number of rejected nodes by kind of reason.
        refused: BTreeMap<&'static str, u64>,
    },
    /// Filter rejected every node.
    FitsNowhere {
        /// Number of rejected nodes by kind of reason.
        refused: BTreeMap<&'static str, u64>,
    },
    /// The pod was bound.
    Bound {
        /// Node of the pod.
        node: String,
        /// Indexes of the GPUs that the pod got.
        gpus: Vec<u8>,
        /// Reason for the choice of these GPUs.
        #[serde(skip_serializing_if = "String::is_empty")]
        why: String,
    },
    /// The bind failed.
    NotBound {
        /// Node on which the bind failed.
        node: String,
        /// Error of the bind.
        error: String,
    },
    /// Preempt named victims on some nodes. kube-scheduler chooses one of these nodes.
    Victims {
        /// Victims by node.
        victims: BTreeMap<String, Vec<String>>,
    },
    /// Preempt found no victims whose eviction would help.
    NoVictims,
}

impl DecisionOutcome {
    /// Returns the name of the outcome in the API.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Fits { .. } => "fits",
            Self::FitsNowhere { .. } => "fits-nowhere",
            Self::Bound { .. } => "bound",
            Self::NotBound { .. } => "not-bound",
            Self::Victims { .. } => "victims",
            Self::NoVictims => "no-victims",
        }
    }
}

impl Decisions {
    /// Records an answer of filter.
    pub fn filtered(&self, now: Timestamp, pod: &Pod, verdicts: &FilterVerdicts<'_>) {
        if !pod.spec.asks_for_gpus() {
            return;
        }
        let refused = verdicts.reasons.clone();
        let outcome = match verdicts.fitting.len() {
            0 => DecisionOutcome::FitsNowhere { refused },
            nodes => DecisionOutcome::Fits { nodes, refused },
        };
        self.add(now, pod, outcome);
    }

    /// Records the end of a bind: the reason for the choice of GPUs, or the error.
    pub fn bound(
        &self,
        now: Timestamp,
        args: &BindingArgs,
        outcome: Result<&str, &dyn Display>,
        state: &State,
    ) {
        let node = args.node.clone();
        let outcome = match outcome {
            Err(error) => DecisionOutcome::NotBound { node, error: error.to_string() },
            Ok(why) => {
                let grant = state.ledger().grant(&PodUid(args.pod_uid.clone()));
                let held = grant.iter().flat_map(|grant| &grant.containers);
                let mut gpus: Vec<u8> =
                    held.flat_map(|container| container.gpus().iter().map(|gpu| gpu.0)).collect();
                gpus.sort_unstable();
                gpus.dedup();
                DecisionOutcome::Bound { node, gpus, why: why.to_owned() }
            }
        };
        self.push(now, &args.pod_namespace, &args.pod_name, &args.pod_uid, outcome);
    }

    /// Records an answer of preempt.
    pub fn preempted(&self, now: Timestamp, pod: &Pod, result: &PreemptionResult, state: &State) {
        if !pod.spec.asks_for_gpus() {
            return;
        }
        let name = |uid: &String| match state.pod(&PodUid(uid.clone())) {
            Some(pod) => format!("{}/{}", pod.namespace, pod.name),
            None => uid.clone(),
        };
        let answers = result.node_name_to_meta_victims.iter().take(MOST_NODES);
        let victims: BTreeMap<String, Vec<String>> = answers
            .map(|(node, victims)| (node.clone(), victims.pods.iter().map(|pod| name(&pod.uid)).collect()))
            .collect();
        let outcome = if victims.is_empty() {
            DecisionOutcome::NoVictims
        } else {
            DecisionOutcome::Victims { victims }
        };
        self.add(now, pod, outcome);
    }

    fn add(&self, now: Timestamp, pod: &Pod, outcome: DecisionOutcome) {
        let meta = &pod.metadata;
        self.push(now, &meta.namespace, &meta.name, &meta.uid, outcome);
    }

    /// Adds a decision. A repeated decision about the same pod only raises the count of its entry
    /// and moves the entry to the end.
    fn push(&self, now: Timestamp, namespace: &str, pod: &str, uid: &str, outcome: DecisionOutcome) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.last += 1;
        let is_it = |known: &Decision| known.uid == uid && known.outcome == outcome;
        let again = ring.kept.iter().rposition(is_it).and_then(|place| ring.kept.remove(place));
        let decision = Decision {
            sequence: ring.last,
            unix_millis: u64::try_from(now.unix_nanos / 1_000_000).unwrap_or(u64::MAX),
            times: again.map_or(1, |earlier| earlier.times.saturating_add(1)),
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            uid: uid.to_owned(),
            outcome,
        };
        if ring.kept.len() == KEPT {
            ring.kept.pop_front();
        }
        ring.kept.push_back(decision);
    }

    /// Returns the sequence number of the newest decision.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).last
    }

    /// Returns up to `most` matching decisions, newest first.
    pub fn newest(&self, passes: impl Fn(&Decision) -> bool, most: usize) -> Vec<Decision> {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.kept.iter().rev().filter(|decision| passes(decision)).take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(decisions: &Decisions, uid: &str, outcome: Result<&str, &str>) {
        let args = BindingArgs {
            pod_name: uid.to_owned(),
            pod_namespace: "team".to_owned(),
            pod_uid: uid.to_owned(),
            node: "n".to_owned(),
        };
        let state = State::new(crate::state::SchedulerSettings::default());
        let outcome = outcome.as_ref().map(|why| *why).map_err(|error| error as &dyn Display);
        decisions.bound(Timestamp::default(), &args, outcome, &state);
    }

    fn kept(decisions: &Decisions) -> Vec<(u64, String, u32)> {
        let all = decisions.newest(|_| true, usize::MAX).into_iter();
        all.map(|decision| (decision.sequence, decision.uid, decision.times)).collect()
    }

    #[test]
    fn a_repeated_decision_is_counted_and_moves_to_the_end() {
        let decisions = Decisions::default();
        for (uid, outcome) in [("a", Err("no")), ("b", Ok("")), ("a", Err("no")), ("a", Ok("near"))] {
            bind(&decisions, uid, outcome);
        }
        assert_eq!(kept(&decisions), [(4, "a".into(), 1), (3, "a".into(), 2), (2, "b".into(), 1)]);
    }

    #[test]
    fn keeps_at_most_the_limit_of_decisions() {
        let decisions = Decisions::default();
        (0..KEPT + 7).for_each(|number| bind(&decisions, &number.to_string(), Ok("")));
        let kept = kept(&decisions);
        assert_eq!((kept.len(), kept.last().map(|oldest| oldest.0)), (KEPT, Some(8)));
    }
}
