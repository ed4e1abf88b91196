//! gpushare's dialect: memory of one GPU, in the unit configured on its node.

use std::fmt;
use std::str::FromStr;

use tessera_core::request::Request;
use tessera_core::units::MiB;

use super::{BadRequest, RequestedAmounts};

/// Resource for memory of one GPU, in the node's unit.
pub const MEMORY: &str = "aliyun.com/gpu-mem";

/// Resource that reports how many GPUs a node has. Pods cannot request it.
pub const COUNT: &str = "aliyun.com/gpu-count";

/// The size of one unit of `aliyun.com/gpu-mem` on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryUnit {
    /// 1024 MiB, the default.
    #[default]
    GiB,
    /// 1 MiB.
    MiB,
    /// A number of MiB, at least 2. A node uses it if units of 1 MiB would exceed the number of
    /// devices that a kubelet accepts.
    Blocks(u32),
}

/// Text that is not a memory unit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown memory unit {0:?}; write GiB or MiB, or a number of MiB such as 256MiB")]
pub struct UnknownUnit(String);

/// Returns a request for `units` of memory, or `None` for zero units.
#[must_use]
pub fn request(units: u64, unit: MemoryUnit) -> Option<Request> {
    (units > 0).then(|| Request::memory(MiB(units.saturating_mul(unit.mib()))))
}

pub(super) fn parse(amounts: &RequestedAmounts<'_>, unit: MemoryUnit) -> Result<Option<Request>, BadRequest> {
    let units = amounts.units(MEMORY, "8 for 8 units (GiB, unless the node counts in MiB)", unit.name())?;
    Ok(request(units, unit))
}

impl MemoryUnit {
    /// Returns the size of one unit in MiB.
    #[must_use]
    pub fn mib(self) -> u64 {
        match self {
            Self::GiB => 1024,
            Self::MiB => 1,
            Self::Blocks(mib) => u64::from(mib),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::GiB => "GiB",
            Self::MiB => "MiB",
            Self::Blocks(_) => "several MiB",
        }
    }
}

impl FromStr for MemoryUnit {
    type Err = UnknownUnit;

    fn from_str(text: &str) -> Result<Self, UnknownUnit> {
        let number =
            |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok());
        match (text, text.strip_suffix("MiB")) {
            ("GiB" | "1024MiB", _) => Some(Self::GiB),
            ("MiB" | "1MiB", _) => Some(Self::MiB),
            (_, Some(digits)) => number(digits).flatten().filter(|mib| *mib > 0).map(Self::Blocks),
            _ => None,
        }
        .ok_or_else(|| UnknownUnit(text.to_owned()))
    }
}

impl fmt::Display for MemoryUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks(mib) => write!(f, "{mib}MiB"),
            Self::GiB | Self::MiB => f.write_str(self.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_units_it_prints() {
        for (text, mib) in [("GiB", 1024), ("MiB", 1), ("256MiB", 256), ("1024MiB", 1024), ("1MiB", 1)] {
            let unit: MemoryUnit = text.parse().unwrap();
            assert_eq!(unit.mib(), mib);
            assert_eq!(unit.to_string().parse(), Ok(unit));
        }
        for text in ["", "GB", "0MiB", "-1MiB", "+2MiB", "4GiB", "99999999999MiB"] {
            assert!(text.parse::<MemoryUnit>().is_err(), "{text}");
        }
    }
}
