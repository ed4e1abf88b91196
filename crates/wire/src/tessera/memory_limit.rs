//! Pod annotation with the memory of each GPU up to which a container with a share may grow.
//!
//! The requested memory is guaranteed and booked. What a container uses beyond it is borrowed from
//! memory that no pod was granted.

use std::collections::BTreeMap;

use tessera_core::units::MiB;

use crate::foreign::quantity::Quantity;

/// Annotation with the memory of one GPU, as a Kubernetes quantity of bytes.
pub const KEY: &str = "tessera.dev/gpu-memory-limit";

/// The annotation [`KEY`] is not an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{KEY}: found {0:?}; write the memory of one GPU up to which a container may grow, such as 16Gi")]
pub struct BadMemoryLimit(String);

/// Parses the annotation [`KEY`]. Returns `None` if the pod has none.
///
/// Less than 1 MiB is an error, because a number without a unit counts bytes.
pub fn parse(annotations: &BTreeMap<String, String>) -> Result<Option<MiB>, BadMemoryLimit> {
    let Some(text) = annotations.get(KEY) else { return Ok(None) };
    let bytes = text.parse::<Quantity>().ok().and_then(Quantity::whole);
    match bytes.map(|bytes| bytes >> 20) {
        Some(mib) if mib > 0 => Ok(Some(MiB(mib))),
        _ => Err(BadMemoryLimit(text.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_quantities_of_bytes() {
        let read = |text: &str| parse(&BTreeMap::from([(KEY.to_owned(), text.to_owned())]));
        assert_eq!(parse(&BTreeMap::new()), Ok(None));
        assert_eq!(read("16Gi"), Ok(Some(MiB(16_384))));
        assert_eq!(read(" 1536Mi "), Ok(Some(MiB(1536))));
        assert_eq!(read("17G"), Ok(Some(MiB(16_212))));
        for bad in ["", "much", "16", "-1Gi", "0", "16GiB"] {
            let said = read(bad).unwrap_err().to_string();
            assert_eq!(
                said,
                format!(
                    "tessera.dev/gpu-memory-limit: found {bad:?}; write the memory of one GPU up to which a \
                     container may grow, such as 16Gi"
                )
            );
        }
    }
}
