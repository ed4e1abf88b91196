//! Times, as objects store them and as tables show them.

use jiff::Timestamp;

/// Returns the current time in seconds, such as `2026-11-15T07:45:40Z`.
pub(crate) fn now() -> String {
    stamp(0)
}

/// Returns the time `seconds_ahead` seconds from now.
pub(crate) fn stamp(seconds_ahead: i64) -> String {
    let seconds = Timestamp::now().as_second() + seconds_ahead;
    Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

/// Returns the age of a time, such as `45s`, `5m10s`, `3h` or `12d`, as Kubernetes shortens it.
pub(super) fn age(since: &str) -> String {
    match since.parse::<Timestamp>() {
        Ok(since) => human(Timestamp::now().as_second() - since.as_second()),
        Err(_) => "<unknown>".to_owned(),
    }
}

fn human(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let two = |large: i64, letter: char, small: i64, below: char| match small {
        0 => format!("{large}{letter}"),
        small => format!("{large}{letter}{small}{below}"),
    };
    match seconds {
        ..120 => format!("{seconds}s"),
        120..600 => two(seconds / 60, 'm', seconds % 60, 's'),
        600..10_800 => format!("{}m", seconds / 60),
        10_800..28_800 => two(seconds / 3600, 'h', seconds / 60 % 60, 'm'),
        28_800..172_800 => format!("{}h", seconds / 3600),
        172_800..691_200 => two(seconds / 86_400, 'd', seconds / 3600 % 24, 'h'),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_shortened_as_kubectl_shows_them() {
        let shown = [0, 119, 120, 310, 600, 10_799, 10_860, 30_000, 180_000, 700_000].map(human);
        assert_eq!(shown, ["0s", "119s", "2m", "5m10s", "10m", "179m", "3h1m", "8h", "2d2h", "8d"]);
        assert_eq!(age("never"), "<unknown>");
        assert_eq!(age(&now()), "0s");
        assert!(now().ends_with('Z') && !now().contains('.'));
    }
}
