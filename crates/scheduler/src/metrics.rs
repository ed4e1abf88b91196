//! What the scheduler tells of itself.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::state::State;

/// The type of the text, as Prometheus asks for it.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    calls: Family<Call, Counter>,
    seconds: Family<Verb, Histogram>,
    refusals: Family<Reason, Counter>,
    binds: Family<Outcome, Counter>,
    connected: Gauge,
    /// The watches that do not run.
    interrupted: Mutex<BTreeSet<&'static str>>,
    /// 1 for the leader.
    pub leading: Gauge,
    /// Filled from the state for each scrape; one at a time.
    totals: Mutex<Totals>,
}

#[derive(Debug, Default)]
struct Totals {
    nodes: Gauge,
    cards: Gauge,
    cards_idle: Gauge,
    cards_overbooked: Gauge,
    pods_waiting: Gauge,
    unconfirmed: Gauge,
    rolled_back: Gauge,
    quota_used: Family<QuotaLabels, Gauge>,
    quota_limit: Family<QuotaLabels, Gauge>,
    map: Family<PodGpu, Gauge>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Verb {
    verb: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    verb: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct QuotaLabels {
    namespace: String,
    model: String,
    resource: &'static str,
}

/// As the exporter of old wrote them.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PodGpu {
    gpu_id: String,
    gpu_model: String,
    namespace: String,
    node: String,
    pod_name: String,
}

/// From half a millisecond to two seconds: budgets are 1 ms for bind and 5 ms for filter.
const BUCKETS: [f64; 12] = [0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0];

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let calls = Family::default();
        let seconds = Family::new_with_constructor((|| Histogram::new(BUCKETS)) as fn() -> Histogram);
        let (refusals, binds) = (Family::default(), Family::default());
        let (connected, leading) = (Gauge::default(), Gauge::default());
        let totals = Totals::default();
        registry.register(
            "pod_and_gpu_map_info",
            "Provide a mapping relationship between pod and gpu",
            totals.map.clone(),
        );
        let own = registry.sub_registry_with_prefix("tessera_scheduler");
        own.register("calls", "Calls answered, by verb and outcome", calls.clone());
        own.register("call_seconds", "How long calls took, by verb", seconds.clone());
        own.register("refusals", "Nodes dropped by filter, by reason", refusals.clone());
        own.register("binds", "Bindings sent, by what became of them", binds.clone());
        own.register("api_connected", "1 while the watches of the API server run", connected.clone());
        own.register("leading", "1 on the replica that leads", leading.clone());
        own.register("nodes", "Nodes with GPUs", totals.nodes.clone());
        own.register("gpus", "GPUs of all nodes", totals.cards.clone());
        own.register("gpus_idle", "GPUs nobody holds anything of", totals.cards_idle.clone());
        own.register(
            "gpus_overbooked",
            "GPUs that carry more than they have",
            totals.cards_overbooked.clone(),
        );
        own.register("pods_waiting", "Pods that wait for GPUs", totals.pods_waiting.clone());
        own.register("bookings_unconfirmed", "Bookings no watch has shown yet", totals.unconfirmed.clone());
        own.register("bookings_rolled_back", "Bookings taken back", totals.rolled_back.clone());
        own.register(
            "quota_used",
            "What namespaces hold: percent of a GPU, or MiB",
            totals.quota_used.clone(),
        );
        own.register(
            "quota_limit",
            "What namespaces may hold: percent of a GPU, or MiB",
            totals.quota_limit.clone(),
        );
        let (totals, interrupted) = (Mutex::new(totals), Mutex::default());
        Self { registry, calls, seconds, refusals, binds, connected, interrupted, leading, totals }
    }
}

impl Metrics {
    /// A call was answered.
    pub fn answered(&self, verb: &'static str, outcome: &'static str, took: Duration) {
        self.calls.get_or_create(&Call { verb, outcome }).inc();
        self.seconds.get_or_create(&Verb { verb }).observe(took.as_secs_f64());
    }

    /// Nodes were dropped.
    pub fn refused(&self, reason: &'static str, nodes: u64) {
        self.refusals.get_or_create(&Reason { reason }).inc_by(nodes);
    }

