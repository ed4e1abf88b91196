//! The bandwidth of single links.

use std::fmt;

use crate::topology::PcieLevel;

/// A predicted bandwidth in tenths of a GB/s. Rates are not known more precisely, and integers
/// compare exactly, so that equally good sets are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bandwidth(u32);

/// The bandwidth of the links of one host in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rates {
    nvlink: Bandwidth,
}

/// The value that NCCL uses for one NVLink of a P100, in tenths of a GB/s.
const NVLINK_1: Bandwidth = Bandwidth(180);
/// The value that NCCL uses for one NVLink of a V100 or an A100.
const NVLINK_2_AND_3: Bandwidth = Bandwidth(200);
/// The value that NCCL uses for one NVLink of an H100.
const NVLINK_4: Bandwidth = Bandwidth(206);

/// A V100 has six NVLinks and an A100 twelve; a GPU with more is of a later generation.
const MAX_NVLINKS_BEFORE_HOPPER: u32 = 12;
/// A P100 has four NVLinks.
const MAX_NVLINKS_OF_PASCAL: u32 = 4;

// === impl Bandwidth ===

impl Bandwidth {
    /// No bandwidth, as for a single GPU.
    pub const NONE: Self = Self(0);

    /// Returns the value in GB/s.
    #[must_use]
    pub fn gb_per_second(self) -> f64 {
        f64::from(self.0) / 10.0
    }

    /// Returns the bandwidth relative to `best`; 1 where `best` is zero.
    #[must_use]
    pub fn share_of(self, best: Self) -> f64 {
        if best == Self::NONE { 1.0 } else { f64::from(self.0) / f64::from(best.0) }
    }

    /// Returns the bandwidth of `count` equal parallel links.
    pub(super) fn times(self, count: u32) -> Self {
        Self(self.0.saturating_mul(count))
    }

    /// Returns the value in tenths of a GB/s.
    pub(super) fn tenths(self) -> u32 {
        self.0
    }
}

/// `40.0 GB/s`
impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} GB/s", self.gb_per_second())
    }
}

// === impl Rates ===

impl Rates {
    /// Infers the NVLink generation from the number of links, because a matrix does not name the
    /// GPUs. `per_gpu` is the number of the best-connected GPU, `doubled` whether any pair has
    /// several.
    pub(super) fn guess(per_gpu: u32, doubled: bool) -> Self {
        let pascal = !doubled && (2..=MAX_NVLINKS_OF_PASCAL).contains(&per_gpu);
        let nvlink = if per_gpu > MAX_NVLINKS_BEFORE_HOPPER {
            NVLINK_4
        } else if pascal {
            NVLINK_1
        } else {
            NVLINK_2_AND_3
        };
        Self { nvlink }
    }

    /// Returns the bandwidth of `count` parallel NVLinks.
    pub(super) fn nvlinks(self, count: u32) -> Bandwidth {
        self.nvlink.times(count)
    }

    /// Returns the bandwidth of PCIe 3. Later generations are faster on every level alike, which
    /// changes no choice.
    pub(super) fn pcie(self, level: PcieLevel) -> Bandwidth {
        Bandwidth(match level {
            PcieLevel::System => 60,
            PcieLevel::Node => 90,
            PcieLevel::HostBridge => 100,
            PcieLevel::MultiSwitch => 115,
            PcieLevel::SingleSwitch | PcieLevel::SameBoard => 120,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infers_the_generation_from_the_number_of_nvlinks() {
        let check = |per_gpu, doubled, expected| {
            assert_eq!(Rates::guess(per_gpu, doubled).nvlinks(1), Bandwidth(expected));
        };
        check(0, false, 200);
        check(1, false, 200);
        check(4, false, 180);
        check(4, true, 200);
        check(6, true, 200);
        check(12, true, 200);
        check(18, true, 206);
    }

    #[test]
    fn nearer_is_never_slower() {
        let rates = Rates::guess(0, false);
        assert!(PcieLevel::ALL.map(|level| rates.pcie(level)).is_sorted());
    }

    #[test]
    fn formats_and_relates_bandwidths() {
        assert_eq!(Bandwidth(412).to_string(), "41.2 GB/s");
        assert!((Bandwidth(100).share_of(Bandwidth(400)) - 0.25).abs() < 1e-12);
        assert!((Bandwidth::NONE.share_of(Bandwidth::NONE) - 1.0).abs() < 1e-12);
    }
}
