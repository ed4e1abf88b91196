//! gpushare's lists of broken cards: one ConfigMap for each node that has any.

use tessera_core::gpu_set::GpuSet;
use tessera_core::units::GpuIndex;

/// Where they lie.
pub const NAMESPACE: &str = "kube-system";

/// What their names begin with; the node's name follows.
pub const PREFIX: &str = "unhealthy-gpu-";

/// The key that holds the indexes, with commas between them.
pub const DATA_KEY: &str = "gpus";

/// A list that cannot be read as a whole. gpushare itself takes what it cannot read for card 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no index of a GPU; write such as 0,3")]
pub struct BadIndex(String);

/// Reads a list. Those that can be read count, also where others cannot: a broken card must not be granted for a typing
/// error beside it.
#[must_use]
pub fn parse(text: &str) -> (GpuSet, Vec<BadIndex>) {
    let mut bad = Vec::new();
    let mut cards = GpuSet::EMPTY;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse::<u8>() {
            Ok(index) if usize::from(index) < GpuSet::CAPACITY => cards = cards.with(GpuIndex(index)),
            _ => bad.push(BadIndex(part.to_owned())),
        }
    }
    (cards, bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, cards: &str, bad: &[&str]) {
        let (found, errors) = parse(text);
        assert_eq!(found.to_string(), cards, "{text:?}");
        assert_eq!(errors, bad.iter().map(|part| BadIndex((*part).to_owned())).collect::<Vec<_>>());
    }

    #[test]
    fn indexes_with_commas() {
        check("", "", &[]);
        check("0", "0", &[]);
        check("3, 1,", "1,3", &[]);
        check("1,x,64,-2,5", "1,5", &["x", "64", "-2"]);
    }
}
