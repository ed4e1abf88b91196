//! The abbreviations that NVIDIA's tools use for the link between two GPUs.

use tessera_core::topology::{Link, PcieLevel};

/// Largest accepted number of NVLinks between two GPUs. A larger number is treated as a typing
/// error.
pub(crate) const MAX_NVLINKS: u8 = 64;

/// Valid cells of a matrix, for error messages.
pub(crate) const EXPECTED: &str = "X, SYS, NODE, PHB, PXB, PIX, PSB, SOC or NV1 to NV18";

/// Returns the abbreviation of a link, or `None` if the link is unknown. NVLinks win over the PCIe
/// level.
#[must_use]
pub fn abbreviation(link: Link) -> Option<String> {
    if link.nvlinks > 0 {
        return Some(format!("NV{}", link.nvlinks));
    }
    link.pcie.map(|level| pcie_abbreviation(level).to_owned())
}

/// Returns the abbreviation of a PCIe level.
#[must_use]
pub fn pcie_abbreviation(level: PcieLevel) -> &'static str {
    match level {
        PcieLevel::System => "SYS",
        PcieLevel::Node => "NODE",
        PcieLevel::HostBridge => "PHB",
        PcieLevel::MultiSwitch => "PXB",
        PcieLevel::SingleSwitch => "PIX",
        PcieLevel::SameBoard => "PSB",
    }
}

/// Parses an abbreviation. Old drivers print `SOC` for `SYS`.
pub(crate) fn parse(word: &str) -> Option<Link> {
    if let Some(level) = PcieLevel::ALL.into_iter().find(|level| pcie_abbreviation(*level) == word) {
        return Some(Link::pcie(level));
    }
    if word == "SOC" {
        return Some(Link::pcie(PcieLevel::System));
    }
    let digits = word.strip_prefix("NV")?;
    let count: u8 = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
    (1..=MAX_NVLINKS).contains(&count).then(|| Link::nvlink(count))
}
