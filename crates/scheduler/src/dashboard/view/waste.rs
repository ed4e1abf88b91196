//! Who wastes what they hold: pods by the part of their GPUs that they do not use. A claim counts for its pods.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

use serde::Serialize;
use tessera_core::grant::{GpuUsage, PodGrant};
use tessera_core::natural::natural;
use tessera_core::units::GpuIndex;

use super::super::usage::{HistoryPoint, UsageLog};
use super::ListQuery;
use crate::state::State;

/// Idle time after which a pod counts as idle but held, in milliseconds.
pub const IDLE_MILLIS: u64 = 10 * 60 * 1000;

/// Held and used GPUs, and the pods that waste most.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WasteView {
    /// Number of GPUs that pods hold, by the scarcer of compute and memory.
    pub held_gpus: f64,
    /// Number of GPUs that pods keep busy. Absent if the use of no pod is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_gpus: Option<f64>,
    /// Number of pods that have been idle for ten minutes or longer. Absent until use has been observed for as long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_pods: Option<usize>,
    /// Number of GPUs that these pods hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_gpus: Option<f64>,
    /// Number of pods whose use is unknown. If there are any, `used_gpus`, `idle_pods` and `idle_gpus` are lower bounds.
    pub unknown_pods: usize,
    /// Time since when this replica observes the use of pods, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_since_millis: Option<u64>,
    /// History of held and used GPUs, oldest first.
    pub history: Vec<HistoryPoint>,
    /// Namespaces of all pods whose use is known, in natural order.
    pub namespaces: Vec<String>,
    /// Number of pods that match the query.
    pub total: usize,
    /// Number of matching pods before the first of `pods`.
    pub offset: usize,
    /// The pods of the requested page.
    pub pods: Vec<WastePod>,
}

/// A pod with what it holds and uses.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WastePod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod, or of the claim that holds the GPUs.
    pub name: String,
    /// True if a claim holds the GPUs, for one or several pods.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_claim: bool,
    /// Node of the pod.
    pub node: String,
    /// Number of GPUs that the pod holds.
    pub held_gpus: f64,
    /// Number of GPUs that it keeps busy.
    pub used_gpus: f64,
    /// Number of GPUs that it holds and does not use.
    pub wasted_gpus: f64,
    /// Used memory in MiB, if known.
    #[serde(rename = "memoryUsedMiB", skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// Time since when the pod is idle, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_since_millis: Option<u64>,
    /// True if the pod has been idle for ten minutes or longer.
    pub idle: bool,
}

/// Held and used GPUs of all pods.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct UseTotals {
    /// Number of GPUs that pods hold.
    pub held_gpus: f64,
    /// Number of GPUs that pods keep busy, or `None` if the use of no pod is known.
    pub used_gpus: Option<f64>,
    /// Number of pods whose use is unknown.
    pub unknown_pods: usize,
}

impl UseTotals {
    /// Returns these totals as a point of history, with the GPUs that the whole cluster has `allocated`.
    #[must_use]
    pub fn point(self, unix_millis: u64, allocated: f64) -> HistoryPoint {
        let Self { used_gpus: used, unknown_pods, .. } = self;
        HistoryPoint { unix_millis, held: allocated, used, unknown_pods }
    }

    fn add(&mut self, held_gpus: f64, used: Option<MeasuredUse>) {
        self.held_gpus += held_gpus;
        match used {
            Some(used) => self.used_gpus = Some(self.used_gpus.unwrap_or(0.0) + used.busy_percent / 100.0),
            None => self.unknown_pods += 1,
        }
    }

    /// Returns the totals of all pods that were added. Without any pod, no GPU is used.
    fn complete(mut self) -> Self {
        if self.unknown_pods == 0 {
            self.used_gpus.get_or_insert(0.0);
        }
        self
    }
}

/// Returns what all pods hold and use. The history and the current figures both come from here.
#[must_use]
pub fn totals(state: &State, log: &UsageLog) -> UseTotals {
    let mut totals = UseTotals::default();
    holders(state).iter().for_each(|holder| totals.add(holder.held_gpus, holder.measured(log)));
    totals.complete()
}

