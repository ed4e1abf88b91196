//! The JSON that kube-scheduler and an extender exchange.
//!
//! kube-scheduler writes Go field names, so its keys are capitalised. It reads keys in any case.
//! Users and older tools write lower-case keys. This module reads both and writes capitalised keys.
//! An absent value arrives as `null`.

mod preemption;

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::preemption::{MetaPod, MetaVictims, PreemptionArgs, PreemptionResult, Victims};
use crate::foreign::objects::{Node, Pod, null_as_default};

/// Highest score of a node; the lowest is 0. kube-scheduler does not clamp higher scores.
pub const MAX_SCORE: i64 = 10;

/// Body of a `filter` or `prioritize` call: one pod and the candidate nodes. `N` holds a node name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<N = String> {
    /// The pod to place.
    #[serde(alias = "pod")]
    pub pod: Pod,
    /// Complete node objects, sent to extenders without `nodeCacheCapable`.
    #[serde(alias = "nodes", default)]
    pub nodes: Option<NodeList>,
    /// Node names, sent to extenders with `nodeCacheCapable`.
    #[serde(alias = "nodeNames", alias = "nodenames")]
    pub node_names: Option<Vec<N>>,
}

/// A node name borrowed from the request body, which may hold ten thousand names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BorrowedName<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl AsRef<str> for BorrowedName<'_> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl<N: AsRef<str>> ExtenderArgs<N> {
    /// Returns the names of the candidate nodes from whichever field is set.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let from_nodes =
            self.nodes.iter().flat_map(|list| &list.items).map(|node| node.metadata.name.as_str());
        self.node_names.iter().flatten().map(N::as_ref).chain(from_nodes)
    }
}

/// A list of complete node objects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeList {
    /// The nodes.
    #[serde(alias = "Items", default, deserialize_with = "null_as_default")]
    pub items: Vec<Node>,
}

/// Response of `filter`. kube-scheduler drops a node that appears in none of the four fields, and
/// the user sees no reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct FilterResult {
    /// The nodes that fit, for extenders without `nodeCacheCapable`.
    #[serde(alias = "nodes")]
    pub nodes: Option<NodeList>,
    /// The names of the nodes that fit, for extenders with `nodeCacheCapable`.
    #[serde(alias = "nodeNames", alias = "nodenames")]
    pub node_names: Option<Vec<String>>,
    /// Reasons of the nodes that do not fit but may fit after evictions.
    #[serde(alias = "failedNodes", deserialize_with = "null_as_default")]
    pub failed_nodes: BTreeMap<String, String>,
    /// Reasons of the nodes that do not fit and that evictions cannot make fit.
    #[serde(alias = "failedAndUnresolvableNodes", deserialize_with = "null_as_default")]
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// Error of the call itself. A pod that fits nowhere is not an error: it gets a reason per
    /// node.
    #[serde(alias = "error", deserialize_with = "null_as_default")]
    pub error: String,
}

/// One entry of the `prioritize` response, which is an array of these. An omitted node scores 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority<H = String> {
    /// Name of the node.
    #[serde(alias = "host")]
    pub host: H,
    /// Score from 0 to [`MAX_SCORE`].
    #[serde(alias = "score")]
    pub score: i64,
}

/// Body of a `bind` call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingArgs {
    /// Name of the pod to bind.
    #[serde(alias = "podName")]
    pub pod_name: String,
    /// Namespace of the pod.
    #[serde(alias = "podNamespace")]
    pub pod_namespace: String,
    /// UID of the pod. It prevents binding a new pod of the same name by mistake.
    #[serde(rename = "PodUID", alias = "podUID", alias = "podUid")]
    pub pod_uid: String,
    /// Name of the chosen node.
    #[serde(alias = "node")]
    pub node: String,
}

/// Response of `bind`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub struct BindingResult {
    /// Reason why the pod was not bound, or empty on success.
    #[serde(alias = "error", deserialize_with = "null_as_default")]
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lower_case_keys_and_accepts_missing_keys() {
        let args: ExtenderArgs =
            serde_json::from_str(r#"{"pod":{"metadata":{"name":"p"}},"nodenames":["a","b"]}"#).unwrap();
        assert_eq!(args.names().collect::<Vec<_>>(), ["a", "b"]);
        let bind: BindingArgs =
            serde_json::from_str(r#"{"podName":"p","podNamespace":"n","podUID":"u","node":"a","more":1}"#)
                .unwrap();
        assert_eq!(bind.pod_uid, "u");
    }

    #[test]
    fn writes_capitalised_keys() {
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
    fn rejects_a_body_without_a_pod() {
        let error = serde_json::from_str::<ExtenderArgs>(r#"{"NodeNames":["a"]}"#).unwrap_err();
        assert!(error.to_string().contains("missing field `Pod`"), "{error}");
    }
}
