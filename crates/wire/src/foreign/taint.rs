//! Taints that only ask pods to stay away, and who does not mind them.
//!
//! Taints that forbid a node are kube-scheduler's to judge before anybody else is asked, and are not read at all.

use serde::{Deserialize, Deserializer};

use crate::foreign::objects::null_as_default;

/// The effect of taints that only ask.
const SOFT: &str = "PreferNoSchedule";

/// A taint of effect `PreferNoSchedule`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SoftTaint {
    key: String,
    value: String,
}

/// A toleration that may be of such a taint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SoftToleration {
    #[serde(deserialize_with = "null_as_default")]
    key: String,
    #[serde(deserialize_with = "null_as_default")]
    operator: String,
    #[serde(deserialize_with = "null_as_default")]
    value: String,
    #[serde(deserialize_with = "null_as_default")]
    effect: String,
}

/// How many of a node's taints ask a pod with these tolerations to stay away: the fewer, the better kube-scheduler likes the node.
#[must_use]
pub fn intolerable(taints: &[SoftTaint], tolerations: &[SoftToleration]) -> usize {
    let is_tolerated = |taint: &&SoftTaint| tolerations.iter().any(|toleration| toleration.covers(taint));
    taints.iter().filter(|taint| !is_tolerated(taint)).count()
}

impl SoftToleration {
    fn covers(&self, taint: &SoftTaint) -> bool {
        (self.key.is_empty() || self.key == taint.key)
            && match self.operator.as_str() {
                "Exists" => true,
                "" | "Equal" => self.value == taint.value,
                _ => false,
            }
    }
}

/// Reads those of a node's taints that only ask.
pub(crate) fn soft_taints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<SoftTaint>, D::Error> {
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
    let all = Option::<Vec<Taint>>::deserialize(deserializer)?.unwrap_or_default();
    let soft = all.into_iter().filter(|taint| taint.effect == SOFT);
    Ok(soft.map(|Taint { key, value, .. }| SoftTaint { key, value }).collect())
}

/// Reads those of a pod's tolerations that may be of such taints. Every pod has two that are not, put in by the API server.
pub(crate) fn soft_tolerations<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<SoftToleration>, D::Error> {
    let mut all = Option::<Vec<SoftToleration>>::deserialize(deserializer)?.unwrap_or_default();
    all.retain(|toleration| toleration.effect.is_empty() || toleration.effect == SOFT);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::objects::{NodeSpec, PodSpec};

    fn check(taints: &str, tolerations: &str, expected: usize) {
        let node: NodeSpec = serde_json::from_str(&format!(r#"{{"taints":{taints}}}"#)).unwrap();
        let pod: PodSpec = serde_json::from_str(&format!(r#"{{"tolerations":{tolerations}}}"#)).unwrap();
        let found = intolerable(&node.soft_taints, &pod.soft_tolerations);
        assert_eq!(found, expected, "{taints} {tolerations}");
    }

    #[test]
    fn only_taints_that_ask_count_and_tolerations_cover_them_as_kubernetes_says() {
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
