//! CPU time of a process's threads as the kernel counts it, for measurements.

use std::{cmp::Reverse, collections::BTreeMap, fmt, fs, io, time::Duration};

/// CPU time of all threads so far, summed up by thread name.
#[derive(Clone, Debug, Default)]
pub struct ThreadTimes(BTreeMap<String, CpuTime>);

#[derive(Clone, Copy, Debug, Default)]
struct CpuTime {
    /// CPU time in nanoseconds.
    cpu_ns: u64,
    /// Number of times a thread was scheduled.
    slices: u64,
}

/// CPU time used during an interval, the busiest threads first.
#[derive(Clone, Debug)]
pub struct ThreadUsage {
    over: Duration,
    by_name: Vec<(String, CpuTime)>,
}

impl ThreadTimes {
    /// Reads the threads of a process.
    pub fn of(process: u32) -> io::Result<Self> {
        let mut threads: BTreeMap<String, CpuTime> = BTreeMap::new();
        for thread in fs::read_dir(format!("/proc/{process}/task"))? {
            let thread = thread?.path();
            // A thread that has just ended has no files.
            let (Ok(name), Ok(time)) =
                (fs::read_to_string(thread.join("comm")), fs::read_to_string(thread.join("schedstat")))
            else {
                continue;
            };
            let mut numbers = time.split_whitespace().map(|number| number.parse().unwrap_or(0));
            let (cpu_ns, _waited, slices) = (numbers.next(), numbers.next(), numbers.next());
            let sum = threads.entry(name.trim_end().to_owned()).or_default();
            sum.cpu_ns += cpu_ns.unwrap_or(0);
            sum.slices += slices.unwrap_or(0);
        }
        Ok(Self(threads))
    }

    /// Returns the CPU time used since `before`, which was read `over` ago.
    #[must_use]
    pub fn since(&self, before: &Self, over: Duration) -> ThreadUsage {
        let spent = |(name, now): (&String, &CpuTime)| {
            let then = before.0.get(name).copied().unwrap_or_default();
            let cpu_ns = now.cpu_ns.saturating_sub(then.cpu_ns);
            (name.clone(), CpuTime { cpu_ns, slices: now.slices.saturating_sub(then.slices) })
        };
        let mut by_name: Vec<(String, CpuTime)> = self.0.iter().map(spent).collect();
        by_name.sort_by_key(|(_, time)| Reverse(time.cpu_ns));
        ThreadUsage { over, by_name }
    }
}

impl ThreadUsage {
    /// Removes the threads of this name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.by_name.retain(|(other, _)| other != name);
        self
    }

    /// Returns the CPU usage of all threads in percent of one core. Threads that ended in between
    /// are not counted.
    #[must_use]
    pub fn percent(&self) -> f64 {
        self.by_name.iter().map(|(_, time)| self.percent_of(*time)).sum()
    }

    fn percent_of(&self, time: CpuTime) -> f64 {
        Duration::from_nanos(time.cpu_ns).as_secs_f64() / self.over.as_secs_f64() * 100.0
    }
}

impl fmt::Display for ThreadUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (name, time)) in self.by_name.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            let often = Duration::from_secs(time.slices).as_secs_f64() / self.over.as_secs_f64();
            write!(f, "{comma}{name} {:.3} % ({often:.1}/s)", self.percent_of(*time))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(of: &[(&str, u64, u64)]) -> ThreadTimes {
        let time = |&(name, cpu_ns, slices): &(&str, u64, u64)| (name.to_owned(), CpuTime { cpu_ns, slices });
        ThreadTimes(of.iter().map(time).collect())
    }

    #[test]
    fn lists_the_busiest_threads_first_and_counts_new_ones_from_zero() {
        let before = threads(&[("a", 1_000_000, 10), ("b", 0, 0)]);
        let after = threads(&[("a", 2_000_000, 20), ("b", 10_000_000, 5), ("new", 500_000, 1)]);
        let spent = after.since(&before, Duration::from_secs(1));
        assert_eq!(spent.to_string(), "b 1.000 % (5.0/s), a 0.100 % (10.0/s), new 0.050 % (1.0/s)");
        assert!((spent.percent() - 1.15).abs() < 1e-9);
    }

    #[test]
    fn reads_the_threads_of_this_process() {
        assert!(!ThreadTimes::of(std::process::id()).unwrap().0.is_empty());
    }
}
