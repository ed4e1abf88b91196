//! Quotas: the GPU limits of each namespace, and what each namespace uses.

mod guarantee;

use std::collections::{BTreeMap, HashMap};

pub use self::guarantee::{DecayedUse, Guarantee, GuaranteedUse, HALF_LIFE_SECONDS, PastUse};
use crate::grant::{ContainerGrant, GpuUsage, gpus};
use crate::node::Node;
use crate::request::{MemoryRequest, PodRequest, Request, Share, peak};
use crate::units::{MiB, Percent};

/// The limits of all namespaces. A namespace that is not listed has no limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// The limits by namespace.
    pub namespaces: BTreeMap<String, NamespaceLimit>,
    /// The limits that exist but could not be parsed.
    pub unreadable: UnreadableLimits,
}

/// Limits that could not be parsed, with the reason for the administrator. The namespaces concerned
/// may take nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnreadableLimits {
    /// The limits of these namespaces, with the reason for each.
    Of(BTreeMap<String, String>),
    /// The limits of all namespaces, because not even their names could be parsed.
    All(String),
}

impl Default for UnreadableLimits {
    fn default() -> Self {
        Self::Of(BTreeMap::new())
    }
}

/// The limits of one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceLimit {
    /// The number of GPUs by model; a model that is not listed is forbidden. `None` allows any
    /// number of any model.
    pub gpus_by_model: Option<BTreeMap<String, u64>>,
    /// The node pools that the namespace may use; empty for all.
    pub pools: Vec<String>,
    /// The limit for the sum of GPU memory.
    pub memory: Option<MiB>,
    /// The limit for the sum of compute; 100 is one GPU.
    pub compute_percent: Option<u64>,
    /// The part that the namespace gets back from others, if it has one.
    pub guarantee: Option<Guarantee>,
}

/// Another limit of a namespace, which counts beside those of [`Quota`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceCap {
    /// The limit for the sum of GPU memory.
    pub memory: Option<MiB>,
    /// The limit for the sum of compute; 100 is one GPU.
    pub compute_percent: Option<u64>,
}

/// An amount of GPU compute and GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuAmount {
    /// The compute; 100 for each whole GPU. A request for memory alone counts as its part of the
    /// GPU.
    pub compute_percent: u64,
    /// The memory; that of the whole GPU for each whole GPU.
    pub memory: MiB,
}

/// The labels of a node to which quotas refer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuotaLabels {
    /// The GPU model of the node.
    pub model: Option<String>,
    /// The pool of the node.
    pub pool: Option<String>,
}

/// The reason why a quota forbids a node. All texts begin with the word that gpu-admission uses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverQuota {
    /// The limits could not be parsed; the text gives the reason and the remedy.
    #[error("ExceedsGPUQuota: {0}")]
    Unreadable(String),
    /// The namespace may not use this pool.
    #[error("ExceedsGPUQuota: not a pool of this namespace")]
    Pool,
    /// The namespace may not use this model.
    #[error("ExceedsGPUQuota: not a model of this namespace")]
    Model,
    /// The limit for GPUs of this model is exceeded.
    #[error("ExceedsGPUQuota: GPUs of this model")]
    GpuCount,
    /// The limit for GPU memory is exceeded.
    #[error("ExceedsGPUQuota: GPU memory")]
    Memory,
    /// The limit for GPU compute is exceeded.
    #[error("ExceedsGPUQuota: GPU compute")]
    Compute,
}

/// What each namespace uses, by GPU model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceUsage {
    namespaces: HashMap<String, BTreeMap<String, GpuAmount>>,
}

// === impl Quota ===

impl Quota {
    /// Returns a quota of which nothing could be parsed.
    #[must_use]
    pub fn all_unreadable(why: String) -> Self {
        Self { unreadable: UnreadableLimits::All(why), ..Self::default() }
    }

    /// Returns the reason why the limits of a namespace could not be parsed, if so.
    #[must_use]
    pub fn why_unreadable(&self, namespace: &str) -> Option<&str> {
        match &self.unreadable {
            UnreadableLimits::Of(namespaces) => namespaces.get(namespace).map(String::as_str),
            UnreadableLimits::All(why) => Some(why),
        }
    }

