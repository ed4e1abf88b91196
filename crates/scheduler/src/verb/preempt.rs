//! Whom to evict.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::preemption::{Holder, Newcomer, victims};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::extender::{MetaPod, MetaVictims, PreemptionArgs, PreemptionResult};

use super::ask::Ask;
use crate::state::State;

impl State {
    /// For each node the pods that must go so that the right cards come free; nodes where nothing helps are left out.
    #[must_use]
    pub fn preempt(&self, args: &PreemptionArgs) -> PreemptionResult {
        let proposals = args.proposals();
        let Ok(ask) = Ask::of(self, &args.pod) else { return PreemptionResult::default() };
        let priority = args.pod.spec.priority.unwrap_or(0);
        let mut answer = BTreeMap::new();
        for (node, proposed) in proposals {
            // A pod without cards is kube-scheduler's own affair.
            let chosen = if ask.wants_gpu() {
                self.victims(&NodeName(node.to_owned()), &ask, priority, &proposed)
            } else {
                Some(proposed)
            };
            // An empty list would fail the whole call; and where nobody need go, the pod fits by itself next time.
            if let Some(chosen) = chosen.filter(|chosen| !chosen.pods.is_empty()) {
                answer.insert(node.to_owned(), chosen);
            }
        }
        PreemptionResult { node_name_to_meta_victims: answer }
    }

    fn victims(
        &self,
        name: &NodeName,
        ask: &Ask<'_>,
        priority: i32,
        proposed: &MetaVictims,
    ) -> Option<MetaVictims> {
        let judged = self.judge(name, ask).ok()?;
        let holders: Vec<Holder<'_>> = self
            .ledger()
            .grants_on(name)
            .map(|grant| {
                // Pods without cards are not ours to evict: as if they mattered more than anybody.
                let priority = self.pod(&grant.pod).map_or(i32::MAX, |pod| pod.priority());
                Holder { grant, priority }
            })
            .collect();
        let request = ask.request(judged.spec.unit);
        let newcomer = Newcomer { request: &request, priority, policy: &ask.policy };
        let wanted: BTreeSet<PodUid> = proposed.pods.iter().map(|pod| PodUid(pod.uid.clone())).collect();
        let chosen = victims(judged.state, &holders, newcomer, &wanted)?;
        Some(MetaVictims {
            pods: chosen.into_iter().map(|uid| MetaPod { uid: uid.0 }).collect(),
            budget_violations: proposed.budget_violations,
        })
    }
}
