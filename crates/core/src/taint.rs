//! Taints of nodes and tolerations of pods.
//!
//! Taints of effect `PreferNoSchedule` ask pods to stay away from a node without forbidding it. The
//! other effects forbid the node. kube-scheduler evaluates those before it calls the extender, so
//! only explanations read them.

/// What a taint does to pods that do not tolerate it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaintEffect {
    /// No new pod is placed on the node.
    #[default]
    NoSchedule,
    /// New pods are placed elsewhere where possible.
    PreferNoSchedule,
    /// No new pod is placed on the node, and running pods are evicted.
    NoExecute,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taint {
    /// The key of the taint.
    pub key: String,
    /// The value of the taint; empty where it has none.
    pub value: String,
    /// The effect of the taint.
    pub effect: TaintEffect,
}

/// A toleration of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toleration {
    /// The key of the covered taints; empty for taints of any key.
    pub key: String,
    /// The value of the covered taints (operator `Equal`); `None` for any value (operator
    /// `Exists`).
    pub value: Option<String>,
    /// The effect of the covered taints; `None` for any effect.
    pub effect: Option<TaintEffect>,
}

/// Returns how many of a node's soft taints a pod with these tolerations does not tolerate.
///
/// kube-scheduler prefers the node for which this number is lower.
///
/// ```
/// use tessera_core::taint::{Taint, TaintEffect, Toleration, untolerated_soft};
///
/// let effect = TaintEffect::PreferNoSchedule;
/// let spot = Taint { key: "spot".to_owned(), value: "yes".to_owned(), effect };
/// let any_value = Toleration { key: "spot".to_owned(), ..Toleration::default() };
/// assert_eq!(untolerated_soft(&[spot.clone()], &[]), 1);
/// assert_eq!(untolerated_soft(&[spot], &[any_value]), 0);
/// ```
#[must_use]
pub fn untolerated_soft(taints: &[Taint], tolerations: &[Toleration]) -> usize {
    let soft = taints.iter().filter(|taint| taint.effect == TaintEffect::PreferNoSchedule);
    soft.filter(|taint| !taint.is_tolerated(tolerations)).count()
}

/// Returns the first taint that keeps a pod with these tolerations off the node.
#[must_use]
pub fn untolerated_hard<'a>(taints: &'a [Taint], tolerations: &[Toleration]) -> Option<&'a Taint> {
    let mut hard = taints.iter().filter(|taint| taint.effect != TaintEffect::PreferNoSchedule);
    hard.find(|taint| !taint.is_tolerated(tolerations))
}

impl Taint {
    /// Returns whether one of these tolerations covers the taint.
    #[must_use]
    pub fn is_tolerated(&self, tolerations: &[Toleration]) -> bool {
        tolerations.iter().any(|toleration| toleration.covers(self))
    }
}

impl Toleration {
    fn covers(&self, taint: &Taint) -> bool {
        (self.key.is_empty() || self.key == taint.key)
            && self.value.as_ref().is_none_or(|value| *value == taint.value)
            && self.effect.is_none_or(|effect| effect == taint.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taint(key: &str, value: &str, effect: TaintEffect) -> Taint {
        Taint { key: key.to_owned(), value: value.to_owned(), effect }
    }

    fn toleration(key: &str, value: Option<&str>) -> Toleration {
        Toleration { key: key.to_owned(), value: value.map(str::to_owned), effect: None }
    }

    #[test]
    fn counts_the_taints_that_no_toleration_covers() {
        let soft = TaintEffect::PreferNoSchedule;
        let spot = [taint("spot", "yes", soft)];
        assert_eq!(untolerated_soft(&[], &[]), 0);
        assert_eq!(untolerated_soft(&spot, &[]), 1);
        assert_eq!(untolerated_soft(&spot, &[toleration("spot", None)]), 0);
        assert_eq!(untolerated_soft(&spot, &[toleration("spot", Some("yes"))]), 0);
        assert_eq!(untolerated_soft(&spot, &[toleration("spot", Some("no"))]), 1);
        assert_eq!(untolerated_soft(&spot, &[toleration("", None)]), 0);
        assert_eq!(untolerated_soft(&spot, &[toleration("other", None)]), 1);
        let two = [taint("a", "", soft), taint("b", "", soft)];
        assert_eq!(untolerated_soft(&two, &[toleration("a", None)]), 1);
    }

    #[test]
    fn only_hard_taints_forbid_a_node() {
        let soft = taint("spot", "", TaintEffect::PreferNoSchedule);
        let hard = taint("gpu", "", TaintEffect::NoSchedule);
        assert_eq!(untolerated_hard(&[soft.clone(), hard.clone()], &[]), Some(&hard));
        assert_eq!(untolerated_hard(&[soft, hard.clone()], &[toleration("gpu", None)]), None);
        let of_eviction = Toleration { effect: Some(TaintEffect::NoExecute), ..toleration("gpu", None) };
        assert_eq!(untolerated_hard(std::slice::from_ref(&hard), &[of_eviction]), Some(&hard));
    }
}
