//! Constraints that kube-scheduler applies to nodes before it calls the extender: unschedulable
//! nodes, taints, node selectors, node affinity, the number of pods and other resources.
//!
//! The verbs do not apply them again. Explanations do, so that they never recommend a node on which
//! kube-scheduler will not place the pod. Constraints between pods are in [`other_pods`].

pub mod other_pods;

use std::collections::BTreeMap;
use std::fmt;

use crate::taint::{Taint, TaintEffect, Toleration, untolerated_hard};

/// Resource of local storage, in bytes.
pub const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// Start of the names of huge pages, such as `hugepages-2Mi`, in bytes.
pub const HUGE_PAGES_PREFIX: &str = "hugepages-";

/// The key of the taint that `kubectl cordon` stands for.
const UNSCHEDULABLE_TAINT: &str = "node.kubernetes.io/unschedulable";

/// The field of a node that affinities can select.
const NAME_FIELD: &str = "metadata.name";

/// The properties of a node that constraints of pods refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeConstraints {
    /// True if the node accepts no new pods.
    pub unschedulable: bool,
    /// The taints of the node.
    pub taints: Vec<Taint>,
    /// The labels of the node.
    pub labels: BTreeMap<String, String>,
    /// Resources that the node offers besides CPU, memory and the GPUs that Tessera serves.
    pub other_resources: BTreeMap<String, u64>,
    /// Largest number of pods on the node, if the node states it.
    pub max_pods: Option<u64>,
}

/// The constraints of a pod on its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodConstraints {
    /// Labels that the node must have with exactly these values.
    pub node_selector: BTreeMap<String, String>,
    /// Required node affinity: the node must match one of these terms. `None` without affinity.
    pub node_terms: Option<Vec<NodeTerm>>,
    /// The tolerations of the pod.
    pub tolerations: Vec<Toleration>,
    /// Requested resources besides CPU, memory and the GPUs that Tessera serves.
    pub other_resources: BTreeMap<String, u64>,
}

/// One term of a node affinity. A node matches the term if it meets every condition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeTerm {
    /// Conditions on the labels of the node.
    pub labels: Vec<NodeExpression>,
    /// Conditions on the fields of the node.
    pub fields: Vec<NodeExpression>,
}

/// A condition on one label or field of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeExpression {
    /// The label or field that the condition reads.
    pub key: String,
    /// The comparison with `values`.
    pub operator: NodeOperator,
    /// The values of the comparison.
    pub values: Vec<String>,
}

/// The comparison of a [`NodeExpression`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeOperator {
    /// The label has one of the values.
    In,
    /// The label is absent or has none of the values.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
    /// The label is a number above the first value.
    Gt,
    /// The label is a number below the first value.
    Lt,
    /// An operator that Kubernetes does not define. No node meets it.
    #[default]
    Undefined,
}

/// The constraint that a node does not meet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnmetConstraint {
    /// The node is cordoned.
    #[error("node is cordoned (unschedulable)")]
    Unschedulable,
    /// The node has a taint that the pod does not tolerate.
    #[error("node has the taint {0}, which the pod does not tolerate")]
    Taint(TaintText),
    /// The node lacks a label of the pod's node selector.
    #[error("node lacks the label {key}={value} of the pod's nodeSelector")]
    Selector {
        /// Key of the label.
        key: String,
        /// Value of the label.
        value: String,
    },
    /// The node matches no term of the pod's node affinity.
    #[error("node does not match the pod's node affinity")]
    Affinity,
    /// The node has as many pods as it can take.
    #[error("node has its largest number of pods, {0}")]
    Pods(u64),
    /// The node offers less of another resource than the pod requests.
    #[error("node offers {} of {resource}, and the pod requests {}", amount(resource, *offered), amount(resource, *requested))]
    Resource {
        /// Name of the resource.
        resource: String,
        /// Amount that the node offers to all pods together.
        offered: u64,
        /// Amount that the pod requests.
        requested: u64,
    },
    /// Other pods hold too much of a resource.
    #[error("node has {left} of {offered} {resource} left, and the pod requests {requested}")]
    InUse {
        /// Name of the resource.
        resource: String,
        /// Amount that no pod holds.
        left: u64,
        /// Amount that the node offers to all pods together.
        offered: u64,
        /// Amount that the pod requests.
        requested: u64,
    },
    /// A container of another pod uses a port of the host that the pod needs.
    #[error("port {port}/{protocol} of the host is in use")]
    HostPort {
        /// Number of the port.
        port: u16,
        /// Protocol of the port.
        protocol: String,
    },
    /// A pod near the node is excluded by the pod's required anti-affinity over this label of nodes.
    #[error("a pod there is excluded by the pod's anti-affinity ({0})")]
    ExcludedPod(String),
    /// A pod near the node excludes the pod by its required anti-affinity over this label of nodes.
    #[error("a pod there excludes the pod by its anti-affinity ({0})")]
    ExcludingPod(String),
}

