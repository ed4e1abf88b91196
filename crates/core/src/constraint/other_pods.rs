//! Constraints between pods: required anti-affinity, and ports of the host.
//!
//! Tessera knows labels and ports of pods with GPUs alone, so a node that these pods allow may still be closed by a
//! pod without GPUs. A node that they close is closed.

use std::collections::{BTreeMap, BTreeSet};

use super::UnmetConstraint;
use crate::disruption::LabelSelector;
use crate::units::NodeName;

/// A term of a required anti-affinity: pods that must not be near the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodTerm {
    /// Labels of the excluded pods. An empty selector excludes pods with any labels.
    pub selector: LabelSelector,
    /// Namespaces of the excluded pods.
    pub namespaces: TermNamespaces,
    /// The label whose value nodes near each other have in common, such as `kubernetes.io/hostname`.
    pub topology_key: String,
}

/// The namespaces of the pods that a [`PodTerm`] excludes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TermNamespaces {
    /// The namespace of the pod with the term.
    Own,
    /// These namespaces.
    Named(Vec<String>),
    /// All namespaces.
    All,
}

/// A port of the host that a container uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// The number of the port.
    pub port: u16,
    /// The protocol, such as `TCP`.
    pub protocol: String,
    /// The address of the host; `None` for all of its addresses.
    pub address: Option<String>,
}

/// A pod as the constraints of other pods meet it.
#[derive(Clone, Debug)]
pub struct OtherPod<'a> {
    /// The namespace of the pod.
    pub namespace: &'a str,
    /// The labels of the pod.
    pub labels: &'a BTreeMap<String, String>,
    /// The terms of the pod's required anti-affinity.
    pub excluded: &'a [PodTerm],
    /// The ports of the host that the pod uses.
    pub ports: Vec<&'a HostPort>,
}

/// The nodes that pods on nodes close for one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClosedNodes {
    /// Values of labels of nodes near pods that the pod excludes, by the key of the label.
    excluded: BTreeMap<String, BTreeSet<String>>,
    /// The same for pods that exclude the pod.
    excluding: BTreeMap<String, BTreeSet<String>>,
    /// A port that the pod needs and another pod uses, by node.
    ports: BTreeMap<NodeName, HostPort>,
}

impl PodTerm {
    /// Returns whether the term of a pod in namespace `own` excludes a pod.
    fn excludes(&self, own: &str, pod: &OtherPod<'_>) -> bool {
        let is_namespace = match &self.namespaces {
            TermNamespaces::Own => own == pod.namespace,
            TermNamespaces::Named(names) => names.iter().any(|name| name == pod.namespace),
            TermNamespaces::All => true,
        };
        is_namespace && self.selector.is_met_by(pod.labels)
    }
}

impl HostPort {
    /// Returns whether two containers on one host cannot use both ports.
    fn conflicts_with(&self, other: &Self) -> bool {
        let is_one_address = match (&self.address, &other.address) {
            (Some(one), Some(another)) => one == another,
            _ => true,
        };
        self.port == other.port && self.protocol == other.protocol && is_one_address
    }
}

