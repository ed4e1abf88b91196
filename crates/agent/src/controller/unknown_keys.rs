//! Annotations whose names mean nothing, most of them typing errors such as `tessera.dev/polcy`.

use std::collections::BTreeMap;

/// The prefix of the names that belong to Tessera.
const PREFIX: &str = "tessera.dev/";

/// The annotations of pods, without [`PREFIX`].
const KNOWN: [&str; 19] = [
    "avoid-gpu-models",
    "avoid-gpu-uuids",
    "checkpoint-interval",
    "do-not-evict",
    "gang",
    "gang-topology",
    "gpu-memory-limit",
    "gpu-policy",
    "gpu-weights",
    "grant",
    "isolation",
    "node-policy",
    "numa-bind",
    "placement-reason",
    "policy",
    "simulated-run-seconds",
    "traffic",
    "use-gpu-models",
    "use-gpu-uuids",
];

/// Largest number of errors for one pod, whose owner writes the names.
const MAX_REPORTED: usize = 3;

/// Largest number of changed letters for which a known name is proposed.
const MAX_DISTANCE: usize = 3;

/// Returns an error for each annotation with an unknown name, with the name that was probably meant.
pub(super) fn errors(annotations: &BTreeMap<String, String>) -> Vec<String> {
    let names = annotations.keys().filter_map(|key| key.strip_prefix(PREFIX));
    let unknown = names.filter(|name| !KNOWN.contains(name));
    unknown.take(MAX_REPORTED).map(error).collect()
}

fn error(name: &str) -> String {
    let nearest = KNOWN.iter().map(|known| (distance(name, known), *known)).min();
    match nearest.filter(|(distance, _)| *distance <= MAX_DISTANCE) {
        Some((_, known)) => {
            format!("{PREFIX}{name}: no annotation has this name; write {PREFIX}{known}, or remove it")
        }
        None => format!("{PREFIX}{name}: no annotation has this name; remove it"),
    }
}

/// Returns the number of letters to insert, remove or replace so that one text becomes the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (position, letter) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], position + 1);
        for (column, theirs) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(letter != theirs);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The page on annotations. The first table lists those that owners of pods set, the second those that Tessera
    /// writes on pods.
    const PAGE: &str = include_str!("../../../../docs/reference/annotations.md");

    fn of(keys: &[&str]) -> Vec<String> {
        errors(&keys.iter().map(|key| ((*key).to_owned(), String::new())).collect())
    }

    #[test]
    fn the_known_names_are_those_of_the_documentation() {
        let rows =
            PAGE.split("## ").skip(1).take(2).flat_map(str::lines).filter(|line| line.starts_with("| `"));
        let keys = rows.filter_map(|row| row.split(" | ").next()).flat_map(|keys| keys.split('`'));
        let documented: BTreeSet<&str> = keys.filter_map(|key| key.strip_prefix(PREFIX)).collect();
        assert_eq!(KNOWN.iter().copied().collect::<BTreeSet<&str>>(), documented);
    }

    #[test]
    fn a_typing_error_is_reported_with_the_name_that_was_meant() {
        let message =
            "tessera.dev/polcy: no annotation has this name; write tessera.dev/policy, or remove it";
        assert_eq!(of(&["tessera.dev/polcy", "tessera.dev/policy", "example.com/polcy"]), [message]);
        assert_eq!(
            of(&["tessera.dev/colour"]),
            ["tessera.dev/colour: no annotation has this name; remove it"]
        );
        let many: Vec<String> = (0..1000).map(|number| format!("tessera.dev/x{number}")).collect();
        assert_eq!(of(&many.iter().map(String::as_str).collect::<Vec<_>>()).len(), MAX_REPORTED);
    }

    #[test]
    fn distances_count_changed_letters() {
        for (one, other, expected) in
            [("", "gang", 4), ("gang", "gang", 0), ("polcy", "policy", 1), ("tarffic", "traffic", 2)]
        {
            assert_eq!((distance(one, other), distance(other, one)), (expected, expected), "{one} {other}");
        }
    }
}