    /// A watch runs, or does not.
    pub fn watching(&self, what: &'static str, runs: bool) {
        let mut interrupted = self.interrupted.lock().unwrap_or_else(PoisonError::into_inner);
        if runs {
            interrupted.remove(what);
        } else {
            interrupted.insert(what);
        }
        self.connected.set(interrupted.is_empty().into());
    }

    /// A Binding was sent.
    pub fn bound(&self, outcome: &'static str) {
        self.binds.get_or_create(&Outcome { outcome }).inc();
    }

    /// The text for Prometheus. The state is given back before it is written: that takes longer than to count.
    #[must_use]
    pub fn text(&self, state: impl Deref<Target = State>) -> String {
        let totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.fill(&state);
        drop(state);
        let mut text = String::new();
        // A String takes whatever is written to it.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl Totals {
    fn fill(&self, state: &State) {
        let nodes: Vec<_> = state.ledger().nodes().filter(|node| !node.node().gpus().is_empty()).collect();
        set(&self.nodes, nodes.len());
        set(&self.cards, nodes.iter().map(|node| node.node().gpus().len()).sum());
        set(&self.cards_idle, nodes.iter().map(|node| node.idle().len()).sum());
        set(&self.cards_overbooked, state.ledger().overbooked().values().map(Vec::len).sum());
        set(&self.pods_waiting, state.gpu_pods().filter(|(_, pod)| pod.node.is_none()).count());
        set(&self.unconfirmed, state.unconfirmed());
        self.rolled_back.set(i64::try_from(state.rolled_back()).unwrap_or(i64::MAX));
        self.fill_quota(state);
        self.fill_map(state);
    }

    fn fill_quota(&self, state: &State) {
        let (quota, accounts) = state.quota();
        self.quota_used.clear();
        self.quota_limit.clear();
        let put =
            |family: &Family<QuotaLabels, Gauge>, namespace: &str, model: &str, resource, amount: u64| {
                let labels =
                    QuotaLabels { namespace: namespace.to_owned(), model: model.to_owned(), resource };
                family.get_or_create(&labels).set(i64::try_from(amount).unwrap_or(i64::MAX));
            };
        for (namespace, model, taken) in accounts.all() {
            put(&self.quota_used, namespace, model, "percent", taken.compute_percent);
            put(&self.quota_used, namespace, model, "mebibytes", taken.memory.0);
        }
        for (namespace, limit) in &quota.namespaces {
            for (model, cards) in limit.gpus_by_model.iter().flatten() {
                put(&self.quota_limit, namespace, model, "percent", cards.saturating_mul(100));
            }
            if let Some(percent) = limit.compute_percent {
                put(&self.quota_limit, namespace, "", "percent", percent);
            }
            if let Some(memory) = limit.memory {
                put(&self.quota_limit, namespace, "", "mebibytes", memory.0);
            }
        }
    }

    fn fill_map(&self, state: &State) {
        self.map.clear();
        for (uid, pod) in state.gpu_pods() {
            let Some(grant) = state.ledger().grant(uid) else { continue };
            let Some(node) = state.ledger().node(&grant.node) else { continue };
            for (gpu, _) in grant.containers.iter().flat_map(|container| &container.holds) {
                let Some(card) = node.node().gpu(*gpu) else { continue };
                let labels = PodGpu {
                    gpu_id: gpu.to_string(),
                    gpu_model: card.model.to_string(),
                    namespace: pod.namespace.clone(),
                    node: grant.node.to_string(),
                    pod_name: pod.name.clone(),
                };
                self.map.get_or_create(&labels).set(1);
            }
        }
    }
}

fn set(gauge: &Gauge, count: usize) {
    gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_watch_that_runs_does_not_hide_another_that_does_not() {
        let metrics = Metrics::default();
        let told = |what, runs| {
            metrics.watching(what, runs);
            metrics.connected.get()
        };
        assert_eq!(told("nodes", true), 1);
        assert_eq!(told("nodes", false), 0);
        assert_eq!(told("pods", true), 0);
        assert_eq!(told("nodes", true), 1);
    }
}
