//! Reports of the libraries in containers and of the arbiter, accumulated over container restarts.

use std::collections::{BTreeMap, VecDeque};

use tessera_core::gpu::GpuUuid;

use super::super::ContainerKey;

/// Totals reported for a container's share of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShareReport {
    /// Seconds in which the container was throttled.
    pub throttled_seconds: f64,
    /// Number of times the container was throttled.
    pub waits: u64,
    /// Bytes of allocations that were rejected.
    pub denied_bytes: u64,
    /// Seconds in which a window of the container was open.
    pub window_seconds: f64,
    /// Seconds in them for which the GPU was busy, as the container reports.
    pub busy_seconds: f64,
    /// Number of windows.
    pub windows: u64,
    /// Number of times the account file was larger than an account, and was cut.
    pub account_overruns: u64,
}

/// Reports by container and GPU.
pub type ShareReports = BTreeMap<(ContainerKey, GpuUuid), ShareReport>;

/// Reports of all containers that still exist.
#[derive(Debug, Default)]
pub(super) struct ShareHistory {
    shares: BTreeMap<(ContainerKey, GpuUuid), Share>,
    /// Time of the last report in seconds since 1970.
    at: f64,
}

#[derive(Debug, Default)]
struct Share {
    /// Last report. A container that restarts counts from zero.
    latest: ShareReport,
    /// Totals over all restarts.
    total: ShareReport,
    /// Fraction of the time between the last two reports in which the container was throttled.
    throttled: Option<f64>,
    /// Windows until some moments, oldest first.
    history: VecDeque<WindowsUntil>,
}

/// Windows of a container until a moment.
#[derive(Clone, Copy, Debug, Default)]
struct WindowsUntil {
    /// Moment in seconds since 1970.
    at: f64,
    /// Seconds in windows until then.
    seconds: f64,
    /// Seconds of them for which the GPU was busy.
    busy_seconds: f64,
    /// Number of windows until then.
    count: f64,
}

/// Windows of a container in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct WindowPart {
    /// Fraction of the interval in which a window was open.
    pub(super) open: f64,
    /// Fraction of the interval in which the GPU was busy in it.
    pub(super) busy: f64,
    /// Number of windows.
    pub(super) count: f64,
}

/// Length of a share's history. It holds more reports than arrive between two samples of a GPU.
const HISTORY_LENGTH: usize = 32;

/// Reports closer together than this are the same report, received twice.
const SAME_REPORT_SECONDS: f64 = 0.01;

impl ShareHistory {
    /// Adds a report of all shares. `at` is the time of the report and `windows_at` the time up to
    /// which windows are counted, in seconds since 1970.
    pub(super) fn add(&mut self, report: ShareReports, at: f64, windows_at: f64) {
        let passed = at - self.at;
        self.at = at;
        for (key, now) in report {
            let is_new = !self.shares.contains_key(&key);
            let share = self.shares.entry(key).or_default();
            let throttled = share.add(now);
            share.throttled = (passed > 0.0 && !is_new).then(|| (throttled / passed).clamp(0.0, 1.0));
            share.remember(windows_at);
        }
    }

    pub(super) fn retain(&mut self, stays: impl Fn(&ContainerKey) -> bool) {
        self.shares.retain(|(key, _), _| stays(key));
    }

    pub(super) fn share(&self, key: &ContainerKey, gpu: &GpuUuid) -> (Option<ShareReport>, Option<f64>) {
        let share = self.shares.get(&(key.clone(), gpu.clone()));
        (share.map(|share| share.total), share.and_then(|share| share.throttled))
    }

    /// Returns whether any container has had a window on the GPU.
    pub(super) fn has_windows(&self, gpu: &GpuUuid) -> bool {
        self.shares.iter().any(|((_, on), share)| on == gpu && share.total.windows > 0)
    }

    /// Returns the windows of each container in an interval, given in seconds since 1970. Containers
    /// without such windows are left out.
    pub(super) fn windows(&self, gpu: &GpuUuid, from: f64, to: f64) -> BTreeMap<ContainerKey, WindowPart> {
        let on_gpu = self.shares.iter().filter(|((_, on), _)| on == gpu);
        let part = |((key, _), share): (&(ContainerKey, GpuUuid), &Share)| {
            let (before, after) = (share.windows_until(from), share.windows_until(to));
            let part = |seconds: f64| (seconds / (to - from)).min(1.0);
            let open = part(after.seconds - before.seconds);
            let busy = part(after.busy_seconds - before.busy_seconds);
            let count = after.count - before.count;
            (open > 0.0).then(|| (key.clone(), WindowPart { open, busy, count }))
        };
        on_gpu.filter_map(part).collect()
    }
}

impl Share {
    /// Adds the growth since the last report and returns the throttled seconds in it.
    fn add(&mut self, now: ShareReport) -> f64 {
        let before = std::mem::replace(&mut self.latest, now);
        let seconds = |now: f64, before: f64| if now >= before { now - before } else { now };
        let count = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let throttled = seconds(now.throttled_seconds, before.throttled_seconds);
        let ShareReport {
            throttled_seconds,
            waits,
            denied_bytes,
            window_seconds,
            busy_seconds,
            windows,
            account_overruns,
        } = &mut self.total;
        *throttled_seconds += throttled;
        *waits = waits.saturating_add(count(now.waits, before.waits));
        *denied_bytes = denied_bytes.saturating_add(count(now.denied_bytes, before.denied_bytes));
        *window_seconds += seconds(now.window_seconds, before.window_seconds);
        *busy_seconds += seconds(now.busy_seconds, before.busy_seconds);
        *windows = windows.saturating_add(count(now.windows, before.windows));
        *account_overruns =
            account_overruns.saturating_add(count(now.account_overruns, before.account_overruns));
        throttled
    }

    fn remember(&mut self, at: f64) {
        let last = self.history.back().map_or(f64::NEG_INFINITY, |last| last.at);
        if (at - last).abs() < SAME_REPORT_SECONDS {
            return;
        }
        // The clock of the host was set back.
        if at < last {
            self.history.clear();
        }
        if self.history.len() == HISTORY_LENGTH {
            self.history.pop_front();
        }
        #[allow(clippy::cast_precision_loss, reason = "a container has fewer than 2^53 windows")]
        let count = self.total.windows as f64;
        let ShareReport { window_seconds: seconds, busy_seconds, .. } = self.total;
        self.history.push_back(WindowsUntil { at, seconds, busy_seconds, count });
    }

    /// Returns the windows up to `moment`, interpolated linearly between two reports.
    fn windows_until(&self, moment: f64) -> WindowsUntil {
        let later = self.history.partition_point(|known| known.at <= moment);
        match (later.checked_sub(1).and_then(|earlier| self.history.get(earlier)), self.history.get(later)) {
            (Some(before), Some(after)) => {
                let part = (moment - before.at) / (after.at - before.at);
                let between = |before: f64, after: f64| before + (after - before) * part;
                WindowsUntil {
                    at: moment,
                    seconds: between(before.seconds, after.seconds),
                    busy_seconds: between(before.busy_seconds, after.busy_seconds),
                    count: between(before.count, after.count),
                }
            }
            (Some(known), None) | (None, Some(known)) => *known,
            (None, None) => WindowsUntil::default(),
        }
    }
}
