//! Reports of pod annotations that cannot be understood. Without a report, a misspelt value would look
//! like one that the agent ignores on purpose.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::units::PodUid;
use tessera_wire::{
    foreign::objects::Pod,
    tessera::{eviction, excerpt::excerpt, grant::BadGrant, preferences},
};

use super::{Action, OPT_OUT, Warning, pods::Pods, unknown_keys};

/// Largest number of errors that are reported for one pod. Its owner writes the annotations, and may change them as long
/// as the pod lives.
const MAX_REPORTED: usize = 64;

/// Errors that were reported, by pod.
#[derive(Debug, Default)]
pub(super) struct BadAnnotations {
    reported: BTreeMap<PodUid, BTreeSet<String>>,
}

impl BadAnnotations {
    /// Reports each error of a pod once to the log and to the owner of the pod.
    pub(super) fn report(&mut self, uid: &PodUid, pod: &Pod, pods: &Pods, actions: &mut Vec<Action>) {
        let Some(errors) = pods.parsed(uid).map(|parsed| &parsed.bad_annotations) else { return };
        for error in errors {
            let reported = self.reported.entry(uid.clone()).or_default();
            if reported.len() >= MAX_REPORTED || !reported.insert(error.clone()) {
                continue;
            }
            let warning = Warning::new("an annotation of a pod cannot be understood");
            actions.push(Action::Warn(warning.pod(pod).detail(error.clone())));
            actions.push(Action::RecordPodEvent {
                uid: uid.clone(),
                namespace: pod.metadata.namespace.clone(),
                name: pod.metadata.name.clone(),
                reason: "AnnotationNotUnderstood",
                message: error.clone(),
            });
        }
    }

    /// Forgets pods that are not in `active`.
    pub(super) fn remove_ended(&mut self, active: &BTreeSet<PodUid>) {
        self.reported.retain(|uid, _| active.contains(uid));
    }
}

/// Returns what is wrong with the annotations of a pod, up to [`MAX_REPORTED`] errors. `grant` has the errors of those that grant GPUs.
pub(super) fn errors(annotations: &BTreeMap<String, String>, grant: &[BadGrant]) -> Vec<String> {
    let preferences = preferences::errors(annotations).into_iter().map(|error| error.to_string());
    let eviction = eviction::errors(annotations).into_iter().map(|error| error.to_string());
    let isolation = annotations.get(OPT_OUT).filter(|value| *value != "off");
    let isolation = isolation.map(|value| format!("{OPT_OUT}: found {value:?}; write off, or remove it"));
    let grant = grant.iter().map(ToString::to_string);
    let unknown = unknown_keys::errors(annotations);
    let all = preferences.chain(eviction).chain(isolation).chain(grant).chain(unknown);
    all.take(MAX_REPORTED).map(excerpt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page on annotations, whose first table lists those that owners of pods may set.
    const PAGE: &str = include_str!("../../../../docs/reference/annotations.md");

    /// The key that only the demo reads.
    const OF_DEMO: &str = "tessera.dev/simulated-run-seconds";

    #[test]
    fn no_documented_annotation_is_ignored_without_a_word() {
        let table = PAGE.split("## ").nth(1).unwrap();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
        let cells = rows.filter_map(|row| row.split_once(" |"));
        let keys = cells.flat_map(|(keys, _)| keys.split('`').filter(|key| key.contains('/')));
        let keys: Vec<&str> = keys.filter(|key| *key != OF_DEMO).collect();
        assert!(keys.contains(&"tessera.dev/avoid-gpu-models"), "{keys:?}");
        // No annotation may have a value that is a single comma.
        let with = |keys: &[&str]| {
            let annotations = keys.iter().map(|key| ((*key).to_owned(), ",".to_owned()));
            errors(&annotations.collect(), &[])
        };
        for key in &keys {
            let said = with(&[*key]);
            assert!(said.len() == 1 && said[0].starts_with(&format!("{key}: ")), "{key}: {said:?}");
        }
        assert_eq!(with(&keys).len(), keys.len(), "all are reported together");
    }
}
