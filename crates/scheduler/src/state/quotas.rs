//! The limits of namespaces: those of the quota ConfigMap and those of ResourceQuotas.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::quota::{NamespaceCap, Quota};
use tessera_wire::foreign::resource_quota::ResourceQuota;

use super::WatchEvent;

/// Namespace and name of a ResourceQuota.
type QuotaName = (String, String);

/// All limits, and where they come from.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    /// Limits of the ConfigMap.
    configured: Quota,
    /// Limits of ResourceQuotas.
    caps: BTreeMap<QuotaName, NamespaceCap>,
    /// Known ResourceQuotas that the current list has not contained yet. They count until the list is complete.
    unlisted: BTreeSet<QuotaName>,
    /// Limits of both together.
    in_force: Quota,
}

impl Quotas {
    /// Returns the limits that are in force.
    pub(super) fn in_force(&self) -> &Quota {
        &self.in_force
    }

    /// Replaces the limits of the ConfigMap.
    pub(super) fn configure(&mut self, quota: Quota) {
        self.configured = quota;
        self.combine();
    }

    /// Applies a watch event of a ResourceQuota.
    pub(super) fn handle(&mut self, change: WatchEvent<ResourceQuota>) {
        let name = |quota: &ResourceQuota| (quota.metadata.namespace.clone(), quota.metadata.name.clone());
        match change {
            WatchEvent::Listing => self.unlisted = self.caps.keys().cloned().collect(),
            WatchEvent::Set(quota) => {
                let name = name(&quota);
                self.unlisted.remove(&name);
                match quota.cap() {
                    Some(cap) => drop(self.caps.insert(name, cap)),
                    None => drop(self.caps.remove(&name)),
                }
            }
            WatchEvent::Gone(quota) => drop(self.caps.remove(&name(&quota))),
            WatchEvent::Listed => {
                for name in std::mem::take(&mut self.unlisted) {
                    self.caps.remove(&name);
                }
            }
        }
        self.combine();
    }

    fn combine(&mut self) {
        let caps = self.caps.iter().map(|((namespace, _), cap)| (namespace.as_str(), *cap));
        self.in_force = self.configured.capped(caps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(name: &str, gpumem: &str) -> ResourceQuota {
        let json = format!(
            r#"{{"metadata":{{"name":"{name}","namespace":"team"}},"spec":{{"hard":{{"limits.nvidia.com/gpumem":"{gpumem}"}}}}}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn memory(quotas: &Quotas) -> Option<u64> {
        quotas.in_force().namespaces.get("team").and_then(|limit| limit.memory).map(|memory| memory.0)
    }

    #[test]
    fn the_lowest_limit_counts_and_a_new_list_lifts_none() {
        let mut quotas = Quotas::default();
        quotas.handle(WatchEvent::Set(quota("a", "1000")));
        quotas.handle(WatchEvent::Set(quota("b", "3000")));
        assert_eq!(memory(&quotas), Some(1000));
        let configured =
            tessera_wire::foreign::quota::parse(r#"{"team":{"memoryMiB":2000}}"#, "the ConfigMap");
        quotas.configure(configured.unwrap());
        assert_eq!(memory(&quotas), Some(1000));
        // The watch begins again, and quota `a` is gone. It counts until the list is complete.
        quotas.handle(WatchEvent::Listing);
        quotas.handle(WatchEvent::Set(quota("b", "3000")));
        assert_eq!(memory(&quotas), Some(1000));
        quotas.handle(WatchEvent::Listed);
        assert_eq!(memory(&quotas), Some(2000));
        quotas.configure(Quota::default());
        assert_eq!(memory(&quotas), Some(3000));
        quotas.handle(WatchEvent::Gone(quota("b", "3000")));
        assert_eq!(memory(&quotas), None);
    }
}
