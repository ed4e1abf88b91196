//! Views of GPU pods, both waiting and placed.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;
use tessera_core::grant::{Hold, PodGrant};
use tessera_core::natural::natural;
use tessera_core::request::{ContainerRole, MemoryRequest, Request};
use tessera_core::units::PodUid;
use tessera_wire::foreign::pod_spec::{BadPod, Claim};
use tessera_wire::tessera::agent_address::AgentAddress;
use tessera_wire::tessera::explanation::{KubeSchedulerReport, offered, unserved};

use super::super::decisions::{Decision, DecisionOutcome};
use super::super::lookup::{self, NodeLookup};
use super::{ListQuery, Page, contains};
use crate::state::{GpuPod, State, StateAccess};

/// A pod in the list of pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRow {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod, which Kubernetes never reuses.
    pub uid: String,
    /// `waiting`, `booking` (GPUs are booked, the binding is not confirmed) or `placed`.
    pub state: &'static str,
    /// Node of the pod, or the node of its booking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Priority of the pod. A higher value is scheduled first.
    pub priority: i32,
    /// GPU requests of the containers.
    pub asks: Vec<RequestView>,
    /// Time when the pod was created, in RFC 3339 form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// Last report of kube-scheduler on a pod that waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kube_scheduler: Option<KubeSchedulerReport>,
    /// The pod's `schedulerName` while the pod waits and no scheduler has reported on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreported: Option<String>,
    /// Requested GPU resources outside Tessera's dialects that a node offers, such as `nvidia.com/mig-1g.10gb=1`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
    /// Requested GPU resources that no node offers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unserved: Vec<String>,
    /// Error in the GPU requests, which keeps the pod from being scheduled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Number of nodes by rejection reason when filter last rejected every node. Set for waiting
    /// pods only.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<&'static str, u64>,
}

/// GPU request of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestView {
    /// Name of the container.
    pub container: String,
    /// Role of the container: `main`, `init` or `sidecar`.
    pub role: &'static str,
    /// Dialect of the request.
    pub dialect: &'static str,
    /// Number of GPUs; absent for a share of one GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u8>,
    /// Compute in percent of each GPU; absent for whole GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<u32>,
    /// Memory of each GPU in MiB.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Memory of each GPU in percent of what it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_percent: Option<u32>,
}

/// Details of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodDetail {
    /// The fields that the list of pods shows too.
    #[serde(flatten)]
    pub row: PodRow,
    /// GPU shares that the pod holds.
    pub grants: Vec<GrantView>,
    /// Annotations of the pod about placement and grants.
    pub annotations: BTreeMap<String, String>,
}

/// The share of one GPU that one container holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GrantView {
    /// Name of the container, or of the request in the claim.
    pub container: String,
    /// Name of the claim that holds the GPU for the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Index of the GPU on the node.
    pub index: u8,
    /// UUID of the GPU.
    pub uuid: String,
    /// Model of the GPU.
    pub model: String,
    /// True if the container holds the whole GPU.
    pub whole: bool,
    /// Compute in percent; zero if the container holds only memory.
    pub compute: u32,
    /// GPU memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

/// Returns the pods that match the query: waiting pods first, then by namespace and name.
#[must_use]
pub fn pods(access: &impl StateAccess, query: &ListQuery) -> Page<PodRow> {
    access.with_state(|state| {
        let mut shown: Vec<(&PodUid, &GpuPod)> =
            state.gpu_pods().filter(|(_, pod)| passes(state, pod, query)).collect();
        let (total, range) = (shown.len(), query.range(shown.len()));
        let offset = range.start;
        let part = part_in_order(&mut shown, range, |(_, a), (_, b)| order(&query.sort, a, b));
        Page { total, offset, items: part.iter().map(|(uid, pod)| row(state, uid, pod)).collect() }
    })
}

