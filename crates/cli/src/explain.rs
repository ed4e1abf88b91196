//! Why a pod waits, and what would help: by the same judgement as the scheduler's.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_core::admission::{self, NodeOffer, NodeVerdict, PodQuery, RejectReason};
use tessera_core::placement::PlacementError;
use tessera_core::preemption::RunningPod;
use tessera_core::quota::GpuAmount;
use tessera_core::remedy;
use tessera_core::request::{PodRequest, Request};
use tessera_core::units::NodeName;
use tessera_wire::foreign::dialect::{Dialect, MemoryUnit};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::explanation::{NodeExplanation, PodExplanation};
use tessera_wire::tessera::parsed_pod::{BadPodObject, ParsedPod};

use crate::show::request_words;
use crate::survey::{NodeFacts, Survey};

/// Nodes for which it is worked out who would have to end: trying all sets of pods on thousands would take minutes.
const RELIEF_LOOKED_AT: usize = 64;

/// The answer.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Answer {
    /// What it asks for, as a manifest writes it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) asks: Vec<String>,
    #[serde(flatten)]
    pub(crate) explanation: PodExplanation,
    /// What it holds, if it has been placed and somebody told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) holds: Vec<String>,
    /// Whose end would let it in, by node, the fewest first.
    #[serde(rename = "relief", skip_serializing_if = "Vec::is_empty")]
    pub(crate) remedies: Vec<Remedy>,
    /// Smaller requests that fit now, each with a node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) smaller: Vec<Smaller>,
    /// What kube-scheduler last said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kube_scheduler: Option<String>,
}

/// Pods whose end would let the pod in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Remedy {
    pub(crate) node: String,
    /// As NAMESPACE/NAME.
    pub(crate) pods: Vec<String>,
}

/// A request that would fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Smaller {
    pub(crate) request: String,
    pub(crate) node: String,
}

/// Explains a pod, whether it exists or not.
pub(crate) fn explain(survey: &Survey, pod: &Pod) -> Result<Answer, BadPodObject> {
    let ask = ParsedPod::of(&survey.rules, pod)?;
    let mut obstacles = BTreeMap::new();
    let mut views = Vec::new();
    for (name, facts) in &survey.nodes {
        let verdict = judge(survey, name, facts, &ask);
        if let NodeVerdict::Rejected(obstacle) = &verdict {
            obstacles.insert(name, obstacle.reason.clone());
        }
        views.push(NodeExplanation::new(&name.0, &ask.request(facts.unit), verdict));
    }
    let placed_on = Some(pod.spec.node_name.clone()).filter(|node| !node.is_empty());
    let waits = placed_on.is_none() && views.iter().all(|view| !view.fits);
    let (remedies, smaller) = if waits { helps(survey, pod, &ask, &obstacles) } else { Default::default() };
    let Pod { metadata, .. } = pod;
    let policy = ask.policy.to_string();
    Ok(Answer {
        asks: asks(pod, survey.rules.unit),
        holds: holds(survey, pod),
        explanation: PodExplanation::new(&metadata.namespace, &metadata.name, placed_on, policy, views),
        remedies,
        smaller,
        kube_scheduler: None,
    })
}

/// The judgement of one node.
pub(crate) fn judge(survey: &Survey, name: &NodeName, facts: &NodeFacts, ask: &ParsedPod<'_>) -> NodeVerdict {
    if let Some(problem) = &facts.problem {
        return NodeVerdict::Rejected(RejectReason::BadNode(problem.clone()).into());
    }
    let Some(state) = survey.state(name) else {
        return NodeVerdict::Rejected(RejectReason::UnknownNode.into());
    };
    let offer =
        NodeOffer { state, serves: facts.serves.covers(ask.shape.dialects), quota_labels: &facts.place };
    let request = ask.request(facts.unit);
    let question = PodQuery { namespace: ask.namespace, request: &request, policy: &ask.policy };
    match admission::judge(offer, question, survey.limits()) {
        // kube-scheduler says so of such a node, before it asks about GPUs.
        NodeVerdict::Fits(_) if request.cpu > state.cpu_left() => refused(PlacementError::Cpu),
        NodeVerdict::Fits(_) if request.memory > state.memory_left() => refused(PlacementError::Memory),
        verdict => verdict,
    }
}

fn refused(refusal: PlacementError) -> NodeVerdict {
    NodeVerdict::Rejected(RejectReason::Placement(refusal).into())
}

