//! Families of quotas: what namespaces hold and may hold, one unit for each family.

use std::collections::BTreeMap;

use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage};

use crate::state::State;

/// Amounts by namespace and model. The model is empty for limits of all models together.
#[derive(Debug, Default)]
pub(super) struct QuotaMetrics {
    /// Compute in percent of one GPU.
    used_percent: BTreeMap<Labels, u64>,
    limit_percent: BTreeMap<Labels, u64>,
    used_mib: BTreeMap<Labels, u64>,
    limit_mib: BTreeMap<Labels, u64>,
    /// Guaranteed and borrowed amounts by namespace.
    guaranteed_percent: BTreeMap<Labels, u64>,
    borrowed_percent: BTreeMap<Labels, u64>,
    guaranteed_mib: BTreeMap<Labels, u64>,
    borrowed_mib: BTreeMap<Labels, u64>,
    /// Namespaces with limits of all models together, by name.
    pub(super) totals: Vec<NamespaceQuota>,
}

/// What a namespace holds of all models together, and what it may hold.
#[derive(Debug)]
pub(super) struct NamespaceQuota {
    pub(super) namespace: String,
    pub(super) used_percent: u64,
    pub(super) limit_percent: Option<u64>,
    pub(super) used_mib: u64,
    pub(super) limit_mib: Option<u64>,
}

impl QuotaMetrics {
    pub(super) fn of(state: &State) -> Self {
        let mut all = Self::default();
        let (quota, usage) = state.quota();
        let labels =
            |namespace: &str, model: &str| Labels::new(&[("namespace", namespace), ("model", model)]);
        for (namespace, model, taken) in usage.all() {
            all.used_percent.insert(labels(namespace, model), taken.compute_percent);
            all.used_mib.insert(labels(namespace, model), taken.memory.0);
        }
        for (namespace, guarantee) in quota.guarantees() {
            let labels = Labels::new(&[("namespace", namespace)]);
            let borrowed = guarantee.borrowed(usage.of(namespace));
            if let Some(percent) = guarantee.compute_percent {
                all.guaranteed_percent.insert(labels.clone(), percent);
                all.borrowed_percent.insert(labels.clone(), borrowed.compute_percent);
            }
            if let Some(memory) = guarantee.memory {
                all.guaranteed_mib.insert(labels.clone(), memory.0);
                all.borrowed_mib.insert(labels, borrowed.memory.0);
            }
        }
        for (namespace, limit) in &quota.namespaces {
            for (model, gpus) in limit.gpus_by_model.iter().flatten() {
                all.limit_percent.insert(labels(namespace, model), gpus.saturating_mul(100));
            }
            if let Some(percent) = limit.compute_percent {
                all.limit_percent.insert(labels(namespace, ""), percent);
            }
            if let Some(memory) = limit.memory {
                all.limit_mib.insert(labels(namespace, ""), memory.0);
            }
            let used = usage.of(namespace);
            all.totals.push(NamespaceQuota {
                namespace: namespace.clone(),
                used_percent: used.compute_percent,
                limit_percent: limit.compute_percent,
                used_mib: used.memory.0,
                limit_mib: limit.memory.map(|memory| memory.0),
            });
        }
        all
    }

    pub(super) fn write(&self, page: &mut MetricsPage) {
        let gpus = |percent: u64| f64::from(u32::try_from(percent).unwrap_or(u32::MAX)) / 100.0;
        let mut write_gpus = |name, help, values: &BTreeMap<Labels, u64>| {
            let mut family = page.family(name, Gauge, help);
            values.iter().for_each(|(labels, percent)| family.sample(labels, gpus(*percent)));
        };
        write_gpus("tessera_scheduler_quota_used_gpus", "GPUs that a namespace holds.", &self.used_percent);
        write_gpus(
            "tessera_scheduler_quota_limit_gpus",
            "GPUs that a namespace may hold.",
            &self.limit_percent,
        );
        write_gpus(
            "tessera_scheduler_quota_guaranteed_gpus",
            "GPUs that a namespace gets back from others.",
            &self.guaranteed_percent,
        );
        write_gpus(
            "tessera_scheduler_quota_borrowed_gpus",
            "GPUs that a namespace holds beyond its guarantee.",
            &self.borrowed_percent,
        );
        let mut write_bytes = |name, help, values: &BTreeMap<Labels, u64>| {
            let mut family = page.family(name, Gauge, help);
            values.iter().for_each(|(labels, mib)| family.sample(labels, mib.saturating_mul(1 << 20)));
        };
        write_bytes(
            "tessera_scheduler_quota_used_bytes",
            "GPU memory that a namespace holds.",
            &self.used_mib,
        );
        write_bytes(
            "tessera_scheduler_quota_limit_bytes",
            "GPU memory that a namespace may hold.",
            &self.limit_mib,
        );
        write_bytes(
            "tessera_scheduler_quota_guaranteed_bytes",
            "GPU memory that a namespace gets back from others.",
            &self.guaranteed_mib,
        );
        write_bytes(
            "tessera_scheduler_quota_borrowed_bytes",
            "GPU memory that a namespace holds beyond its guarantee.",
            &self.borrowed_mib,
        );
    }
}
