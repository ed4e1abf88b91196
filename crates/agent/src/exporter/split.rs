//! Divides the usage of a GPU among its consumers. The parts always add up to the whole.

use std::collections::BTreeMap;

use super::{Consumer, ContainerKey};

/// An amount and its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Split<T> {
    /// The sum `containers + host + unknown + rest`.
    pub whole: T,
    /// Parts of the containers with a process on the GPU.
    pub containers: BTreeMap<ContainerKey, T>,
    /// Part of the host's own processes.
    pub host: T,
    /// Part of processes that cannot be identified.
    pub unknown: T,
    /// Part that belongs to no process, such as the driver's own memory.
    pub rest: T,
}

impl<T: Copy + Default> Default for Split<T> {
    fn default() -> Self {
        let nothing = T::default();
        Self { whole: nothing, containers: BTreeMap::new(), host: nothing, unknown: nothing, rest: nothing }
    }
}

impl<T: Copy + Default + std::ops::AddAssign> Split<T> {
    fn add(&mut self, consumer: &Consumer, amount: T) {
        match consumer {
            Consumer::Container(key) => *self.containers.entry(key.clone()).or_default() += amount,
            Consumer::Host => self.host += amount,
            Consumer::Unknown => self.unknown += amount,
        }
    }
}

/// Divides the used memory of a GPU, in bytes. Memory that no process reports belongs to the driver.
/// The driver reports the GPU and its processes one after the other. If the processes report more in
/// total, that total counts as the GPU's usage.
#[must_use]
pub fn split_memory<'a>(
    used: u64,
    processes: impl IntoIterator<Item = (&'a Consumer, Option<u64>)>,
) -> Split<u64> {
    let mut split = Split::default();
    let mut known: u64 = 0;
    for (consumer, bytes) in processes {
        // A process without a reported size still counts as present on the GPU.
        let bytes = bytes.unwrap_or(0).min(u64::MAX - known);
        known += bytes;
        split.add(consumer, bytes);
    }
    split.whole = used.max(known);
    split.rest = split.whole - known;
    split
}

/// Division of an interval among the consumers, as fractions of the interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimeSplit {
    /// Fractions of all consumers.
    pub all: Split<f64>,
    /// Fraction of each process that the driver reported. It is contained in `all`.
    pub processes: BTreeMap<u32, f64>,
}

/// Divides the busy time of an interval, as fractions of the interval. Busy time that no process
/// explains is counted as unknown.
///
/// Each of the driver's samples names one process, so samples are inaccurate for processes that
/// alternate within milliseconds. For containers that share the GPU by windows, the arbiter's record of
/// their windows is used instead. If the claims add up to more than the GPU was busy, they are scaled down.
#[must_use]
pub fn split_time(
    gpu: Option<f64>,
    processes: Option<Vec<(u32, Consumer, f64)>>,
    windows: &BTreeMap<ContainerKey, f64>,
) -> Option<TimeSplit> {
    let processes = match (gpu, processes) {
        (None, None) => return None,
        (_, processes) => processes.unwrap_or_default(),
    };
    let mut sampled: BTreeMap<&Consumer, f64> = BTreeMap::new();
    for (_, consumer, part) in &processes {
        *sampled.entry(consumer).or_default() += part;
    }
    let by_window = |consumer: &Consumer| match consumer {
        Consumer::Container(key) => windows.get(key).copied(),
        Consumer::Host | Consumer::Unknown => None,
    };
    let mut claims: BTreeMap<Consumer, f64> = sampled
        .iter()
        .map(|(consumer, part)| ((*consumer).clone(), by_window(consumer).unwrap_or(*part)))
        .collect();
    // The driver's samples may have missed a container with little work.
    for (key, part) in windows {
        claims.entry(Consumer::Container(key.clone())).or_insert(*part);
    }
    let sum: f64 = claims.values().sum();
    let whole = gpu.unwrap_or(sum).clamp(0.0, 1.0);
    // Windows end slightly before or after the last kernel. If only containers with windows were busy,
    // all busy time of the GPU is theirs.
    let only_windows = claims.keys().all(|consumer| by_window(consumer).is_some());
    let scale = if sum > whole || (sum > 0.0 && only_windows) { whole / sum } else { 1.0 };
    let mut split = TimeSplit { all: Split { whole, ..Split::default() }, ..TimeSplit::default() };
    for (consumer, claim) in &claims {
        split.all.add(consumer, claim * scale);
    }
    split.all.unknown += (whole - sum * scale).max(0.0);
    for (pid, consumer, part) in &processes {
        let [claim, of_all] = [&claims[consumer], &sampled[consumer]].map(|part| *part);
        let own = if of_all > 0.0 { part / of_all * claim * scale } else { 0.0 };
        split.processes.insert(*pid, own);
    }
    Some(split)
}

