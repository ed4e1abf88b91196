//! The abbreviations NVIDIA's tools use for what joins two GPUs.

use tessera_core::topology::{Link, PcieLevel};

/// More NVLinks than this between two GPUs are taken for a typing error.
pub(crate) const MOST_NVLINKS: u8 = 64;

/// What a matrix cell may say.
pub(crate) const EXPECTED: &str = "X, SYS, NODE, PHB, PXB, PIX, PSB, SOC or NV1 to NV18";

/// The abbreviation of a link; `None` where nothing is known. NVLinks win over the PCIe level below them.
#[must_use]
pub fn abbreviation(link: Link) -> Option<String> {
    if link.nvlinks > 0 {
        return Some(format!("NV{}", link.nvlinks));
    }
    link.pcie.map(|level| pcie_abbreviation(level).to_owned())
}

/// The abbreviation of a PCIe level.
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

/// The link of an abbreviation; `None` for a word that is none. Old drivers print `SOC` for `SYS`.
pub(crate) fn parse(word: &str) -> Option<Link> {
    if let Some(level) = PcieLevel::ALL.into_iter().find(|level| pcie_abbreviation(*level) == word) {
        return Some(Link::pcie(level));
    }
    if word == "SOC" {
        return Some(Link::pcie(PcieLevel::System));
    }
    let digits = word.strip_prefix("NV")?;
    let count: u8 = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
    (1..=MOST_NVLINKS).contains(&count).then(|| Link::nvlink(count))
}