impl ClosedNodes {
    /// Returns the nodes that `others`, the pods on nodes, close for a pod. `label` returns the value of a label of a
    /// node.
    pub fn new<'a>(
        pod: &OtherPod<'_>,
        others: impl IntoIterator<Item = (&'a NodeName, OtherPod<'a>)>,
        label: impl Fn(&NodeName, &str) -> Option<String>,
    ) -> Self {
        let mut closed = Self::default();
        let close = |values: &mut BTreeMap<String, BTreeSet<String>>, node: &NodeName, term: &PodTerm| {
            if let Some(value) = label(node, &term.topology_key) {
                values.entry(term.topology_key.clone()).or_default().insert(value);
            }
        };
        for (node, other) in others {
            for term in pod.excluded.iter().filter(|term| term.excludes(pod.namespace, &other)) {
                close(&mut closed.excluded, node, term);
            }
            for term in other.excluded.iter().filter(|term| term.excludes(other.namespace, pod)) {
                close(&mut closed.excluding, node, term);
            }
            let taken =
                pod.ports.iter().find(|port| other.ports.iter().any(|used| port.conflicts_with(used)));
            if let Some(port) = taken {
                closed.ports.entry(node.clone()).or_insert_with(|| (*port).clone());
            }
        }
        closed
    }

    /// Returns why the node with these labels is closed, or `None` if it is open.
    #[must_use]
    pub fn unmet_on(&self, node: &NodeName, labels: &BTreeMap<String, String>) -> Option<UnmetConstraint> {
        if let Some(HostPort { port, protocol, .. }) = self.ports.get(node) {
            return Some(UnmetConstraint::HostPort { port: *port, protocol: protocol.clone() });
        }
        let key_of = |values: &BTreeMap<String, BTreeSet<String>>| {
            let is_near = |(key, values): &(&String, &BTreeSet<String>)| {
                labels.get(*key).is_some_and(|value| values.contains(value))
            };
            values.iter().find(is_near).map(|(key, _)| key.clone())
        };
        key_of(&self.excluded)
            .map(UnmetConstraint::ExcludedPod)
            .or_else(|| key_of(&self.excluding).map(UnmetConstraint::ExcludingPod))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disruption::{LabelExpression, LabelOperator};

    const HOST: &str = "kubernetes.io/hostname";

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn term(app: &str, namespaces: TermNamespaces, key: &str) -> PodTerm {
        let selector = LabelSelector { labels: labels(&[("app", app)]), expressions: Vec::new() };
        PodTerm { selector, namespaces, topology_key: key.to_owned() }
    }

    /// Nodes `a` and `b` are in zone `x`, node `c` in zone `y`. Returns the nodes that a pod on node `a` with `theirs`
    /// closes for a pod with `own`, both with the label `app=train`.
    fn closed(own: &[PodTerm], theirs: &[PodTerm], namespace: &str) -> Vec<&'static str> {
        let app = labels(&[("app", "train")]);
        let pod = |namespace, excluded| OtherPod { namespace, labels: &app, excluded, ports: Vec::new() };
        let zone = |node: &str| if node == "c" { "y" } else { "x" };
        let node_labels = |node: &str| labels(&[(HOST, node), ("zone", zone(node))]);
        let others = [(&NodeName("a".to_owned()), pod(namespace, theirs))];
        let label = |node: &NodeName, key: &str| node_labels(&node.0).get(key).cloned();
        let closed = ClosedNodes::new(&pod("team", own), others, label);
        let is_closed =
            |node: &&str| closed.unmet_on(&NodeName((*node).to_owned()), &node_labels(node)).is_some();
        ["a", "b", "c"].into_iter().filter(is_closed).collect()
    }

    #[test]
    fn anti_affinity_closes_the_nodes_near_the_other_pod() {
        let own = || TermNamespaces::Own;
        assert_eq!(closed(&[term("train", own(), HOST)], &[], "team"), ["a"]);
        assert_eq!(closed(&[term("train", own(), "zone")], &[], "team"), ["a", "b"]);
        assert!(closed(&[term("train", own(), "rack")], &[], "team").is_empty(), "the nodes have no racks");
        assert!(closed(&[term("web", own(), HOST)], &[], "team").is_empty());
        assert!(closed(&[term("train", own(), HOST)], &[], "other").is_empty());
        let named = TermNamespaces::Named(vec!["other".to_owned()]);
        assert_eq!(closed(&[term("train", named, HOST)], &[], "other"), ["a"]);
        assert_eq!(closed(&[term("train", TermNamespaces::All, HOST)], &[], "other"), ["a"]);
        let any = PodTerm { selector: LabelSelector::default(), ..term("", own(), HOST) };
        assert_eq!(closed(&[any], &[], "team"), ["a"], "an empty selector excludes all pods");
        let expression =
            LabelExpression { key: "app".to_owned(), operator: LabelOperator::Exists, values: Vec::new() };
        let selector = LabelSelector { labels: BTreeMap::new(), expressions: vec![expression] };
        assert_eq!(closed(&[PodTerm { selector, ..term("", own(), HOST) }], &[], "team"), ["a"]);
    }

    /// Kubernetes applies the anti-affinity of pods on nodes to new pods, too.
    #[test]
    fn the_anti_affinity_of_the_other_pod_counts() {
        assert_eq!(closed(&[], &[term("train", TermNamespaces::Own, "zone")], "team"), ["a", "b"]);
        assert!(closed(&[], &[term("train", TermNamespaces::Own, "zone")], "other").is_empty());
        assert_eq!(closed(&[], &[term("train", TermNamespaces::All, HOST)], "other"), ["a"]);
    }

    #[test]
    fn ports_of_the_host_are_used_once() {
        let port = |port, protocol: &str, address: Option<&str>| HostPort {
            port,
            protocol: protocol.to_owned(),
            address: address.map(str::to_owned),
        };
        let none = BTreeMap::new();
        let check = |own: HostPort, theirs: HostPort, expected: Option<&str>| {
            let pod = |port| OtherPod { namespace: "team", labels: &none, excluded: &[], ports: vec![port] };
            let node = NodeName("a".to_owned());
            let closed = ClosedNodes::new(&pod(&own), [(&node, pod(&theirs))], |_, _| None);
            let unmet = closed.unmet_on(&node, &none).map(|unmet| unmet.to_string());
            assert_eq!(unmet.as_deref(), expected, "{own:?} {theirs:?}");
            assert_eq!(closed.unmet_on(&NodeName("b".to_owned()), &none), None);
        };
        let taken = Some("port 80/TCP of the host is in use");
        check(port(80, "TCP", None), port(80, "TCP", None), taken);
        check(port(80, "TCP", None), port(81, "TCP", None), None);
        check(port(80, "TCP", None), port(80, "UDP", None), None);
        check(port(80, "TCP", Some("10.0.0.1")), port(80, "TCP", None), taken);
        check(port(80, "TCP", Some("10.0.0.1")), port(80, "TCP", Some("10.0.0.1")), taken);
        check(port(80, "TCP", Some("10.0.0.1")), port(80, "TCP", Some("10.0.0.2")), None);
    }
}
