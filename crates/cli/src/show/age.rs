//! Ages of objects in kubectl's short form.

use tessera_wire::foreign::time::unix_seconds;

/// Returns the time between `created` and `now_seconds` in kubectl's short form, such as `5m` or `3d`.
pub(crate) fn age(created: Option<&str>, now_seconds: i64) -> String {
    seconds_since(created, now_seconds).map_or_else(|| "-".to_owned(), short)
}

/// Returns the time since `created`, or `None` if it is unknown.
pub(crate) fn seconds_since(created: Option<&str>, now_seconds: i64) -> Option<u64> {
    let created = created.and_then(unix_seconds)?;
    Some(u64::try_from(now_seconds - created).unwrap_or(0))
}

/// Formats a time in kubectl's short form.
pub(crate) fn short(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_the_largest_useful_unit() {
        let of = |seconds: i64| age(Some("2024-02-29T12:00:00Z"), 1_709_208_000 + seconds);
        assert_eq!([of(-3), of(61), of(300), of(7300), of(200_000)], ["0s", "61s", "5m", "2h", "2d"]);
        assert_eq!(age(None, 0), "-");
    }
}
