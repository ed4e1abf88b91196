//! The value of `--disable-health-checks`, in the format of NVIDIA's plugin.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::str::FromStr;

/// GPU errors that are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DisabledChecks {
    /// True if all errors are ignored.
    pub(super) all: bool,
    /// Ignored XIDs.
    pub(super) xids: BTreeSet<u64>,
    /// True if retired memory that waits for a reset is ignored.
    pub(super) pending_reset: bool,
    /// Unknown words. The agent logs them and continues, because watching too many errors is safer
    /// than watching none.
    pub(super) unknown: Vec<String>,
}

impl FromStr for DisabledChecks {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let mut disabled = Self::default();
        for word in text.split(',').map(|word| word.trim().to_lowercase()) {
            match (word.as_str(), word.parse()) {
                ("", _) => {}
                ("all", _) => (disabled.all, disabled.pending_reset) = (true, true),
                ("xids", _) => disabled.all = true,
                ("pending-reset", _) => disabled.pending_reset = true,
                (_, Ok(xid)) => _ = disabled.xids.insert(xid),
                (_, Err(_)) => disabled.unknown.push(word),
            }
        }
        Ok(disabled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, all: bool, xids: &[u64], unknown: &[&str]) {
        let pending_reset = text.contains("all") || text.contains("pending-reset");
        let expected = DisabledChecks {
            all,
            pending_reset,
            xids: xids.iter().copied().collect(),
            unknown: unknown.iter().map(|word| (*word).to_owned()).collect(),
        };
        assert_eq!(text.parse(), Ok(expected), "{text}");
    }

    #[test]
    fn parses_words_and_numbers_separated_by_commas() {
        check("", false, &[], &[]);
        check("all", true, &[], &[]);
        check("XIDs", true, &[], &[]);
        check("63, 94,", false, &[63, 94], &[]);
        check("all,63", true, &[63], &[]);
        check("pending-reset,63", false, &[63], &[]);
        check("ecc,63,-1", false, &[63], &["ecc", "-1"]);
    }
}
