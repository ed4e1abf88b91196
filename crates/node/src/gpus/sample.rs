//! Sample of a GPU. A value that could not be read is absent, never zero.

/// Interval of a sample in microseconds since 1970, the unit of the driver's timestamps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleInterval {
    /// End of the last interval, or 0 for the first sample, which measures no busy time.
    pub since: u64,
    /// Current time.
    pub now: u64,
}

/// Time up to which the busy time of a GPU has been measured. Only time that really passed is
/// counted: the host's clock may be set, a GPU may stop answering, and the driver keeps its samples
/// for 30 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleProgress {
    to: u64,
    /// Time of the last sample, by the host's clock and by the monotonic clock.
    sampled_at: (u64, u64),
}

/// Time in microseconds for which the driver keeps its samples.
const DRIVER_MEMORY_US: u64 = 30_000_000;

/// Deviation in microseconds from which the host's clock counts as set. Smaller deviations come
/// from clock synchronization.
const CLOCK_SET_US: u64 = 1_000_000;

impl SampleProgress {
    /// Returns the interval to sample now. `uptime` is in microseconds of the monotonic clock.
    #[must_use]
    pub fn next_interval(&self, now: u64, uptime: u64) -> SampleInterval {
        if self.to == 0 {
            return SampleInterval { since: 0, now };
        }
        let (sampled_at, uptime_then) = self.sampled_at;
        let expected = sampled_at.saturating_add(uptime.saturating_sub(uptime_then));
        let since = if now.abs_diff(expected) > CLOCK_SET_US {
            (self.to.saturating_add(now)).saturating_sub(expected)
        } else {
            self.to
        };
        SampleInterval { since: since.max(now.saturating_sub(DRIVER_MEMORY_US)).max(1), now }
    }

    /// Records a sample of `interval` that measured `work`.
    pub fn record(&mut self, interval: SampleInterval, uptime: u64, work: &BusyTime) {
        *self = Self { to: work.to, sampled_at: (interval.now, uptime) };
    }
}

/// One sample of a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuSample {
    /// Memory of the GPU.
    pub memory: Option<GpuMemory>,
    /// Processes on the GPU, each once, by ascending PID.
    pub processes: Option<Vec<ProcessMemory>>,
    /// Busy time since the last sample.
    pub work: BusyTime,
    /// Energy in millijoules since the driver was loaded.
    pub energy: Option<u64>,
    /// Other measurements.
    pub sensors: Sensors,
    /// MIG instances of the GPU.
    pub instances: Vec<MigInstance>,
}

/// Memory of a GPU in bytes. `used + free + reserved` equals `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// Size of the memory.
    pub total: u64,
    /// Memory in use by processes, and by the driver on their behalf.
    pub used: u64,
    /// Memory that is not in use.
    pub free: u64,
    /// Memory that the driver always reserves for itself.
    pub reserved: u64,
}

/// Memory of a process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// PID in the driver's PID namespace.
    pub pid: u32,
    /// Bytes in use, if the driver reports them.
    pub bytes: Option<u64>,
    /// GPU instance ID on a GPU in MIG mode.
    pub instance: Option<u32>,
}

/// Busy time of a GPU in an interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BusyTime {
    /// Start in microseconds since 1970. It equals `to` if nothing was measured.
    pub from: u64,
    /// Time of the newest driver sample, which is the `since` of the next interval.
    pub to: u64,
    /// Fraction of the interval in which any kernel ran, from 0 to 1.
    pub gpu: Option<f64>,
    /// Fraction of the interval in which each process's kernels ran, by PID. Unlisted processes
    /// were idle.
    pub processes: Option<Vec<(u32, f64)>>,
}

