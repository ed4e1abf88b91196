//! Plans which pods to evict so that waiting pods get their places.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tessera_core::admission::QuotaState;
use tessera_core::defragment::{Fixed, HeldPod};
use tessera_core::disruption::DisruptionBudget;
use tessera_core::eviction::{EvictionNode, EvictionScene, EvictionUnit, plan};
use tessera_core::gang::TopologyWish;
use tessera_core::ledger::NodeGrant;
use tessera_core::node::NodeState;
use tessera_core::quota::{DecayedUse, GpuAmount, GuaranteedUse};
use tessera_core::units::{NodeName, PodUid};
use tessera_wire::tessera::eviction;
use tessera_wire::tessera::gang::{GangKey, GangOrigin};

use super::gang::{Surroundings, assign, demands};
use crate::state::{Claim, ClaimGroup, Claimant, GangStatus, GpuPod, RoomPlan, State, Timestamp};

/// The pods that wait together. A pod alone counts as a gang of one.
struct Waiting {
    key: GangKey,
    status: GangStatus,
    /// The lowest of their priorities.
    priority: i32,
}

/// The pods that may be evicted, and those that end anyway.
#[derive(Default)]
struct Evictable {
    units: Vec<EvictionUnit>,
    pods: BTreeMap<PodUid, HeldPod>,
    /// The unit of each pod.
    unit_of: HashMap<PodUid, usize>,
    ending: BTreeSet<PodUid>,
}

/// The order in which units are evicted, the first one first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    level: i64,
    /// True unless a pod of the same gang is ending, so that the gang has lost its work already.
    is_whole: bool,
    priority: i32,
    /// The newest start of a pod, in seconds since 1970.
    started: Reverse<i64>,
    pods: Vec<PodUid>,
}

impl State {
    /// Plans the evictions after which the waiting pods have their places: of pods of lower priority for a gang or a
    /// pod that waits for claims, then of pods of namespaces that use more than their guarantees. Returns `None` if
    /// neither suffices, or if the pods may not preempt.
    #[must_use]
    pub fn plan_evictions(&self, claimant: &Claimant, now: Timestamp) -> Option<RoomPlan> {
        let waiting = self.waiting(claimant)?;
        let pods = || waiting.status.missing().iter().filter_map(|uid| self.member(uid));
        if pods().any(|pod| pod.spec.never_preempts) {
            return None;
        }
        let guarantees = self.guarantees_of_others(&waiting.key.namespace);
        let by_priority = || {
            // kube-scheduler preempts for single pods, but not for claims.
            if let Claimant::Pod(uid) = claimant
                && !self.pod(uid).is_some_and(|pod| self.waits_for_plain_claims(pod))
            {
                return None;
            }
            let claim = Claim::Priority(waiting.priority);
            let below =
                |_: &GpuPod, priority: i32| (priority < waiting.priority).then_some(i64::from(priority));
            let evictable = self.evictable(&waiting.key, below);
            self.plan_with(&waiting, &evictable, &guarantees, self.quota_state(), claimant, claim)
        };
        by_priority().or_else(|| {
            let QuotaState { quota, usage } = self.quota_state();
            let namespace = waiting.key.namespace.as_str();
            let limits = quota.capped([(namespace, quota.guarantee(namespace)?.as_limit())]);
            let order = self.borrowers(&guarantees, now);
            let level = |pod: &GpuPod, _: i32| order.get(pod.namespace.as_str()).copied();
            let evictable = self.evictable(&waiting.key, level);
            let within = QuotaState { quota: &limits, usage };
            self.plan_with(&waiting, &evictable, &guarantees, within, claimant, Claim::Guarantee)
        })
    }

    fn waiting(&self, claimant: &Claimant) -> Option<Waiting> {
        let (key, status) = match claimant {
            Claimant::Gang(key) => (key.clone(), self.gang_status(key)?),
            Claimant::Pod(uid) => {
                let pod = self.pod(uid).filter(|pod| pod.node.is_none())?;
                // No gang has such a name, because names have no spaces.
                let name = format!("pod {}", pod.name);
                let key = GangKey { namespace: pod.namespace.clone(), name, origin: GangOrigin::Tessera };
                let (waiting, topology) = (vec![uid.clone()], TopologyWish::Any);
                (key, GangStatus { size: 1, present: 1, waiting, settled: 0, topology })
            }
        };
        let priority =
            status.missing().iter().filter_map(|uid| self.member(uid)).map(GpuPod::priority).min()?;
        Some(Waiting { key, status, priority })
    }

