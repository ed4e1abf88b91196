//! Annotations that say whether a pod may be evicted, and how much work an eviction loses.

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_core::defragment::Fixed;

use crate::foreign::objects::Pod;
use crate::tessera::gang;

/// Annotation that forbids evictions.
const DO_NOT_EVICT: &str = "tessera.dev/do-not-evict";

/// Annotations that forbid evictions, with the value that does so: ours, cluster-autoscaler's and Karpenter's.
pub const MARKS: [(&str, &str); 3] = [
    (DO_NOT_EVICT, "true"),
    ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
    ("karpenter.sh/do-not-disrupt", "true"),
];

/// Annotation with the longest time between two checkpoints of a pod, such as `30m`.
pub const CHECKPOINT_INTERVAL: &str = "tessera.dev/checkpoint-interval";

/// Annotation of static pods, which no scheduler moves.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// An annotation of ours that cannot be understood, so that it does not count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadEvictionHint {
    /// The mark against evictions is neither set nor cleared.
    #[error("{DO_NOT_EVICT}: found {0:?}; write true or false")]
    Mark(String),
    /// The time between two checkpoints is not a time.
    #[error("{CHECKPOINT_INTERVAL}: found {0:?}; write a time such as 90s, 30m or 2h")]
    CheckpointInterval(String),
}

/// Returns the error of each annotation that cannot be understood.
#[must_use]
pub fn errors(annotations: &BTreeMap<String, String>) -> Vec<BadEvictionHint> {
    let mark = annotations.get(DO_NOT_EVICT).filter(|set| !["true", "false"].contains(&set.as_str()));
    let interval = annotations.get(CHECKPOINT_INTERVAL).filter(|text| parse_duration(text).is_none());
    let mark = mark.cloned().map(BadEvictionHint::Mark);
    mark.into_iter().chain(interval.cloned().map(BadEvictionHint::CheckpointInterval)).collect()
}

/// Returns why a pod with this controller must stay on its node, or `None` if it may be evicted.
#[must_use]
pub fn fixed(pod: &Pod, controller: Option<&str>) -> Option<Fixed> {
    let meta = &pod.metadata;
    let is_marked = |(key, value): &(&str, &str)| meta.annotations.get(*key).is_some_and(|set| set == value);
    if let Some((key, _)) = MARKS.iter().find(|mark| is_marked(mark)) {
        return Some(Fixed::Marked(key));
    }
    if meta.deletion_timestamp.is_some() {
        return Some(Fixed::Ending);
    }
    if controller == Some("DaemonSet") || meta.annotations.contains_key(MIRROR) {
        return Some(Fixed::BoundToNode);
    }
    if controller.is_none() {
        return Some(Fixed::NoController);
    }
    if !matches!(gang::membership(pod), Ok(None)) {
        return Some(Fixed::Gang);
    }
    let is_bound = !pod.spec.relations_to_others().is_empty() || !pod.spec.resource_claims.is_empty();
    is_bound.then_some(Fixed::KnownToKubeScheduler)
}

/// Returns why a pod must not be evicted in favour of others, or `None` if it may be. Unlike a pod that is moved, such a
/// pod needs neither a controller nor another place.
#[must_use]
pub fn fixed_for_others(annotations: &BTreeMap<String, String>) -> Option<Fixed> {
    let is_marked = |(key, value): &(&str, &str)| annotations.get(*key).is_some_and(|set| set == value);
    let mark = MARKS.iter().find(|mark| is_marked(mark)).map(|(key, _)| Fixed::Marked(key));
    mark.or_else(|| annotations.contains_key(MIRROR).then_some(Fixed::BoundToNode))
}

/// Returns whether an annotation with this key says something about evictions.
#[must_use]
pub fn is_key(key: &str) -> bool {
    MARKS.iter().any(|(mark, _)| *mark == key) || [CHECKPOINT_INTERVAL, MIRROR].contains(&key)
}

