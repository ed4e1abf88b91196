//! Metrics of the scheduler, written with `tessera_wire::metrics` like the agent's page.

mod hami;
mod quota;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tessera_core::claim::Replacement;
use tessera_core::grant::PodGrant;
use tessera_serve::Tls;
use tessera_wire::foreign::pod_gpu_map::{PodGpuMap, PodOnGpu};
use tessera_wire::metrics::{
    Format, Histogram, Labels,
    MetricKind::{self, Counter, Gauge},
    MetricsPage,
};
use tessera_wire::tessera::certificate_expiry;

use self::quota::QuotaMetrics;
use crate::state::State;

/// Upper bounds of the latency buckets in seconds, from half a millisecond to two seconds. The
/// budgets are 1 ms for bind and 5 ms for filter.
const LATENCY_BOUNDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0];

/// Everything the scheduler counts.
#[derive(Debug, Default)]
pub struct Metrics {
    counters: Mutex<Counters>,
    /// Watches that are not connected.
    interrupted: Mutex<BTreeSet<&'static str>>,
    connected: AtomicBool,
    leading: AtomicBool,
    /// Certificates by the role of their listeners.
    certificates: Mutex<BTreeMap<&'static str, Tls>>,
}

#[derive(Debug, Default)]
struct Counters {
    /// Answered calls by verb and outcome.
    calls: BTreeMap<(&'static str, &'static str), u64>,
    /// Latencies by verb.
    seconds: BTreeMap<&'static str, Histogram>,
    /// Rejected nodes by reason.
    refusals: BTreeMap<&'static str, u64>,
    /// Bindings by outcome.
    binds: BTreeMap<&'static str, u64>,
    /// Claims whose GPUs were replaced, by reason.
    replaced_claims: BTreeMap<&'static str, u64>,
    /// Evictions by outcome.
    evictions: BTreeMap<&'static str, u64>,
}

/// Values read from the state for one page.
#[derive(Debug, Default)]
struct StateTotals {
    nodes: usize,
    agents: usize,
    gpus: usize,
    idle: usize,
    overbooked: usize,
    pods_waiting: usize,
    unconfirmed: usize,
    rolled_back: u64,
    gangs_waiting: usize,
    gang_gpus: usize,
    reserved_gpus: usize,
    unused_reservations: u64,
    pending_evictions: usize,
    quota: QuotaMetrics,
    pods_on_gpus: PodGpuMap,
}

impl Metrics {
    /// Counts an answered call.
    pub fn answered(&self, verb: &'static str, outcome: &'static str, took: Duration) {
        let mut counters = lock(&self.counters);
        *counters.calls.entry((verb, outcome)).or_default() += 1;
        let seconds = counters.seconds.entry(verb).or_insert_with(|| Histogram::new(&LATENCY_BOUNDS));
        seconds.observe(took.as_secs_f64());
    }

    /// Counts nodes that filter rejected for a reason.
    pub fn refused(&self, reason: &'static str, nodes: u64) {
        *lock(&self.counters).refusals.entry(reason).or_default() += nodes;
    }

    /// Records whether the watch of a resource is connected.
    pub fn watching(&self, what: &'static str, runs: bool) {
        let mut interrupted = lock(&self.interrupted);
        if runs {
            interrupted.remove(what);
        } else {
            interrupted.insert(what);
        }
        self.connected.store(interrupted.is_empty(), Ordering::Relaxed);
    }

    /// Counts a Binding by its outcome.
    pub fn bound(&self, outcome: &'static str) {
        *lock(&self.counters).binds.entry(outcome).or_default() += 1;
    }

    /// Counts a claim whose GPUs were replaced.
    pub fn claim_replaced(&self, why: Replacement) {
        let reason = match why {
            Replacement::NoRoom => "no-room",
            Replacement::BetterLinks => "better-links",
            Replacement::LinksOfOthers => "links-of-others",
        };
        *lock(&self.counters).replaced_claims.entry(reason).or_default() += 1;
    }

    /// Counts an eviction by its outcome.
    pub fn evicted(&self, outcome: &'static str) {
        *lock(&self.counters).evictions.entry(outcome).or_default() += 1;
    }

    /// Records whether this replica leads.
    pub fn set_leading(&self, leads: bool) {
        self.leading.store(leads, Ordering::Relaxed);
    }

