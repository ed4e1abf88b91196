//! Selectors of lists and watches: by namespace, fields and labels.

use std::collections::BTreeMap;

use super::kinds::{COMMON_FIELDS, ResourceKind};
use super::status::Problem;
use super::store::StoredObject;

/// A selector of objects of one kind.
#[derive(Debug, Clone, Default)]
pub(super) struct Selector {
    /// Namespace of the objects. Empty for all namespaces.
    pub(super) namespace: String,
    fields: Vec<Condition>,
    labels: Vec<Condition>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Condition {
    key: String,
    test: Test,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

impl Condition {
    fn holds(&self, value: Option<&str>) -> bool {
        match &self.test {
            Test::In(values) => value.is_some_and(|value| values.iter().any(|known| known == value)),
            Test::NotIn(values) => !value.is_some_and(|value| values.iter().any(|known| known == value)),
            Test::Exists => value.is_some(),
            Test::Absent => value.is_none(),
        }
    }
}

impl Selector {
    /// Returns a selector of everything in a namespace. An empty name means all namespaces.
    pub(super) fn of_namespace(namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..Self::default() }
    }

    /// Parses a field selector and a label selector.
    pub(super) fn parse(
        kind: &ResourceKind,
        namespace: &str,
        fields: &str,
        labels: &str,
    ) -> Result<Self, Problem> {
        let read = |text: &str| split(text).into_iter().map(condition).collect::<Option<Vec<_>>>();
        let bad = |why: String| {
            let (group, plural) = (kind.group, kind.plural);
            Problem::bad_request(format!(
                "Unable to find \"{group}/v1, Resource={plural}\" that match label selector {labels:?}, field selector \
                 {fields:?}: {why}"
            ))
        };
        let unclear = || bad("unable to parse requirement".to_owned());
        let selector = Self {
            namespace: namespace.to_owned(),
            fields: read(fields).ok_or_else(unclear)?,
            labels: read(labels).ok_or_else(unclear)?,
        };
        let supported = |key: &str| COMMON_FIELDS.contains(&key) || kind.fields.contains(&key);
        match selector.fields.iter().find(|condition| !supported(&condition.key)) {
            Some(unknown) => Err(bad(format!("field label not supported: {}", unknown.key))),
            None => Ok(selector),
        }
    }

    /// Returns whether the selector matches an object of its kind.
    pub(super) fn selects(&self, object: &StoredObject) -> bool {
        let labels: &BTreeMap<String, String> = &object.labels;
        (self.namespace.is_empty() || self.namespace == object.namespace)
            && self.fields.iter().all(|condition| condition.holds(Some(object.field(&condition.key))))
            && self
                .labels
                .iter()
                .all(|condition| condition.holds(labels.get(&condition.key).map(String::as_str)))
    }
}

/// Splits at commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0u32;
    let parts = text.split(|letter| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn condition(text: &str) -> Option<Condition> {
    let made = |key: &str, test: Test| {
        let key = key.trim();
        let sound = !key.is_empty() && !key.contains([' ', '=', '(', ')', '!']);
        sound.then(|| Condition { key: key.to_owned(), test })
    };
    let one = |value: &str| vec![value.trim().trim_start_matches('=').trim().to_owned()];
    if let Some((key, value)) = text.split_once("!=") {
        return made(key, Test::NotIn(one(value)));
    }
    if let Some((key, value)) = text.split_once('=') {
        return made(key, Test::In(one(value)));
    }
    let several = |values: &str| -> Option<Vec<String>> {
        let inner = values.trim().strip_prefix('(')?.strip_suffix(')')?;
        Some(inner.split(',').map(|value| value.trim().to_owned()).collect())
    };
    if let Some((key, values)) = text.split_once(" notin ") {
        return made(key, Test::NotIn(several(values)?));
    }
    if let Some((key, values)) = text.split_once(" in ") {
        return made(key, Test::In(several(values)?));
    }
    match text.strip_prefix('!') {
        Some(key) => made(key, Test::Absent),
        None => made(text, Test::Exists),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(fields: &str, labels: &str) -> bool {
        let kind = ResourceKind::find("", "pods").unwrap();
        let pod = json!({
            "metadata": { "name": "p", "namespace": "team", "labels": { "app": "train", "tier": "gold" } },
            "spec": { "nodeName": "n1" }, "status": { "phase": "Running" },
        });
        Selector::parse(kind, "", fields, labels).unwrap().selects(&StoredObject::of(kind, &pod, 1))
    }

    #[test]
    fn supports_every_operator() {
        for yes in [
            "app=train",
            "app==train",
            "app!=x",
            "app in (a, train),tier",
            "app notin (a,b)",
            "!gone",
            "gone!=x",
        ] {
            assert!(selects("", yes), "{yes}");
        }
        for no in ["app=x", "app!=train", "app in (a,b)", "app notin (train)", "!app", "gone", "app,gone=1"] {
            assert!(!selects("", no), "{no}");
        }
        assert!(selects("spec.nodeName=n1,status.phase!=Failed", ""));
        assert!(!selects("spec.nodeName=n2", ""));
        assert!(selects("status.podIP=", ""), "a field selector treats an absent field as empty");
    }

    #[test]
    fn names_the_unsupported_field() {
        let kind = ResourceKind::find("", "pods").unwrap();
        let problem = Selector::parse(kind, "", "spec.colour=red", "").unwrap_err().into_body();
        let message = problem["message"].as_str().unwrap();
        assert!(message.ends_with("field label not supported: spec.colour"), "{message}");
        assert!(Selector::parse(kind, "", "", "a in b").is_err());
    }
}
