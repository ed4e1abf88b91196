//! Patches.

use serde_json::{Map, Value};

/// How a patch is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Lists are replaced.
    Merge,
    /// Lists of things with names are merged by name.
    Strategic,
}

impl Kind {
    pub(super) fn of(content_type: &str) -> Option<Self> {
        let media = content_type.split(';').next().unwrap_or_default().trim();
        match media {
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            _ => None,
        }
    }
}

/// What tells the items of a list apart, where Kubernetes merges it.
fn merge_key(list: &str) -> Option<&'static str> {
    match list {
        "conditions" | "addresses" => Some("type"),
        "containers" | "initContainers" | "containerStatuses" | "volumes" | "env" => Some("name"),
        "ownerReferences" => Some("uid"),
        "taints" => Some("key"),
        _ => None,
    }
}

/// Applies a patch: `null` removes, objects are merged, everything else replaces.
pub(super) fn apply(target: &mut Value, patch: &Value, kind: Kind) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return };
    for (key, change) in changes {
        match (change, merge_key(key)) {
            (Value::Null, _) => {
                fields.remove(key);
            }
            (Value::Array(items), Some(name)) if kind == Kind::Strategic => {
                merge_list(
                    fields.entry(key.clone()).or_insert_with(|| Value::Array(Vec::new())),
                    items,
                    name,
                );
            }
            _ => apply(fields.entry(key.clone()).or_insert(Value::Null), change, kind),
        }
    }
}

fn merge_list(target: &mut Value, items: &[Value], name: &str) {
    let Value::Array(known) = target else {
        *target = Value::Array(items.to_vec());
        return;
    };
    for item in items {
        let same = known.iter().position(|other| other[name] == item[name]);
        match (same, item["$patch"] == "delete") {
            (Some(place), true) => {
                known.remove(place);
            }
            (Some(place), false) => apply(&mut known[place], item, Kind::Strategic),
            (None, true) => {}
            (None, false) => known.push(item.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(before: Value, patch: &Value, kind: Kind, expected: &Value) {
        let mut after = before;
        apply(&mut after, patch, kind);
        assert_eq!(after, *expected);
    }

    #[test]
    fn nulls_remove_and_objects_merge() {
        let before = json!({"a": 1, "b": {"c": 2, "d": 3}, "l": [1]});
        let patch = json!({"a": null, "b": {"c": 4}, "l": [2], "n": {"x": null, "y": 1}});
        check(before, &patch, Kind::Merge, &json!({"b": {"c": 4, "d": 3}, "l": [2], "n": {"y": 1}}));
    }

    #[test]
    fn conditions_merge_by_type_in_a_strategic_patch_only() {
        let before = json!({"conditions": [{"type": "A", "status": "True"}, {"type": "B"}]});
        let patch =
            json!({"conditions": [{"type": "A", "status": "False"}, {"$patch": "delete", "type": "B"}]});
        check(
            before.clone(),
            &patch,
            Kind::Strategic,
            &json!({"conditions": [{"type": "A", "status": "False"}]}),
        );
        check(before, &json!({"conditions": []}), Kind::Merge, &json!({"conditions": []}));
    }
}
