//! `PodDisruptionBudget`s: how many evictions a set of victims takes beyond what the budgets allow.

use std::collections::{BTreeMap, BTreeSet};

/// A `PodDisruptionBudget`, reduced to the fields that the choice of victims reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DisruptionBudget {
    /// The namespace of the budget; a budget protects only pods of its own namespace.
    pub namespace: String,
    /// The pods that the budget protects.
    pub selector: LabelSelector,
    /// The number of further evictions that the budget allows.
    pub disruptions_allowed: i64,
    /// Names of pods that the API server has already counted as evicted.
    pub disrupted_pods: BTreeSet<String>,
}

/// A selection of pods by their labels. An empty selector selects no pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector {
    /// Labels that a selected pod must have with exactly these values.
    pub labels: BTreeMap<String, String>,
    /// Conditions that the labels of a selected pod must all meet.
    pub expressions: Vec<LabelExpression>,
}

/// A condition on one label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelExpression {
    /// The label that the condition reads.
    pub key: String,
    /// The comparison with `values`.
    pub operator: LabelOperator,
    /// The values of [`LabelOperator::In`] and [`LabelOperator::NotIn`].
    pub values: Vec<String>,
}

/// The comparison of a [`LabelExpression`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelOperator {
    /// The label has one of the values.
    In,
    /// The label is absent or has none of the values.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
    /// An operator that Kubernetes does not define. No pod meets it, as in kube-scheduler.
    Undefined,
}

/// A pod that is to be evicted.
#[derive(Clone, Copy, Debug)]
pub struct EvictedPod<'a> {
    /// The namespace of the pod.
    pub namespace: &'a str,
    /// The name of the pod.
    pub name: &'a str,
    /// The labels of the pod.
    pub labels: &'a BTreeMap<String, String>,
}

/// Returns how many of the `victims` exceed what a budget allows.
///
/// The function counts as kube-scheduler does: in the given order, which starts with the highest
/// priority. A victim that exceeds several budgets counts once.
///
/// ```
/// use std::collections::BTreeMap;
/// use tessera_core::disruption::{DisruptionBudget, EvictedPod, LabelSelector, violations};
///
/// let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
/// let budget = DisruptionBudget {
///     namespace: "team".to_owned(),
///     selector: LabelSelector { labels: labels.clone(), expressions: Vec::new() },
///     disruptions_allowed: 1,
///     ..DisruptionBudget::default()
/// };
/// let victims = ["a", "b"].map(|name| EvictedPod { namespace: "team", name, labels: &labels });
/// assert_eq!(violations([&budget], victims), 1);
/// ```
pub fn violations<'a>(
    budgets: impl IntoIterator<Item = &'a DisruptionBudget>,
    victims: impl IntoIterator<Item = EvictedPod<'a>>,
) -> i64 {
    let mut allowed: Vec<(&DisruptionBudget, i64)> =
        budgets.into_iter().map(|budget| (budget, budget.disruptions_allowed)).collect();
    let mut violations = 0;
    for victim in victims {
        let mut is_violated = false;
        for (_, left) in allowed.iter_mut().filter(|(budget, _)| budget.protects(&victim)) {
            *left -= 1;
            is_violated |= *left < 0;
        }
        violations += i64::from(is_violated);
    }
    violations
}

/// Returns whether the budgets allow all these evictions.
///
/// The API server evicts no pod that several budgets protect, so such a pod is never allowed.
pub fn allow<'a>(budgets: &[DisruptionBudget], victims: impl IntoIterator<Item = EvictedPod<'a>>) -> bool {
    if budgets.is_empty() {
        return true;
    }
    let victims: Vec<EvictedPod<'a>> = victims.into_iter().collect();
    let has_one =
        |victim: &EvictedPod<'_>| budgets.iter().filter(|budget| budget.protects(victim)).count() <= 1;
    victims.iter().all(has_one) && violations(budgets, victims) == 0
}

