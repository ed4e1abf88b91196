//! Quotas and usage of the namespaces.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tessera_core::quota::{GpuAmount, UnreadableLimits};

use crate::state::State;

/// Quota and usage of one namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespaceQuota {
    /// Name of the namespace.
    pub namespace: String,
    /// Limits of the namespace; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<LimitView>,
    /// The part that the namespace gets back from others; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guaranteed: Option<GuaranteeView>,
    /// Reason why the limits cannot be parsed. The namespace gets no GPUs until they are corrected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Usage of all GPUs together.
    pub held: Amounts,
    /// Usage by the model label of the nodes.
    pub by_model: BTreeMap<String, Amounts>,
}

/// Limits of a namespace. An absent field means no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitView {
    /// Number of GPUs by model. The namespace may not use other models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<BTreeMap<String, u64>>,
    /// Pools that the namespace may use; empty means all pools.
    pub pools: Vec<String>,
    /// Limit of the GPU memory, summed over all GPUs, in MiB.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Limit of the compute, summed over all GPUs, in percent of one GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<u64>,
}

/// Guarantee of a namespace. An absent field is not guaranteed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GuaranteeView {
    /// Guaranteed GPU memory, summed over all GPUs, in MiB.
    #[serde(rename = "memoryMiB", skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Guaranteed compute, summed over all GPUs, in percent of one GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute: Option<u64>,
    /// Use beyond the guarantee.
    pub borrowed: Amounts,
}

/// An amount of compute and GPU memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Amounts {
    /// Compute in percent of one GPU.
    pub compute: u64,
    /// GPU memory in MiB.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
}

impl From<GpuAmount> for Amounts {
    fn from(taken: GpuAmount) -> Self {
        Self { compute: taken.compute_percent, memory_mib: taken.memory.0 }
    }
}

/// Returns every namespace that has a limit or holds GPUs, sorted by name.
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
        guaranteed: quota.guarantee(namespace).map(|guarantee| GuaranteeView {
            memory_mib: guarantee.memory.map(|memory| memory.0),
            compute: guarantee.compute_percent,
            borrowed: guarantee.borrowed(accounts.of(namespace)).into(),
        }),
        problem: quota.why_unreadable(namespace).map(str::to_owned),
        held: accounts.of(namespace).into(),
        by_model: by_model.get(namespace).cloned().unwrap_or_default(),
    };
    names.into_iter().map(view).collect()
}