impl TimeSplit {
    /// Returns the consumers with a fraction above zero.
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

    fn consumer() -> impl Strategy<Value = Consumer> {
        prop_oneof![Just(Consumer::Host), Just(Consumer::Unknown), container().prop_map(Consumer::Container)]
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    proptest! {
        #[test]
        fn memory_parts_add_up(
            used in 0..200u64 << 30,
            processes in prop::collection::vec((consumer(), prop::option::of(prop_oneof![0..90u64 << 30, Just(u64::MAX)])), 0..12),
        ) {
            let split = split_memory(used, processes.iter().map(|(consumer, bytes)| (consumer, *bytes)));
            let sum = split.containers.values().sum::<u64>() + split.host + split.unknown + split.rest;
            prop_assert_eq!(sum, split.whole);
            prop_assert!(split.whole >= used);
        }

        #[test]
        fn time_parts_add_up_and_never_exceed_the_interval(
            gpu in prop::option::of(0.0..1.0f64),
            processes in prop::option::of(prop::collection::vec((consumer(), 0.0..1.0f64), 0..12)),
            windows in prop::collection::btree_map(container(), 0.0..1.0f64, 0..4),
        ) {
            let numbered = |all: Vec<(Consumer, f64)>| (0..).zip(all).map(|(pid, (consumer, part))| (pid, consumer, part)).collect();
            let split = split_time(gpu, processes.clone().map(numbered), &windows);
            prop_assert_eq!(split.is_none(), gpu.is_none() && processes.is_none());
            let Some(TimeSplit { all, processes }) = split else { return Ok(()) };
            let sum = all.containers.values().sum::<f64>() + all.host + all.unknown + all.rest;
            prop_assert!(close(sum, all.whole), "{} {}", sum, all.whole);
            prop_assert!(all.whole <= 1.0 + 1e-9);
            prop_assert!(gpu.is_none_or(|gpu| close(gpu, all.whole)));
            prop_assert!(processes.values().sum::<f64>() <= all.whole + 1e-9);
        }
    }

    #[test]
    fn divides_memory_and_time_by_consumer() {
        let (a, b) = (Consumer::Host, Consumer::Unknown);
        let split = split_memory(100, [(&a, Some(30)), (&b, Some(20)), (&b, None)]);
        assert_eq!((split.host, split.unknown, split.rest), (30, 20, 50));
        let both = vec![(1, a, 0.75), (2, b, 0.25)];
        let split = split_time(Some(0.5), Some(both), &BTreeMap::new()).unwrap();
        assert_eq!((split.all.host, split.all.unknown), (0.375, 0.125));
        assert_eq!(split.processes, BTreeMap::from([(1, 0.375), (2, 0.125)]));
    }

    #[test]
    fn prefers_windows_to_samples_for_containers_that_have_them() {
        let of = |name: &str| ContainerKey { uid: PodUid(name.into()), container: String::new() };
        let [a, b] = ["a", "b"].map(|name| Consumer::Container(of(name)));
        let windows = BTreeMap::from([(of("a"), 0.2), (of("b"), 0.2)]);
        // The driver's samples name only one of the two containers.
        let split = split_time(Some(0.5), Some(vec![(1, a.clone(), 0.5)]), &windows).unwrap();
        assert_eq!(split.all.containers, BTreeMap::from([(of("a"), 0.25), (of("b"), 0.25)]));
        // A host process without windows was busy too, and process 3 of container `b` was idle.
        let all = vec![(1, a, 0.1), (2, Consumer::Host, 0.6), (3, b, 0.0)];
        let split = split_time(Some(0.5), Some(all), &windows).unwrap();
        assert!(close(split.all.host, 0.3) && close(split.all.containers[&of("b")], 0.1), "{split:?}");
        assert_eq!(split.processes[&3], 0.0);
    }
}