    /// Returns the same quota with these limits beside its own. The lower limit of each kind counts.
    #[must_use]
    pub fn capped<'a>(&self, caps: impl IntoIterator<Item = (&'a str, NamespaceCap)>) -> Self {
        let lower = |own: Option<u64>, cap: Option<u64>| own.into_iter().chain(cap).min();
        let mut quota = self.clone();
        for (namespace, cap) in caps {
            let limit = quota.namespaces.entry(namespace.to_owned()).or_default();
            limit.memory = lower(limit.memory.map(|own| own.0), cap.memory.map(|cap| cap.0)).map(MiB);
            limit.compute_percent = lower(limit.compute_percent, cap.compute_percent);
        }
        quota
    }

    /// Returns whether the quota limits pods of this namespace.
    #[must_use]
    pub fn limits(&self, namespace: &str) -> bool {
        self.why_unreadable(namespace).is_some() || self.namespaces.contains_key(namespace)
    }

    /// Returns the guarantee of a namespace, if it has one.
    #[must_use]
    pub fn guarantee(&self, namespace: &str) -> Option<Guarantee> {
        self.namespaces.get(namespace)?.guarantee
    }

    /// Returns the namespaces with a guarantee.
    pub fn guarantees(&self) -> impl Iterator<Item = (&str, Guarantee)> {
        let all = self.namespaces.iter();
        all.filter_map(|(namespace, limit)| Some((namespace.as_str(), limit.guarantee?)))
    }

    /// Checks whether a pod of `namespace` that takes `more` is allowed on a node with these
    /// `labels`.
    pub fn allows(
        &self,
        namespace: &str,
        usage: &NamespaceUsage,
        labels: &QuotaLabels,
        more: GpuAmount,
    ) -> Result<(), OverQuota> {
        if let Some(why) = self.why_unreadable(namespace) {
            return Err(OverQuota::Unreadable(why.to_owned()));
        }
        let Some(limit) = self.namespaces.get(namespace) else { return Ok(()) };
        let in_pool = |pool: &String| limit.pools.contains(pool);
        if !limit.pools.is_empty() && !labels.pool.as_ref().is_some_and(in_pool) {
            return Err(OverQuota::Pool);
        }
        if let Some(models) = &limit.gpus_by_model {
            let model = labels.model.as_deref().unwrap_or_default();
            let most = models.get(model).ok_or(OverQuota::Model)?.saturating_mul(100);
            if usage.of_model(namespace, model).plus(more).compute_percent > most {
                return Err(OverQuota::GpuCount);
            }
        }
        let then = usage.of(namespace).plus(more);
        if limit.memory.is_some_and(|most| then.memory > most) {
            return Err(OverQuota::Memory);
        }
        if limit.compute_percent.is_some_and(|most| then.compute_percent > most) {
            return Err(OverQuota::Compute);
        }
        Ok(())
    }
}

impl Quota {
    /// Returns the amount that the namespace must release on nodes with these `labels` first, or
    /// `None` where that cannot help.
    #[must_use]
    pub fn excess(
        &self,
        namespace: &str,
        usage: &NamespaceUsage,
        labels: &QuotaLabels,
        more: GpuAmount,
    ) -> Option<GpuAmount> {
        match self.allows(namespace, usage, labels, more) {
            Ok(()) => return Some(GpuAmount::default()),
            Err(over) if !over.may_resolve() => return None,
            Err(_) => {}
        }
        let limit = self.namespaces.get(namespace)?;
        let model = labels.model.as_deref().unwrap_or_default();
        let of_model = limit.gpus_by_model.as_ref().and_then(|models| models.get(model)).map_or(0, |most| {
            let then = usage.of_model(namespace, model).plus(more);
            then.compute_percent.saturating_sub(most.saturating_mul(100))
        });
        let then = usage.of(namespace).plus(more);
        let compute_percent =
            limit.compute_percent.map_or(0, |most| then.compute_percent.saturating_sub(most));
        let memory = limit.memory.map_or(MiB::ZERO, |most| then.memory.saturating_sub(most));
        Some(GpuAmount { compute_percent: compute_percent.max(of_model), memory })
    }

    /// Describes the usage and the limits of a namespace as text; `None` for a namespace without
    /// limits.
    #[must_use]
    pub fn describe(&self, namespace: &str, usage: &NamespaceUsage) -> Option<String> {
        let limit = self.namespaces.get(namespace)?;
        let mut parts = Vec::new();
        for (model, most) in limit.gpus_by_model.iter().flatten() {
            let held = usage.of_model(namespace, model).compute_percent;
            parts.push(format!("{}.{:02} of {most} {model}", held / 100, held % 100));
        }
        let held = usage.of(namespace);
        parts.extend(limit.compute_percent.map(|most| format!("{}% of {most}%", held.compute_percent)));
        parts.extend(limit.memory.map(|most| format!("{} of {most}", held.memory)));
        if let Some(guarantee) = limit.guarantee {
            let most = guarantee.compute_percent;
            parts.extend(most.map(|most| format!("{}% of {most}% guaranteed", held.compute_percent)));
            parts.extend(guarantee.memory.map(|most| format!("{} of {most} guaranteed", held.memory)));
        }
        if !limit.pools.is_empty() {
            parts.push(format!("only in pool {}", limit.pools.join(" or ")));
        }
        if parts.is_empty() {
            parts.push("no GPU at all".to_owned());
        }
        Some(parts.join(", "))
    }
}

impl OverQuota {
    /// Returns whether the quota could allow the pod once other pods of the namespace have ended.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        !matches!(self, Self::Unreadable(_) | Self::Pool | Self::Model)
    }
}

// === impl NamespaceUsage ===

impl NamespaceUsage {
    /// Charges a namespace.
    pub fn add(&mut self, namespace: &str, model: &str, taken: GpuAmount) {
        if taken == GpuAmount::default() {
            return;
        }
        let models = self.namespaces.entry(namespace.to_owned()).or_default();
        let account = models.entry(model.to_owned()).or_default();
        *account = account.plus(taken);
    }

