//! Times in the API server's form, such as `2026-01-02T03:04:05Z`.

const SECONDS_PER_DAY: i64 = 86_400;

/// Days between 0000-03-01 and 1970-01-01 in the Gregorian calendar.
const DAYS_BEFORE_1970: i64 = 719_468;

/// Days in 400 years of the Gregorian calendar.
const DAYS_PER_ERA: i64 = 146_097;

/// Returns the seconds since 1970 of a time in UTC, or `None` if the text has another form. Fractions are ignored.
#[must_use]
pub fn unix_seconds(text: &str) -> Option<i64> {
    let part = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
    let (year, month, day) = (part(0, 4)?, part(5, 7)?, part(8, 10)?);
    let (hour, minute, second) = (part(11, 13)?, part(14, 16)?, part(17, 19)?);
    // Days since 1970, with years that begin in March.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100)
        + year.div_euclid(400)
        + (153 * month + 2) / 5
        + day
        - 1
        - DAYS_BEFORE_1970;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// Formats seconds since 1970 as a time in UTC.
#[must_use]
pub fn rfc3339(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(SECONDS_PER_DAY), seconds.rem_euclid(SECONDS_PER_DAY));
    let days = days.saturating_add(DAYS_BEFORE_1970);
    let (era, day_of_era) = (days.div_euclid(DAYS_PER_ERA), days.rem_euclid(DAYS_PER_ERA));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / (DAYS_PER_ERA - 1)) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months are counted from March.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (era * 400 + year_of_era, month + 3),
        _ => (era * 400 + year_of_era + 1, month - 9),
    };
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}Z", second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_seconds_since_1970() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-03-01T00:00:01Z", 951_868_801),
            ("2024-02-29T12:00:00Z", 1_709_208_000),
            ("1999-12-31T23:59:59Z", 946_684_799),
        ] {
            assert_eq!(unix_seconds(text), Some(seconds));
            assert_eq!(rfc3339(seconds), text);
        }
        assert_eq!(unix_seconds("2024-02-29T12:00:00.123456Z"), Some(1_709_208_000));
        assert_eq!(unix_seconds("nonsense"), None);
    }

    #[test]
    fn every_day_is_written_and_read_alike() {
        for day in -10_000..40_000 {
            let seconds = day * SECONDS_PER_DAY + 3_723;
            assert_eq!(unix_seconds(&rfc3339(seconds)), Some(seconds), "{}", rfc3339(seconds));
        }
    }
}
