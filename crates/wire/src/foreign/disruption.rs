//! PodDisruptionBudget objects, which the core counts violations of.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_core::disruption::{DisruptionBudget, LabelExpression, LabelOperator, LabelSelector};

use crate::foreign::objects::{Metadata, null_as_default};

/// A PodDisruptionBudget object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Budget {
    /// Identity of the budget.
    pub metadata: Metadata,
    /// Desired state of the budget.
    pub spec: BudgetSpec,
    /// Observed state of the budget.
    pub status: BudgetStatus,
}

/// Desired state of a budget.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BudgetSpec {
    /// Selector of the pods that the budget protects.
    #[serde(deserialize_with = "null_as_default")]
    pub selector: SelectorObject,
}

/// Observed state of a budget.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BudgetStatus {
    /// Number of further evictions that the budget allows.
    pub disruptions_allowed: i64,
    /// Pods that the API server has already counted as evicted, by name.
    #[serde(deserialize_with = "null_as_default")]
    pub disrupted_pods: BTreeMap<String, String>,
}

/// Label selector of pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SelectorObject {
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

impl From<Budget> for DisruptionBudget {
    fn from(budget: Budget) -> Self {
        Self {
            namespace: budget.metadata.namespace,
            selector: budget.spec.selector.into(),
            disruptions_allowed: budget.status.disruptions_allowed,
            disrupted_pods: budget.status.disrupted_pods.into_keys().collect(),
        }
    }
}

impl SelectorObject {
    /// Returns whether the selector has no condition.
    pub(crate) fn is_empty(&self) -> bool {
        self.match_labels.is_empty() && self.match_expressions.is_empty()
    }
}

impl From<SelectorObject> for LabelSelector {
    fn from(SelectorObject { match_labels, match_expressions }: SelectorObject) -> Self {
        let expressions = match_expressions.into_iter().map(LabelExpression::from).collect();
        Self { labels: match_labels, expressions }
    }
}

impl From<Expression> for LabelExpression {
    fn from(Expression { key, operator, values }: Expression) -> Self {
        let operator = match operator.as_str() {
            "In" => LabelOperator::In,
            "NotIn" => LabelOperator::NotIn,
            "Exists" => LabelOperator::Exists,
            "DoesNotExist" => LabelOperator::DoesNotExist,
            _ => LabelOperator::Undefined,
        };
        Self { key, operator, values }
    }
}

#[cfg(test)]
mod tests {
    use tessera_core::disruption::{EvictedPod, violations};

    use super::*;

    fn budget(allowed: i64, selector: &str) -> DisruptionBudget {
        let json = format!(
            r#"{{"metadata":{{"name":"b","namespace":"team"}},"spec":{{"minAvailable":1,"selector":{selector}}},
                "status":{{"disruptionsAllowed":{allowed},"disruptedPods":{{"gone":"2026-01-01T00:00:00Z"}},"expectedPods":3}}}}"#
        );
        serde_json::from_str::<Budget>(&json).unwrap().into()
    }

    fn check(budgets: &[DisruptionBudget], names: &[&str], expected: i64) {
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let victims = names.iter().map(|name| EvictedPod { namespace: "team", name, labels: &labels });
        assert_eq!(violations(budgets, victims), expected, "{budgets:?}");
    }

    #[test]
    fn parsed_budgets_count_victims_beyond_the_limit() {
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
    fn parses_every_operator() {
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
