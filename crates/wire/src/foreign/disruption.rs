//! PodDisruptionBudgets, as far as the choice of victims needs them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::foreign::objects::{Metadata, null_as_default};

/// A budget.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Budget {
    /// Who it is.
    pub metadata: Metadata,
    /// Whom it protects.
    pub spec: BudgetSpec,
    /// How many more may go.
    pub status: BudgetStatus,
}

/// Whom a budget protects.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BudgetSpec {
    /// By their labels.
    #[serde(deserialize_with = "null_as_default")]
    pub selector: Selector,
}

/// How many more may go.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BudgetStatus {
    /// So many.
    pub disruptions_allowed: i64,
    /// Those that are about to go already, by name.
    #[serde(deserialize_with = "null_as_default")]
    pub disrupted_pods: BTreeMap<String, String>,
}

/// A selection by labels. An empty one selects nobody here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Selector {
    #[serde(deserialize_with = "null_as_default")]
    match_labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "null_as_default")]
    match_expressions: Vec<Expression>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Expression {
    key: String,
    operator: String,
    #[serde(deserialize_with = "null_as_default")]
    values: Vec<String>,
}

/// A pod that is to go.
#[derive(Debug, Clone, Copy)]
pub struct Victim<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
}

/// How many of the victims go beyond what some budget allows, counted as kube-scheduler does: in the order given, the most
/// important first.
pub fn violations<'a>(
    budgets: impl IntoIterator<Item = &'a Budget>,
    victims: impl IntoIterator<Item = Victim<'a>>,
) -> i64 {
    let mut left: Vec<(&Budget, i64)> =
        budgets.into_iter().map(|budget| (budget, budget.status.disruptions_allowed)).collect();
    let mut violations = 0;
    for victim in victims {
        let mut is_violated = false;
        for (_, allowed) in left.iter_mut().filter(|(budget, _)| budget.protects(&victim)) {
            *allowed -= 1;
            is_violated |= *allowed < 0;
        }
        violations += i64::from(is_violated);
    }
    violations
}

impl Budget {
    fn protects(&self, victim: &Victim<'_>) -> bool {
        self.metadata.namespace == victim.namespace
            && !self.status.disrupted_pods.contains_key(victim.name)
            && self.spec.selector.selects(victim.labels)
    }
}

impl Selector {
    /// Whether it selects somebody with these labels.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        let is_empty = self.match_labels.is_empty() && self.match_expressions.is_empty();
        let has = |(key, value): (&String, &String)| labels.get(key) == Some(value);
        !is_empty
            && self.match_labels.iter().all(has)
            && self.match_expressions.iter().all(|expression| expression.holds(labels))
    }
}

impl Expression {
    fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let is_listed = value.is_some_and(|value| self.values.contains(value));
        match self.operator.as_str() {
            "In" => is_listed,
            "NotIn" => !is_listed,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            // Nobody can write it; kube-scheduler passes such a budget over.
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(allowed: i64, selector: &str) -> Budget {
        let json = format!(
            r#"{{"metadata":{{"name":"b","namespace":"team"}},"spec":{{"minAvailable":1,"selector":{selector}}},
                "status":{{"disruptionsAllowed":{allowed},"disruptedPods":{{"gone":"2026-01-01T00:00:00Z"}},"expectedPods":3}}}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn check(budgets: &[Budget], names: &[&str], expected: i64) {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let victims = names.iter().map(|name| Victim { namespace: "team", name, labels: &labels });
        assert_eq!(violations(budgets, victims), expected, "{budgets:?}");
    }

    #[test]
    fn those_beyond_the_budget_are_counted() {
        let web = r#"{"matchLabels":{"app":"web"}}"#;
        check(&[], &["a", "b"], 0);
        check(&[budget(1, web)], &["a"], 0);
        check(&[budget(1, web)], &["a", "b", "c"], 2);
        check(&[budget(0, web), budget(0, web)], &["a"], 1);
        check(&[budget(0, web)], &["gone"], 0);
        check(&[budget(0, "null")], &["a"], 0);
        check(&[budget(0, "{}")], &["a"], 0);
    }

    #[test]
    fn expressions() {
        let expression = |operator: &str, values: &str| {
            budget(
                0,
                &format!(
                    r#"{{"matchExpressions":[{{"key":"app","operator":"{operator}","values":{values}}}]}}"#
                ),
            )
        };
        check(&[expression("In", r#"["web","api"]"#)], &["a"], 1);
        check(&[expression("In", r#"["api"]"#)], &["a"], 0);
        check(&[expression("NotIn", r#"["api"]"#)], &["a"], 1);
        check(&[expression("Exists", "null")], &["a"], 1);
        check(&[expression("DoesNotExist", "null")], &["a"], 0);
        check(&[expression("Odd", "[]")], &["a"], 0);
    }
}