    /// Reverses a charge.
    pub fn remove(&mut self, namespace: &str, model: &str, taken: GpuAmount) {
        let Some(models) = self.namespaces.get_mut(namespace) else { return };
        if let Some(account) = models.get_mut(model) {
            *account = account.minus(taken);
            if *account == GpuAmount::default() {
                models.remove(model);
            }
        }
        if models.is_empty() {
            self.namespaces.remove(namespace);
        }
    }

    /// Returns the total usage of a namespace.
    #[must_use]
    pub fn of(&self, namespace: &str) -> GpuAmount {
        let models = self.namespaces.get(namespace).into_iter().flat_map(BTreeMap::values);
        models.fold(GpuAmount::default(), |sum, taken| sum.plus(*taken))
    }

    /// Returns the usage of a namespace on nodes of one GPU model.
    #[must_use]
    pub fn of_model(&self, namespace: &str, model: &str) -> GpuAmount {
        self.namespaces.get(namespace).and_then(|models| models.get(model)).copied().unwrap_or_default()
    }

    /// Returns the usage of every namespace and model, in no particular order.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str, GpuAmount)> {
        self.namespaces.iter().flat_map(|(namespace, models)| {
            models.iter().map(move |(model, taken)| (namespace.as_str(), model.as_str(), *taken))
        })
    }
}

// === impl GpuAmount ===

impl GpuAmount {
    /// Returns what these grants take of a node's GPUs.
    #[must_use]
    pub fn of_grants(grants: &[ContainerGrant], node: &Node) -> Self {
        let amounts = gpus(grants).iter().filter_map(|gpu| {
            let memory = node.gpu(gpu)?.memory;
            // Each container counts for itself: one without guaranteed compute counts as its part of the GPU, although
            // another one of the pod has guaranteed compute there.
            let own = |container: &ContainerGrant| Self::of_gpu(container.usage(gpu), memory);
            let taken = peak(grants, |container| container.role, own, Self::plus, Self::larger);
            Some(Self { compute_percent: taken.compute_percent.min(100), ..taken })
        });
        amounts.fold(Self::default(), Self::plus)
    }

    /// Returns the most that a pod can take of a node at one moment, whichever GPUs it gets. Its grants amount to no
    /// more, unless an init container gets GPUs that no other container has.
    #[must_use]
    pub fn peak_need(pod: &PodRequest, node: &Node) -> Self {
        let memories = || node.gpus().iter().map(|gpu| gpu.memory);
        let largest = memories().max().unwrap_or_default();
        // A share without guaranteed compute counts as its part of the GPU: most on the smallest one.
        let part_of = |gpu: MiB, compute_percent: Percent, memory: MemoryRequest| {
            let memory = memory.on(gpu);
            Self::of_gpu(GpuUsage { compute_percent, memory, ..GpuUsage::default() }, gpu)
        };
        let need = |request: Option<Request>| match request {
            None => Self::default(),
            Some(Request::Whole(count)) => {
                let count = u64::from(count);
                Self { compute_percent: 100 * count, memory: MiB(largest.0.saturating_mul(count)) }
            }
            Some(Request::Share(Share { count, compute_percent, memory })) => {
                let fitting = memories().filter(|gpu| memory.on(*gpu) <= *gpu);
                let parts = fitting.map(|gpu| part_of(gpu, compute_percent, memory));
                let most = parts.reduce(Self::larger);
                let most = most.unwrap_or_else(|| part_of(largest, compute_percent, memory));
                Self {
                    compute_percent: most.compute_percent.saturating_mul(u64::from(count)),
                    memory: MiB(most.memory.0.saturating_mul(u64::from(count))),
                }
            }
        };
        peak(
            &pod.containers,
            |container| container.role,
            |container| need(container.request),
            Self::plus,
            Self::larger,
        )
    }

    fn of_gpu(usage: GpuUsage, gpu_memory: MiB) -> Self {
        if usage.whole {
            return Self { compute_percent: 100, memory: gpu_memory };
        }
        let compute_percent = match usage.compute_percent.0 {
            0 => usage.memory.0.saturating_mul(100).div_ceil(gpu_memory.0.max(1)).min(100),
            compute_percent => u64::from(compute_percent),
        };
        Self { compute_percent, memory: usage.memory }
    }

    /// Returns whether both parts are at least those of `other`.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.compute_percent >= other.compute_percent && self.memory >= other.memory
    }

    /// Returns the sum.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            compute_percent: self.compute_percent.saturating_add(other.compute_percent),
            memory: self.memory + other.memory,
        }
    }

    fn larger(self, other: Self) -> Self {
        Self {
            compute_percent: self.compute_percent.max(other.compute_percent),
            memory: self.memory.max(other.memory),
        }
    }

    /// Returns the difference, where no part is below zero.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self {
            compute_percent: self.compute_percent.saturating_sub(other.compute_percent),
            memory: self.memory.saturating_sub(other.memory),
        }
    }
}

#[cfg(test)]
mod tests;
