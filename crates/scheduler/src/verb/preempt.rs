//! Whom to evict.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use tessera_core::disruption::{EvictedPod, violations};
use tessera_core::preemption::{Preemptor, RunningPod, victims};
use tessera_core::quota::GpuAmount;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::foreign::extender::{MetaPod, MetaVictims, PreemptionArgs, PreemptionResult};

use super::ask::ParsedPod;
use super::reason::RejectReason;
use crate::state::{GpuPod, ReadableNode, State};

impl State {
    /// For each node the pods that must go so that the right GPUs come free; nodes where nothing helps are left out.
    #[must_use]
    pub fn preempt(&self, args: &PreemptionArgs) -> PreemptionResult {
        let Ok(ask) = ParsedPod::of(self, &args.pod) else { return PreemptionResult::default() };
        let victims = args.proposals().filter_map(|(node, proposed)| {
            Some((node.to_owned(), self.preempt_on(node, &ask, args.pod.spec.priority, proposed)?))
        });
        PreemptionResult { node_name_to_meta_victims: victims.collect() }
    }

    /// The same on one node.
    pub(crate) fn preempt_on(
        &self,
        node: &str,
        ask: &ParsedPod<'_>,
        priority: Option<i32>,
        proposed: MetaVictims,
    ) -> Option<MetaVictims> {
        // A pod without GPUs is kube-scheduler's own affair.
        let chosen = if ask.wants_gpu() {
            self.victims(&NodeName(node.to_owned()), ask, priority.unwrap_or(0), &proposed)?
        } else {
            proposed
        };
        // An empty list would fail the whole call; and where nobody need go, the pod fits by itself next time.
        Some(chosen).filter(|chosen| !chosen.pods.is_empty())
    }

    fn victims(
        &self,
        name: &NodeName,
        ask: &ParsedPod<'_>,
        priority: i32,
        proposed: &MetaVictims,
    ) -> Option<MetaVictims> {
        let ReadableNode { spec, state, place } = self.serving(&name.0, ask).ok()?;
        let request = ask.request(spec.unit);
        let (quota, accounts) = self.quota();
        let more = GpuAmount::upper_bound(&request, &spec.node);
        let quota_excess = quota.excess(ask.namespace, accounts, place, more)?;
        let holders: Vec<RunningPod<'_>> = self
            .ledger()
            .grants_on(name)
            .map(|grant| {
                let pod = self.pod(&grant.pod);
                // Pods without GPUs are not ours to evict: as if they mattered more than anybody.
                let priority = pod.map_or(i32::MAX, GpuPod::priority);
                let is_own = pod.is_some_and(|pod| pod.namespace == ask.namespace);
                let quota_released = if is_own {
                    GpuAmount::of_grants(&grant.containers, &spec.node)
                } else {
                    GpuAmount::default()
                };
                RunningPod { grant, priority, quota_released }
            })
            .collect();
        let newcomer = Preemptor { request: &request, priority, policy: &ask.policy, quota_excess };
        let wanted: BTreeSet<PodUid> = proposed.pods.iter().map(|pod| PodUid(pod.uid.clone())).collect();
        let chosen = victims(state, &holders, newcomer, &wanted)?;
        let is_as_proposed = chosen.iter().collect::<BTreeSet<_>>() == wanted.iter().collect();
        let budget_violations =
            if is_as_proposed { proposed.budget_violations } else { self.violations(&chosen) };
        Some(MetaVictims {
            pods: chosen.into_iter().map(|uid| MetaPod { uid: uid.0 }).collect(),
            budget_violations,
        })
    }

    /// How many of these a disruption budget protects.
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

    /// Whether nothing but its namespace's quota keeps a pod from all these nodes.
    #[must_use]
    pub fn is_over_quota(&self, args: &PreemptionArgs) -> bool {
        let Ok(ask) = ParsedPod::of(self, &args.pod) else { return false };
        let mut judged =
            args.proposals().map(|(node, _)| self.judge(&NodeName(node.to_owned()), &ask)).peekable();
        judged.peek().is_some() && judged.all(|judged| matches!(judged, Err(RejectReason::Quota(_))))
    }

    /// What a namespace holds of its quota, or why nobody can tell, for its people; `None` without one.
    #[must_use]
    pub fn describe_quota(&self, namespace: &str) -> Option<String> {
        let (quota, accounts) = self.quota();
        if let Some(why) = quota.why_unreadable(namespace) {
            return Some(why.to_owned());
        }
        let held = quota.describe(namespace, accounts)?;
        Some(format!("namespace {namespace} holds {held}"))
    }
}
