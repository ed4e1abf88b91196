//! What the threads of a process take, by the kernel's accounts: for measurements.

use std::{cmp::Reverse, collections::BTreeMap, fmt, fs, io, time::Duration};

/// What threads have taken so far, those of one name together.
#[derive(Clone, Debug, Default)]
pub struct Threads(BTreeMap<String, Taken>);

#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// Nanoseconds of processor time.
    on_processor: u64,
    /// How often a thread was put on a processor.
    slices: u64,
}

/// What was taken over some time, the busiest threads first.
#[derive(Clone, Debug)]
pub struct Spent {
    over: Duration,
    by_name: Vec<(String, Taken)>,
}

impl Threads {
    /// Of the process with this number.
    pub fn of(process: u32) -> io::Result<Self> {
        let mut threads: BTreeMap<String, Taken> = BTreeMap::new();
        for thread in fs::read_dir(format!("/proc/{process}/task"))? {
            let thread = thread?.path();
            // One that has just ended has no files.
            let (Ok(name), Ok(taken)) =
                (fs::read_to_string(thread.join("comm")), fs::read_to_string(thread.join("schedstat")))
            else {
                continue;
            };
            let mut numbers = taken.split_whitespace().map(|number| number.parse().unwrap_or(0));
            let (on_processor, _waited, slices) = (numbers.next(), numbers.next(), numbers.next());
            let sum = threads.entry(name.trim_end().to_owned()).or_default();
            sum.on_processor += on_processor.unwrap_or(0);
            sum.slices += slices.unwrap_or(0);
        }
        Ok(Self(threads))
    }

    /// What was taken since `before`, which was so long ago.
    #[must_use]
    pub fn since(&self, before: &Self, over: Duration) -> Spent {
        let spent = |(name, now): (&String, &Taken)| {
            let then = before.0.get(name).copied().unwrap_or_default();
            let on_processor = now.on_processor.saturating_sub(then.on_processor);
            (name.clone(), Taken { on_processor, slices: now.slices.saturating_sub(then.slices) })
        };
        let mut by_name: Vec<(String, Taken)> = self.0.iter().map(spent).collect();
        by_name.sort_by_key(|(_, taken)| Reverse(taken.on_processor));
        Spent { over, by_name }
    }
}

impl Spent {
    /// Without the threads of this name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.by_name.retain(|(other, _)| other != name);
        self
    }

    /// Of one core, by all together. Threads that ended meanwhile are left out.
    #[must_use]
    pub fn percent(&self) -> f64 {
        self.by_name.iter().map(|(_, taken)| self.percent_of(*taken)).sum()
    }

    fn percent_of(&self, taken: Taken) -> f64 {
        Duration::from_nanos(taken.on_processor).as_secs_f64() / self.over.as_secs_f64() * 100.0
    }
}

impl fmt::Display for Spent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (name, taken)) in self.by_name.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            let often = Duration::from_secs(taken.slices).as_secs_f64() / self.over.as_secs_f64();
            write!(f, "{comma}{name} {:.3} % ({often:.1}/s)", self.percent_of(*taken))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(of: &[(&str, u64, u64)]) -> Threads {
        let taken = |&(name, on_processor, slices): &(&str, u64, u64)| {
            (name.to_owned(), Taken { on_processor, slices })
        };
        Threads(of.iter().map(taken).collect())
    }

    #[test]
    fn the_busiest_come_first_and_new_ones_count_from_nothing() {
        let before = threads(&[("a", 1_000_000, 10), ("b", 0, 0)]);
        let after = threads(&[("a", 2_000_000, 20), ("b", 10_000_000, 5), ("new", 500_000, 1)]);
        let spent = after.since(&before, Duration::from_secs(1));
        assert_eq!(spent.to_string(), "b 1.000 % (5.0/s), a 0.100 % (10.0/s), new 0.050 % (1.0/s)");
        assert!((spent.percent() - 1.15).abs() < 1e-9);
    }

    #[test]
    fn this_process_is_seen() {
        assert!(!Threads::of(std::process::id()).unwrap().0.is_empty());
    }
}