    /// Reports when these certificates expire, now and after they were replaced. `role` says which listeners use them:
    /// `verbs` or `webhook`.
    pub fn set_certificates(&self, role: &'static str, certificates: Tls) {
        lock(&self.certificates).insert(role, certificates);
    }

    /// Returns the page for Prometheus. The lock on the state is released before the page is
    /// written, because writing takes longer than counting. A replica that does not know the cluster
    /// has no `state`: its page has no families about the cluster, because unknown is not zero.
    #[must_use]
    pub fn text(&self, state: Option<impl Deref<Target = State>>, format: Format) -> String {
        let totals = state.map(|state| StateTotals::of(&state));
        let mut page = MetricsPage::new(format);
        self.write_counters(&mut page);
        let none = Labels::default();
        let mut gauge = |name, help, value: u64| page.family(name, Gauge, help).sample(&none, value);
        gauge(
            "tessera_scheduler_api_connected",
            "1 while all watches of the API server are connected.",
            self.connected.load(Ordering::Relaxed).into(),
        );
        gauge(
            "tessera_scheduler_leading",
            "1 on the replica that leads.",
            self.leading.load(Ordering::Relaxed).into(),
        );
        if let Some(totals) = totals {
            totals.write(&mut page);
        }
        let mut ends = Vec::new();
        for (role, certificates) in lock(&self.certificates).iter() {
            let own = certificates.expiries().into_iter();
            ends.extend(
                own.map(|end| (Labels::new(&[("role", role)]), end.role.to_string(), end.unix_seconds)),
            );
        }
        certificate_expiry::write(
            &mut page,
            ends.iter().map(|(labels, certificate, end)| (labels, certificate.as_str(), *end)),
        );
        page.finish()
    }

    fn write_counters(&self, page: &mut MetricsPage) {
        let counters = lock(&self.counters);
        let mut calls =
            page.family("tessera_scheduler_calls_total", Counter, "Answered calls by verb and outcome.");
        for ((verb, outcome), count) in &counters.calls {
            calls.sample(&Labels::new(&[("verb", verb), ("outcome", outcome)]), *count);
        }
        let mut seconds = page.family(
            "tessera_scheduler_call_seconds",
            MetricKind::Histogram,
            "Duration of calls by verb.",
        );
        for (verb, histogram) in &counters.seconds {
            seconds.histogram(&Labels::new(&[("verb", verb)]), histogram);
        }
        let mut refusals = page.family(
            "tessera_scheduler_refusals_total",
            Counter,
            "Nodes that filter rejected, by reason.",
        );
        for (reason, count) in &counters.refusals {
            refusals.sample(&Labels::new(&[("reason", reason)]), *count);
        }
        let mut binds = page.family("tessera_scheduler_binds_total", Counter, "Bindings sent, by outcome.");
        for (outcome, count) in &counters.binds {
            binds.sample(&Labels::new(&[("outcome", outcome)]), *count);
        }
        let mut replaced = page.family(
            "tessera_scheduler_claims_replaced_total",
            Counter,
            "Claims whose GPUs were replaced when their pod was bound, by reason.",
        );
        for (reason, count) in &counters.replaced_claims {
            replaced.sample(&Labels::new(&[("reason", reason)]), *count);
        }
        let help = "Evictions that the scheduler asked for, by outcome: accepted, gone, refused or failed.";
        let mut evictions = page.family("tessera_evictions_total", Counter, help);
        for (outcome, count) in &counters.evictions {
            evictions.sample(&Labels::new(&[("outcome", outcome)]), *count);
        }
    }
}

impl StateTotals {
    fn of(state: &State) -> Self {
        let nodes: Vec<_> = state.ledger().nodes().filter(|node| !node.node().gpus().is_empty()).collect();
        let (gang_gpus, reserved_gpus) = state.reserved_gpus();
        let mut totals = Self {
            nodes: nodes.len(),
            agents: state.agents(),
            gpus: nodes.iter().map(|node| node.node().gpus().len()).sum(),
            idle: nodes.iter().map(|node| node.idle().len()).sum(),
            overbooked: state.ledger().overbooked().values().map(Vec::len).sum(),
            pods_waiting: state.gpu_pods().filter(|(_, pod)| pod.node.is_none()).count(),
            unconfirmed: state.unconfirmed(),
            rolled_back: state.rolled_back(),
            gangs_waiting: state.gangs().filter(|(_, status)| !status.missing().is_empty()).count(),
            gang_gpus,
            reserved_gpus,
            unused_reservations: state.unused_reservations(),
            pending_evictions: state.pending_evictions(),
            ..Self::default()
        };
        totals.quota = QuotaMetrics::of(state);
        totals.pods_on_gpus = pods_on_gpus(state);
        totals
    }

