//! The patch formats of Kubernetes.

use serde_json::{Map, Value};

/// Format of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PatchKind {
    /// JSON merge patch: lists are replaced.
    Merge,
    /// Strategic merge patch: lists with a merge key are merged by it.
    Strategic,
    /// JSON patch: a list of operations.
    Json,
    /// Server-side apply. The object need not exist. Field ownership is not tracked, so a field
    /// that its owner drops later stays.
    Apply,
}

impl PatchKind {
    pub(super) fn of(content_type: &str) -> Option<Self> {
        let media = content_type.split(';').next().unwrap_or_default().trim();
        match media {
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            "application/json-patch+json" => Some(Self::Json),
            "application/apply-patch+yaml" => Some(Self::Apply),
            _ => None,
        }
    }
}

/// Reasons why a patch cannot be applied, in the words of the real API server where it has some.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum PatchError {
    #[error("a JSON patch is a list of operations")]
    NotAList,
    #[error("an operation of a JSON patch needs a path")]
    NoPath,
    #[error("the path {0:?} does not exist")]
    NoSuchPath(String),
    #[error("testing value {0} failed")]
    TestFailed(String),
    #[error("Unexpected kind: {0}")]
    UnknownOperation(String),
}

/// Applies a patch.
pub(super) fn apply(target: &mut Value, patch: &Value, kind: PatchKind) -> Result<(), PatchError> {
    match kind {
        PatchKind::Json => operations(target, patch),
        PatchKind::Merge => {
            merge(target, patch, false);
            Ok(())
        }
        PatchKind::Strategic | PatchKind::Apply => {
            merge(target, patch, true);
            Ok(())
        }
    }
}

/// Returns the key by which Kubernetes merges a list.
fn merge_key(list: &str) -> Option<&'static str> {
    match list {
        "conditions" | "addresses" => Some("type"),
        "containers" | "initContainers" | "volumes" | "env" | "imagePullSecrets" => Some("name"),
        "ports" => Some("containerPort"),
        "volumeMounts" => Some("mountPath"),
        "podIPs" => Some("ip"),
        "ownerReferences" => Some("uid"),
        _ => None,
    }
}

/// Merges a patch: `null` removes a field, objects are merged, other values are replaced.
fn merge(target: &mut Value, patch: &Value, by_name: bool) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() || (by_name && patch["$patch"] == "replace") {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return };
    for (key, change) in changes {
        // Directives set the order of lists, which no client here depends on.
        if by_name && key.starts_with('$') {
            continue;
        }
        match (change, merge_key(key)) {
            (Value::Null, _) => {
                fields.remove(key);
            }
            (Value::Array(items), Some(name)) if by_name => {
                merge_list(
                    fields.entry(key.clone()).or_insert_with(|| Value::Array(Vec::new())),
                    items,
                    name,
                );
            }
            _ => merge(fields.entry(key.clone()).or_insert(Value::Null), change, by_name),
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
            (Some(place), false) => merge(&mut known[place], item, true),
            (None, true) => {}
            (None, false) => known.push(item.clone()),
        }
    }
}

/// Executes the operations of a JSON patch (RFC 6902).
fn operations(target: &mut Value, patch: &Value) -> Result<(), PatchError> {
    let list = patch.as_array().ok_or(PatchError::NotAList)?;
    for operation in list {
        let text = |key: &str| operation[key].as_str();
        let path = text("path").ok_or(PatchError::NoPath)?;
        let missing = || PatchError::NoSuchPath(path.to_owned());
        match text("op") {
            Some("add") => add(target, path, operation["value"].clone()).ok_or_else(missing)?,
            Some("replace") => {
                *target.pointer_mut(path).ok_or_else(missing)? = operation["value"].clone();
            }
            Some("remove") => drop(take(target, path).ok_or_else(missing)?),
            Some("move") => {
                let value = take(target, text("from").unwrap_or_default()).ok_or_else(missing)?;
                add(target, path, value).ok_or_else(missing)?;
            }
            Some("copy") => {
                let value = target.pointer(text("from").unwrap_or_default()).cloned().ok_or_else(missing)?;
                add(target, path, value).ok_or_else(missing)?;
            }
            Some("test") if target.pointer(path) == Some(&operation["value"]) => {}
            Some("test") => return Err(PatchError::TestFailed(path.to_owned())),
            other => return Err(PatchError::UnknownOperation(other.unwrap_or("unknown").to_owned())),
        }
    }
    Ok(())
}