/// A pod or a claim that holds GPUs.
struct Holder<'a> {
    namespace: &'a str,
    name: &'a str,
    is_claim: bool,
    node: &'a str,
    held_gpus: f64,
    /// UIDs of the pods that use the GPUs. `None` if these pods hold other GPUs, too, so that their use cannot be told
    /// apart, or if objects other than pods may use the GPUs.
    users: Option<Vec<&'a str>>,
}

/// What the pods of a holder use.
#[derive(Clone, Copy)]
struct MeasuredUse {
    busy_percent: f64,
    memory_mib: Option<u64>,
    idle_since_millis: Option<u64>,
}

impl Holder<'_> {
    /// Returns the use of all pods of the holder, or `None` if that of a pod is unknown. A claim that is reserved for no
    /// pod uses nothing, but it is unknown since when.
    fn measured(&self, log: &UsageLog) -> Option<MeasuredUse> {
        let users = self.users.as_ref()?;
        if users.is_empty() {
            return Some(MeasuredUse { busy_percent: 0.0, memory_mib: Some(0), idle_since_millis: None });
        }
        let mut users = users.iter().map(|uid| {
            let used = log.pod(uid)?;
            let (memory_mib, idle_since_millis) = (used.memory_mib, used.idle_since_millis);
            Some(MeasuredUse { busy_percent: used.busy_percent, memory_mib, idle_since_millis })
        });
        let first = users.next()??;
        users.try_fold(first, |sum, used| {
            let used = used?;
            Some(MeasuredUse {
                busy_percent: sum.busy_percent + used.busy_percent,
                memory_mib: sum.memory_mib.zip(used.memory_mib).map(|(a, b)| a.saturating_add(b)),
                // The GPUs are idle since the last pod has become idle.
                idle_since_millis: sum.idle_since_millis.zip(used.idle_since_millis).map(|(a, b)| a.max(b)),
            })
        })
    }
}

/// Returns the pods and claims that hold GPUs.
fn holders(state: &State) -> Vec<Holder<'_>> {
    let placed = state.gpu_pods().filter_map(|(uid, pod)| Some((uid, pod, pod.node.as_ref()?)));
    let of_pods = placed.map(|(uid, pod, node)| {
        let held_gpus = state.ledger().grant(uid).map_or(0.0, |grant| held(state, grant));
        (
            Holder {
                namespace: &pod.namespace,
                name: &pod.name,
                is_claim: false,
                node: &node.0,
                held_gpus,
                users: Some(vec![&uid.0]),
            },
            pod,
        )
    });
    // Agents do not measure what kube-scheduler counts itself, such as MIG instances.
    let measured = of_pods.filter(|(holder, pod)| holder.held_gpus > 0.0 || pod.spec.asks_for_gpus());
    let mut holders: Vec<Holder<'_>> = measured.map(|(holder, _)| holder).collect();
    holders.extend(state.claim_holders().map(|(grant, claim)| {
        let pods: Vec<&str> = claim.consumer_pods().map(|consumer| consumer.uid.as_str()).collect();
        let users = (pods.len() == claim.status.reserved_for.len()).then_some(pods);
        let (namespace, name) = (claim.metadata.namespace.as_str(), claim.metadata.name.as_str());
        let held_gpus = held(state, grant);
        Holder { namespace, name, is_claim: true, node: &grant.node.0, held_gpus, users }
    }));
    let mut held_by: HashMap<&str, usize> = HashMap::new();
    let users = holders.iter().flat_map(|holder| &holder.users).flatten();
    users.for_each(|uid| *held_by.entry(*uid).or_default() += 1);
    for holder in &mut holders {
        let holds_other = |uid: &&str| held_by.get(uid).is_some_and(|count| *count > 1);
        holder.users = holder.users.take().filter(|users| !users.iter().any(holds_other));
    }
    holders
}