    fn plan_with(
        &self,
        waiting: &Waiting,
        evictable: &Evictable,
        guarantees: &BTreeMap<String, GuaranteedUse>,
        quota: QuotaState<'_>,
        claimant: &Claimant,
        claim: Claim,
    ) -> Option<RoomPlan> {
        let Waiting { key, status, .. } = waiting;
        let classes = self.classes(status.missing(), None);
        let bases = self.bases(key, claim, evictable);
        let around = Surroundings { states: Some(&bases), quota };
        let nodes = self.gang_nodes(key, status, &classes, &[], around).ok()?;
        let held = |node: &NodeState| {
            let grants = self.ledger().grants_on(&node.node().name);
            grants.filter_map(|grant| Some((*evictable.unit_of.get(&grant.pod)?, grant))).collect()
        };
        let nodes: Vec<EvictionNode<'_>> =
            nodes.into_iter().map(|node| EvictionNode { held: held(node.state), node }).collect();
        let budgets: Vec<DisruptionBudget> = self.budgets().cloned().collect();
        let Evictable { units, pods, .. } = evictable;
        let scene = EvictionScene { nodes: &nodes, units, pods, budgets: &budgets, guarantees };
        let planned = plan(scene, &demands(&classes), &status.topology)?;
        let victims = planned.units.iter().flat_map(|unit| evictable.units[*unit].pods.iter().cloned());
        let victims: Vec<PodUid> = victims.collect();
        if victims.is_empty() && evictable.ending.is_empty() {
            // The pods fit already, and the next call of filter places them.
            return None;
        }
        let nodes: Vec<_> = nodes.into_iter().map(|node| node.node).collect();
        let places = assign(&classes, &nodes, planned.placed, None);
        self.check_quota(key, &places, quota).ok()?;
        Some(RoomPlan { claimant: claimant.clone(), claim, places, victims })
    }

    /// Returns the guarantees of all other namespaces, with the use of their pods that are not ending.
    pub(super) fn guarantees_of_others(&self, namespace: &str) -> BTreeMap<String, GuaranteedUse> {
        let (quota, usage) = self.quota();
        let others = quota.guarantees().filter(|(other, _)| *other != namespace);
        let mut all: BTreeMap<String, GuaranteedUse> = others
            .map(|(other, guarantee)| (other.to_owned(), GuaranteedUse { guarantee, used: usage.of(other) }))
            .collect();
        if !all.is_empty() {
            for (uid, pod) in self.gpu_pods().filter(|(_, pod)| pod.is_ending) {
                if let Some(guaranteed) = all.get_mut(&pod.namespace) {
                    guaranteed.used = guaranteed.used.minus(self.amount_of(uid));
                }
            }
        }
        all
    }