/// Returns the parent of a path's last segment, and that segment.
fn parent<'a>(target: &'a mut Value, path: &str) -> Option<(&'a mut Value, String)> {
    let (above, last) = path.rsplit_once('/')?;
    Some((target.pointer_mut(above)?, last.replace("~1", "/").replace("~0", "~")))
}

fn add(target: &mut Value, path: &str, value: Value) -> Option<()> {
    match parent(target, path)? {
        (Value::Object(fields), last) => {
            fields.insert(last, value);
        }
        (Value::Array(items), last) => {
            let place = if last == "-" { items.len() } else { last.parse().ok()? };
            (place <= items.len()).then(|| items.insert(place, value))?;
        }
        _ => return None,
    }
    Some(())
}

fn take(target: &mut Value, path: &str) -> Option<Value> {
    match parent(target, path)? {
        (Value::Object(fields), last) => fields.remove(&last),
        (Value::Array(items), last) => {
            let place: usize = last.parse().ok()?;
            (place < items.len()).then(|| items.remove(place))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(before: Value, patch: &Value, kind: PatchKind, expected: &Value) {
        let mut after = before;
        apply(&mut after, patch, kind).unwrap();
        assert_eq!(after, *expected);
    }

    #[test]
    fn a_merge_patch_removes_nulls_and_merges_objects() {
        let before = json!({"a": 1, "b": {"c": 2, "d": 3}, "l": [1]});
        let patch = json!({"a": null, "b": {"c": 4}, "l": [2], "n": {"x": null, "y": 1}});
        check(before, &patch, PatchKind::Merge, &json!({"b": {"c": 4, "d": 3}, "l": [2], "n": {"y": 1}}));
    }

    #[test]
    fn only_a_strategic_patch_merges_conditions_by_type() {
        let before = json!({"conditions": [{"type": "A", "status": "True"}, {"type": "B"}]});
        let patch = json!({
            "$setElementOrder/conditions": [{"type": "A"}],
            "conditions": [{"type": "A", "status": "False"}, {"$patch": "delete", "type": "B"}],
        });
        check(
            before.clone(),
            &patch,
            PatchKind::Strategic,
            &json!({"conditions": [{"type": "A", "status": "False"}]}),
        );
        check(before, &json!({"conditions": []}), PatchKind::Merge, &json!({"conditions": []}));
    }

    #[test]
    fn operations_run_in_order_and_errors_name_the_missing_path() {
        let patch = json!([
            {"op": "test", "path": "/a/b~1c", "value": 1},
            {"op": "add", "path": "/l/-", "value": 3},
            {"op": "add", "path": "/l/0", "value": 0},
            {"op": "move", "from": "/a/b~1c", "path": "/d"},
            {"op": "copy", "from": "/d", "path": "/e"},
            {"op": "replace", "path": "/d", "value": 9},
            {"op": "remove", "path": "/l/1"},
        ]);
        let before = json!({"a": {"b/c": 1}, "l": [1]});
        check(before.clone(), &patch, PatchKind::Json, &json!({"a": {}, "d": 9, "e": 1, "l": [0, 3]}));
        let failing = |operation: Value| {
            apply(&mut before.clone(), &json!([operation]), PatchKind::Json).unwrap_err().to_string()
        };
        assert!(failing(json!({"op": "remove", "path": "/x/y"})).contains("does not exist"));
        assert!(failing(json!({"op": "test", "path": "/l", "value": 0})).contains("failed"));
        assert!(failing(json!({"op": "dance", "path": "/l"})).contains("Unexpected kind: dance"));
    }
}
