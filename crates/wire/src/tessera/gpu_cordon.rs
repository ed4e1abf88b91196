//! Node annotations that keep new pods from GPUs. Pods that run there stay.

use std::collections::{BTreeMap, BTreeSet};

/// Annotations with the UUIDs of GPUs that get no new pods, separated by commas: ours and HAMi's.
pub const KEYS: [&str; 2] = ["tessera.dev/gpu-cordon", "hami.io/device-cordon"];

/// New values of annotations; `None` removes one.
pub type AnnotationChanges = BTreeMap<&'static str, Option<String>>;

/// Returns the UUIDs of the GPUs that get no new pods.
#[must_use]
pub fn cordoned(annotations: &BTreeMap<String, String>) -> BTreeSet<&str> {
    KEYS.into_iter().flat_map(|key| listed(annotations, key)).collect()
}

/// Returns the changes that keep new pods from these GPUs.
#[must_use]
pub fn cordon(annotations: &BTreeMap<String, String>, uuids: &BTreeSet<&str>) -> AnnotationChanges {
    let known = cordoned(annotations);
    let mut own = listed(annotations, KEYS[0]);
    own.extend(uuids.iter().filter(|uuid| !known.contains(*uuid)));
    changes(annotations, [(KEYS[0], own)])
}

/// Returns the changes that let new pods use these GPUs again, whichever annotation lists them.
#[must_use]
pub fn uncordon(annotations: &BTreeMap<String, String>, uuids: &BTreeSet<&str>) -> AnnotationChanges {
    let rest = |key| (key, listed(annotations, key).difference(uuids).copied().collect());
    changes(annotations, KEYS.map(rest))
}

fn listed<'a>(annotations: &'a BTreeMap<String, String>, key: &str) -> BTreeSet<&'a str> {
    let uuids = annotations.get(key).into_iter().flat_map(|uuids| uuids.split(',').map(str::trim));
    uuids.filter(|uuid| !uuid.is_empty()).collect()
}

/// Returns the annotations of which the list differs.
fn changes<'a>(
    annotations: &BTreeMap<String, String>,
    lists: impl IntoIterator<Item = (&'static str, BTreeSet<&'a str>)>,
) -> AnnotationChanges {
    let changed = lists.into_iter().filter(|(key, uuids)| listed(annotations, key) != *uuids);
    changed
        .map(|(key, uuids)| {
            let uuids: Vec<&str> = uuids.into_iter().collect();
            (key, (!uuids.is_empty()).then(|| uuids.join(",")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(
        change: fn(&BTreeMap<String, String>, &BTreeSet<&str>) -> AnnotationChanges,
        before: [&str; 2],
        uuids: &[&str],
        after: &[(&str, Option<&str>)],
    ) {
        let pairs = KEYS.into_iter().zip(before).filter(|(_, value)| !value.is_empty());
        let before = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let changes = change(&before, &uuids.iter().copied().collect());
        let found: Vec<_> = changes.iter().map(|(key, value)| (*key, value.as_deref())).collect();
        assert_eq!(found, after);
    }

    #[test]
    fn lists_change_only_where_they_must() {
        let [ours, theirs] = KEYS;
        check(cordon, ["", ""], &["GPU-b", "GPU-a"], &[(ours, Some("GPU-a,GPU-b"))]);
        check(cordon, ["GPU-c", ""], &["GPU-a"], &[(ours, Some("GPU-a,GPU-c"))]);
        check(cordon, ["GPU-a", "GPU-b"], &["GPU-a", "GPU-b"], &[]);
        check(uncordon, ["GPU-a, GPU-b", ""], &["GPU-a"], &[(ours, Some("GPU-b"))]);
        check(uncordon, ["GPU-a", "GPU-a,GPU-b"], &["GPU-a"], &[(theirs, Some("GPU-b")), (ours, None)]);
        check(uncordon, ["", ""], &["GPU-a"], &[]);
    }
}
