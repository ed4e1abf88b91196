//! Chooses the pods to evict so that a pod of higher priority gets its GPUs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tessera_core::admission::{QuotaState, RejectReason};
use tessera_core::disruption::{EvictedPod, violations};
use tessera_core::ledger::NodeGrant;
use tessera_core::preemption::{Preemptor, RunningPod, victims};
use tessera_core::quota::{GpuAmount, GuaranteedUse};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::extender::{MetaPod, MetaVictims, PreemptionArgs, PreemptionResult};
use tessera_wire::foreign::objects::Pod;
use tessera_wire::tessera::gang::GangKey;
use tessera_wire::tessera::parsed_pod::ParsedPod;

use crate::state::{Claimant, GpuPod, State, StateAccess};

/// Returns for each node the pods that must go so that the right GPUs become free. Nodes on which evictions
/// do not help are left out. The state is locked for one node at a time, because a crowded node takes
/// milliseconds and kube-scheduler may name hundreds.
#[must_use]
pub fn preempt(access: &impl StateAccess, args: &PreemptionArgs) -> PreemptionResult {
    let mut result = PreemptionResult::default();
    let Ok(pod) = access.with_state(|state| ParsedPod::of(state, &args.pod)) else { return result };
    // kube-scheduler finds no victims for claims, and an answer without victims is an error for it.
    if access
        .with_state(|state| !state.waiting_claims(&args.pod).is_empty() || state.evicts_for_pod(&args.pod))
    {
        return result;
    }
    let priority = args.pod.spec.priority.unwrap_or(0);
    let guarantees = access.with_state(|state| state.guarantees_of_others(pod.namespace));
    let preempting = Preempting { pod: &pod, priority, guarantees: &guarantees };
    for (node, proposed) in args.proposals() {
        let victims = access.with_state(|state| state.preempt_on(node, preempting, proposed));
        result.node_name_to_meta_victims.extend(victims.map(|victims| (node.to_owned(), victims)));
    }
    result
}

/// The pod for which others are preempted.
#[derive(Clone, Copy)]
struct Preempting<'a> {
    pod: &'a ParsedPod<'a>,
    priority: i32,
    /// Guarantees of the namespaces of other pods.
    guarantees: &'a BTreeMap<String, GuaranteedUse>,
}

impl State {
    /// Returns whether evictions for this pod are planned here: for all pods of its gang together, or within the
    /// guarantee of its namespace. kube-scheduler must not evict further pods for it then.
    fn evicts_for_pod(&self, pod: &Pod) -> bool {
        let uid = PodUid(pod.metadata.uid.clone());
        self.may_evict()
            && (self.gang_of(&uid).is_some() || self.evictions_left(&Claimant::Pod(uid)).is_some())
    }

    /// Returns the pods of a node whose eviction would leave other namespaces below their guarantees. Of the others all
    /// may go together.
    fn guaranteed_pods(
        &self,
        name: &NodeName,
        guarantees: &BTreeMap<String, GuaranteedUse>,
    ) -> BTreeSet<&PodUid> {
        if guarantees.is_empty() {
            return BTreeSet::new();
        }
        let held =
            self.ledger().grants_on(name).filter_map(|grant| Some((&grant.pod, self.pod(&grant.pod)?)));
        let mut held: Vec<(&PodUid, &GpuPod)> = held.filter(|(_, pod)| !pod.is_ending).collect();
        held.sort_by_key(|(uid, pod)| (pod.priority(), Reverse(pod.started), *uid));
        let mut lost: BTreeMap<&str, GpuAmount> = BTreeMap::new();
        let mut kept = BTreeSet::new();
        for (uid, pod) in held {
            let Some(guaranteed) = guarantees.get(&pod.namespace) else { continue };
            let sum = lost.entry(&pod.namespace).or_default();
            let more = sum.plus(self.amount_of(uid));
            if guaranteed.may_lose(more) {
                *sum = more;
            } else {
                kept.insert(uid);
            }
        }
        kept
    }

    fn preempt_on(
        &self,
        node: &str,
        preempting: Preempting<'_>,
        proposed: MetaVictims,
    ) -> Option<MetaVictims> {
        // kube-scheduler alone decides for a pod without GPUs.
        let chosen = if preempting.pod.wants_gpu() {
            self.victims(&NodeName(node.to_owned()), preempting, &proposed)?
        } else {
            proposed
        };
        // An empty list would fail the whole call. A pod that needs no victims fits at the next attempt.
        Some(chosen).filter(|chosen| !chosen.pods.is_empty())
    }

