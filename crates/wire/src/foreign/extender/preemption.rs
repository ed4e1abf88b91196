//! The verb `preempt`: which pods of lower priority are to be evicted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Pod, null_as_default};

/// Body of a `preempt` call: a pod that fits nowhere, and the pods kube-scheduler would evict from
/// each node.
///
/// `nodeCacheCapable` determines which of the two maps is set. Either map and every list may be null.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptionArgs {
    /// The pod that needs room.
    #[serde(alias = "pod")]
    pub pod: Pod,
    /// Complete pod objects, by node.
    #[serde(alias = "nodeNameToVictims", default, deserialize_with = "null_as_default")]
    pub node_name_to_victims: BTreeMap<String, Option<Victims>>,
    /// Pod UIDs, by node.
    #[serde(alias = "nodeNameToMetaVictims", default, deserialize_with = "null_as_default")]
    pub node_name_to_meta_victims: BTreeMap<String, Option<MetaVictims>>,
}

/// Pods to evict from a node, as complete objects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Victims {
    /// The pods to evict.
    #[serde(alias = "pods", deserialize_with = "null_as_default")]
    pub pods: Vec<Pod>,
    /// Number of these pods that a disruption budget protects.
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", deserialize_with = "null_as_default")]
    pub budget_violations: i64,
}

/// Pods to evict from a node, by UID.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct MetaVictims {
    /// The pods to evict.
    #[serde(alias = "pods", deserialize_with = "null_as_default")]
    pub pods: Vec<MetaPod>,
    /// Number of these pods that a disruption budget protects.
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", deserialize_with = "null_as_default")]
    pub budget_violations: i64,
}

/// A pod that is identified by its UID.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MetaPod {
    /// The pod's UID.
    #[serde(rename = "UID", alias = "uid", deserialize_with = "null_as_default")]
    pub uid: String,
}

/// Response of `preempt`, always by UID. kube-scheduler does not preempt on omitted nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct PreemptionResult {
    /// Pods to evict, by node.
    #[serde(alias = "nodeNameToMetaVictims", deserialize_with = "null_as_default")]
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

impl PreemptionArgs {
    /// Returns the proposed victims of each node from whichever field is set.
    pub fn proposals(&self) -> impl Iterator<Item = (&str, MetaVictims)> {
        let by_identity = self.node_name_to_meta_victims.iter();
        let by_identity =
            by_identity.map(|(node, victims)| (node.as_str(), victims.clone().unwrap_or_default()));
        let whole = self.node_name_to_victims.iter().map(|(node, victims)| {
            let victims = victims.as_ref();
            let pods = victims.iter().flat_map(|victims| &victims.pods);
            let proposed = MetaVictims {
                pods: pods.map(|pod| MetaPod { uid: pod.metadata.uid.clone() }).collect(),
                budget_violations: victims.map_or(0, |victims| victims.budget_violations),
            };
            (node.as_str(), proposed)
        });
        by_identity.chain(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposals(json: &str) -> Vec<(String, Vec<String>)> {
        let args: PreemptionArgs = serde_json::from_str(json).unwrap();
        let uids = |victims: MetaVictims| victims.pods.into_iter().map(|pod| pod.uid).collect();
        args.proposals().map(|(node, victims)| (node.to_owned(), uids(victims))).collect()
    }

    #[test]
    fn reads_both_forms_nulls_and_empty_lists() {
        let meta = r#"{"Pod":{},"NodeNameToVictims":null,
            "NodeNameToMetaVictims":{"a":{"Pods":[{"UID":"u1"},{"UID":"u2"}],"NumPDBViolations":0},"b":{"Pods":null},"c":null}}"#;
        let none = Vec::new;
        assert_eq!(
            proposals(meta),
            [("a".into(), vec!["u1".into(), "u2".into()]), ("b".into(), none()), ("c".into(), none())]
        );
        let whole = r#"{"pod":{},"nodeNameToVictims":{"a":{"pods":[{"metadata":{"uid":"u1"}}]}}}"#;
        assert_eq!(proposals(whole), [("a".into(), vec!["u1".into()])]);
    }

    #[test]
    fn writes_the_keys_that_kube_scheduler_reads() {
        let victims = MetaVictims { pods: vec![MetaPod { uid: "u".into() }], budget_violations: 1 };
        let result = PreemptionResult { node_name_to_meta_victims: BTreeMap::from([("n".into(), victims)]) };
        assert_eq!(
            serde_json::to_string(&result).unwrap(),
            r#"{"NodeNameToMetaVictims":{"n":{"Pods":[{"UID":"u"}],"NumPDBViolations":1}}}"#
        );
    }
}
