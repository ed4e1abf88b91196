//! Quotas under the names of HAMi's scheduler, for its dashboards and alerts. HAMi counts compute in percent of one
//! GPU and memory in MiB, and calls both by the resource that pods request.

use tessera_wire::foreign::dialect::hami::{CORES, MEMORY};
use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage};

use super::quota::NamespaceQuota;

/// Label on every sample of HAMi's scheduler.
const ZONE: (&str, &str) = ("zone", "vGPU");

/// Writes used and permitted amounts of the namespaces that have a limit. HAMi knows no limits by model.
pub(super) fn write(rows: &[NamespaceQuota], page: &mut MetricsPage) {
    let amounts = |row: &NamespaceQuota| {
        [(CORES, row.used_percent, row.limit_percent), (MEMORY, row.used_mib, row.limit_mib)]
    };
    let mut used = page.family("hami_resource_quota_used", Gauge, "resourcequota usage for a certain device");
    for row in rows {
        for (name, used_amount, limit) in amounts(row) {
            let Some(limit) = limit else { continue };
            let limit = limit.to_string();
            let labels =
                [("namespace", row.namespace.as_str()), ("quota_name", name), ("limit", &limit), ZONE];
            used.sample(&Labels::new(&labels), used_amount);
        }
    }
    let help = "resourcequota limit for a certain device";
    let mut limits = page.family("hami_resource_quota_limit", Gauge, help);
    for row in rows {
        for (name, _, limit) in amounts(row) {
            let Some(limit) = limit else { continue };
            let labels = [("namespace", row.namespace.as_str()), ("quota_name", name), ZONE];
            limits.sample(&Labels::new(&labels), limit);
        }
    }
}
