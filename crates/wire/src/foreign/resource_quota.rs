//! ResourceQuota objects, with the keys by which HAMi limits the GPUs of a namespace.
//!
//! The API server does not count these keys: it counts extended resources by `requests.` only, and per pod, not per
//! GPU. The scheduler counts them, with what it has granted.

use serde::{Deserialize, Serialize};
use tessera_core::quota::NamespaceCap;
use tessera_core::units::MiB;

use crate::foreign::dialect::hami;
use crate::foreign::objects::{Amounts, Metadata, null_as_default};
use crate::foreign::quantity::Quantity;

/// Begin of the keys. The name of a resource follows.
const PREFIX: &str = "limits.";

/// A ResourceQuota object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceQuota {
    /// Identity of the quota.
    pub metadata: Metadata,
    /// Limits of the quota.
    pub spec: ResourceQuotaSpec,
}

/// Limits of a ResourceQuota.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceQuotaSpec {
    /// Largest amounts, by key.
    #[serde(deserialize_with = "null_as_default")]
    pub hard: Amounts,
}

impl ResourceQuota {
    /// Returns the limits for GPUs, or `None` if the quota has none.
    ///
    /// The API server accepts quantities only. Whatever else is found closes the namespace, because it may be a limit.
    #[must_use]
    pub fn cap(&self) -> Option<NamespaceCap> {
        let amount = |resource: &str| {
            let text = self.spec.hard.get(&format!("{PREFIX}{resource}"))?;
            let amount = text.0.parse::<Quantity>().ok().and_then(Quantity::milli);
            Some(amount.unwrap_or_default() / 1000)
        };
        let cap =
            NamespaceCap { memory: amount(hami::MEMORY).map(MiB), compute_percent: amount(hami::CORES) };
        (cap != NamespaceCap::default()).then_some(cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_keys_of_hami() {
        let check = |hard: &str, expected: Option<(Option<u64>, Option<u64>)>| {
            let json =
                format!(r#"{{"metadata":{{"name":"q","namespace":"team"}},"spec":{{"hard":{hard}}}}}"#);
            let quota: ResourceQuota = serde_json::from_str(&json).unwrap();
            let found = quota.cap().map(|cap| (cap.memory.map(|memory| memory.0), cap.compute_percent));
            assert_eq!(found, expected, "{hard}");
        };
        check("null", None);
        check(r#"{"limits.cpu":"4","requests.nvidia.com/gpu":"1"}"#, None);
        check(
            r#"{"limits.nvidia.com/gpumem":"20000","limits.nvidia.com/gpucores":"150"}"#,
            Some((Some(20_000), Some(150))),
        );
        check(r#"{"limits.nvidia.com/gpumem":"20k"}"#, Some((Some(20_000), None)));
        check(r#"{"limits.nvidia.com/gpucores":0}"#, Some((None, Some(0))));
        check(r#"{"limits.nvidia.com/gpucores":"-1"}"#, Some((None, Some(0))));
    }
}
