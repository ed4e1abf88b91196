//! What namespaces may hold, and what they do hold.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tessera_core::quota::{GpuAmount, UnreadableLimits};

use crate::state::State;

/// One namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceQuota {
    /// Its name.
    pub namespace: String,
    /// Its limits; absent for a namespace that is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<LimitView>,
    /// Why its limits cannot be read: it gets no GPUs meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What it holds of all GPUs.
    pub held: Amounts,
    /// What it holds by model label of the nodes.
    pub by_model: BTreeMap<String, Amounts>,
}

/// What a namespace may hold. What is absent is not limited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitView {
    /// GPUs by model; others are closed to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<BTreeMap<String, u64>>,
    /// The pools it may use; empty for all.
    pub pools: Vec<String>,
    /// Memory of all GPUs together.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Compute of all GPUs together, percent of one GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<u64>,
}

/// So much of the GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Amounts {
    /// Compute, percent of one GPU.
    pub compute: u64,
    /// Memory.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

impl From<GpuAmount> for Amounts {
    fn from(taken: GpuAmount) -> Self {
        Self { compute: taken.compute_percent, memory_mib: taken.memory.0 }
    }
}

/// Every namespace that has a limit or holds anything, by name.
#[must_use]
pub fn quota(state: &State) -> Vec<NamespaceQuota> {
    let (quota, accounts) = state.quota();
    let mut by_model: BTreeMap<&str, BTreeMap<String, Amounts>> = BTreeMap::new();
    for (namespace, model, taken) in accounts.all() {
        by_model.entry(namespace).or_default().insert(model.to_owned(), taken.into());
    }
    let limited = quota.namespaces.keys().map(String::as_str);
    let mut names: BTreeSet<&str> = limited.chain(by_model.keys().copied()).collect();
    if let UnreadableLimits::Of(namespaces) = &quota.unreadable {
        names.extend(namespaces.keys().map(String::as_str));
    }
    let view = |namespace: &str| NamespaceQuota {
        namespace: namespace.to_owned(),
        limit: quota.namespaces.get(namespace).map(|limit| LimitView {
            gpus: limit.gpus_by_model.clone(),
            pools: limit.pools.clone(),
            memory_mib: limit.memory.map(|memory| memory.0),
            compute: limit.compute_percent,
        }),
        problem: quota.why_unreadable(namespace).map(str::to_owned),
        held: accounts.of(namespace).into(),
        by_model: by_model.get(namespace).cloned().unwrap_or_default(),
    };
    names.into_iter().map(view).collect()
}
