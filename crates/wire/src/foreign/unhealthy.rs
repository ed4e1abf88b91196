//! gpushare's lists of broken GPUs: one ConfigMap for each node that has any.

use std::collections::BTreeMap;

use tessera_core::gpu_set::GpuSet;
use tessera_core::units::GpuIndex;

/// Where they lie.
pub const NAMESPACE: &str = "kube-system";

/// What their names begin with; the node's name follows.
pub const PREFIX: &str = "unhealthy-gpu-";

/// The key that holds the indexes, with commas between them.
pub const DATA_KEY: &str = "gpus";

/// A list that cannot be read as a whole. gpushare itself takes what it cannot read for GPU 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no index of a GPU; write such as 0,3")]
pub struct BadIndex(String);

/// What a ConfigMap says: the node, its broken GPUs, and what cannot be read; `None` where it is no such list.
#[must_use]
pub fn of_config_map<'a>(
    name: &'a str,
    data: &BTreeMap<String, String>,
) -> Option<(&'a str, GpuSet, Vec<BadIndex>)> {
    let node = name.strip_prefix(PREFIX)?;
    let (cards, bad) = parse(data.get(DATA_KEY).map_or("", String::as_str));
    Some((node, cards, bad))
}

/// Reads a list. Those that can be read count, also where others cannot: a broken GPU must not be granted for a typing
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
    fn a_list_is_known_by_its_name() {
        let data = BTreeMap::from([(DATA_KEY.to_owned(), "2".to_owned())]);
        let (node, cards, bad) = of_config_map("unhealthy-gpu-node-1", &data).unwrap();
        assert_eq!((node, cards.to_string().as_str(), bad.len()), ("node-1", "2", 0));
        assert_eq!(of_config_map("gpuquota", &data), None);
    }

    #[test]
    fn indexes_with_commas() {
        check("", "", &[]);
        check("0", "0", &[]);
        check("3, 1,", "1,3", &[]);
        check("1,x,64,-2,5", "1,5", &["x", "64", "-2"]);
    }
}