impl UnmetConstraint {
    /// Returns whether the node could meet the constraint once other pods have ended.
    #[must_use]
    pub fn may_resolve(&self) -> bool {
        match self {
            Self::Unschedulable
            | Self::Taint(_)
            | Self::Selector { .. }
            | Self::Affinity
            | Self::Resource { .. } => false,
            Self::Pods(most) => *most > 0,
            Self::InUse { offered, requested, .. } => offered >= requested,
            Self::HostPort { .. } | Self::ExcludedPod(_) | Self::ExcludingPod(_) => true,
        }
    }
}

/// Returns an amount of a resource in words: storage and huge pages with a unit, other resources as a number. The amount
/// is rounded down to a tenth of the unit.
fn amount(resource: &str, amount: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if resource != EPHEMERAL_STORAGE && !resource.starts_with(HUGE_PAGES_PREFIX) {
        return amount.to_string();
    }
    let power = amount.checked_ilog2().unwrap_or(0) / 10;
    let Some(unit) = power.checked_sub(1).and_then(|position| UNITS.get(usize::try_from(position).ok()?))
    else {
        return format!("{amount} B");
    };
    let tenths = (u128::from(amount) * 10) >> (10 * power);
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        tenth => format!("{}.{tenth} {unit}", tenths / 10),
    }
}

/// A taint in kubectl's form: `key=value:Effect`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaintText(pub Taint);

impl fmt::Display for TaintText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Taint { key, value, effect } = &self.0;
        let effect = match effect {
            TaintEffect::NoSchedule => "NoSchedule",
            TaintEffect::PreferNoSchedule => "PreferNoSchedule",
            TaintEffect::NoExecute => "NoExecute",
        };
        if value.is_empty() { write!(f, "{key}:{effect}") } else { write!(f, "{key}={value}:{effect}") }
    }
}

impl NodeConstraints {
    /// Returns the constraint that no other pod fits on a node with `pods` pods, if that is so.
    #[must_use]
    pub fn unmet_by_pods(&self, pods: u64) -> Option<UnmetConstraint> {
        self.max_pods.filter(|most| pods >= *most).map(UnmetConstraint::Pods)
    }
}

impl PodConstraints {
    /// Returns the first constraint that the node `name` does not meet, in kube-scheduler's order.
    ///
    /// ```
    /// use tessera_core::constraint::{NodeConstraints, PodConstraints, UnmetConstraint};
    ///
    /// let cordoned = NodeConstraints { unschedulable: true, ..NodeConstraints::default() };
    /// let unmet = PodConstraints::default().unmet_on("n", &cordoned);
    /// assert_eq!(unmet, Some(UnmetConstraint::Unschedulable));
    /// ```
    #[must_use]
    pub fn unmet_on(&self, name: &str, node: &NodeConstraints) -> Option<UnmetConstraint> {
        let cordon = Taint { key: UNSCHEDULABLE_TAINT.to_owned(), ..Taint::default() };
        if node.unschedulable && !cordon.is_tolerated(&self.tolerations) {
            return Some(UnmetConstraint::Unschedulable);
        }
        if let Some(taint) = untolerated_hard(&node.taints, &self.tolerations) {
            return Some(UnmetConstraint::Taint(TaintText(taint.clone())));
        }
        let lacks = |(key, value): &(&String, &String)| node.labels.get(*key) != Some(*value);
        if let Some((key, value)) = self.node_selector.iter().find(lacks) {
            return Some(UnmetConstraint::Selector { key: key.clone(), value: value.clone() });
        }
        if let Some(terms) = &self.node_terms
            && !terms.iter().any(|term| term.matches(name, &node.labels))
        {
            return Some(UnmetConstraint::Affinity);
        }
        self.other_resources.iter().find_map(|(resource, requested)| {
            let offered = node.other_resources.get(resource).copied().unwrap_or(0);
            (offered < *requested).then(|| UnmetConstraint::Resource {
                resource: resource.clone(),
                offered,
                requested: *requested,
            })
        })
    }
}

impl NodeTerm {
    /// Returns whether the node meets every condition. A term without conditions matches no node,
    /// as in Kubernetes.
    fn matches(&self, name: &str, labels: &BTreeMap<String, String>) -> bool {
        let field = |key: &str| (key == NAME_FIELD).then_some(name);
        let label = |key: &str| labels.get(key).map(String::as_str);
        let is_empty = self.labels.is_empty() && self.fields.is_empty();
        !is_empty
            && self.labels.iter().all(|expression| expression.is_met_by(label(&expression.key)))
            && self.fields.iter().all(|expression| expression.is_met_by(field(&expression.key)))
    }
}

impl NodeExpression {
    fn is_met_by(&self, value: Option<&str>) -> bool {
        let is_listed = || value.is_some_and(|value| self.values.iter().any(|listed| listed == value));
        let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
        let bound = || number(self.values.first().map(String::as_str));
        match self.operator {
            NodeOperator::In => is_listed(),
            NodeOperator::NotIn => !is_listed(),
            NodeOperator::Exists => value.is_some(),
            NodeOperator::DoesNotExist => value.is_none(),
            NodeOperator::Gt => number(value).zip(bound()).is_some_and(|(value, bound)| value > bound),
            NodeOperator::Lt => number(value).zip(bound()).is_some_and(|(value, bound)| value < bound),
            NodeOperator::Undefined => false,
        }
    }
}

#[cfg(test)]
mod tests;
