//! Decides from the driver's figures whether a container uses more GPU time than it was granted.
//!
//! The driver takes a sample every 200 ms. Each sample names one process, the last one that computed, and
//! charges to it all time for which the GPU was busy. So the samples overstate a container whose short
//! windows happen to end when samples are taken, and over a short time they may do so every time. But
//! without a window an honest container is not named at all, and for one window at most once, except for
//! the time that the window lasted. That gives a bound for a short time that honest containers never
//! reach. Over a long time the coincidences even out, and the samples themselves can be compared.
//!
//! Nothing here comes from the container's account, which a process of the container can write.

use std::{collections::VecDeque, time::Duration};

use super::TimeTotals;

/// Stretch of time in which a container without windows is noticed.
const SHORT: Duration = Duration::from_secs(6);

/// Stretch of time after which the driver's samples are accurate enough to be compared with windows.
const LONG: Duration = Duration::from_secs(120);

/// Longest time that one sample of the driver charges to a process: the driver's interval of 200 ms, and
/// a quarter more.
const SAMPLE: Duration = Duration::from_millis(250);

/// Part of a stretch of time that is tolerated, as its divisor. Of 218 samples of the driver on an H200,
/// 2 named the wrong process; the rest of this quarter is margin.
const TOLERATED_PART: u32 = 4;

/// GPU time that a container used beyond what it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OverTime {
    /// Stretch of time of the comparison.
    pub(super) measured: Duration,
    /// Time that the container used.
    pub(super) busy: Duration,
    /// Time that it was granted.
    pub(super) granted: Duration,
}

/// Totals of a container on one GPU at several moments, oldest first.
#[derive(Debug, Default)]
pub(super) struct TimeHistory {
    points: VecDeque<TimeTotals>,
}

impl TimeHistory {
    /// Adds the current totals, and forgets those that are too old for any comparison. Returns false if
    /// the driver has measured nothing since the last call.
    pub(super) fn add(&mut self, now: TimeTotals) -> bool {
        if let Some(last) = self.points.back() {
            if now.measured == last.measured {
                return false;
            }
            // Totals that have become smaller are those of another run of the container.
            if now.measured < last.measured || now.busy < last.busy || now.window < last.window {
                self.points.clear();
            }
        }
        self.points.push_back(now);
        while self.points.get(1).is_some_and(|second| now.measured - second.measured >= LONG) {
            self.points.pop_front();
        }
        true
    }

    /// Returns by how much a container with this ceiling was over its time, if it was.
    pub(super) fn over_time(&self, ceiling_percent: u32) -> Option<OverTime> {
        self.over_short_time().or_else(|| self.over_long_time(ceiling_percent))
    }

    /// Returns the busy part of the last measurement, from 0 to 1.
    pub(super) fn latest_part(&self) -> Option<f64> {
        let mut latest = self.points.iter().rev();
        let (now, before) = (latest.next()?, latest.next()?);
        let change = difference(*now, *before);
        Some(change.busy.as_secs_f64() / change.measured.as_secs_f64())
    }

    fn over_short_time(&self) -> Option<OverTime> {
        let TimeTotals { measured, busy, window, windows } = self.last(SHORT)?;
        let windows = u32::try_from(windows).unwrap_or(u32::MAX);
        let allowed = window.saturating_add(SAMPLE.saturating_mul(windows)) + measured / TOLERATED_PART;
        (busy > allowed).then_some(OverTime { measured, busy, granted: window })
    }

    fn over_long_time(&self, ceiling_percent: u32) -> Option<OverTime> {
        let TimeTotals { measured, busy, window, .. } = self.last(LONG)?;
        // A container can let the arbiter believe that its work still runs, so its windows are not
        // counted beyond the ceiling.
        let granted = window.min(measured * ceiling_percent.min(100) / 100);
        (busy > granted + measured / TOLERATED_PART).then_some(OverTime { measured, busy, granted })
    }

    /// Returns the change in the shortest known stretch of at least this length.
    fn last(&self, length: Duration) -> Option<TimeTotals> {
        let now = *self.points.back()?;
        let before = self.points.iter().rev().find(|point| now.measured - point.measured >= length)?;
        Some(difference(now, *before))
    }
}