    /// Returns the namespaces that use more than their guarantees, each with its turn: first the one that has used most
    /// over time in proportion to its guarantee.
    fn borrowers<'g>(
        &self,
        guarantees: &'g BTreeMap<String, GuaranteedUse>,
        now: Timestamp,
    ) -> HashMap<&'g str, i64> {
        let above = guarantees.iter().filter(|(_, guaranteed)| guaranteed.is_above());
        let mut uses: BTreeMap<&str, DecayedUse> =
            above.map(|(namespace, _)| (namespace.as_str(), self.past_use(namespace, now))).collect();
        for (uid, pod) in self.gpu_pods() {
            if let Some(used) = uses.get_mut(pod.namespace.as_str()) {
                *used = used.plus(self.use_of_pod(uid, pod, now.unix_seconds()));
            }
        }
        let ratio = |namespace: &str, used: DecayedUse| {
            guarantees.get(namespace).map_or(0.0, |guaranteed| used.in_proportion_to(guaranteed.guarantee))
        };
        let mut order: Vec<(&str, f64)> =
            uses.into_iter().map(|(namespace, used)| (namespace, ratio(namespace, used))).collect();
        order.sort_by(|(a, used), (b, other)| other.total_cmp(used).then_with(|| a.cmp(b)));
        order.into_iter().zip(0..).map(|((namespace, _), turn)| (namespace, turn)).collect()
    }

    /// Returns the pods that may be evicted for others, in the order of eviction. `level` returns the level of a pod with
    /// a priority, or `None` if it is spared. The pods of a gang are one unit with the highest of their priorities.
    fn evictable(&self, key: &GangKey, level: impl Fn(&GpuPod, i32) -> Option<i64>) -> Evictable {
        let mut found = Evictable::default();
        let mut gangs: BTreeMap<&GangKey, usize> = BTreeMap::new();
        let mut units: Vec<(Turn, GpuAmount)> = Vec::new();
        let groups = self.claim_groups();
        let by_claims: BTreeSet<&PodUid> = groups.iter().flat_map(|group| &group.pods).collect();
        for group in &groups {
            units.extend(self.evictable_group(group, &level, &mut found));
        }
        let is_alone = |(uid, pod): &(&PodUid, &GpuPod)| pod.node.is_some() && !by_claims.contains(uid);
        let mut held: Vec<(&PodUid, &GpuPod)> = self.gpu_pods().filter(is_alone).collect();
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
            let own = pod.priority();
            let priority = gang.map_or(own, |gang| self.priority_of_gang(gang).max(own));
            let Some(level) = level(pod, priority) else { continue };
            found.pods.insert(uid.clone(), self.held_pod(uid, pod));
            let started = Reverse(pod.started.unwrap_or(0));
            match gang.and_then(|gang| gangs.get(gang)).and_then(|unit| units.get_mut(*unit)) {
                Some((turn, amount)) => {
                    turn.pods.push(uid.clone());
                    turn.started = turn.started.min(started);
                    *amount = amount.plus(self.amount_of(uid));
                }
                None => {
                    gangs.extend(gang.map(|gang| (gang, units.len())));
                    let is_whole = !gang.is_some_and(|gang| self.is_gang_ending(gang));
                    let turn = Turn { level, is_whole, priority, started, pods: vec![uid.clone()] };
                    units.push((turn, self.amount_of(uid)));
                }
            }
        }
        units.sort_by(|(a, _), (b, _)| a.cmp(b));
        let claims: HashMap<&PodUid, &ClaimGroup> =
            groups.iter().flat_map(|group| group.pods.iter().map(move |pod| (pod, group))).collect();
        for (Turn { level, pods, .. }, released) in units {
            let unit = found.units.len();
            let claims = pods.first().and_then(|pod| claims.get(pod)).map(|group| &group.claims);
            found.unit_of.extend(claims.into_iter().flatten().map(|claim| (claim.clone(), unit)));
            found.unit_of.extend(pods.iter().map(|pod| (pod.clone(), unit)));
            found.units.push(EvictionUnit { pods, level, released });
        }
        found
    }

    /// Returns the pods of a group as one unit, which releases their claims, or `None` if they are spared or end
    /// anyway.
    fn evictable_group(
        &self,
        group: &ClaimGroup,
        level: impl Fn(&GpuPod, i32) -> Option<i64>,
        found: &mut Evictable,
    ) -> Option<(Turn, GpuAmount)> {
        let pods: Vec<(&PodUid, &GpuPod)> =
            group.pods.iter().filter_map(|uid| Some((uid, self.tenant(uid)?))).collect();
        let (ending, staying): (Vec<_>, Vec<_>) = pods.into_iter().partition(|(_, pod)| pod.is_ending);
        found.ending.extend(ending.into_iter().map(|(uid, _)| uid.clone()));
        if group.is_fixed {
            return None;
        }
        if staying.is_empty() {
            found.ending.extend(group.claims.iter().cloned());
            return None;
        }
        let priority = staying.iter().map(|(_, pod)| pod.priority()).max()?;
        let levels = staying.iter().map(|(_, pod)| level(pod, priority)).collect::<Option<Vec<i64>>>()?;
        found.pods.extend(staying.iter().map(|(uid, pod)| ((*uid).clone(), self.held_pod(uid, pod))));
        let started = staying.iter().map(|(_, pod)| pod.started.unwrap_or(0)).max().map(Reverse)?;
        let holders = staying.iter().map(|(uid, _)| *uid).chain(&group.claims);
        let released = holders.fold(GpuAmount::default(), |sum, holder| sum.plus(self.amount_of(holder)));
        let pods = staying.into_iter().map(|(uid, _)| uid.clone()).collect();
        let level = levels.into_iter().max()?;
        Some((Turn { level, is_whole: true, priority, started, pods }, released))
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
    fn bases(&self, key: &GangKey, claim: Claim, evictable: &Evictable) -> HashMap<NodeName, NodeState> {
        let priority = if let Claim::Priority(priority) = claim { priority } else { i32::MIN };
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
