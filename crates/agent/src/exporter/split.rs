//! What a GPU used, split among those who used it. The parts always add up to the whole.

use std::collections::BTreeMap;

use super::{Consumer, ContainerKey};

/// A whole and its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Split<T> {
    /// `containers + host + unknown + rest`.
    pub whole: T,
    /// Of each container that has a process on the GPU.
    pub containers: BTreeMap<ContainerKey, T>,
    /// Of the machine itself.
    pub host: T,
    /// Of processes that nobody knows.
    pub unknown: T,
    /// Of no process: the driver's own memory.
    pub rest: T,
}

impl<T: Copy + Default> Default for Split<T> {
    fn default() -> Self {
        let nothing = T::default();
        Self { whole: nothing, containers: BTreeMap::new(), host: nothing, unknown: nothing, rest: nothing }
    }
}

impl<T: Copy + Default + std::ops::AddAssign> Split<T> {
    fn add(&mut self, holder: &Consumer, amount: T) {
        match holder {
            Consumer::Container(key) => *self.containers.entry(key.clone()).or_default() += amount,
            Consumer::Host => self.host += amount,
            Consumer::Unknown => self.unknown += amount,
        }
    }
}

/// Memory, in bytes. What no process explains is the driver's. GPU and processes are read one after the other: where the
/// processes have more by then, so has the GPU.
#[must_use]
pub fn split_memory<'a>(
    used: u64,
    processes: impl IntoIterator<Item = (&'a Consumer, Option<u64>)>,
) -> Split<u64> {
    let mut split = Split::default();
    let mut known: u64 = 0;
    for (holder, bytes) in processes {
        // A process that does not tell is on the GPU all the same.
        let bytes = bytes.unwrap_or(0).min(u64::MAX - known);
        known += bytes;
        split.add(holder, bytes);
    }
    split.whole = used.max(known);
    split.rest = split.whole - known;
    split
}

/// Whose an interval was, as parts of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimeSplit {
    /// Everybody's part.
    pub all: Split<f64>,
    /// Of these, each process's own, where the driver told of it.
    pub processes: BTreeMap<u32, f64>,
}

/// Time, as parts of an interval: the GPU's, and that of each process of each holder. What no process explains is unknown.
///
/// The driver's samples name one process each, so of processes that take turns within milliseconds they tell only roughly who had
/// how much. Containers that share the GPU by windows are therefore taken at the word of whoever opened these. Claims of processes that
/// ran side by side may sum up to more than the GPU was busy: each then counts for its part.
#[must_use]
pub fn split_time(
    card: Option<f64>,
    processes: Option<Vec<(u32, Consumer, f64)>>,
    windows: &BTreeMap<ContainerKey, f64>,
) -> Option<TimeSplit> {
    let processes = match (card, processes) {
        (None, None) => return None,
        (_, processes) => processes.unwrap_or_default(),
    };
    let mut sampled: BTreeMap<&Consumer, f64> = BTreeMap::new();
    for (_, holder, part) in &processes {
        *sampled.entry(holder).or_default() += part;
    }
    let by_window = |holder: &Consumer| match holder {
        Consumer::Container(key) => windows.get(key).copied(),
        Consumer::Host | Consumer::Unknown => None,
    };
    let mut claims: BTreeMap<Consumer, f64> = sampled
        .iter()
        .map(|(holder, part)| ((*holder).clone(), by_window(holder).unwrap_or(*part)))
        .collect();
    // Too little for the driver to have noticed.
    for (key, part) in windows {
        claims.entry(Consumer::Container(key.clone())).or_insert(*part);
    }
    let sum: f64 = claims.values().sum();
    let whole = card.unwrap_or(sum).clamp(0.0, 1.0);
    // Windows end a little before or after the last kernel: what the GPU did is theirs if nobody else did anything.
    let is_theirs = claims.keys().all(|holder| by_window(holder).is_some());
    let scale = if sum > whole || (sum > 0.0 && is_theirs) { whole / sum } else { 1.0 };
    let mut split = TimeSplit { all: Split { whole, ..Split::default() }, ..TimeSplit::default() };
    for (holder, claim) in &claims {
        split.all.add(holder, claim * scale);
    }
    split.all.unknown += (whole - sum * scale).max(0.0);
    for (pid, holder, part) in &processes {
        let [claim, of_all] = [&claims[holder], &sampled[holder]].map(|part| *part);
        let own = if of_all > 0.0 { part / of_all * claim * scale } else { 0.0 };
        split.processes.insert(*pid, own);
    }
    Some(split)
}

