//! What a GPU is doing, as a look at it tells. What could not be learned is absent, never zero.

/// The time of a look, in microseconds since 1970: the driver stamps its samples so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleInterval {
    /// What was measured up to here is known already; 0 at the first look, which measures nothing yet.
    pub since: u64,
    /// Now.
    pub now: u64,
}

/// Up to when a GPU's work is known. Only time that really passed counts as worked: the machine's clock may be set, a GPU may not
/// answer for long, and the driver remembers its samples for half a minute only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleProgress {
    to: u64,
    /// The last look, by the machine's clock and by one that nobody sets.
    looked: (u64, u64),
}

/// In microseconds.
const FORGETS: u64 = 30_000_000;

/// The machine's clock was set if it is this far from where it should be, in microseconds; less is a clock that is being trimmed.
const SET: u64 = 1_000_000;

impl SampleProgress {
    /// What to ask for now. `uptime`: microseconds by a clock that nobody sets.
    #[must_use]
    pub fn window(&self, now: u64, uptime: u64) -> SampleInterval {
        if self.to == 0 {
            return SampleInterval { since: 0, now };
        }
        let (looked, uptime_then) = self.looked;
        let expected = looked.saturating_add(uptime.saturating_sub(uptime_then));
        let since = if now.abs_diff(expected) > SET {
            (self.to.saturating_add(now)).saturating_sub(expected)
        } else {
            self.to
        };
        SampleInterval { since: since.max(now.saturating_sub(FORGETS)).max(1), now }
    }

    /// Takes note of what a look told.
    pub fn learn(&mut self, window: SampleInterval, uptime: u64, work: &BusyTime) {
        *self = Self { to: work.to, looked: (window.now, uptime) };
    }
}

/// One look at a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuSample {
    /// Its memory.
    pub memory: Option<GpuMemory>,
    /// The processes on it, each once, by ascending number.
    pub processes: Option<Vec<ProcessMemory>>,
    /// What it computed since the last look.
    pub work: BusyTime,
    /// Millijoules since the driver was loaded.
    pub energy: Option<u64>,
    /// All else that is measured.
    pub sensors: Sensors,
    /// The parts of a GPU that is cut up (MIG).
    pub instances: Vec<MigInstance>,
}

/// The memory of a GPU, in bytes. `used + free + reserved` is all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total: u64,
    /// In use, by processes and by the driver for them.
    pub used: u64,
    /// Left.
    pub free: u64,
    /// Kept by the driver for itself, whoever uses the GPU.
    pub reserved: u64,
}

/// A process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Its number, as the driver sees it.
    pub pid: u32,
    /// The memory it holds, where the driver tells.
    pub bytes: Option<u64>,
    /// The part of the GPU it runs on, if that is cut up.
    pub instance: Option<u32>,
}

/// What was computed between two moments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BusyTime {
    /// Begin and end, in microseconds since 1970; equal where nothing is known.
    pub from: u64,
    /// The newest stamp seen: the `since` of the next look.
    pub to: u64,
    /// The part of that time in which any kernel ran: 0 to 1.
    pub card: Option<f64>,
    /// The part in which each process's kernels ran; whoever is not listed was idle.
    pub processes: Option<Vec<(u32, f64)>>,
}

/// What else is measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sensors {
    /// Percent, over the driver's last period.
    pub utilization: Option<u32>,
    /// Percent of time in which memory was read or written.
    pub memory_utilization: Option<u32>,
    /// Percent.
    pub encoder: Option<u32>,
    /// Percent.
    pub decoder: Option<u32>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// Degrees Celsius.
    pub memory_temperature: Option<u32>,
    /// Milliwatts.
    pub power: Option<u32>,
    /// MHz.
    pub sm_clock: Option<u32>,
    /// MHz.
    pub memory_clock: Option<u32>,
    /// Times a PCIe packet had to be sent again.
    pub pcie_replays: Option<u64>,
    /// Memory errors beyond correction since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    /// And in the life of the GPU.
    pub uncorrected_errors_ever: Option<u64>,
    /// Memory errors that were corrected since the driver was loaded.
    pub corrected_errors: Option<u64>,
    /// And in the life of the GPU.
    pub corrected_errors_ever: Option<u64>,
    /// Rows of memory replaced.
    pub remapped_rows: Option<RemappedRows>,
    /// Why the clocks are not higher, a bit for each reason.
    pub clock_events: Option<u64>,
    /// KiB over all NVLinks.
    pub nvlink: Option<u64>,
    /// Ratios and rates of the chip's own counters, from Hopper on.
    pub profile: Option<ProfilingCounters>,
}

