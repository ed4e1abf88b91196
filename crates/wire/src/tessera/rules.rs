//! The scheduler's policy, static table, memory unit and quota settings, which it publishes as annotations of its
//! lease. The kubectl plugins read them to explain its decisions with the same rules.

use std::collections::BTreeMap;

use tessera_core::placement::Policy;
use tessera_core::placement::static_table::StaticTable;

use crate::foreign::dialect::MemoryUnit;
use crate::foreign::quota;
use crate::tessera::parsed_pod::PolicyResolver;
use crate::tessera::preferences::POLICY;
use crate::tessera::static_table;

/// Default namespace and name of the scheduler's lease.
pub const LEASE: (&str, &str) = ("kube-system", "tessera-scheduler");

/// Annotation with the default memory unit.
const UNIT: &str = "tessera.dev/memory-unit";

/// Annotation with the address of the leader's pages, to which other replicas forward requests.
pub const PAGES: &str = "tessera.dev/pages";

/// Annotation with the address of the leader's verbs, to which other replicas forward calls of kube-scheduler.
pub const VERBS: &str = "tessera.dev/verbs";

/// Annotation with the quota settings as JSON. It is absent without a quota.
const QUOTA: &str = "tessera.dev/quota";

/// Annotation that is `true` if policy `static` chooses only sets of its table. It is absent otherwise.
const STRICT: &str = "tessera.dev/static-strict";

/// Annotation with the origin of the table of policy `static`: [`SHIPPED`], or `file` for `--static-table`.
const TABLE: &str = "tessera.dev/static-table";

/// Value of [`TABLE`] for the tables that are part of the program.
const SHIPPED: &str = "shipped";

/// The settings of a scheduler that determine its decisions.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Policy of pods that name none, without learned parameters. `None` if it was not published.
    pub policy: Option<Policy>,
    /// Unit of `aliyun.com/gpu-mem` on nodes that do not publish theirs.
    pub unit: MemoryUnit,
    /// ConfigMap and labels of the quota, or `None` without a quota.
    pub quota: Option<quota::QuotaSettings>,
    /// True if policy `static` chooses only sets of its table.
    pub static_strict: bool,
    /// True if policy `static` uses the tables that are part of the program. False if it uses a file, or if the origin
    /// was not published.
    pub has_shipped_table: bool,
}

impl Rules {
    /// Returns the table of policy `static`, or `None` if only the scheduler knows it.
    #[must_use]
    pub fn table(&self) -> Option<StaticTable> {
        self.has_shipped_table.then(|| StaticTable { strict: self.static_strict, ..static_table::shipped() })
    }
}

/// Writes the annotations.
#[must_use]
pub fn print(rules: &Rules) -> BTreeMap<String, String> {
    let policy = rules.policy.as_ref().map(|policy| (POLICY, policy.to_string()));
    // Serializing strings cannot fail.
    let quota = rules.quota.as_ref().and_then(|quota| Some((QUOTA, serde_json::to_string(quota).ok()?)));
    let strict = rules.static_strict.then(|| (STRICT, "true".to_owned()));
    let table = (TABLE, if rules.has_shipped_table { SHIPPED } else { "file" }.to_owned());
    let annotations = [policy, Some((UNIT, rules.unit.to_string())), quota, strict, Some(table)];
    annotations.into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Parses the annotations. An absent or unknown value, for example of another version, gets its
/// default.
#[must_use]
pub fn parse(annotations: &BTreeMap<String, String>) -> Rules {
    Rules {
        policy: annotations.get(POLICY).and_then(|name| name.parse().ok()),
        unit: annotations.get(UNIT).and_then(|unit| unit.parse().ok()).unwrap_or_default(),
        quota: annotations.get(QUOTA).and_then(|json| quota::parse_settings(json).ok()),
        static_strict: annotations.get(STRICT).is_some_and(|strict| strict == "true"),
        has_shipped_table: annotations.get(TABLE).is_some_and(|table| table == SHIPPED),
    }
}

impl PolicyResolver for Rules {
    fn policy(&self, preferred: Option<Policy>) -> Policy {
        preferred.or_else(|| self.policy.clone()).unwrap_or_else(|| Policy::Tessera(Default::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_its_own_output() {
        let json = r#"{"GPUModelLabel":"model","GPUPoolLabel":"pool"}"#;
        let rules = Rules {
            policy: "binpack".parse().ok(),
            unit: MemoryUnit::Blocks(256),
            quota: quota::parse_settings(json).ok(),
            static_strict: true,
            has_shipped_table: true,
        };
        let read = parse(&print(&rules));
        assert!(read.table().unwrap().strict && parse(&BTreeMap::new()).table().is_none());
        let of_file = parse(&print(&Rules { has_shipped_table: false, ..rules.clone() }));
        assert!(of_file.static_strict && of_file.table().is_none());
        assert_eq!(read.policy.map(|policy| policy.name()), Some("binpack"));
        assert_eq!((read.unit, read.quota), (rules.unit, rules.quota));
        assert!(parse(&BTreeMap::new()).policy.is_none());
    }
}