/// Sensors and error counters of a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sensors {
    /// GPU utilization in percent, over the driver's last period.
    pub utilization: Option<u32>,
    /// Percentage of time in which memory was read or written.
    pub memory_utilization: Option<u32>,
    /// Encoder utilization in percent.
    pub encoder: Option<u32>,
    /// Decoder utilization in percent.
    pub decoder: Option<u32>,
    /// Temperature of the chip in degrees Celsius.
    pub temperature: Option<u32>,
    /// Temperature of the memory in degrees Celsius.
    pub memory_temperature: Option<u32>,
    /// Power draw in milliwatts.
    pub power: Option<u32>,
    /// Clock of the multiprocessors in MHz.
    pub sm_clock: Option<u32>,
    /// Clock of the memory in MHz.
    pub memory_clock: Option<u32>,
    /// Number of PCIe retransmissions.
    pub pcie_replays: Option<u64>,
    /// Uncorrectable memory errors since the driver was loaded.
    pub uncorrected_errors: Option<u64>,
    /// Uncorrectable memory errors in the lifetime of the GPU.
    pub uncorrected_errors_ever: Option<u64>,
    /// Corrected memory errors since the driver was loaded.
    pub corrected_errors: Option<u64>,
    /// Corrected memory errors in the lifetime of the GPU.
    pub corrected_errors_ever: Option<u64>,
    /// Remapped memory rows.
    pub remapped_rows: Option<RemappedRows>,
    /// Mask of the reasons that limit the clocks.
    pub clock_events: Option<u64>,
    /// KiB transferred over all NVLinks.
    pub nvlink: Option<u64>,
    /// Values of the chip's profiling counters, from Hopper on.
    pub profile: Option<ProfilingCounters>,
}

/// Memory rows that were remapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemappedRows {
    /// Rows remapped after correctable errors.
    pub correctable: u32,
    /// Rows remapped after uncorrectable errors.
    pub uncorrectable: u32,
    /// True if a remapping waits for a reset.
    pub pending: bool,
    /// True if a row could not be remapped.
    pub failed: bool,
}

/// Values of the chip's profiling counters since the last sample, as fractions of the time unless
/// stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProfilingCounters {
    /// Activity of the graphics engine.
    pub graphics: Option<f64>,
    /// Activity of the multiprocessors, averaged over all.
    pub sm: Option<f64>,
    /// Resident warps as a fraction of the maximum.
    pub occupancy: Option<f64>,
    /// Activity of the tensor cores.
    pub tensor: Option<f64>,
    /// Activity of the 64-bit floating point units.
    pub fp64: Option<f64>,
    /// Activity of the 32-bit floating point units.
    pub fp32: Option<f64>,
    /// Activity of the 16-bit floating point units.
    pub fp16: Option<f64>,
    /// Memory bandwidth in use, as a fraction of the maximum.
    pub dram: Option<f64>,
    /// Bytes per second to the host.
    pub pcie_sent: Option<f64>,
    /// Bytes per second from the host.
    pub pcie_received: Option<f64>,
}

/// An instance of a GPU in MIG mode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MigInstance {
    /// UUID of the instance.
    pub uuid: String,
    /// Profile of the instance, such as `1g.10gb`.
    pub profile: Option<String>,
    /// ID of the GPU instance, to which the memory belongs.
    pub gpu_instance: Option<u32>,
    /// ID of the compute instance.
    pub compute_instance: Option<u32>,
    /// Memory of the GPU instance.
    pub memory: Option<GpuMemory>,
    /// Profiling counters of the GPU instance since the last sample.
    pub counted: Option<ProfilingCounters>,
}

impl BusyTime {
    /// Combines what the driver reports about an interval.
    ///
    /// `samples` are times and percentages. `measured` is the busy fraction of the interval, used
    /// if there are no samples. `processes` are PIDs with the time of their newest sample and their
    /// mean percentage. Percentages over 100 are ignored, because the driver may return them for
    /// ended processes.
    #[must_use]
    pub fn of(
        interval: SampleInterval,
        samples: Option<&[(u64, f64)]>,
        measured: Option<f64>,
        processes: Option<&[(u32, u64, u32)]>,
    ) -> Self {
        let SampleInterval { since, now } = interval;
        if since == 0 || since >= now {
            return Self { from: now, to: now, gpu: None, processes: None };
        }
        let new = |moment: u64| moment > since && moment <= now;
        let samples: Option<Vec<(u64, f64)>> = samples
            .map(|samples| samples.iter().copied().filter(|(at, used)| new(*at) && *used <= 100.0).collect());
        let processes: Option<Vec<(u32, u64, u32)>> = processes
            .map(|all| all.iter().copied().filter(|(_, at, used)| new(*at) && *used <= 100).collect());
        let newest = samples.iter().flatten().map(|(at, _)| *at);
        let newest = newest.chain(processes.iter().flatten().map(|(_, at, _)| *at)).max();
        let ratio = |percent: f64| (percent / 100.0).clamp(0.0, 1.0);
        let busy = match &samples {
            // There is no new sample yet, so this time is counted with the next interval.
            Some(samples) if samples.is_empty() => {
                return Self { from: since, to: since, gpu: None, processes: None };
            }
            Some(samples) => {
                Some(samples.iter().map(|(_, percent)| ratio(*percent)).sum::<f64>() / count(samples))
            }
            None => measured.map(|part| part.clamp(0.0, 1.0)),
        };
        let to = if samples.is_some() { newest.unwrap_or(now) } else { now };
        let mut each: Vec<(u32, f64)> =
            processes.iter().flatten().map(|(pid, _, percent)| (*pid, ratio((*percent).into()))).collect();
        each.sort_by_key(|(pid, _)| *pid);
        Self { from: since, to, gpu: busy, processes: processes.is_some().then_some(each) }
    }

