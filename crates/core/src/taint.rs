//! Soft taints: taints of effect `PreferNoSchedule`, which ask pods to stay away from a node
//! without forbidding it.
//!
//! kube-scheduler evaluates the taints that forbid a node before it calls the extender, so the core
//! does not read those.

/// A taint of effect `PreferNoSchedule`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SoftTaint {
    /// The key of the taint.
    pub key: String,
    /// The value of the taint; empty where it has none.
    pub value: String,
}

/// A toleration that can cover a soft taint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SoftToleration {
    /// The key of the covered taints; empty for taints of any key.
    pub key: String,
    /// The value of the covered taints (operator `Equal`); `None` for any value (operator
    /// `Exists`).
    pub value: Option<String>,
}

/// Returns how many of a node's soft taints a pod with these tolerations does not tolerate.
///
/// kube-scheduler prefers the node for which this number is lower.
///
/// ```
/// use tessera_core::taint::{SoftTaint, SoftToleration, untolerated};
///
/// let spot = SoftTaint { key: "spot".to_owned(), value: "yes".to_owned() };
/// let any_value = SoftToleration { key: "spot".to_owned(), value: None };
/// assert_eq!(untolerated(&[spot.clone()], &[]), 1);
/// assert_eq!(untolerated(&[spot], &[any_value]), 0);
/// ```
#[must_use]
pub fn untolerated(taints: &[SoftTaint], tolerations: &[SoftToleration]) -> usize {
    let is_tolerated = |taint: &&SoftTaint| tolerations.iter().any(|toleration| toleration.covers(taint));
    taints.iter().filter(|taint| !is_tolerated(taint)).count()
}

impl SoftToleration {
    fn covers(&self, taint: &SoftTaint) -> bool {
        (self.key.is_empty() || self.key == taint.key)
            && self.value.as_ref().is_none_or(|value| *value == taint.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taint(key: &str, value: &str) -> SoftTaint {
        SoftTaint { key: key.to_owned(), value: value.to_owned() }
    }

    fn toleration(key: &str, value: Option<&str>) -> SoftToleration {
        SoftToleration { key: key.to_owned(), value: value.map(str::to_owned) }
    }

    #[test]
    fn counts_the_taints_that_no_toleration_covers() {
        let spot = [taint("spot", "yes")];
        assert_eq!(untolerated(&[], &[]), 0);
        assert_eq!(untolerated(&spot, &[]), 1);
        assert_eq!(untolerated(&spot, &[toleration("spot", None)]), 0);
        assert_eq!(untolerated(&spot, &[toleration("spot", Some("yes"))]), 0);
        assert_eq!(untolerated(&spot, &[toleration("spot", Some("no"))]), 1);
        assert_eq!(untolerated(&spot, &[toleration("", None)]), 0);
        assert_eq!(untolerated(&spot, &[toleration("other", None)]), 1);
        assert_eq!(untolerated(&[taint("a", ""), taint("b", "")], &[toleration("a", None)]), 1);
    }
}
