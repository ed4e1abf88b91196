//! Pod annotations with placement preferences.

use std::collections::BTreeMap;

use tessera_core::placement::{Policy, UnknownPolicy};
use tessera_core::request::LinkSensitivity;

use crate::foreign::dialect::vcuda;

/// Annotation with the name of the pod's placement policy. Without it, the cluster's policy
/// applies.
pub const POLICY: &str = "tessera.dev/policy";

/// Annotation with the pod's link sensitivity. GPUs of `insensitive` jobs exchange little data, so
/// these jobs leave the fast links to other pods.
pub const TRAFFIC: &str = "tessera.dev/traffic";

/// All annotations that [`parse`] reads.
pub const KEYS: [&str; 3] = [POLICY, TRAFFIC, vcuda::CEILING];

/// An annotation that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPreference {
    /// The policy is unknown.
    #[error("{POLICY}: {0}")]
    Policy(#[from] UnknownPolicy),
    /// The link sensitivity is unknown.
    #[error("{TRAFFIC}: found {0:?}; write sensitive or insensitive")]
    LinkSensitivity(String),
    /// The ceiling of a share is not a number.
    #[error(transparent)]
    Ceiling(#[from] vcuda::BadCeiling),
}

/// The placement preferences of a pod.
#[derive(Clone, Debug, Default)]
pub struct Preferences {
    /// Policy by name, without learned parameters.
    pub policy: Option<Policy>,
    /// Dependence of the pod on fast links.
    pub link_sensitivity: LinkSensitivity,
}

/// Parses a pod's annotations.
pub fn parse(annotations: &BTreeMap<String, String>) -> Result<Preferences, BadPreference> {
    let policy = policy(annotations)?;
    let link_sensitivity = link_sensitivity(annotations)?;
    // The agent enforces the ceiling. It is read here so that a bad one is reported before the pod is placed.
    vcuda::ceiling(annotations)?;
    Ok(Preferences { policy, link_sensitivity })
}

/// Returns the error of each annotation that cannot be parsed.
#[must_use]
pub fn errors(annotations: &BTreeMap<String, String>) -> Vec<BadPreference> {
    let ceiling = vcuda::ceiling(annotations).err().map(BadPreference::from);
    [policy(annotations).err(), link_sensitivity(annotations).err(), ceiling].into_iter().flatten().collect()
}

fn policy(annotations: &BTreeMap<String, String>) -> Result<Option<Policy>, BadPreference> {
    Ok(annotations.get(POLICY).map(|name| name.parse()).transpose()?)
}

fn link_sensitivity(annotations: &BTreeMap<String, String>) -> Result<LinkSensitivity, BadPreference> {
    match annotations.get(TRAFFIC).map(String::as_str) {
        None | Some("sensitive") => Ok(LinkSensitivity::Sensitive),
        Some("insensitive") => Ok(LinkSensitivity::Insensitive),
        Some(other) => Err(BadPreference::LinkSensitivity(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(key: &str, value: &str) -> Result<Preferences, BadPreference> {
        parse(&BTreeMap::from([(key.to_owned(), value.to_owned())]))
    }

    #[test]
    fn uses_defaults_without_annotations() {
        let preferences = parse(&BTreeMap::new()).unwrap();
        assert!(preferences.policy.is_none());
        assert_eq!(preferences.link_sensitivity, LinkSensitivity::Sensitive);
    }

    #[test]
    fn parses_both_annotations() {
        assert_eq!(read(POLICY, "best_effort").unwrap().policy.unwrap().name(), "best-effort");
        assert_eq!(read(TRAFFIC, "insensitive").unwrap().link_sensitivity, LinkSensitivity::Insensitive);
        assert_eq!(
            read(TRAFFIC, "none").unwrap_err().to_string(),
            "tessera.dev/traffic: found \"none\"; write sensitive or insensitive"
        );
        assert_eq!(
            read(vcuda::CEILING, "abc").unwrap_err().to_string(),
            "tencent.com/vcuda-core-limit: found \"abc\"; write a percentage of one GPU, such as 80"
        );
        assert!(read(vcuda::CEILING, "80").is_ok());
        assert!(read(POLICY, "dynamic").unwrap_err().to_string().starts_with("tessera.dev/policy: unknown"));
    }
}