/// Rows of memory replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemappedRows {
    /// After errors that were corrected.
    pub correctable: u32,
    /// After errors that were not.
    pub uncorrectable: u32,
    /// Some wait for a reset.
    pub pending: bool,
    /// A row could not be replaced.
    pub failed: bool,
}

/// What the chip counts itself, since the last look. Parts of the time, unless something else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProfilingCounters {
    /// The graphics engine was active.
    pub graphics: Option<f64>,
    /// A multiprocessor had work, on average over all.
    pub sm: Option<f64>,
    /// Part of the warps that could be resident.
    pub occupancy: Option<f64>,
    /// Tensor cores were active.
    pub tensor: Option<f64>,
    /// Units for numbers of 64 bits were active.
    pub fp64: Option<f64>,
    /// Of 32 bits.
    pub fp32: Option<f64>,
    /// Of 16 bits.
    pub fp16: Option<f64>,
    /// Part of the memory bandwidth in use.
    pub dram: Option<f64>,
    /// Bytes a second to the host.
    pub pcie_sent: Option<f64>,
    /// Bytes a second from the host.
    pub pcie_received: Option<f64>,
}

/// A part of a GPU that is cut up.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MigInstance {
    /// Its name.
    pub uuid: String,
    /// How it is cut, as `1g.10gb`.
    pub profile: Option<String>,
    /// Its memory is that of this part.
    pub gpu_instance: Option<u32>,
    /// And its compute of that one.
    pub compute_instance: Option<u32>,
    /// Its memory.
    pub memory: Option<GpuMemory>,
    /// What the chip counted of it since the last look. All of it is that of the part with its memory.
    pub counted: Option<ProfilingCounters>,
}

impl BusyTime {
    /// Puts together what the driver says of the time since the last look.
    ///
    /// `card`: moments and percent of samples; `measured`: where there are none, the part of all that time; `processes`: number, moment
    /// of the newest sample, mean percent. Values over 100 mean nothing: processes that have ended may leave such.
    #[must_use]
    pub fn of(
        window: SampleInterval,
        card: Option<&[(u64, f64)]>,
        measured: Option<f64>,
        processes: Option<&[(u32, u64, u32)]>,
    ) -> Self {
        let SampleInterval { since, now } = window;
        if since == 0 || since >= now {
            return Self { from: now, to: now, card: None, processes: None };
        }
        let new = |moment: u64| moment > since && moment <= now;
        let card: Option<Vec<(u64, f64)>> = card
            .map(|samples| samples.iter().copied().filter(|(at, used)| new(*at) && *used <= 100.0).collect());
        let processes: Option<Vec<(u32, u64, u32)>> = processes
            .map(|all| all.iter().copied().filter(|(_, at, used)| new(*at) && *used <= 100).collect());
        let newest = card.iter().flatten().map(|(at, _)| *at);
        let newest = newest.chain(processes.iter().flatten().map(|(_, at, _)| *at)).max();
        let ratio = |percent: f64| (percent / 100.0).clamp(0.0, 1.0);
        let busy = match &card {
            // No sample has come yet: this time is counted with the next.
            Some(samples) if samples.is_empty() => {
                return Self { from: since, to: since, card: None, processes: None };
            }
            Some(samples) => {
                Some(samples.iter().map(|(_, percent)| ratio(*percent)).sum::<f64>() / count(samples))
            }
            None => measured.map(|part| part.clamp(0.0, 1.0)),
        };
        let to = if card.is_some() { newest.unwrap_or(now) } else { now };
        let mut each: Vec<(u32, f64)> =
            processes.iter().flatten().map(|(pid, _, percent)| (*pid, ratio((*percent).into()))).collect();
        each.sort_by_key(|(pid, _)| *pid);
        Self { from: since, to, card: busy, processes: processes.is_some().then_some(each) }
    }

