//! Explains why a pod waits and what would help, with the same code as the scheduler.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_core::admission::{Admission, NodeOffer, NodeVerdict, PodQuery, RejectReason};
use tessera_core::ledger::NodeGrant;
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

use crate::show::request_text;
use crate::survey::{NodeFacts, Survey};

/// Largest number of nodes on which the plugin searches for pods whose end would help. Trying all
/// sets of pods on thousands of nodes would take minutes.
const MAX_SEARCHED_NODES: usize = 64;

/// Explanation of a pod, and what would help it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodReport {
    /// Requests of the pod, as in a manifest.
    #[serde(rename = "asks", skip_serializing_if = "Vec::is_empty")]
    pub(crate) requests: Vec<String>,
    #[serde(flatten)]
    pub(crate) explanation: PodExplanation,
    /// GPUs that the pod holds, if it is placed and they are known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) holds: Vec<String>,
    /// Pods whose end would make room, by node, fewest pods first.
    #[serde(rename = "relief", skip_serializing_if = "Vec::is_empty")]
    pub(crate) remedies: Vec<Remedy>,
    /// Smaller requests that fit now, each with a node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) smaller: Vec<SmallerRequest>,
    /// Last message of kube-scheduler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kube_scheduler: Option<String>,
}

/// Pods of one node whose end would make room for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Remedy {
    pub(crate) node: String,
    /// Pods as NAMESPACE/NAME.
    pub(crate) pods: Vec<String>,
}

/// A smaller request that fits on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct SmallerRequest {
    pub(crate) request: String,
    pub(crate) node: String,
}

/// Explains a pod, which need not exist in the cluster.
pub(crate) fn explain(survey: &Survey, pod: &Pod) -> Result<PodReport, BadPodObject> {
    let query = ParsedPod::of(&survey.rules, pod)?;
    let mut obstacles = BTreeMap::new();
    let mut views = Vec::new();
    for (name, facts) in &survey.nodes {
        let verdict = judge(survey, name, facts, &query);
        if let NodeVerdict::Rejected(obstacle) = &verdict {
            obstacles.insert(name, obstacle.reason.clone());
        }
        views.push(NodeExplanation::new(&name.0, &query.request(facts.unit), verdict));
    }
    let placed_on = Some(pod.spec.node_name.clone()).filter(|node| !node.is_empty());
    let is_waiting = placed_on.is_none() && views.iter().all(|view| !view.fits);
    let (remedies, smaller) =
        if is_waiting { find_remedies(survey, pod, &query, &obstacles) } else { Default::default() };
    let Pod { metadata, .. } = pod;
    let policy = query.policy.to_string();
    Ok(PodReport {
        requests: request_texts(pod, survey.rules.unit),
        holds: holds(survey, pod),
        explanation: PodExplanation::new(&metadata.namespace, &metadata.name, placed_on, policy, views),
        remedies,
        smaller,
        kube_scheduler: None,
    })
}

/// Returns the verdict of one node.
pub(crate) fn judge(
    survey: &Survey,
    name: &NodeName,
    facts: &NodeFacts,
    query: &ParsedPod<'_>,
) -> NodeVerdict {
    let state = survey.state(name).filter(|_| facts.problem.is_none());
    let Some(state) = state else {
        let reason = RejectReason::of_missing_node(facts.problem.as_deref());
        return NodeVerdict::Rejected(reason.into());
    };
    let offer = NodeOffer {
        state,
        serves: facts.dialects.covers(query.shape.dialects),
        quota_labels: &facts.quota_labels,
    };
    let request = query.request(facts.unit);
    let pod = PodQuery { namespace: query.namespace, request: &request, policy: &query.policy };
    // kube-scheduler rejects a node without enough CPU or memory before it calls the extender.
    Admission { offer, query: pod, quota: Some(survey.limits()) }.verdict_with_host()
}

/// Finds remedies on nodes without enough free GPUs. If a quota or the host's CPU is exhausted,
/// neither the end of a pod nor a smaller GPU request helps.
fn find_remedies(
    survey: &Survey,
    pod: &Pod,
    query: &ParsedPod<'_>,
    obstacles: &BTreeMap<&NodeName, RejectReason>,
) -> (Vec<Remedy>, Vec<SmallerRequest>) {
    let mut remedies = Vec::new();
    let mut smaller = LargestRequests::default();
    let mut searched = 0;
    for (name, reason) in obstacles {
        let (Some(facts), Some(state)) = (survey.nodes.get(*name), survey.state(name)) else { continue };
        let lacks_gpus = matches!(reason, RejectReason::Placement(refusal) if !matches!(refusal, PlacementError::Cpu | PlacementError::Memory));
        if !lacks_gpus || facts.cordoned {
            continue;
        }
        let request = gpus_only(&query.request(facts.unit));
        let dialect = dialect_of(pod, facts.unit);
        for less in remedy::smaller_requests(state, &request, &query.policy) {
            if let Some(text) = dialect.and_then(|dialect| request_text(dialect, less, facts.unit)) {
                smaller.offer(less, text, &name.0);
            }
        }
        if reason.may_resolve() && searched < MAX_SEARCHED_NODES {
            searched += 1;
            let grants = survey.grants(name);
            let holder = |grant| RunningPod {
                grant: NodeGrant::Held(grant),
                priority: 0,
                quota_released: GpuAmount::default(),
            };
            let holders: Vec<RunningPod<'_>> = grants.iter().copied().map(holder).collect();
            let ends = remedy::pods_to_end(state, &holders, &request, &query.policy);
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

/// Drops CPU and memory from a request. kube-scheduler checks them, and remedies concern only GPUs.
fn gpus_only(request: &PodRequest) -> PodRequest {
    PodRequest { cpu: Default::default(), memory: Default::default(), ..request.clone() }
}

/// The largest smaller request of each kind, with the first node where it fits.
#[derive(Default)]
struct LargestRequests(BTreeMap<u8, (u64, SmallerRequest)>);

impl LargestRequests {
    fn offer(&mut self, request: Request, words: String, node: &str) {
        // Shares can shrink in compute or in memory, so the product compares them.
        let (kind, size) = match request {
            Request::Whole(count) => (0, u64::from(count)),
            Request::Memory(memory) => (1, memory.0),
            Request::Share { compute_percent, memory } => {
                (2, u64::from(compute_percent.0).saturating_mul(memory.0))
            }
        };
        let better = self.0.get(&kind).is_none_or(|(known, _)| size > *known);
        if better {
            self.0.insert(kind, (size, SmallerRequest { request: words, node: node.to_owned() }));
        }
    }

    fn into_list(self) -> Vec<SmallerRequest> {
        self.0.into_values().map(|(_, smaller)| smaller).collect()
    }
}

fn dialect_of(pod: &Pod, unit: MemoryUnit) -> Option<Dialect> {
    pod.spec.claims(unit).ok()?.first().map(|claim| claim.dialect)
}

fn request_texts(pod: &Pod, unit: MemoryUnit) -> Vec<String> {
    let claims = pod.spec.claims(unit).unwrap_or_default();
    let several = claims.len() > 1;
    let words = claims.iter().filter_map(|claim| {
        let words = request_text(claim.dialect, claim.request, unit)?;
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
            (true, _) => format!("GPU{gpu}: whole GPU"),
            (false, 0) => format!("GPU{gpu}: {}", usage.memory),
            (false, _) => format!("GPU{gpu}: {} and {}", usage.compute_percent, usage.memory),
        })
        .collect()
}
