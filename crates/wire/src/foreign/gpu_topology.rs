//! gputopology's node annotation `GPU_TOPOLOGY`, which lists each pair of GPUs:
//! `"GPU_NV2_0_3":"Two NVLinks"`.

use std::collections::BTreeMap;

use tessera_core::gpu_set::GpuSet;
use tessera_core::topology::{Link, PcieLevel, Topology};
use tessera_core::units::GpuIndex;

use crate::foreign::link;

/// Key of the annotation.
pub const KEY: &str = "GPU_TOPOLOGY";

/// An annotation that cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum BadAnnotation {
    /// The annotation is not a JSON object of strings.
    #[error(
        "{KEY}: expected a JSON object of strings such as {{\"GPU_PIX_0_1\":\"Single PCI switch\"}}: {0}"
    )]
    Json(#[from] serde_json::Error),
    /// A key has the wrong form.
    #[error(
        "{KEY}: found key `{key}`, expected GPU_<link>_<i>_<j> with i < j < {limit} and a link such as PIX or NV2"
    )]
    Key {
        /// Key found in the annotation.
        key: String,
        /// Number of GPUs of the node.
        limit: usize,
    },
}

const UNKNOWN: &str = "N-A";

/// Parses the annotation of a node with `count` GPUs. The link of an omitted pair is unknown.
pub fn parse(json: &str, count: usize) -> Result<Topology, BadAnnotation> {
    let entries: BTreeMap<String, String> = serde_json::from_str(json)?;
    let limit = count.min(GpuSet::CAPACITY);
    let mut links = BTreeMap::new();
    for key in entries.into_keys() {
        match parse_key(&key, limit) {
            Some((pair, link)) => links.insert(pair, link),
            None => return Err(BadAnnotation::Key { key, limit }),
        };
    }
    Ok(Topology::from_pairs(limit, |a, b| links.get(&(a, b)).copied().unwrap_or_default()))
}

fn parse_key(key: &str, limit: usize) -> Option<((GpuIndex, GpuIndex), Link)> {
    let mut parts = key.split('_');
    let (Some("GPU"), Some(word), Some(a), Some(b), None) =
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let (a, b) = (GpuIndex(a.parse().ok()?), GpuIndex(b.parse().ok()?));
    let link = if word == UNKNOWN { Link::default() } else { link::parse(word)? };
    (a < b && b.position() < limit).then_some(((a, b), link))
}

/// Writes the annotation as compact JSON with keys in byte order. Returns `None` for fewer than two
/// GPUs, which form no pair.
#[must_use]
pub fn print(topology: &Topology) -> Option<String> {
    let pairs = topology.gpus().pairs().map(|(a, b)| {
        let link = topology.link(a, b);
        let word = link::abbreviation(link).unwrap_or_else(|| UNKNOWN.to_owned());
        (format!("GPU_{word}_{a}_{b}"), description(link))
    });
    let entries: BTreeMap<String, String> = pairs.collect();
    // Serializing a map of strings cannot fail.
    (!entries.is_empty()).then(|| serde_json::to_string(&entries).ok())?
}

fn description(link: Link) -> String {
    const NUMBERS: [&str; 18] = [
        "Single",
        "Two",
        "Three",
        "Four",
        "Five",
        "Six",
        "Seven",
        "Eight",
        "Nine",
        "Ten",
        "Eleven",
        "Twelve",
        "Thirteen",
        "Fourteen",
        "Fifteen",
        "Sixteen",
        "Seventeen",
        "Eighteen",
    ];
    if link.nvlinks > 0 {
        let count = usize::from(link.nvlinks);
        let number = NUMBERS.get(count - 1).map_or_else(|| count.to_string(), |word| (*word).to_owned());
        let plural = if count == 1 { "" } else { "s" };
        return format!("{number} NVLink{plural}");
    }
    let text = match link.pcie {
        None => "N/A",
        Some(PcieLevel::System) => "Cross CPU socket",
        Some(PcieLevel::Node) => "Same CPU socket",
        Some(PcieLevel::HostBridge) => "Host PCI bridge",
        Some(PcieLevel::MultiSwitch) => "Multiple PCI switches",
        Some(PcieLevel::SingleSwitch) => "Single PCI switch",
        Some(PcieLevel::SameBoard) => "Same board",
    };
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_the_same_text_as_gputopology() {
        let topology = Topology::from_pairs(3, |a, b| match (a.0, b.0) {
            (0, 1) => Link { pcie: Some(PcieLevel::System), nvlinks: 2 },
            (0, 2) => Link::pcie(PcieLevel::HostBridge),
            _ => Link::default(),
        });
        let text = r#"{"GPU_N-A_1_2":"N/A","GPU_NV2_0_1":"Two NVLinks","GPU_PHB_0_2":"Host PCI bridge"}"#;
        assert_eq!(print(&topology).as_deref(), Some(text));
        assert_eq!(print(&Topology::unknown(1)), None);
    }

    #[test]
    fn writes_keys_in_byte_order() {
        let text = print(&Topology::from_pairs(11, |_, _| Link::nvlink(1))).unwrap();
        assert!(text.find("GPU_NV1_0_10").unwrap() < text.find("GPU_NV1_0_2").unwrap());
        assert_eq!(text.matches("Single NVLink\"").count(), 55);
    }

    #[test]
    fn parses_its_own_output_up_to_eighteen_nvlinks() {
        let topology = Topology::from_pairs(16, |a, b| match (a.0 + b.0) % 25 {
            sum @ 1..=18 => Link::nvlink(sum),
            sum @ 19..=24 => Link::pcie(PcieLevel::ALL[usize::from(sum - 19)]),
            _ => Link::default(),
        });
        assert_eq!(parse(&print(&topology).unwrap(), 16).unwrap(), topology);
    }

    #[test]
    fn every_error_names_the_key() {
        for key in ["GPU_PIX_0", "GPU_PIX_1_0", "GPU_PIX_0_8", "GPU_FAST_0_1", "GPU_PIX_0_1_2", "PIX_0_1"] {
            let error = parse(&format!(r#"{{"{key}":""}}"#), 8).unwrap_err().to_string();
            assert!(error.contains(&format!("found key `{key}`, expected GPU_<link>_<i>_<j>")), "{error}");
        }
        assert!(parse("[]", 8).unwrap_err().to_string().starts_with("GPU_TOPOLOGY: expected a JSON object"));
        assert_eq!(parse("{}", 2).unwrap(), Topology::unknown(2));
    }
}
