//! The verb `preempt`: which pods of lower priority would have to go.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Pod, null_as_default};

/// The question: a pod that fits nowhere, and for each node the pods kube-scheduler would evict there. Which of the two
/// maps is filled depends on `nodeCacheCapable`; either may be null, and so may every list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptionArgs {
    /// The pod to make room for.
    #[serde(alias = "pod")]
    pub pod: Pod,
    /// Whole pods, by node.
    #[serde(alias = "nodeNameToVictims", default, deserialize_with = "null_as_default")]
    pub node_name_to_victims: BTreeMap<String, Option<Victims>>,
    /// Identities only, by node.
    #[serde(alias = "nodeNameToMetaVictims", default, deserialize_with = "null_as_default")]
    pub node_name_to_meta_victims: BTreeMap<String, Option<MetaVictims>>,
}

/// Pods to evict from a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct Victims {
    /// The pods.
    #[serde(alias = "pods", deserialize_with = "null_as_default")]
    pub pods: Vec<Pod>,
    /// How many of them a disruption budget protects.
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", deserialize_with = "null_as_default")]
    pub budget_violations: i64,
}

/// Pods to evict from a node, by identity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct MetaVictims {
    /// The pods.
    #[serde(alias = "pods", deserialize_with = "null_as_default")]
    pub pods: Vec<MetaPod>,
    /// How many of them a disruption budget protects.
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", deserialize_with = "null_as_default")]
    pub budget_violations: i64,
}

/// A pod by its identity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MetaPod {
    /// The identity.
    #[serde(rename = "UID", alias = "uid", deserialize_with = "null_as_default")]
    pub uid: String,
}

/// The answer: always by identity. Nodes left out are given up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct PreemptionResult {
    /// By node.
    #[serde(alias = "nodeNameToMetaVictims", deserialize_with = "null_as_default")]
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

impl PreemptionArgs {
    /// For each node the victims proposed, whichever way they were sent.
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
    fn both_forms_nulls_and_empty_lists() {
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
    fn written_as_kube_scheduler_reads_it() {
        let victims = MetaVictims { pods: vec![MetaPod { uid: "u".into() }], budget_violations: 1 };
        let result = PreemptionResult { node_name_to_meta_victims: BTreeMap::from([("n".into(), victims)]) };
        assert_eq!(
            serde_json::to_string(&result).unwrap(),
            r#"{"NodeNameToMetaVictims":{"n":{"Pods":[{"UID":"u"}],"NumPDBViolations":1}}}"#
        );
    }
}