impl TimeSplit {
    /// Whoever had more than nothing.
    pub fn parts(&self) -> impl Iterator<Item = (Consumer, f64)> {
        let containers =
            self.all.containers.iter().map(|(key, part)| (Consumer::Container(key.clone()), *part));
        let others = [(Consumer::Host, self.all.host), (Consumer::Unknown, self.all.unknown)];
        containers.chain(others).filter(|(_, part)| *part > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_core::units::PodUid;

    use super::*;

    fn container() -> impl Strategy<Value = ContainerKey> {
        (0..3u8, 0..2u8).prop_map(|(pod, container)| ContainerKey {
            uid: PodUid(format!("pod-{pod}")),
            container: format!("c{container}"),
        })
    }

    fn holder() -> impl Strategy<Value = Consumer> {
        prop_oneof![Just(Consumer::Host), Just(Consumer::Unknown), container().prop_map(Consumer::Container)]
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    proptest! {
        #[test]
        fn memory_adds_up(
            used in 0..200u64 << 30,
            processes in prop::collection::vec((holder(), prop::option::of(prop_oneof![0..90u64 << 30, Just(u64::MAX)])), 0..12),
        ) {
            let split = split_memory(used, processes.iter().map(|(holder, bytes)| (holder, *bytes)));
            let sum = split.containers.values().sum::<u64>() + split.host + split.unknown + split.rest;
            prop_assert_eq!(sum, split.whole);
            prop_assert!(split.whole >= used);
        }

        #[test]
        fn time_adds_up_and_never_exceeds_the_interval(
            card in prop::option::of(0.0..1.0f64),
            processes in prop::option::of(prop::collection::vec((holder(), 0.0..1.0f64), 0..12)),
            windows in prop::collection::btree_map(container(), 0.0..1.0f64, 0..4),
        ) {
            let numbered = |all: Vec<(Consumer, f64)>| (0..).zip(all).map(|(pid, (holder, part))| (pid, holder, part)).collect();
            let split = split_time(card, processes.clone().map(numbered), &windows);
            prop_assert_eq!(split.is_none(), card.is_none() && processes.is_none());
            let Some(TimeSplit { all, processes }) = split else { return Ok(()) };
            let sum = all.containers.values().sum::<f64>() + all.host + all.unknown + all.rest;
            prop_assert!(close(sum, all.whole), "{} {}", sum, all.whole);
            prop_assert!(all.whole <= 1.0 + 1e-9);
            prop_assert!(card.is_none_or(|card| close(card, all.whole)));
            prop_assert!(processes.values().sum::<f64>() <= all.whole + 1e-9);
        }
    }

    #[test]
    fn nothing_is_taken_from_one_for_the_other() {
        let (a, b) = (Consumer::Host, Consumer::Unknown);
        let split = split_memory(100, [(&a, Some(30)), (&b, Some(20)), (&b, None)]);
        assert_eq!((split.host, split.unknown, split.rest), (30, 20, 50));
        let both = vec![(1, a, 0.75), (2, b, 0.25)];
        let split = split_time(Some(0.5), Some(both), &BTreeMap::new()).unwrap();
        assert_eq!((split.all.host, split.all.unknown), (0.375, 0.125));
        assert_eq!(split.processes, BTreeMap::from([(1, 0.375), (2, 0.125)]));
    }

    #[test]
    fn windows_are_believed_more_than_samples_and_the_others_keep_theirs() {
        let of = |name: &str| ContainerKey { uid: PodUid(name.into()), container: String::new() };
        let [a, b] = ["a", "b"].map(|name| Consumer::Container(of(name)));
        let windows = BTreeMap::from([(of("a"), 0.2), (of("b"), 0.2)]);
        // The driver saw only one of them.
        let split = split_time(Some(0.5), Some(vec![(1, a.clone(), 0.5)]), &windows).unwrap();
        assert_eq!(split.all.containers, BTreeMap::from([(of("a"), 0.25), (of("b"), 0.25)]));
        // Somebody without windows was there too; 3 of `b` did nothing.
        let all = vec![(1, a, 0.1), (2, Consumer::Host, 0.6), (3, b, 0.0)];
        let split = split_time(Some(0.5), Some(all), &windows).unwrap();
        assert!(close(split.all.host, 0.3) && close(split.all.containers[&of("b")], 0.1), "{split:?}");
        assert_eq!(split.processes[&3], 0.0);
    }
}