/// Compares what pods hold with what they use at `now_millis`. The query selects pods by namespace and by the state
/// `idle`, sorts them, and chooses a page.
#[must_use]
pub fn waste(state: &State, log: &UsageLog, now_millis: u64, query: &ListQuery) -> WasteView {
    let mut view = WasteView {
        history: log.points().copied().collect(),
        observed_since_millis: log.observed_since_millis(),
        ..WasteView::default()
    };
    let mut namespaces = BTreeSet::new();
    let mut totals = UseTotals::default();
    let (mut idle_pods, mut idle_gpus) = (0, 0.0);
    for holder in holders(state) {
        let used = holder.measured(log);
        totals.add(holder.held_gpus, used);
        let Some(used) = used else { continue };
        namespaces.insert(holder.namespace);
        let pod = waste_pod(&holder, used, now_millis);
        if pod.idle {
            idle_pods += 1;
            idle_gpus += pod.held_gpus;
        }
        if (query.namespace.is_empty() || pod.namespace == query.namespace)
            && (query.state != "idle" || pod.idle)
        {
            view.pods.push(pod);
        }
    }
    let totals = totals.complete();
    let has_observed = log.has_observed_for(IDLE_MILLIS, now_millis);
    // Without any pod, none is idle.
    let is_idle_known = totals.used_gpus.is_some() && (has_observed || namespaces.is_empty());
    (view.held_gpus, view.used_gpus, view.unknown_pods) =
        (totals.held_gpus, totals.used_gpus, totals.unknown_pods);
    (view.idle_pods, view.idle_gpus) =
        (is_idle_known.then_some(idle_pods), is_idle_known.then_some(idle_gpus));
    view.namespaces = namespaces.into_iter().map(str::to_owned).collect();
    view.namespaces.sort_by(|a, b| natural(a, b));
    view.pods.sort_by(|a, b| order(&query.sort, a, b));
    if query.reversed {
        view.pods.reverse();
    }
    let range = query.range(view.pods.len());
    (view.total, view.offset) = (view.pods.len(), range.start);
    view.pods = view.pods.drain(range).collect();
    view
}

/// Compares pods in the order of a column: the most, the longest or the first by name comes first.
fn order(sort: &str, a: &WastePod, b: &WastePod) -> Ordering {
    let most = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
    let used = |pod: &WastePod| pod.used_gpus / pod.held_gpus.max(0.01);
    let by_name = || natural(&a.namespace, &b.namespace).then_with(|| natural(&a.name, &b.name));
    let idle_since = |pod: &WastePod| pod.idle_since_millis.unwrap_or(u64::MAX);
    let by_column = match sort {
        "pod" => Ordering::Equal,
        "node" => natural(&a.node, &b.node),
        "held" => most(a.held_gpus, b.held_gpus),
        "used" => most(used(b), used(a)),
        "idle" => idle_since(a).cmp(&idle_since(b)),
        _ => most(a.wasted_gpus, b.wasted_gpus),
    };
    by_column.then_with(by_name)
}

fn held(state: &State, grant: &PodGrant) -> f64 {
    let Some(node) = state.ledger().node(&grant.node) else { return 0.0 };
    let part = |(index, usage): (GpuIndex, GpuUsage)| {
        node.node().gpu(index).map_or(0.0, |gpu| usage.part_of(gpu.memory))
    };
    grant.footprint().map(part).sum()
}

fn waste_pod(holder: &Holder<'_>, used: MeasuredUse, now_millis: u64) -> WastePod {
    let Holder { namespace, name, is_claim, node, held_gpus, .. } = *holder;
    let used_gpus = used.busy_percent / 100.0;
    let idle_for = used.idle_since_millis.map(|since| now_millis.saturating_sub(since));
    WastePod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        is_claim,
        node: node.to_owned(),
        held_gpus,
        used_gpus,
        wasted_gpus: (held_gpus - used_gpus).max(0.0),
        memory_used_mib: used.memory_mib,
        idle_since_millis: used.idle_since_millis,
        idle: idle_for.is_some_and(|idle| idle >= IDLE_MILLIS),
    }
}