    /// Nobody did anything.
    #[must_use]
    pub fn none(window: SampleInterval) -> Self {
        let SampleInterval { since, now } = window;
        if since == 0 || since >= now {
            return Self { from: now, to: now, card: None, processes: None };
        }
        Self { from: since, to: now, card: Some(0.0), processes: Some(Vec::new()) }
    }

    /// How long that was, in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        let microseconds = u32::try_from(self.to.saturating_sub(self.from)).unwrap_or(u32::MAX);
        f64::from(microseconds) / 1e6
    }
}

fn count<T>(all: &[T]) -> f64 {
    f64::from(u32::try_from(all.len()).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: SampleInterval = SampleInterval { since: 1_000_000, now: 3_000_000 };

    #[test]
    fn the_mean_of_the_new_samples_counts() {
        let card =
            [(900_000, 100.0), (1_500_000, 50.0), (2_000_000, 4711.0), (2_500_000, 100.0), (3_500_000, 0.0)];
        let processes = [(7, 2_400_000, 60), (5, 2_600_000, 10), (6, 800_000, 90), (8, 2_000_000, 4711)];
        let work = BusyTime::of(WINDOW, Some(&card), Some(0.01), Some(&processes));
        assert_eq!(work.card, Some(0.75));
        assert_eq!((work.from, work.to), (1_000_000, 2_600_000));
        assert_eq!(work.processes, Some(vec![(5, 0.1), (7, 0.6)]));
        assert!((work.seconds() - 1.6).abs() < 1e-9);
    }

    #[test]
    fn the_first_look_measures_nothing_and_a_look_too_early_waits() {
        let first = BusyTime::of(SampleInterval { since: 0, now: 5 }, Some(&[(4, 50.0)]), None, None);
        assert_eq!(first, BusyTime { from: 5, to: 5, card: None, processes: None });
        let early = BusyTime::of(WINDOW, Some(&[]), None, Some(&[]));
        assert_eq!((early.from, early.to, early.card), (1_000_000, 1_000_000, None));
    }

    #[test]
    fn only_time_that_passed_is_counted_whatever_the_clock_says() {
        const SECOND: u64 = 1_000_000;
        const HOUR: u64 = 3_600 * SECOND;
        let now = 500 * HOUR;
        let mut known = SampleProgress::default();
        assert_eq!(known.window(now, 7).since, 0, "the first look measures nothing yet");
        let first = SampleInterval { since: 0, now };
        known.learn(first, 7, &BusyTime { from: now, to: now, ..BusyTime::default() });
        for (what, now_then, passed, since) in [
            ("as it should be", now + 2 * SECOND, 2 * SECOND, now),
            ("the clock is trimmed", now + 2 * SECOND + 300_000, 2 * SECOND, now),
            ("set forward", now + HOUR, 2 * SECOND, now + HOUR - 2 * SECOND),
            ("set back", now - HOUR, 2 * SECOND, now - HOUR - 2 * SECOND),
            ("the GPU hung", now + HOUR, HOUR, now + HOUR - FORGETS),
            ("the machine slept", now + HOUR, 3 * SECOND, now + HOUR - 3 * SECOND),
        ] {
            assert_eq!(known.window(now_then, 7 + passed), SampleInterval { since, now: now_then }, "{what}");
        }
    }

    #[test]
    fn what_was_measured_takes_the_place_of_samples_and_without_either_nothing_is_claimed() {
        let work = BusyTime::of(WINDOW, None, Some(0.4), Some(&[]));
        assert_eq!((work.card, work.to, work.processes), (Some(0.4), WINDOW.now, Some(vec![])));
        assert_eq!(BusyTime::of(WINDOW, None, None, None).card, None);
    }
}
