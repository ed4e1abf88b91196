//! Kubernetes quantities: `3`, `500m`, `10G`, `4Gi`, `1e3`.

use std::fmt;
use std::str::FromStr;

/// A quantity in thousandths. Smaller fractions are rounded up, as in Kubernetes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity {
    milli: i128,
}

/// Text that is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a quantity; write a number such as 2, 500m or 4Gi")]
pub struct BadQuantity(String);

/// Largest accepted number of digits. More digits could overflow with the largest suffix.
const MAX_DIGITS: usize = 18;

impl Quantity {
    /// Returns the quantity if it is a whole number and not negative.
    #[must_use]
    pub fn whole(self) -> Option<u64> {
        (self.milli % 1000 == 0).then(|| u64::try_from(self.milli / 1000).ok())?
    }

    /// Returns the quantity in thousandths, or `None` if it is negative.
    #[must_use]
    pub fn milli(self) -> Option<u64> {
        u64::try_from(self.milli).ok()
    }

    /// Converts bytes to MiB, rounded up. Returns `None` if the quantity is negative.
    #[must_use]
    pub fn mib(self) -> Option<u64> {
        let per_mib = 1000i128 << 20;
        u64::try_from(self.milli).ok()?;
        u64::try_from((self.milli + per_mib - 1) / per_mib).ok()
    }
}

impl FromStr for Quantity {
    type Err = BadQuantity;

    fn from_str(text: &str) -> Result<Self, BadQuantity> {
        parse(text).ok_or_else(|| BadQuantity(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Quantity> {
    let text = text.trim();
    let (negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (integer.is_empty() && fraction.is_empty())
        || fraction.contains('.')
        || integer.len() + fraction.len() > MAX_DIGITS
    {
        return None;
    }
    let digits: i128 = format!("{integer}{fraction}").parse().ok()?;
    let (base, exponent) = scale(suffix)?;
    let scaled = digits.checked_mul(base)?.checked_mul(1000)?;
    let shift = exponent - i32::try_from(fraction.len()).ok()?;
    let power = 10i128.checked_pow(shift.unsigned_abs())?;
    let milli = if shift >= 0 { scaled.checked_mul(power)? } else { (scaled + power - 1) / power };
    Some(Quantity { milli: if negative { -milli } else { milli } })
}

/// Returns the multiplier and the power of ten of a suffix.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    Some(match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            ((-18..=18).contains(&exponent)).then_some((1, exponent))?
        }
    })
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.milli % 1000 == 0 { write!(f, "{}", self.milli / 1000) } else { write!(f, "{}m", self.milli) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        assert_eq!(text.parse::<Quantity>().unwrap().to_string(), expected, "{text}");
    }

    #[test]
    fn parses_every_form_that_kubernetes_accepts() {
        check("3", "3");
        check("+3", "3");
        check("-1", "-1");
        check("500m", "500m");
        check("0.5", "500m");
        check(".5", "500m");
        check("5.", "5");
        check("1.5k", "1500");
        check("10G", "10000000000");
        check("4Gi", "4294967296");
        check("1e3", "1000");
        check("1E3", "1000");
        check("2E", "2000000000000000000");
        check("1e-3", "1m");
        check("100n", "1m");
        check("0", "0");
    }

    #[test]
    fn rejects_malformed_quantities() {
        for text in ["", "x", "1.2.3", "G", "1 G", "5Q", "1e", "1e99", "--1", ".", "9999999999999999999", "٣"]
        {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
    }

    #[test]
    fn rounds_bytes_up_to_mib() {
        let mib = |text: &str| text.parse::<Quantity>().unwrap().mib();
        assert_eq!(mib("1Gi"), Some(1024));
        assert_eq!(mib("1"), Some(1));
        assert_eq!(mib("1M"), Some(1));
        assert_eq!(mib("-1"), None);
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in "[-+]?[0-9.]{0,40}[a-zA-Z]{0,3}[-0-9]{0,4}", any in ".{0,20}") {
            let _ = text.parse::<Quantity>();
            let _ = any.parse::<Quantity>();
        }
    }
}
