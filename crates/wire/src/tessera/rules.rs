//! What a scheduler goes by, told in annotations of its lease, so that whoever explains its decisions goes by the same.

use std::collections::BTreeMap;

use tessera_core::placement::Policy;

use crate::foreign::dialect::MemoryUnit;
use crate::foreign::quota;
use crate::tessera::parsed_pod::PolicyResolver;
use crate::tessera::preferences::POLICY;

/// Where a scheduler keeps its lease unless told otherwise: namespace and name.
pub const LEASE: (&str, &str) = ("kube-system", "tessera-scheduler");

/// What `aliyun.com/gpu-mem` counts on nodes that do not say.
const UNIT: &str = "tessera.dev/memory-unit";

/// The settings of its quota, as JSON; absent without one.
const QUOTA: &str = "tessera.dev/quota";

/// The settings of a scheduler, as far as they decide what it answers.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// The policy of pods that name none, with nothing learned in it; `None` where nobody told.
    pub policy: Option<Policy>,
    /// What `aliyun.com/gpu-mem` counts on nodes that do not say.
    pub unit: MemoryUnit,
    /// Which ConfigMap and labels a quota goes by; `None` without one.
    pub quota: Option<quota::QuotaSettings>,
}

/// Writes the annotations.
#[must_use]
pub fn print(rules: &Rules) -> BTreeMap<String, String> {
    let policy = rules.policy.as_ref().map(|policy| (POLICY, policy.to_string()));
    // Texts always have a JSON form.
    let quota = rules.quota.as_ref().and_then(|quota| Some((QUOTA, serde_json::to_string(quota).ok()?)));
    let notes = [policy, Some((UNIT, rules.unit.to_string())), quota];
    notes.into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Reads the annotations. What is absent or cannot be read, as of another version, is as if nobody had told.
#[must_use]
pub fn parse(notes: &BTreeMap<String, String>) -> Rules {
    Rules {
        policy: notes.get(POLICY).and_then(|name| name.parse().ok()),
        unit: notes.get(UNIT).and_then(|unit| unit.parse().ok()).unwrap_or_default(),
        quota: notes.get(QUOTA).and_then(|json| quota::parse_settings(json).ok()),
    }
}

impl PolicyResolver for Rules {
    fn policy(&self, wished: Option<Policy>) -> Policy {
        wished.or_else(|| self.policy.clone()).unwrap_or_else(|| Policy::Tessera(Default::default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_understood() {
        let json = r#"{"GPUModelLabel":"model","GPUPoolLabel":"pool"}"#;
        let rules = Rules {
            policy: "binpack".parse().ok(),
            unit: MemoryUnit::Blocks(256),
            quota: quota::parse_settings(json).ok(),
        };
        let read = parse(&print(&rules));
        assert_eq!(read.policy.map(|policy| policy.name()), Some("binpack"));
        assert_eq!((read.unit, read.quota), (rules.unit, rules.quota));
        assert!(parse(&BTreeMap::new()).policy.is_none());
    }
}