fn order(sort: &str, a: &GpuPod, b: &GpuPod) -> Ordering {
    // Times in RFC 3339 form in UTC sort like text.
    let by_age = || a.created.cmp(&b.created);
    let by_name = || natural(&a.namespace, &b.namespace).then_with(|| natural(&a.name, &b.name));
    let by_state = || a.node.is_some().cmp(&b.node.is_some());
    let by_wait = || if a.node.is_none() && b.node.is_none() { by_age() } else { Ordering::Equal };
    match sort {
        "age" => by_age().then_with(by_name),
        "youngest" => by_age().reverse().then_with(by_name),
        "name" => by_name(),
        _ => by_state().then_with(by_wait).then_with(by_name),
    }
}

/// Returns the elements at `range` of the sorted list, without sorting the other elements.
fn part_in_order<T>(all: &mut [T], range: Range<usize>, compare: impl Fn(&T, &T) -> Ordering + Copy) -> &[T] {
    let (from, count) = (range.start, range.len());
    if from > 0 && from < all.len() {
        all.select_nth_unstable_by(from, compare);
    }
    let rest = &mut all[from..];
    if count > 0 && count < rest.len() {
        rest.select_nth_unstable_by(count, compare);
    }
    let part = &mut rest[..count];
    part.sort_by(compare);
    part
}

fn passes(state: &State, pod: &GpuPod, query: &ListQuery) -> bool {
    let in_state = match query.state.as_str() {
        "waiting" => pod.node.is_none(),
        "placed" => pod.node.is_some(),
        _ => true,
    };
    let on = |text: &str| pod.node.as_ref().is_some_and(|node| contains(&node.0, text));
    let model = || match pod.node.as_ref().and_then(|name| lookup::node(state, name)) {
        Some(NodeLookup::Gpus(node)) => node.spec.node.gpus().iter().any(|gpu| *gpu.model.0 == *query.model),
        _ => false,
    };
    in_state
        && (query.namespace.is_empty() || pod.namespace == query.namespace)
        && (query.dialect.is_empty() || lookup::asks_in(pod, &query.dialect))
        && (query.mentions(&pod.name) || on(&query.q))
        && (query.model.is_empty() || model())
}

/// Returns the details of a pod, or `None` if the pod is unknown or has ended. A pod on a node whose GPUs are held by
/// claims shows these GPUs.
#[must_use]
pub fn pod(state: &State, namespace: &str, name: &str) -> Option<PodDetail> {
    let Some((uid, pod)) = lookup::pod(state, namespace, name) else {
        return pod_of_claims(state, namespace, name);
    };
    let grant = state.ledger().grant(uid);
    Some(PodDetail {
        row: row(state, uid, pod),
        grants: grant.map_or_else(Vec::new, |grant| grants(state, grant, None)),
        annotations: pod.annotations.clone(),
    })
}

/// Returns the details of a pod on a node whose GPUs are held by claims. Of such a pod, the state keeps no more than the
/// claims that are reserved for it.
fn pod_of_claims(state: &State, namespace: &str, name: &str) -> Option<PodDetail> {
    let (uid, claims) = state.claims_of_placed(namespace, name)?;
    let (_, first) = claims.first()?;
    Some(PodDetail {
        row: PodRow {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.to_owned(),
            state: "placed",
            node: Some(first.node.to_string()),
            ..PodRow::default()
        },
        grants: claims.iter().flat_map(|(claim, grant)| grants(state, grant, Some(claim))).collect(),
        annotations: BTreeMap::new(),
    })
}

fn row(state: &State, uid: &PodUid, pod: &GpuPod) -> PodRow {
    let (asks, problem) = match requests(state, pod) {
        Ok(asks) => (asks, None),
        Err(bad) => (Vec::new(), Some(bad.to_string())),
    };
    let booked = state.ledger().grant(uid).map(|grant| &grant.node);
    PodRow {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        uid: uid.to_string(),
        state: match (&pod.node, booked) {
            (Some(_), _) => "placed",
            (None, Some(_)) => "booking",
            (None, None) => "waiting",
        },
        node: pod.node.as_ref().or(booked).map(ToString::to_string),
        priority: pod.priority(),
        created: pod.created.clone(),
        unreported: (pod.node.is_none() && booked.is_none() && pod.unscheduled.is_none())
            .then(|| pod.spec.scheduler().to_owned()),
        kube_scheduler: pod.unscheduled.as_deref().cloned().map(KubeSchedulerReport::from),
        others: offered(state, &pod.spec),
        unserved: unserved(state, &pod.spec),
        asks,
        problem,
        refused: BTreeMap::new(),
    }
}

