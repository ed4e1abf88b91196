//! What evictions add to the allocation of a full cluster.
//!
//! A policy fills a cluster with the pods of a trace, as in [`run()`](super::run()). The pods that it rejected then wait,
//! and the planner of the core moves pods to make room for them: the largest first, one after the other, with as few
//! evictions as it finds.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use tessera_core::defragment::{Goal, HeldPod, Requests, Scene, Wanted, plan};
use tessera_core::forecast::{FreeCapacity, Learner};
use tessera_core::ledger::Ledger;
use tessera_core::node::Node;
use tessera_core::placement::Policy;
use tessera_core::request::PodRequest;
use tessera_core::units::{NodeName, PodUid};
use tessera_core::workload::Workload;

use super::pod::SimPod;
use super::{Experiment, FillPolicy, run};

/// Allocated GPUs after a number of evictions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    /// Pods evicted so far. A pod that moved twice counts twice.
    pub evictions: usize,
    /// Rejected pods that run now.
    pub placed: usize,
    /// Allocated GPUs in percent of all GPUs.
    pub allocated_percent: f64,
}

/// The requests of all pods, by the number of their arrival.
#[derive(Debug)]
struct AllRequests<'a>(HashMap<PodUid, &'a PodRequest>);

impl Requests for AllRequests<'_> {
    fn request_on(&self, pod: &PodUid, _: &NodeName) -> Option<PodRequest> {
        self.0.get(pod).map(|request| (*request).clone())
    }
}

/// Fills the cluster with one policy and seed, then makes room for the rejected pods with up to `max_evictions`
/// evictions. Returns a point for each pod that got room, after the point without evictions.
#[must_use]
pub fn defragment(
    experiment: &Experiment,
    policy: FillPolicy,
    seed: u64,
    max_evictions: usize,
) -> Vec<CurvePoint> {
    let filled = run(experiment, policy, seed);
    let arrivals = experiment.arrivals(seed);
    let rejected: HashSet<usize> = filled.rejected.iter().copied().collect();
    let accepted: Vec<&SimPod> = (arrivals.iter().enumerate())
        .filter(|(position, _)| !rejected.contains(position))
        .map(|(_, pod)| *pod)
        .collect();
    let mut ledger = Ledger::default();
    for node in &experiment.nodes {
        ledger.set_node(Node::clone(node));
    }
    let mut requests = AllRequests(HashMap::new());
    let mut pods = BTreeMap::new();
    for (grant, pod) in filled.grants.into_iter().zip(accepted) {
        requests.0.insert(grant.pod.clone(), &pod.request);
        if pod.percent > 0 {
            pods.insert(grant.pod.clone(), held(pod));
        }
        // The policy placed the pod on the same nodes, so there is room.
        ledger.observe(grant);
    }
    let mut waiting: Vec<(usize, &SimPod)> =
        filled.rejected.iter().map(|position| (*position, arrivals[*position])).collect();
    waiting.retain(|(_, pod)| pod.percent > 0);
    waiting.sort_by_key(|(position, pod)| (Reverse(pod.percent), *position));
    let policy = forecast(experiment, &ledger);
    let all = f64::from(u32::try_from(experiment.gpu_count()).unwrap_or(u32::MAX));
    let percent_of_all = |pod: &SimPod| f64::from(pod.percent) / all;
    let mut point = CurvePoint { evictions: 0, placed: 0, allocated_percent: filled.allocated_percent };
    let mut curve = vec![point];
    let mut hopeless: Vec<&PodRequest> = Vec::new();
    for (position, pod) in waiting {
        // The cluster only becomes fuller, so a request that found no room finds none later.
        if hopeless.contains(&&pod.request) {
            continue;
        }
        let uid = PodUid(format!("waiting-{position}"));
        requests.0.insert(uid.clone(), &pod.request);
        let max_moves = max_evictions - point.evictions;
        let scene = Scene {
            ledger: &ledger,
            pods: &pods,
            budgets: &[],
            requests: &requests,
            policy: &policy,
            max_moves,
        };
        let goal = Goal { wanted: vec![Wanted { pod: uid.clone(), max_priority: 0 }], ..Goal::default() };
        let found = plan(scene, &goal);
        if !found.unmet.is_empty() {
            hopeless.push(&pod.request);
            continue;
        }
        for moved in &found.moves {
            ledger.release(&moved.to.pod);
        }
        point.evictions += found.moves.len();
        let moved = found.moves.into_iter().map(|moved| moved.to);
        // The plan was made on the same ledger, so there is room.
        for grant in moved.chain(found.places) {
            ledger.observe(grant);
        }
        pods.insert(uid, held(pod));
        point.placed += 1;
        point.allocated_percent += percent_of_all(pod);
        curve.push(point);
    }
    debug_assert!(ledger.overbooked().is_empty(), "a plan keeps within each GPU");
    curve
}

/// Returns policy `tessera` with the forecast for the workload of the trace.
fn forecast(experiment: &Experiment, ledger: &Ledger) -> Policy {
    let workload = Workload::of(experiment.pods.iter().map(|pod| &pod.request));
    let left: FreeCapacity = ledger.nodes().collect();
    Policy::Tessera(std::sync::Arc::new(Learner::new(workload).forecast(&left)))
}

/// Describes a pod that may move. The trace names no owners, priorities and costs.
fn held(pod: &SimPod) -> HeldPod {
    HeldPod {
        namespace: String::new(),
        name: pod.name.clone(),
        labels: BTreeMap::new(),
        priority: 0,
        cost: Duration::ZERO,
        fixed: None,
    }
}