    fn victims(
        &self,
        name: &NodeName,
        Preempting { pod, priority, guarantees }: Preempting<'_>,
        proposed: &MetaVictims,
    ) -> Option<MetaVictims> {
        let node = self.readable_node(&name.0).ok()?;
        let request = pod.request(node.spec.unit);
        let quota_excess = self.admission(&node, pod, &request).quota_excess()?;
        let guaranteed = self.guaranteed_pods(name, guarantees);
        let mut gangs: Vec<&GangKey> = Vec::new();
        let running: Vec<RunningPod<'_>> = self
            .ledger()
            .counted_on(name)
            .map(|counted| {
                let holder = match counted {
                    NodeGrant::Held(grant) => self.pod(&grant.pod),
                    NodeGrant::InDoubt(_) | NodeGrant::Reserved(_) => None,
                };
                let gang = holder.and_then(|_| self.placed_gang_of(&counted.grant().pod));
                // Pods without GPUs are never victims, so they get the highest priority.
                let priority = match (holder, gang) {
                    (Some(holder), Some(gang)) => holder.priority().max(self.priority_of_gang(gang)),
                    (Some(holder), None) => holder.priority(),
                    (None, _) => i32::MAX,
                };
                let gang = gang.map(|gang| {
                    gangs.iter().position(|known| *known == gang).unwrap_or_else(|| {
                        gangs.push(gang);
                        gangs.len() - 1
                    })
                });
                let is_same_namespace = holder.is_some_and(|holder| holder.namespace == pod.namespace);
                let quota_released = if is_same_namespace {
                    GpuAmount::of_grants(&counted.grant().containers, &node.spec.node)
                } else {
                    GpuAmount::default()
                };
                let is_guaranteed = guaranteed.contains(&counted.grant().pod);
                RunningPod { grant: counted, priority, gang, quota_released, is_guaranteed }
            })
            .collect();
        let preemptor = Preemptor { request: &request, priority, policy: &pod.policy, quota_excess };
        let wanted: BTreeSet<PodUid> = proposed.pods.iter().map(|pod| PodUid(pod.uid.clone())).collect();
        let chosen = victims(node.state, &running, preemptor, &wanted)?;
        let is_as_proposed = chosen.iter().collect::<BTreeSet<_>>() == wanted.iter().collect();
        let budget_violations =
            if is_as_proposed { proposed.budget_violations } else { self.violations(&chosen) };
        Some(MetaVictims {
            pods: chosen.into_iter().map(|uid| MetaPod { uid: uid.0 }).collect(),
            budget_violations,
        })
    }

    /// Returns how many evictions violate a PodDisruptionBudget.
    fn violations(&self, victims: &[PodUid]) -> i64 {
        let mut pods: Vec<&GpuPod> = victims.iter().filter_map(|uid| self.pod(uid)).collect();
        pods.sort_by_key(|pod| Reverse(pod.priority()));
        let victims = pods.into_iter().map(|pod| EvictedPod {
            namespace: &pod.namespace,
            name: &pod.name,
            labels: &pod.labels,
        });
        violations(self.budgets(), victims)
    }

    /// Returns whether the quota is the reason on every proposed node.
    #[must_use]
    pub fn is_over_quota(&self, args: &PreemptionArgs) -> bool {
        let Ok(pod) = ParsedPod::of(self, &args.pod) else { return false };
        let is_quota = |node: &str| {
            let Ok(node) = self.readable_node(node) else { return false };
            let request = pod.request(node.spec.unit);
            matches!(self.admission(&node, &pod, &request).check(), Err(RejectReason::Quota(_)))
        };
        let mut nodes = args.proposals().map(|(node, _)| node).peekable();
        nodes.peek().is_some() && nodes.all(is_quota)
    }

    /// Describes what a namespace uses of its quota, or why its limits cannot be read. Returns `None` for a
    /// namespace without limits.
    #[must_use]
    pub fn describe_quota(&self, namespace: &str) -> Option<String> {
        let QuotaState { quota, usage } = self.quota_state();
        if let Some(why) = quota.why_unreadable(namespace) {
            return Some(why.to_owned());
        }
        let held = quota.describe(namespace, usage)?;
        Some(format!("namespace {namespace} holds {held}"))
    }
}
