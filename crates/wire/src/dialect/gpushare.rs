//! gpushare's vocabulary: memory of one card, in the unit its node is set to.

use std::fmt;
use std::str::FromStr;

use tessera_core::request::Request;
use tessera_core::units::MiB;

use super::{Asked, BadRequest};

/// Memory of one card, in the node's unit.
pub const MEMORY: &str = "aliyun.com/gpu-mem";

/// How many cards a node has; informational, nobody can ask for it.
pub const COUNT: &str = "aliyun.com/gpu-count";

/// What one unit of `aliyun.com/gpu-mem` is on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryUnit {
    /// 1024 MiB, as shipped.
    #[default]
    GiB,
    /// 1 MiB.
    MiB,
}

/// A text that is no unit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown memory unit {0:?}; write GiB or MiB")]
pub struct UnknownUnit(String);

/// So many units of memory; `None` for none.
#[must_use]
pub fn request(units: u64, unit: MemoryUnit) -> Option<Request> {
    (units > 0).then(|| Request::Memory(MiB(units.saturating_mul(unit.mib()))))
}

pub(super) fn read(asked: &Asked<'_>, unit: MemoryUnit) -> Result<Option<Request>, BadRequest> {
    let units = asked.units(MEMORY, "8 for 8 units (GiB, unless the node counts in MiB)", unit.name())?;
    Ok(request(units, unit))
}

impl MemoryUnit {
    /// How many MiB one unit is.
    #[must_use]
    pub fn mib(self) -> u64 {
        match self {
            Self::GiB => 1024,
            Self::MiB => 1,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::GiB => "GiB",
            Self::MiB => "MiB",
        }
    }
}

impl FromStr for MemoryUnit {
    type Err = UnknownUnit;

    fn from_str(text: &str) -> Result<Self, UnknownUnit> {
        [Self::GiB, Self::MiB]
            .into_iter()
            .find(|unit| unit.name() == text)
            .ok_or_else(|| UnknownUnit(text.to_owned()))
    }
}

impl fmt::Display for MemoryUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
