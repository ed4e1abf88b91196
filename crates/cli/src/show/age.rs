//! Ages of objects in kubectl's short form.

/// Returns the seconds since 1970 of a time of the API server, such as `2026-01-02T03:04:05Z`.
fn unix_seconds(text: &str) -> Option<i64> {
    let part = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
    let (year, month, day) = (part(0, 4)?, part(5, 7)?, part(8, 10)?);
    let (hour, minute, second) = (part(11, 13)?, part(14, 16)?, part(17, 19)?);
    // Days since 1970 in the Gregorian calendar, with years that begin in March.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// Returns the time between `created` and `now_seconds` in kubectl's short form, such as `5m` or `3d`.
pub(crate) fn age(created: Option<&str>, now_seconds: i64) -> String {
    let Some(created) = created.and_then(unix_seconds) else { return "-".to_owned() };
    let seconds = (now_seconds - created).max(0);
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
    fn counts_seconds_since_1970() {
        assert_eq!(unix_seconds("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(unix_seconds("2000-03-01T00:00:01Z"), Some(951_868_801));
        assert_eq!(unix_seconds("2024-02-29T12:00:00Z"), Some(1_709_208_000));
        assert_eq!(unix_seconds("nonsense"), None);
    }

    #[test]
    fn shows_the_largest_useful_unit() {
        let of = |seconds: i64| age(Some("2024-02-29T12:00:00Z"), 1_709_208_000 + seconds);
        assert_eq!([of(-3), of(61), of(300), of(7300), of(200_000)], ["0s", "61s", "5m", "2h", "2d"]);
        assert_eq!(age(None, 0), "-");
    }
}
