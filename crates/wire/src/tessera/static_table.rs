//! The configuration file of the policy `static`:
//! `{"<instance type>": {"<size>": [[0, 1], [2, 3]]}}`.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::gpu_set::GpuSet;
use tessera_core::placement::static_table::StaticTable;
use tessera_core::units::GpuIndex;

/// A table that cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum BadTable {
    /// The file is not JSON of the expected form.
    #[error("expected {{\"<instance type>\": {{\"<size>\": [[0, 1], ...]}}}}: {0}")]
    Json(serde_json::Error),
    /// A set has the wrong size or contains an invalid GPU index.
    #[error(
        "{instance_type}: set {set:?} is listed under {size}; list {size} different indexes below {}",
        GpuSet::CAPACITY
    )]
    Set {
        /// Instance type that lists the set.
        instance_type: String,
        /// Size under which the set is listed.
        size: usize,
        /// GPU indexes of the set.
        set: Vec<u8>,
    },
}

/// Parses a table.
pub fn parse(json: &str) -> Result<StaticTable, BadTable> {
    let file: BTreeMap<String, BTreeMap<usize, Vec<Vec<u8>>>> =
        serde_json::from_str(json).map_err(BadTable::Json)?;
    let mut sets = BTreeMap::new();
    for (instance_type, sizes) in file {
        let mut by_size = BTreeMap::new();
        for (size, listed) in sizes {
            let to_set = |set: Vec<u8>| {
                let different: BTreeSet<u8> = set.iter().copied().collect();
                let valid = different.iter().all(|index| usize::from(*index) < GpuSet::CAPACITY);
                if different.len() != size || set.len() != size || !valid {
                    return Err(BadTable::Set { instance_type: instance_type.clone(), size, set });
                }
                Ok(different.into_iter().map(GpuIndex).collect::<GpuSet>())
            };
            by_size.insert(size, listed.into_iter().map(to_set).collect::<Result<Vec<_>, _>>()?);
        }
        sets.insert(instance_type, by_size);
    }
    Ok(StaticTable { sets, strict: false })
}

/// Returns the tables of common machines, which apply without a file: NVIDIA's DGX-1 and DGX-2 and HGX boards, and
/// the one type that gputopology ships. A node names its type in `NODE_TYPE` or the label
/// `node.kubernetes.io/instance-type`.
#[must_use]
pub fn shipped() -> StaticTable {
    // A test parses the text.
    parse(include_str!("static_tables.json")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_shipped_file() {
        let table = parse(r#"{"ecs.sccgn6.24xlarge":{"1":[[0],[1]],"2":[[0,2],[1,3]]}}"#).unwrap();
        let pairs = &table.sets["ecs.sccgn6.24xlarge"][&2];
        assert_eq!(pairs.iter().map(ToString::to_string).collect::<Vec<_>>(), ["0,2", "1,3"]);
    }

    #[test]
    fn shipped_tables_cover_each_machine() {
        let shipped = shipped();
        for (machine, gpus) in [
            ("dgx-1-pascal", 8),
            ("dgx-1-volta", 8),
            ("dgx-2", 16),
            ("hgx-4", 4),
            ("hgx-8", 8),
            ("ecs.sccgn6.24xlarge", 8),
        ] {
            let sizes = &shipped.sets[machine];
            assert_eq!(sizes.keys().next_back(), Some(&gpus), "{machine}");
            for (size, sets) in sizes {
                let all = sets.iter().copied().fold(GpuSet::EMPTY, GpuSet::union);
                assert_eq!((all, sets.len() * size), (GpuSet::first(gpus), gpus), "{machine}: {size}");
            }
        }
        let pairs =
            |machine: &str| shipped.sets[machine][&2].iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(pairs("dgx-1-volta"), ["0,3", "1,2", "4,7", "5,6"]);
        assert_eq!(pairs("ecs.sccgn6.24xlarge"), ["0,2", "1,3", "4,6", "5,7"]);
    }

    #[test]
    fn every_error_says_what_to_write() {
        let error = |json: &str| parse(json).unwrap_err().to_string();
        assert!(error("[]").starts_with(r#"expected {"<instance type>": {"<size>": [[0, 1], ...]}}: "#));
        assert_eq!(
            error(r#"{"big":{"2":[[0,0]]}}"#),
            "big: set [0, 0] is listed under 2; list 2 different indexes below 64"
        );
        assert!(error(r#"{"big":{"1":[[64]]}}"#).contains("[64]"));
    }
}