/// Adds to each waiting pod the rejection reasons from the newest of `decisions` about it.
pub fn add_refusals(rows: &mut [PodRow], decisions: &[Decision]) {
    for row in rows.iter_mut().filter(|row| row.state == "waiting") {
        let refused =
            decisions.iter().filter(|decision| decision.uid == row.uid).find_map(|decision| match &decision
                .outcome
            {
                DecisionOutcome::FitsNowhere { refused } => Some(refused),
                _ => None,
            });
        row.refused = refused.cloned().unwrap_or_default();
    }
}

fn requests(state: &State, pod: &GpuPod) -> Result<Vec<RequestView>, BadPod> {
    let unit = lookup::unit_of(state, pod.node.as_ref());
    let claims = pod.spec.claims(unit)?;
    let view = |claim: Claim| {
        let (gpus, compute, memory_mib, memory_percent) = match claim.request {
            Request::Whole(gpus) => (Some(gpus), None, None, None),
            Request::Share(share) => {
                let compute = share.has_compute().then_some(share.compute_percent.0);
                let (memory, part) = match share.memory {
                    MemoryRequest::Amount(memory) => (Some(memory.0), None),
                    MemoryRequest::PartOfGpu(part) => (None, Some(part.0)),
                };
                ((share.count > 1).then_some(share.count), compute, memory, part)
            }
        };
        let role = match claim.role {
            ContainerRole::Main => "main",
            ContainerRole::Init => "init",
            ContainerRole::Sidecar => "sidecar",
        };
        let (container, dialect) = (claim.container, lookup::dialect_name(claim.dialect));
        RequestView { container, role, dialect, gpus, compute, memory_mib, memory_percent }
    };
    Ok(claims.into_iter().map(view).collect())
}

fn grants(state: &State, grant: &PodGrant, claim: Option<&str>) -> Vec<GrantView> {
    let Some(node) = state.ledger().node(&grant.node) else { return Vec::new() };
    let held = grant.containers.iter().flat_map(|container| {
        container.holds.iter().map(|(index, hold)| (container.container.as_str(), *index, *hold))
    });
    held.filter_map(|(container, index, hold)| {
        let gpu = node.node().gpu(index)?;
        let (whole, compute, memory_mib) = match hold {
            Hold::Whole => (true, 100, gpu.memory.0),
            Hold::Share { compute_percent, memory } => (false, compute_percent.0, memory.0),
        };
        Some(GrantView {
            container: container.to_owned(),
            claim: claim.map(str::to_owned),
            index: index.0,
            uuid: gpu.uuid.to_string(),
            model: gpu.model.to_string(),
            whole,
            compute,
            memory_mib,
        })
    })
    .collect()
}

/// Returns the address of the agent on the pod's node.
#[must_use]
pub fn agent(state: &State, namespace: &str, name: &str) -> Option<AgentAddress> {
    let node = match lookup::pod(state, namespace, name) {
        Some((_, pod)) => pod.node.as_ref()?,
        None => &state.claims_of_placed(namespace, name)?.1.first()?.1.node,
    };
    super::node::agent(state, &node.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn part_in_order_matches_a_full_sort(mut all in prop::collection::vec(any::<u8>(), 0..60), from in 0usize..70, count in 0usize..70) {
            let mut sorted = all.clone();
            sorted.sort_unstable();
            let from = from.min(all.len());
            let range = from..(from + count).min(all.len());
            prop_assert_eq!(part_in_order(&mut all, range.clone(), Ord::cmp), &sorted[range]);
        }
    }
}
