//! Plans which pods to evict so that all pods of a waiting gang get their places.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tessera_core::defragment::{Fixed, HeldPod};
use tessera_core::disruption::DisruptionBudget;
use tessera_core::eviction::{EvictionNode, EvictionScene, EvictionUnit, plan};
use tessera_core::ledger::NodeGrant;
use tessera_core::node::NodeState;
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::tessera::eviction;
use tessera_wire::tessera::gang::GangKey;

use super::gang::{assign, demands};
use crate::state::{GpuPod, RoomPlan, State};

/// The pods that may be evicted for a gang, and those that end anyway.
#[derive(Default)]
struct Evictable {
    units: Vec<EvictionUnit>,
    pods: BTreeMap<PodUid, HeldPod>,
    /// The unit of each pod.
    unit_of: HashMap<PodUid, usize>,
    ending: BTreeSet<PodUid>,
}

impl State {
    /// Plans the evictions after which all missing pods of a gang have their places. Returns `None` if no evictions of
    /// pods of lower priority suffice, or if the gang may not preempt.
    #[must_use]
    pub fn plan_evictions(&self, key: &GangKey) -> Option<RoomPlan> {
        let status = self.gang_status(key)?;
        let missing = || status.missing().iter().filter_map(|uid| self.member(uid));
        let priority = missing().map(GpuPod::priority).min()?;
        if missing().any(|pod| pod.spec.never_preempts) {
            return None;
        }
        let classes = self.classes(status.missing(), None);
        let evictable = self.evictable(key, priority);
        let bases = self.bases(key, priority, &evictable);
        let nodes = self.gang_nodes(key, &status, &classes, &[], Some(&bases)).ok()?;
        let held = |node: &NodeState| {
            let grants = self.ledger().grants_on(&node.node().name);
            grants.filter_map(|grant| Some((*evictable.unit_of.get(&grant.pod)?, grant))).collect()
        };
        let nodes: Vec<EvictionNode<'_>> =
            nodes.into_iter().map(|node| EvictionNode { held: held(node.state), node }).collect();
        let budgets: Vec<DisruptionBudget> = self.budgets().cloned().collect();
        let scene = EvictionScene {
            nodes: &nodes,
            units: &evictable.units,
            pods: &evictable.pods,
            budgets: &budgets,
        };
        let planned = plan(scene, &demands(&classes), &status.topology)?;
        let victims = planned.units.iter().flat_map(|unit| evictable.units[*unit].pods.iter().cloned());
        let victims: Vec<PodUid> = victims.collect();
        if victims.is_empty() && evictable.ending.is_empty() {
            // The gang fits already, and the next call of filter places it.
            return None;
        }
        let nodes: Vec<_> = nodes.into_iter().map(|node| node.node).collect();
        let places = assign(&classes, &nodes, planned.placed, None);
        self.check_quota(key, &places).ok()?;
        Some(RoomPlan { gang: key.clone(), priority, places, victims })
    }

    /// Returns the pods of lower priority that may be evicted for a gang. The pods of a gang are one unit with the
    /// highest of their priorities.
    fn evictable(&self, key: &GangKey, priority: i32) -> Evictable {
        let mut found = Evictable::default();
        let mut gangs: BTreeMap<&GangKey, usize> = BTreeMap::new();
        let mut units: Vec<(i32, Vec<PodUid>)> = Vec::new();
        let mut held: Vec<(&PodUid, &GpuPod)> =
            self.gpu_pods().filter(|(_, pod)| pod.node.is_some()).collect();
        held.sort_by_key(|(uid, _)| *uid);
        for (uid, pod) in held {
            if pod.is_ending {
                found.ending.insert(uid.clone());
                continue;
            }
            if self.gang_key_of(uid) == Some(key) {
                continue;
            }
            let gang = self.placed_gang_of(uid);
            let level =
                gang.map_or_else(|| pod.priority(), |gang| self.priority_of_gang(gang).max(pod.priority()));
            if level >= priority {
                continue;
            }
            found.pods.insert(uid.clone(), self.held_pod(uid, pod));
            let known = gang.and_then(|gang| gangs.get(gang)).copied();
            match known {
                Some(unit) => units[unit].1.push(uid.clone()),
                None => {
                    gangs.extend(gang.map(|gang| (gang, units.len())));
                    units.push((level, vec![uid.clone()]));
                }
            }
        }
        // The last ones are spared first: those of gangs that are not ending already.
        let is_ending = |pods: &[PodUid]| {
            pods.first().and_then(|pod| self.gang_key_of(pod)).is_some_and(|gang| self.is_gang_ending(gang))
        };
        units.sort_by_cached_key(|(level, pods)| (*level, !is_ending(pods), pods.clone()));
        for (level, pods) in units {
            found.unit_of.extend(pods.iter().map(|pod| (pod.clone(), found.units.len())));
            found.units.push(EvictionUnit { pods, level: level.into() });
        }
        found
    }

    fn held_pod(&self, uid: &PodUid, pod: &GpuPod) -> HeldPod {
        let is_known = self.ledger().grant(uid).is_some_and(|grant| !self.is_set_aside(grant));
        let fixed = eviction::fixed_for_others(&pod.annotations);
        HeldPod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            labels: pod.labels.clone(),
            priority: pod.priority(),
            cost: Duration::ZERO,
            fixed: fixed.or_else(|| (!is_known).then_some(Fixed::UnknownGpus)),
        }
    }

    /// Returns the nodes without the pods that may be evicted, without those that end anyway, and without GPUs that are
    /// held back for the gang itself.
    fn bases(&self, key: &GangKey, priority: i32, evictable: &Evictable) -> HashMap<NodeName, NodeState> {
        let stays = |counted: &NodeGrant<'_>| match counted {
            NodeGrant::Held(grant) => {
                !evictable.ending.contains(&grant.pod) && !evictable.unit_of.contains_key(&grant.pod)
            }
            NodeGrant::Reserved(place) => !self.is_held_back_for(place, key, priority),
            NodeGrant::InDoubt(_) => true,
        };
        let base = |node: &NodeState| {
            let mut state = NodeState::empty(node.shared_node());
            let counted = self.ledger().counted_on(&node.node().name);
            counted.filter(stays).for_each(|counted| state.add(counted.grant()));
            (node.node().name.clone(), state)
        };
        self.ledger().nodes().map(base).collect()
    }
}