/// What would help where GPUs are short. A quota or the host's CPU is no matter of GPUs: neither another pod's end nor another
/// size helps.
fn helps(
    survey: &Survey,
    pod: &Pod,
    ask: &ParsedPod<'_>,
    obstacles: &BTreeMap<&NodeName, RejectReason>,
) -> (Vec<Remedy>, Vec<Smaller>) {
    let mut remedies = Vec::new();
    let mut smaller = Best::default();
    let mut looked_at = 0;
    for (name, reason) in obstacles {
        let (Some(facts), Some(state)) = (survey.nodes.get(*name), survey.state(name)) else { continue };
        let of_cards = matches!(reason, RejectReason::Placement(refusal) if !matches!(refusal, PlacementError::Cpu | PlacementError::Memory));
        if !of_cards || facts.cordoned {
            continue;
        }
        let request = gpus_only(&ask.request(facts.unit));
        let dialect = dialect_of(pod, facts.unit);
        for less in remedy::smaller_requests(state, &request, &ask.policy) {
            if let Some(words) = dialect.and_then(|dialect| request_words(dialect, less, facts.unit)) {
                smaller.offer(less, words, &name.0);
            }
        }
        if reason.may_resolve() && looked_at < RELIEF_LOOKED_AT {
            looked_at += 1;
            let grants = survey.grants(name);
            let holder = |grant| RunningPod { grant, priority: 0, quota_released: GpuAmount::default() };
            let holders: Vec<RunningPod<'_>> = grants.iter().copied().map(holder).collect();
            let ends = remedy::pods_to_end(state, &holders, &request, &ask.policy);
            let full = |uid| survey.pod(uid).map(|pod| format!("{}/{}", pod.namespace, pod.name));
            let pods: Vec<String> = ends.iter().flatten().filter_map(full).collect();
            if !pods.is_empty() {
                remedies.push(Remedy { node: name.to_string(), pods });
            }
        }
    }
    remedies.sort_by_key(|remedy: &Remedy| remedy.pods.len());
    (remedies, smaller.into_list())
}

/// CPU and memory are kube-scheduler's affair, and no GPU pod's end is asked for their sake.
fn gpus_only(request: &PodRequest) -> PodRequest {
    PodRequest { cpu: Default::default(), memory: Default::default(), ..request.clone() }
}

/// The largest request of each kind, with the first node that has room for it.
#[derive(Default)]
struct Best(BTreeMap<u8, (u64, Smaller)>);

impl Best {
    fn offer(&mut self, request: Request, words: String, node: &str) {
        // Shares come in two kinds: as much compute with less memory, or the other way round.
        let (kind, size) = match request {
            Request::Whole(count) => (0, u64::from(count)),
            Request::Memory(memory) => (1, memory.0),
            Request::Share { compute_percent, memory } => {
                (2, u64::from(compute_percent.0).saturating_mul(memory.0))
            }
        };
        let better = self.0.get(&kind).is_none_or(|(known, _)| size > *known);
        if better {
            self.0.insert(kind, (size, Smaller { request: words, node: node.to_owned() }));
        }
    }

    fn into_list(self) -> Vec<Smaller> {
        self.0.into_values().map(|(_, smaller)| smaller).collect()
    }
}

fn dialect_of(pod: &Pod, unit: MemoryUnit) -> Option<Dialect> {
    pod.spec.claims(unit).ok()?.first().map(|claim| claim.dialect)
}

fn asks(pod: &Pod, unit: MemoryUnit) -> Vec<String> {
    let claims = pod.spec.claims(unit).unwrap_or_default();
    let several = claims.len() > 1;
    let words = claims.iter().filter_map(|claim| {
        let words = request_words(claim.dialect, claim.request, unit)?;
        Some(if several { format!("{}: {words}", claim.container) } else { words })
    });
    words.collect()
}

fn holds(survey: &Survey, pod: &Pod) -> Vec<String> {
    let uid = pod.metadata.uid.as_str().into();
    let node = NodeName(pod.spec.node_name.clone());
    let known = survey.holders(&node).into_iter().find(|(_, grant)| grant.pod == uid);
    let footprint = known.into_iter().flat_map(|(_, grant)| grant.footprint());
    footprint
        .map(|(gpu, usage)| match (usage.whole, usage.compute_percent.0) {
            (true, _) => format!("GPU{gpu}: all of it"),
            (false, 0) => format!("GPU{gpu}: {}", usage.memory),
            (false, _) => format!("GPU{gpu}: {} and {}", usage.compute_percent, usage.memory),
        })
        .collect()
}