fn difference(now: TimeTotals, before: TimeTotals) -> TimeTotals {
    TimeTotals {
        measured: now.measured.saturating_sub(before.measured),
        busy: now.busy.saturating_sub(before.busy),
        window: now.window.saturating_sub(before.window),
        windows: now.windows.saturating_sub(before.windows),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Usage of one measurement of two seconds, in milliseconds: by the driver, in windows, and the
    /// number of windows.
    type Usage = (u64, u64, u64);

    /// Returns the number of seconds after which a container is over its time.
    fn noticed_after(usage: impl Iterator<Item = Usage>, ceiling_percent: u32) -> Option<u64> {
        let (mut history, mut totals) = (TimeHistory::default(), TimeTotals::default());
        history.add(totals);
        for (busy, window, windows) in usage {
            totals.measured += Duration::from_secs(2);
            totals.busy += Duration::from_millis(busy);
            totals.window += Duration::from_millis(window);
            totals.windows += windows;
            history.add(totals);
            if history.over_time(ceiling_percent).is_some() {
                return Some(totals.measured.as_secs());
            }
        }
        None
    }

    fn steady(usage: Usage, ceiling_percent: u32) -> Option<u64> {
        noticed_after(std::iter::repeat_n(usage, 200), ceiling_percent)
    }

    #[test]
    fn a_container_without_windows_is_noticed_after_six_seconds() {
        assert_eq!(steady((1220, 0, 0), 5), Some(6), "61 % of the time without a window");
        assert_eq!(steady((520, 0, 0), 5), Some(6));
        assert_eq!(steady((480, 0, 0), 5), None, "within the tolerance");
    }

    #[test]
    fn a_container_that_also_uses_windows_is_noticed_after_two_minutes() {
        // A second process asks for the windows of a share of 25 %.
        assert_eq!(steady((1220, 500, 25), 25), Some(120));
        assert_eq!(steady((900, 500, 25), 25), None, "within the tolerance");
    }

    #[test]
    fn forged_windows_count_up_to_the_ceiling() {
        assert_eq!(steady((2000, 2000, 100), 25), Some(120));
        assert_eq!(steady((2000, 2000, 100), 100), None, "a soft share may use all time");
    }

    #[test]
    fn a_container_that_denies_its_work_is_noticed_after_two_minutes() {
        // No other container wants the GPU, so its window is extended for ever.
        assert_eq!(steady((2000, 2000, 0), 25), Some(120));
        assert_eq!(steady((900, 2000, 0), 25), None, "within the tolerance");
    }

    #[test]
    fn honest_containers_are_not_over_their_time() {
        assert_eq!(steady((400, 2000, 0), 25), None, "a program that is slower than the GPU");
        assert_eq!(steady((100, 100, 5), 5), None);
        assert_eq!(steady((2000, 2000, 0), 100), None, "one window is extended for ever");
        // Each short window of a container with 5 % coincides with a sample, for a minute.
        let unlucky = std::iter::repeat_n((1000, 100, 5), 30);
        assert_eq!(noticed_after(unlucky.chain(std::iter::repeat_n((100, 100, 5), 100)), 5), None);
    }

    #[test]
    fn totals_of_another_run_start_a_new_history() {
        let mut history = TimeHistory::default();
        let totals = |measured, busy| TimeTotals {
            measured: Duration::from_secs(measured),
            busy: Duration::from_secs(busy),
            ..TimeTotals::default()
        };
        assert!(history.add(totals(100, 50)));
        assert!(!history.add(totals(100, 50)), "nothing was measured");
        assert!(history.add(totals(110, 0)));
        assert_eq!(history.over_time(5), None);
        assert!(history.add(totals(117, 7)));
        assert_eq!(
            history.over_time(5),
            Some(OverTime {
                measured: Duration::from_secs(7),
                busy: Duration::from_secs(7),
                granted: Duration::ZERO
            })
        );
        assert_eq!(history.latest_part(), Some(1.0));
    }

    proptest! {
        /// Work in windows is never over time, whatever the samples charge for each window and however
        /// long the windows are.
        #[test]
        fn one_sample_for_each_window_is_never_over_a_short_time(
            windows in prop::collection::vec((0..=10_u64, 0..=200_u64), 3..60)
        ) {
            let usage = windows.into_iter().map(|(count, length)| (count * length.max(200), count * length, count));
            let (mut history, mut totals) = (TimeHistory::default(), TimeTotals::default());
            history.add(totals);
            for (busy, window, count) in usage {
                totals.measured += Duration::from_secs(2);
                totals.busy += Duration::from_millis(busy.min(2000));
                totals.window += Duration::from_millis(window.min(2000));
                totals.windows += count;
                history.add(totals);
                prop_assert_eq!(history.over_short_time(), None);
            }
        }
    }
}
