//! What a pod says by annotation about how it wants to be placed.

use std::collections::BTreeMap;

use tessera_core::placement::{Policy, UnknownPolicy};
use tessera_core::request::LinkSensitivity;

/// The placement policy for this pod, by name; the cluster's where absent.
pub const POLICY: &str = "tessera.dev/policy";

/// `insensitive` for jobs whose GPUs exchange little: they leave the good links to others.
pub const TRAFFIC: &str = "tessera.dev/traffic";

/// A wish nobody can read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPreference {
    /// Of the policy.
    #[error("{POLICY}: {0}")]
    Policy(#[from] UnknownPolicy),
    /// Of the traffic.
    #[error("{TRAFFIC}: found {0:?}; write sensitive or insensitive")]
    Traffic(String),
}

/// What a pod wishes.
#[derive(Clone, Debug, Default)]
pub struct Preferences {
    /// Its policy, with nothing learned in it; only the name counts.
    pub policy: Option<Policy>,
    /// How much it depends on links.
    pub traffic: LinkSensitivity,
}

/// Reads a pod's annotations.
pub fn parse(annotations: &BTreeMap<String, String>) -> Result<Preferences, BadPreference> {
    let policy = annotations.get(POLICY).map(|name| name.parse()).transpose()?;
    let traffic = match annotations.get(TRAFFIC).map(String::as_str) {
        None | Some("sensitive") => LinkSensitivity::Sensitive,
        Some("insensitive") => LinkSensitivity::Insensitive,
        Some(other) => return Err(BadPreference::Traffic(other.to_owned())),
    };
    Ok(Preferences { policy, traffic })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(key: &str, value: &str) -> Result<Preferences, BadPreference> {
        parse(&BTreeMap::from([(key.to_owned(), value.to_owned())]))
    }

    #[test]
    fn absent_wishes_are_the_clusters() {
        let wishes = parse(&BTreeMap::new()).unwrap();
        assert!(wishes.policy.is_none());
        assert_eq!(wishes.traffic, LinkSensitivity::Sensitive);
    }

    #[test]
    fn both_keys() {
        assert_eq!(read(POLICY, "best_effort").unwrap().policy.unwrap().name(), "best-effort");
        assert_eq!(read(TRAFFIC, "insensitive").unwrap().traffic, LinkSensitivity::Insensitive);
        assert_eq!(
            read(TRAFFIC, "none").unwrap_err().to_string(),
            "tessera.dev/traffic: found \"none\"; write sensitive or insensitive"
        );
        assert!(read(POLICY, "dynamic").unwrap_err().to_string().starts_with("tessera.dev/policy: unknown"));
    }
}
