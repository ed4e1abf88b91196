//! What the libraries in containers and the arbiter report, over all restarts of a container.

use std::collections::{BTreeMap, VecDeque};

use tessera_core::gpu::GpuUuid;

use super::super::ContainerKey;

/// What is reported of a container's share of a GPU, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ShareReport {
    /// Seconds spent waiting for the share.
    pub seconds: f64,
    /// How often it had to wait.
    pub waits: u64,
    /// Bytes it asked for and was refused.
    pub denied_bytes: u64,
    /// Seconds its windows on the GPU have been open while it had work.
    pub open: f64,
    /// How many windows it has had.
    pub windows: u64,
}

/// By container and GPU.
pub type ShareReports = BTreeMap<(ContainerKey, GpuUuid), ShareReport>;

/// All that was reported of containers that are still there.
#[derive(Debug, Default)]
pub(super) struct Library {
    shares: BTreeMap<(ContainerKey, GpuUuid), Share>,
    /// When the last report came, in seconds since 1970.
    at: f64,
}

#[derive(Debug, Default)]
struct Share {
    /// As it was last told: a container that starts again counts from zero.
    told: ShareReport,
    /// Over all its starts.
    total: ShareReport,
    /// The part of the time before the last report in which it waited.
    waiting: Option<f64>,
    /// When its windows had been open for how long, oldest first.
    open: VecDeque<(f64, f64)>,
}

/// Reports that are remembered: more than come between two looks at a GPU.
const REMEMBERED: usize = 32;

/// Moments this near to each other, in seconds, are the same one, told twice.
const SAME: f64 = 0.01;

impl Library {
    /// A report of all shares there are: of a moment, and of the windows until another, in seconds since 1970.
    pub(super) fn take(&mut self, report: ShareReports, at: f64, windows_at: f64) {
        let passed = at - self.at;
        self.at = at;
        for (key, now) in report {
            let is_new = !self.shares.contains_key(&key);
            let share = self.shares.entry(key).or_default();
            let waited = share.add(now);
            share.waiting = (passed > 0.0 && !is_new).then(|| (waited / passed).clamp(0.0, 1.0));
            share.remember(windows_at);
        }
    }

    pub(super) fn keep(&mut self, stays: impl Fn(&ContainerKey) -> bool) {
        self.shares.retain(|(key, _), _| stays(key));
    }

    pub(super) fn share(&self, key: &ContainerKey, gpu: &GpuUuid) -> (Option<ShareReport>, Option<f64>) {
        let share = self.shares.get(&(key.clone(), gpu.clone()));
        (share.map(|share| share.total), share.and_then(|share| share.waiting))
    }

    /// Whether anybody has had a window on the GPU.
    pub(super) fn has_windows(&self, gpu: &GpuUuid) -> bool {
        self.shares.iter().any(|((_, card), share)| card == gpu && share.total.windows > 0)
    }

    /// The part of a time, in seconds since 1970, in which containers had the GPU and used it; those that did.
    pub(super) fn windows(&self, gpu: &GpuUuid, from: f64, to: f64) -> BTreeMap<ContainerKey, f64> {
        let of_card = self.shares.iter().filter(|((_, card), _)| card == gpu);
        let part = |((key, _), share): (&(ContainerKey, GpuUuid), &Share)| {
            let part = (share.open_until(to) - share.open_until(from)) / (to - from);
            (part > 0.0).then(|| (key.clone(), part.min(1.0)))
        };
        of_card.filter_map(part).collect()
    }
}

impl Share {
    /// Adds what is new, and returns the seconds waited since the last time.
    fn add(&mut self, now: ShareReport) -> f64 {
        let before = std::mem::replace(&mut self.told, now);
        let seconds = |now: f64, before: f64| if now >= before { now - before } else { now };
        let count = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let waited = seconds(now.seconds, before.seconds);
        let ShareReport { seconds: total, waits, denied_bytes, open, windows } = &mut self.total;
        *total += waited;
        *waits = waits.saturating_add(count(now.waits, before.waits));
        *denied_bytes = denied_bytes.saturating_add(count(now.denied_bytes, before.denied_bytes));
        *open += seconds(now.open, before.open);
        *windows = windows.saturating_add(count(now.windows, before.windows));
        waited
    }

    fn remember(&mut self, at: f64) {
        let last = self.open.back().map_or(f64::NEG_INFINITY, |(last, _)| *last);
        if (at - last).abs() < SAME {
            return;
        }
        // The clock was set.
        if at < last {
            self.open.clear();
        }
        if self.open.len() == REMEMBERED {
            self.open.pop_front();
        }
        self.open.push_back((at, self.total.open));
    }

    /// For how long its windows had been open at a moment: between two reports, as if evenly.
    fn open_until(&self, moment: f64) -> f64 {
        let later = self.open.partition_point(|(at, _)| *at <= moment);
        match (later.checked_sub(1).and_then(|earlier| self.open.get(earlier)), self.open.get(later)) {
            (Some((begin, before)), Some((end, after))) => {
                before + (after - before) * (moment - begin) / (end - begin)
            }
            (Some((_, known)), None) | (None, Some((_, known))) => *known,
            (None, None) => 0.0,
        }
    }
}