    /// Writes the families about the cluster.
    fn write(&self, page: &mut MetricsPage) {
        self.pods_on_gpus.write(page);
        let none = Labels::default();
        let mut gauge = |name, help, value: u64| page.family(name, Gauge, help).sample(&none, value);
        gauge("tessera_scheduler_nodes", "Nodes with GPUs.", self.nodes as u64);
        gauge(
            "tessera_scheduler_agents",
            "Nodes on which an agent has announced its address.",
            self.agents as u64,
        );
        gauge("tessera_scheduler_gpus", "GPUs of all nodes.", self.gpus as u64);
        gauge("tessera_scheduler_gpus_idle", "GPUs without any grant that may be granted.", self.idle as u64);
        gauge(
            "tessera_scheduler_gpus_overbooked",
            "GPUs with more grants than they have capacity.",
            self.overbooked as u64,
        );
        gauge("tessera_scheduler_pods_waiting", "Pods that wait for GPUs.", self.pods_waiting as u64);
        gauge(
            "tessera_scheduler_bookings_unconfirmed",
            "Bookings that no watch has confirmed yet.",
            self.unconfirmed as u64,
        );
        gauge("tessera_gang_waiting", "Gangs with pods that wait for GPUs.", self.gangs_waiting as u64);
        gauge(
            "tessera_gang_reserved_gpus",
            "GPUs that are reserved for pods of gangs that are not bound yet.",
            self.gang_gpus as u64,
        );
        gauge("tessera_reserved_gpus", "GPUs that node annotations reserve.", self.reserved_gpus as u64);
        gauge(
            "tessera_evictions_pending",
            "Pods that are evicted for others and have not ended.",
            self.pending_evictions as u64,
        );
        let help = "Reservations of gangs that ended before all pods were bound.";
        let mut unused = page.family("tessera_gang_reservations_unused_total", Counter, help);
        unused.sample(&none, self.unused_reservations);
        let help = "Bookings that were revoked.";
        let mut revoked = page.family("tessera_scheduler_bookings_rolled_back_total", Counter, help);
        revoked.sample(&none, self.rolled_back);
        self.quota.write(page);
        hami::write(&self.quota.totals, page);
    }
}

/// Returns the page `/metrics/nodes`: pods with their GPUs, in one family for each node.
#[must_use]
pub fn text_by_node(state: impl Deref<Target = State>, format: Format) -> String {
    let pods_on_gpus = pods_on_gpus(&state);
    drop(state);
    let mut page = MetricsPage::new(format);
    pods_on_gpus.write_by_node(&mut page);
    page.finish()
}

/// Returns the pods of the cluster with the GPUs they hold, by themselves or by claims.
fn pods_on_gpus(state: &State) -> PodGpuMap {
    let mut pairs = PodGpuMap::default();
    let mut insert = |grant: &PodGrant, namespace: &str, pod: &str| {
        let Some(node) = state.ledger().node(&grant.node) else { return };
        for (index, _) in grant.containers.iter().flat_map(|container| &container.holds) {
            let Some(gpu) = node.node().gpu(*index) else { continue };
            pairs.insert(PodOnGpu {
                gpu_uuid: &gpu.uuid.0,
                gpu_model: &gpu.model.0,
                namespace,
                node: &grant.node.0,
                pod,
            });
        }
    };
    for (uid, pod) in state.gpu_pods() {
        if let Some(grant) = state.ledger().grant(uid) {
            insert(grant, &pod.namespace, &pod.name);
        }
    }
    for (grant, claim) in state.claim_holders() {
        claim.consumer_pods().for_each(|pod| insert(grant, &claim.metadata.namespace, &pod.name));
    }
    pairs
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_connected_only_while_every_watch_is() {
        let metrics = Metrics::default();
        let connected = |what, runs| {
            metrics.watching(what, runs);
            metrics.connected.load(Ordering::Relaxed)
        };
        assert!(connected("nodes", true));
        assert!(!connected("nodes", false));
        assert!(!connected("pods", true));
        assert!(connected("nodes", true));
    }
}
