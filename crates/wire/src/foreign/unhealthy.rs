//! gpushare's lists of unhealthy GPUs: one ConfigMap per node that has unhealthy GPUs.

use std::collections::BTreeMap;

use tessera_core::gpu_set::GpuSet;
use tessera_core::units::GpuIndex;

/// Namespace of the ConfigMaps.
pub const NAMESPACE: &str = "kube-system";

/// Prefix of the ConfigMaps' names. The node's name follows.
pub const PREFIX: &str = "unhealthy-gpu-";

/// Key in the ConfigMap that holds the GPU indexes, separated by commas.
pub const DATA_KEY: &str = "gpus";

/// An entry that is not a GPU index. gpushare itself treats such an entry as GPU 0.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a GPU index; write indexes such as 0,3")]
pub struct BadIndex(String);

/// Parses a ConfigMap into its node, the unhealthy GPUs, and the invalid entries. Returns `None` if
/// the ConfigMap is not such a list.
#[must_use]
pub fn of_config_map<'a>(
    name: &'a str,
    data: &BTreeMap<String, String>,
) -> Option<(&'a str, GpuSet, Vec<BadIndex>)> {
    let node = name.strip_prefix(PREFIX)?;
    let (gpus, bad) = parse(data.get(DATA_KEY).map_or("", String::as_str));
    Some((node, gpus, bad))
}

/// Parses a list. Valid entries count even if others are invalid, because a typing error must not
/// make an unhealthy GPU available.
#[must_use]
pub fn parse(text: &str) -> (GpuSet, Vec<BadIndex>) {
    let mut bad = Vec::new();
    let mut gpus = GpuSet::EMPTY;
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse::<u8>() {
            Ok(index) if usize::from(index) < GpuSet::CAPACITY => gpus = gpus.with(GpuIndex(index)),
            _ => bad.push(BadIndex(part.to_owned())),
        }
    }
    (gpus, bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, gpus: &str, bad: &[&str]) {
        let (found, errors) = parse(text);
        assert_eq!(found.to_string(), gpus, "{text:?}");
        assert_eq!(errors, bad.iter().map(|part| BadIndex((*part).to_owned())).collect::<Vec<_>>());
    }

    #[test]
    fn recognizes_a_list_by_its_name() {
        let data = BTreeMap::from([(DATA_KEY.to_owned(), "2".to_owned())]);
        let (node, gpus, bad) = of_config_map("unhealthy-gpu-node-1", &data).unwrap();
        assert_eq!((node, gpus.to_string().as_str(), bad.len()), ("node-1", "2", 0));
        assert_eq!(of_config_map("gpuquota", &data), None);
    }

    #[test]
    fn parses_indexes_separated_by_commas() {
        check("", "", &[]);
        check("0", "0", &[]);
        check("3, 1,", "1,3", &[]);
        check("1,x,64,-2,5", "1,5", &["x", "64", "-2"]);
    }
}
