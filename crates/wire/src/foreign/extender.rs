//! The JSON between kube-scheduler and an extender.
//!
//! kube-scheduler writes its Go field names, so keys are capitalised; it reads keys in any case. People and older tools
//! write lower-case keys. So we read both and write capitals. Absent things come as `null`.

mod preemption;

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::preemption::{MetaPod, MetaVictims, PreemptionArgs, PreemptionResult, Victims};
use crate::foreign::objects::{Node, Pod, null_as_default};

/// Scores run from 0 to this; kube-scheduler does not clamp what goes beyond.
pub const MAX_SCORE: i64 = 10;

/// The question of `filter` and `prioritize`: one pod, and the nodes still in play. `N` is how names are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<N = String> {
    /// The pod to place.
    #[serde(alias = "pod")]
    pub pod: Pod,
    /// Whole nodes: sent to extenders without `nodeCacheCapable`.
    #[serde(alias = "nodes", default)]
    pub nodes: Option<NodeList>,
    /// Their names: sent to extenders with `nodeCacheCapable`.
    #[serde(alias = "nodeNames", alias = "nodenames")]
    pub node_names: Option<Vec<N>>,
}

/// A node's name, left where it stands in the request: there may be ten thousand of them in each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Name<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl AsRef<str> for Name<'_> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl<N: AsRef<str>> ExtenderArgs<N> {
    /// The nodes asked about, whichever way they were sent.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let from_nodes =
            self.nodes.iter().flat_map(|list| &list.items).map(|node| node.metadata.name.as_str());
        self.node_names.iter().flatten().map(N::as_ref).chain(from_nodes)
    }
}

/// Whole nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeList {
    /// The nodes.
    #[serde(alias = "Items", default, deserialize_with = "null_as_default")]
    pub items: Vec<Node>,
}

/// The answer of `filter`. A node in none of the four places is dropped without a reason for the user to read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct FilterResult {
    /// The nodes that fit, for extenders without `nodeCacheCapable`.
    #[serde(alias = "nodes")]
    pub nodes: Option<NodeList>,
    /// The names of those that fit, for extenders with it.
    #[serde(alias = "nodeNames", alias = "nodenames")]
    pub node_names: Option<Vec<String>>,
    /// Why others do not; evicting pods there might help.
    #[serde(alias = "failedNodes", deserialize_with = "null_as_default")]
    pub failed_nodes: BTreeMap<String, String>,
    /// Why others do not; nothing but a change of the node would help.
    #[serde(alias = "failedAndUnresolvableNodes", deserialize_with = "null_as_default")]
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// The question could not be answered. Not for pods that fit nowhere: those get reasons per node.
    #[serde(alias = "error", deserialize_with = "null_as_default")]
    pub error: String,
}

/// One entry of the answer of `prioritize`, which is a bare array of these. Nodes that are left out have 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority<H = String> {
    /// The node.
    #[serde(alias = "host")]
    pub host: H,
    /// 0 to [`MAX_SCORE`].
    #[serde(alias = "score")]
    pub score: i64,
}

/// The question of `bind`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingArgs {
    /// The pod to bind.
    #[serde(alias = "podName")]
    pub pod_name: String,
    /// Its namespace.
    #[serde(alias = "podNamespace")]
    pub pod_namespace: String,
    /// Its identity, so that a new pod of the same name is not bound by mistake.
    #[serde(rename = "PodUID", alias = "podUID", alias = "podUid")]
    pub pod_uid: String,
    /// The node that was chosen.
    #[serde(alias = "node")]
    pub node: String,
}

/// The answer of `bind`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct BindingResult {
    /// Why the pod was not bound; empty when it was.
    #[serde(alias = "error", deserialize_with = "null_as_default")]
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_case_keys_and_missing_keys_are_read() {
        let args: ExtenderArgs =
            serde_json::from_str(r#"{"pod":{"metadata":{"name":"p"}},"nodenames":["a","b"]}"#).unwrap();
        assert_eq!(args.names().collect::<Vec<_>>(), ["a", "b"]);
        let bind: BindingArgs =
            serde_json::from_str(r#"{"podName":"p","podNamespace":"n","podUID":"u","node":"a","more":1}"#)
                .unwrap();
        assert_eq!(bind.pod_uid, "u");
    }

    #[test]
    fn keys_are_written_capitalised() {
        let result = FilterResult {
            node_names: Some(vec!["a".into()]),
            failed_nodes: BTreeMap::from([("b".into(), "full".into())]),
            ..FilterResult::default()
        };
        assert_eq!(
            serde_json::to_value(&result).unwrap(),
            serde_json::json!({
                "Nodes": null, "NodeNames": ["a"], "FailedNodes": {"b": "full"},
                "FailedAndUnresolvableNodes": {}, "Error": ""
            })
        );
        let bind = BindingArgs {
            pod_name: "p".into(),
            pod_namespace: "n".into(),
            pod_uid: "u".into(),
            node: "a".into(),
        };
        assert_eq!(
            serde_json::to_string(&bind).unwrap(),
            r#"{"PodName":"p","PodNamespace":"n","PodUID":"u","Node":"a"}"#
        );
        let priority = HostPriority { host: "a", score: 7 };
        assert_eq!(serde_json::to_string(&priority).unwrap(), r#"{"Host":"a","Score":7}"#);
    }

    #[test]
    fn a_pod_is_needed() {
        let error = serde_json::from_str::<ExtenderArgs>(r#"{"NodeNames":["a"]}"#).unwrap_err();
        assert!(error.to_string().contains("missing field `Pod`"), "{error}");
    }
}