    /// Returns an interval in which the GPU was idle.
    #[must_use]
    pub fn idle(interval: SampleInterval) -> Self {
        let SampleInterval { since, now } = interval;
        if since == 0 || since >= now {
            return Self { from: now, to: now, gpu: None, processes: None };
        }
        Self { from: since, to: now, gpu: Some(0.0), processes: Some(Vec::new()) }
    }

    /// Returns the length of the interval in seconds.
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

    const INTERVAL: SampleInterval = SampleInterval { since: 1_000_000, now: 3_000_000 };

    #[test]
    fn averages_the_new_samples() {
        let samples =
            [(900_000, 100.0), (1_500_000, 50.0), (2_000_000, 4711.0), (2_500_000, 100.0), (3_500_000, 0.0)];
        let processes = [(7, 2_400_000, 60), (5, 2_600_000, 10), (6, 800_000, 90), (8, 2_000_000, 4711)];
        let work = BusyTime::of(INTERVAL, Some(&samples), Some(0.01), Some(&processes));
        assert_eq!(work.gpu, Some(0.75));
        assert_eq!((work.from, work.to), (1_000_000, 2_600_000));
        assert_eq!(work.processes, Some(vec![(5, 0.1), (7, 0.6)]));
        assert!((work.seconds() - 1.6).abs() < 1e-9);
    }

    #[test]
    fn measures_nothing_in_the_first_interval_or_without_new_samples() {
        let first = BusyTime::of(SampleInterval { since: 0, now: 5 }, Some(&[(4, 50.0)]), None, None);
        assert_eq!(first, BusyTime { from: 5, to: 5, gpu: None, processes: None });
        let early = BusyTime::of(INTERVAL, Some(&[]), None, Some(&[]));
        assert_eq!((early.from, early.to, early.gpu), (1_000_000, 1_000_000, None));
    }

    #[test]
    fn counts_only_time_that_passed_when_the_clock_is_set() {
        const SECOND: u64 = 1_000_000;
        const HOUR: u64 = 3_600 * SECOND;
        let now = 500 * HOUR;
        let mut progress = SampleProgress::default();
        assert_eq!(progress.next_interval(now, 7).since, 0, "the first sample measures nothing");
        let first = SampleInterval { since: 0, now };
        progress.record(first, 7, &BusyTime { from: now, to: now, ..BusyTime::default() });
        for (what, now_then, passed, since) in [
            ("nothing special", now + 2 * SECOND, 2 * SECOND, now),
            ("the clock is adjusted slightly", now + 2 * SECOND + 300_000, 2 * SECOND, now),
            ("the clock is set forward", now + HOUR, 2 * SECOND, now + HOUR - 2 * SECOND),
            ("the clock is set back", now - HOUR, 2 * SECOND, now - HOUR - 2 * SECOND),
            ("the GPU hung", now + HOUR, HOUR, now + HOUR - DRIVER_MEMORY_US),
            ("the host was suspended", now + HOUR, 3 * SECOND, now + HOUR - 3 * SECOND),
        ] {
            assert_eq!(
                progress.next_interval(now_then, 7 + passed),
                SampleInterval { since, now: now_then },
                "{what}"
            );
        }
    }

    #[test]
    fn uses_the_measured_fraction_without_samples_and_nothing_without_both() {
        let work = BusyTime::of(INTERVAL, None, Some(0.4), Some(&[]));
        assert_eq!((work.gpu, work.to, work.processes), (Some(0.4), INTERVAL.now, Some(vec![])));
        assert_eq!(BusyTime::of(INTERVAL, None, None, None).gpu, None);
    }
}
