//! Taints with the effect `PreferNoSchedule`, and the tolerations that can match them.
//!
//! kube-scheduler evaluates all other taints before it calls the extender, so they are not parsed.

use serde::{Deserialize, Deserializer};
use tessera_core::taint::{SoftTaint, SoftToleration};

use crate::foreign::objects::null_as_default;

const SOFT_EFFECT: &str = "PreferNoSchedule";

#[derive(Default, Deserialize)]
#[serde(default)]
struct Taint {
    #[serde(deserialize_with = "null_as_default")]
    key: String,
    #[serde(deserialize_with = "null_as_default")]
    value: String,
    #[serde(deserialize_with = "null_as_default")]
    effect: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Toleration {
    #[serde(deserialize_with = "null_as_default")]
    key: String,
    #[serde(deserialize_with = "null_as_default")]
    operator: String,
    #[serde(deserialize_with = "null_as_default")]
    value: String,
    #[serde(deserialize_with = "null_as_default")]
    effect: String,
}

/// Deserializes a node's taints and keeps those with the effect `PreferNoSchedule`.
pub(crate) fn soft_taints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<SoftTaint>, D::Error> {
    let all = Option::<Vec<Taint>>::deserialize(deserializer)?.unwrap_or_default();
    let soft = all.into_iter().filter(|taint| taint.effect == SOFT_EFFECT);
    Ok(soft.map(|Taint { key, value, .. }| SoftTaint { key, value }).collect())
}

/// Deserializes a pod's tolerations and keeps those that can match taints with the effect
/// `PreferNoSchedule`. The API server adds two others to every pod.
pub(crate) fn soft_tolerations<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<SoftToleration>, D::Error> {
    let all = Option::<Vec<Toleration>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(all.into_iter().filter_map(Toleration::into_soft).collect())
}

impl Toleration {
    /// Returns `None` for another effect and for operators that never match a soft taint.
    fn into_soft(self) -> Option<SoftToleration> {
        let value = match self.operator.as_str() {
            "Exists" => None,
            "" | "Equal" => Some(self.value),
            _ => return None,
        };
        let is_soft = self.effect.is_empty() || self.effect == SOFT_EFFECT;
        is_soft.then_some(SoftToleration { key: self.key, value })
    }
}

#[cfg(test)]
mod tests {
    use tessera_core::taint::untolerated;

    use crate::foreign::objects::{NodeSpec, PodSpec};

    fn check(taints: &str, tolerations: &str, expected: usize) {
        let node: NodeSpec = serde_json::from_str(&format!(r#"{{"taints":{taints}}}"#)).unwrap();
        let pod: PodSpec = serde_json::from_str(&format!(r#"{{"tolerations":{tolerations}}}"#)).unwrap();
        let found = untolerated(&node.soft_taints, &pod.soft_tolerations);
        assert_eq!(found, expected, "{taints} {tolerations}");
    }

    #[test]
    fn reads_only_soft_taints_and_matches_tolerations_like_kubernetes() {
        const SPOT: &str = r#"[{"key":"spot","value":"yes","effect":"PreferNoSchedule"}]"#;
        check("null", "null", 0);
        check(r#"[{"key":"hard","effect":"NoSchedule"},{"key":"out","effect":"NoExecute"}]"#, "[]", 0);
        check(SPOT, "[]", 1);
        check(SPOT, r#"[{"key":"spot","operator":"Exists"}]"#, 0);
        check(SPOT, r#"[{"key":"spot","operator":"Exists","effect":"NoSchedule"}]"#, 1);
        check(SPOT, r#"[{"key":"spot","value":"yes","effect":"PreferNoSchedule"}]"#, 0);
        check(SPOT, r#"[{"key":"spot","operator":"Equal","value":"no"}]"#, 1);
        check(SPOT, r#"[{"operator":"Exists"}]"#, 0);
        check(SPOT, r#"[{"key":"spot","operator":"Gt","value":"1"}]"#, 1);
        let two = r#"[{"key":"a","effect":"PreferNoSchedule"},{"key":"b","effect":"PreferNoSchedule"}]"#;
        check(two, r#"[{"key":"a","operator":"Exists"}]"#, 1);
    }
}