impl DisruptionBudget {
    fn protects(&self, pod: &EvictedPod<'_>) -> bool {
        self.namespace == pod.namespace
            && !self.disrupted_pods.contains(pod.name)
            && self.selector.selects(pod.labels)
    }
}

impl LabelSelector {
    /// Returns whether the selector selects a pod with these labels.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        let is_empty = self.labels.is_empty() && self.expressions.is_empty();
        !is_empty && self.is_met_by(labels)
    }

    /// Returns whether these labels meet every condition. Any labels meet an empty selector.
    pub(crate) fn is_met_by(&self, labels: &BTreeMap<String, String>) -> bool {
        let has = |(key, value): (&String, &String)| labels.get(key) == Some(value);
        self.labels.iter().all(has) && self.expressions.iter().all(|expression| expression.is_met_by(labels))
    }
}

impl LabelExpression {
    fn is_met_by(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let is_listed = value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            LabelOperator::In => is_listed,
            LabelOperator::NotIn => !is_listed,
            LabelOperator::Exists => value.is_some(),
            LabelOperator::DoesNotExist => value.is_none(),
            LabelOperator::Undefined => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(disruptions_allowed: i64, selector: LabelSelector) -> DisruptionBudget {
        let disrupted_pods = BTreeSet::from(["gone".to_owned()]);
        DisruptionBudget { namespace: "team".to_owned(), selector, disruptions_allowed, disrupted_pods }
    }

    fn web() -> BTreeMap<String, String> {
        BTreeMap::from([("app".to_owned(), "web".to_owned())])
    }

    fn check(budgets: &[DisruptionBudget], names: &[&str], expected: i64) {
        let labels = web();
        let victims = names.iter().map(|name| EvictedPod { namespace: "team", name, labels: &labels });
        assert_eq!(violations(budgets, victims), expected, "{budgets:?}");
    }

    #[test]
    fn counts_the_victims_beyond_the_budget() {
        let of_web = || LabelSelector { labels: web(), expressions: Vec::new() };
        check(&[], &["a", "b"], 0);
        check(&[budget(1, of_web())], &["a"], 0);
        check(&[budget(1, of_web())], &["a", "b", "c"], 2);
        check(&[budget(0, of_web()), budget(0, of_web())], &["a"], 1);
        check(&[budget(0, of_web())], &["gone"], 0);
        check(&[budget(0, LabelSelector::default())], &["a"], 0);
        let elsewhere = DisruptionBudget { namespace: "other".to_owned(), ..budget(0, of_web()) };
        check(&[elsewhere], &["a"], 0);
    }

    #[test]
    fn allows_no_pod_that_two_budgets_protect() {
        let labels = web();
        let of_web = || LabelSelector { labels: web(), expressions: Vec::new() };
        let allows = |budgets: &[DisruptionBudget], names: &[&str]| {
            allow(budgets, names.iter().map(|name| EvictedPod { namespace: "team", name, labels: &labels }))
        };
        assert!(allows(&[], &["a", "b"]));
        assert!(allows(&[budget(1, of_web())], &["a"]));
        assert!(!allows(&[budget(1, of_web())], &["a", "b"]));
        assert!(!allows(&[budget(5, of_web()), budget(5, of_web())], &["a"]));
    }

    #[test]
    fn evaluates_label_expressions_as_kubernetes_does() {
        let expression = |operator, values: &[&str]| {
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            let expression = LabelExpression { key: "app".to_owned(), operator, values };
            budget(0, LabelSelector { labels: BTreeMap::new(), expressions: vec![expression] })
        };
        check(&[expression(LabelOperator::In, &["web", "api"])], &["a"], 1);
        check(&[expression(LabelOperator::In, &["api"])], &["a"], 0);
        check(&[expression(LabelOperator::NotIn, &["api"])], &["a"], 1);
        check(&[expression(LabelOperator::Exists, &[])], &["a"], 1);
        check(&[expression(LabelOperator::DoesNotExist, &[])], &["a"], 0);
        check(&[expression(LabelOperator::Undefined, &[])], &["a"], 0);
    }
}
