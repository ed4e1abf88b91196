//! Names and UIDs of objects.

use super::kinds::ResourceKind;
use super::status::Problem;
use crate::scatter::scatter;

/// Verifies that an object may have this name.
pub(super) fn check_name(kind: &ResourceKind, name: &str) -> Result<(), Problem> {
    if name.is_empty() {
        return Err(Problem::invalid(
            kind,
            "",
            "metadata.name: Required value: name or generateName is required",
        ));
    }
    let edge = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
    let sound = name.chars().all(|letter| edge(letter) || matches!(letter, '-' | '.'))
        && name.starts_with(edge)
        && name.ends_with(edge)
        && name.len() <= 253;
    if sound || kind.plural == "events" {
        return Ok(());
    }
    let why = format!(
        "metadata.name: Invalid value: {name:?}: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric \
         characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for \
         validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
    );
    Err(Problem::invalid(kind, name, &why))
}

/// Returns the UID of the object with this number. UIDs are distinct and the same in every run.
pub(super) fn uid(made: u64) -> String {
    let (high, low) = (scatter(made), scatter(made ^ (1 << 63)));
    let (node, clock) = (low & 0xffff_ffff_ffff, (low >> 48) & 0x3fff | 0x8000);
    format!("{:08x}-{:04x}-4{:03x}-{clock:04x}-{node:012x}", high >> 32, high >> 16 & 0xffff, high & 0xfff)
}

/// Returns the suffix that follows a `generateName`.
pub(super) fn suffix(made: u64) -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut number = scatter(made);
    let letter = |_: usize| {
        let place = usize::try_from(number % 27).unwrap_or_default();
        number /= 27;
        char::from(LETTERS[place])
    };
    (0..5).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_and_suffixes_of_different_numbers_differ() {
        let uids: std::collections::BTreeSet<String> = (0..1000).map(uid).collect();
        assert_eq!(uids.len(), 1000);
        assert!(uids.iter().all(|uid| uid.len() == 36 && uid.as_bytes()[14] == b'4'), "{uids:?}");
        assert_ne!(suffix(1), suffix(2));
        assert_eq!(suffix(1).len(), 5);
    }
}
