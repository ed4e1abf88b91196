//! The order of names in which people count: `node-2` before `node-10`.

use std::cmp::Ordering;

/// Compares names by their text, and runs of digits by their number. Different names are never equal.
#[must_use]
pub fn natural(a: &str, b: &str) -> Ordering {
    by_numbers(a.as_bytes(), b.as_bytes()).then_with(|| a.cmp(b))
}

fn by_numbers(mut a: &[u8], mut b: &[u8]) -> Ordering {
    loop {
        let (Some(first), Some(second)) = (a.first(), b.first()) else { return a.len().cmp(&b.len()) };
        if first.is_ascii_digit() && second.is_ascii_digit() {
            let ((x, rest_a), (y, rest_b)) = (number(a), number(b));
            let order = x.len().cmp(&y.len()).then_with(|| x.cmp(y));
            if order != Ordering::Equal {
                return order;
            }
            (a, b) = (rest_a, rest_b);
        } else {
            if first != second {
                return first.cmp(second);
            }
            (a, b) = (&a[1..], &b[1..]);
        }
    }
}

/// Returns the digits at the begin of `text` without leading zeros, and the rest.
fn number(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    (&digits[zeros..], rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_as_people_do() {
        let mut names = ["node-10", "node-2", "node-1", "a", "node-02b", "node", "node-100"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, ["a", "node", "node-1", "node-2", "node-02b", "node-10", "node-100"]);
        assert_eq!(natural("node-2", "node-02"), Ordering::Greater);
        assert_eq!(natural("node-2", "node-2"), Ordering::Equal);
    }
}