/// Returns the work that an eviction loses: all since the start of the pod, or since its last checkpoint. A hint that
/// cannot be parsed does not count.
#[must_use]
pub fn lost_work(annotations: &BTreeMap<String, String>, age: Duration) -> Duration {
    let hint = annotations.get(CHECKPOINT_INTERVAL).and_then(|text| parse_duration(text));
    hint.map_or(age, |interval| interval.min(age))
}

/// Parses a whole number of seconds, minutes or hours, such as `90s`, `30m` or `2h`.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(seconds).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::objects::Metadata;

    fn pod(annotations: &[(&str, &str)]) -> Pod {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Pod {
            metadata: Metadata { annotations: annotations.collect(), ..Metadata::default() },
            ..Pod::default()
        }
    }

    #[test]
    fn pods_without_a_controller_or_with_a_mark_stay() {
        assert_eq!(fixed(&pod(&[]), Some("ReplicaSet")), None);
        assert_eq!(fixed(&pod(&[]), None), Some(Fixed::NoController));
        assert_eq!(fixed(&pod(&[]), Some("DaemonSet")), Some(Fixed::BoundToNode));
        assert_eq!(fixed(&pod(&[("tessera.dev/gang", "train/2")]), Some("Job")), Some(Fixed::Gang));
        for (key, value) in MARKS {
            assert_eq!(fixed(&pod(&[(key, value)]), Some("Job")), Some(Fixed::Marked(key)));
            let other = if value == "true" { "false" } else { "true" };
            assert_eq!(fixed(&pod(&[(key, other)]), Some("Job")), None, "{key}={other}");
        }
        let mut ending = pod(&[]);
        ending.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
        assert_eq!(fixed(&ending, Some("Job")), Some(Fixed::Ending));
    }

    #[test]
    fn only_marked_and_static_pods_stay_where_others_need_the_gpus() {
        let fixed = |annotations: &[(&str, &str)]| fixed_for_others(&pod(annotations).metadata.annotations);
        assert_eq!(fixed(&[]), None);
        assert_eq!(fixed(&[("tessera.dev/gang", "train/2")]), None);
        assert_eq!(fixed(&[(MIRROR, "hash")]), Some(Fixed::BoundToNode));
        for (key, value) in MARKS {
            assert_eq!(fixed(&[(key, value)]), Some(Fixed::Marked(key)));
            assert!(is_key(key));
        }
    }

    #[test]
    fn a_checkpoint_bounds_the_lost_work() {
        let lost = |hint: &str| {
            lost_work(&pod(&[(CHECKPOINT_INTERVAL, hint)]).metadata.annotations, Duration::from_secs(4000))
        };
        assert_eq!(lost("90s"), Duration::from_secs(90));
        assert_eq!(lost("30m"), Duration::from_secs(1800));
        assert_eq!(lost("2h"), Duration::from_secs(4000), "the pod is younger");
        for wrong in ["", "30", "-1m", "1.5h", "m", "99999999999999999999h", "9999999999999999999h", "3é"] {
            assert_eq!(lost(wrong), Duration::from_secs(4000), "{wrong}");
        }
    }

    #[test]
    fn hints_that_do_not_count_are_errors() {
        let said = |mark: &str, interval: &str| {
            let hints = pod(&[(DO_NOT_EVICT, mark), (CHECKPOINT_INTERVAL, interval)]);
            errors(&hints.metadata.annotations).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert!(errors(&BTreeMap::new()).is_empty());
        assert_eq!(said("true", "30m"), [""; 0]);
        assert_eq!(said("false", "90s"), [""; 0]);
        assert_eq!(
            said("yes", "often"),
            [
                "tessera.dev/do-not-evict: found \"yes\"; write true or false",
                "tessera.dev/checkpoint-interval: found \"often\"; write a time such as 90s, 30m or 2h",
            ]
        );
    }
}
