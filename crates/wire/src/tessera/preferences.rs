//! Pod annotations with placement preferences.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::{self, Display, Formatter};

use tessera_core::placement::{Policy, UnknownPolicy};
use tessera_core::request::LinkSensitivity;
use tessera_core::units::MiB;

use crate::foreign::dialect::vcuda;
use crate::tessera::gang::{self, BadGang};
use crate::tessera::gpu_wishes::{self, BadWish, GpuWishes};
use crate::tessera::memory_limit::{self, BadMemoryLimit};

/// Annotation with the name of the pod's placement policy. Without it, the cluster's policy
/// applies.
pub const POLICY: &str = "tessera.dev/policy";

/// Annotation with the pod's link sensitivity. GPUs of `insensitive` jobs exchange little data, so
/// these jobs leave the fast links to other pods.
pub const TRAFFIC: &str = "tessera.dev/traffic";

/// Returns whether [`parse`] reads the annotation with this key.
#[must_use]
pub fn is_key(key: &str) -> bool {
    [POLICY, TRAFFIC, vcuda::CEILING, memory_limit::KEY].contains(&key)
        || gpu_wishes::KEYS.contains(&key)
        || gang::is_key(key)
}

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
    /// The memory up to which containers may grow is not an amount.
    #[error(transparent)]
    MemoryLimit(#[from] BadMemoryLimit),
    /// A wish for GPUs cannot be followed.
    #[error(transparent)]
    Wish(#[from] BadWish),
    /// The gang of the pod cannot be read.
    #[error(transparent)]
    Gang(#[from] BadGang),
}

/// All annotations of a pod that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadPreferences(pub Vec<BadPreference>);

impl Display for BadPreferences {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
    }
}

impl Error for BadPreferences {}

/// The placement preferences of a pod.
#[derive(Clone, Debug, Default)]
pub struct Preferences {
    /// Policy by name, without learned parameters.
    pub policy: Option<Policy>,
    /// Dependence of the pod on fast links.
    pub link_sensitivity: LinkSensitivity,
    /// The GPUs that the pod wants.
    pub wishes: GpuWishes,
    /// Memory of each GPU up to which a container with a share may grow.
    pub memory_limit: Option<MiB>,
}

/// Parses a pod's annotations.
pub fn parse(annotations: &BTreeMap<String, String>) -> Result<Preferences, BadPreference> {
    let policy = policy(annotations)?;
    let link_sensitivity = link_sensitivity(annotations)?;
    // The agent enforces the ceiling. It is read here so that a bad one is reported before the pod is placed.
    vcuda::ceiling(annotations)?;
    gang::check(annotations)?;
    let memory_limit = memory_limit::parse(annotations)?;
    Ok(Preferences { policy, link_sensitivity, wishes: gpu_wishes::parse(annotations)?, memory_limit })
}

/// Parses a pod's annotations, and names all that cannot be parsed.
pub fn parse_all(annotations: &BTreeMap<String, String>) -> Result<Preferences, BadPreferences> {
    parse(annotations).map_err(|_| BadPreferences(errors(annotations)))
}

/// Returns the error of each annotation that cannot be parsed.
#[must_use]
pub fn errors(annotations: &BTreeMap<String, String>) -> Vec<BadPreference> {
    // Each annotation is parsed by itself, so that one error does not hide another.
    let own = annotations.iter().filter(|(key, _)| is_key(key));
    let alone = own.map(|(key, value)| parse(&BTreeMap::from([(key.clone(), value.clone())])));
    let mut errors: Vec<BadPreference> = alone.filter_map(Result::err).collect();
    // Annotations that contradict each other can be parsed one by one.
    if let Err(error) = parse(annotations)
        && !errors.contains(&error)
    {
        errors.push(error);
    }
    errors
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
    fn no_error_hides_another() {
        let said = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let found = errors(&pairs.collect()).iter().map(ToString::to_string).collect::<Vec<_>>();
            found
                .iter()
                .filter_map(|text| text.split([':', ' ']).next())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let bad = [
            ("tessera.dev/gang", "x/0"),
            ("tessera.dev/gang-topology", "rack"),
            ("tessera.dev/node-policy", "mutex"),
            ("tessera.dev/numa-bind", "1"),
            ("tessera.dev/traffic", "much"),
        ];
        assert_eq!(said(&bad), bad.map(|(key, _)| key));
        let contradiction = [("nvidia.com/numa-bind", "true"), ("tessera.dev/numa-bind", "false")];
        assert_eq!(said(&contradiction), ["tessera.dev/numa-bind"]);
        assert_eq!(said(&[(POLICY, "binpack"), (TRAFFIC, "insensitive")]), [""; 0]);
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
