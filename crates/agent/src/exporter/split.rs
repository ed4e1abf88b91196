//! Divides the usage of a GPU among its consumers. The parts always add up to the whole.

use std::collections::BTreeMap;

use super::{Consumer, ContainerKey};

/// Division of the used memory of a GPU, in bytes. The known parts add up to `whole`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemorySplit {
    /// Memory in use.
    pub whole: u64,
    /// Parts of the containers with a process on the GPU. A part is `None` if the driver does not report
    /// the size of each process of the container.
    pub containers: BTreeMap<ContainerKey, Option<u64>>,
    /// Part of the host's own processes, or `None` if it is not known.
    pub host: Option<u64>,
    /// Memory that cannot be attributed.
    pub unknown: u64,
    /// Part of the driver itself, or `None` if it cannot be told from the memory of processes.
    pub driver: Option<u64>,
}

impl MemorySplit {
    /// Returns the division of memory whose processes are not visible: nothing of it can be attributed.
    #[must_use]
    pub fn unattributed(used: u64) -> Self {
        Self { whole: used, unknown: used, ..Self::default() }
    }
}

/// Divides the used memory of a GPU, in bytes. Memory that no process reports belongs to the driver. If the
/// size of a process is not reported, the part of its consumer and that of the driver are unknown, and the
/// memory counts as not attributed. The driver reports the GPU and its processes one after the other. If the
/// processes report more in total, that total counts as the GPU's usage.
#[must_use]
pub fn split_memory<'a>(
    used: u64,
    processes: impl IntoIterator<Item = (&'a Consumer, Option<u64>)>,
) -> MemorySplit {
    let mut sums: BTreeMap<&Consumer, Option<u64>> = BTreeMap::from([(&Consumer::Host, Some(0))]);
    let (mut known, mut attributed): (u64, u64) = (0, 0);
    let mut is_complete = true;
    for (consumer, bytes) in processes {
        is_complete &= bytes.is_some();
        let bytes = bytes.map(|bytes| bytes.min(u64::MAX - known));
        known += bytes.unwrap_or(0);
        let sum = sums.entry(consumer).or_insert(Some(0));
        *sum = sum.zip(bytes).map(|(sum, bytes)| sum + bytes);
    }
    let mut split = MemorySplit { whole: used.max(known), ..MemorySplit::default() };
    let mut unidentified = 0;
    for (consumer, sum) in sums {
        match consumer {
            Consumer::Container(key) => drop(split.containers.insert(key.clone(), sum)),
            Consumer::Host => split.host = sum,
            Consumer::Unknown => unidentified = sum.unwrap_or(0),
        }
        attributed += sum.filter(|_| *consumer != Consumer::Unknown).unwrap_or(0);
    }
    split.driver = is_complete.then_some(split.whole - known);
    split.unknown = if is_complete { unidentified } else { split.whole - attributed };
    split
}

/// Division of the busy time of an interval, as fractions of the interval. The parts add up to `whole`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fractions {
    /// Fraction in which the GPU was busy.
    pub whole: f64,
    /// Fractions of containers.
    pub containers: BTreeMap<ContainerKey, f64>,
    /// Fraction of the host's own processes.
    pub host: f64,
    /// Fraction of processes that cannot be identified, and busy time that no process explains.
    pub unknown: f64,
}

impl Fractions {
    fn add(&mut self, consumer: &Consumer, part: f64) {
        match consumer {
            Consumer::Container(key) => *self.containers.entry(key.clone()).or_default() += part,
            Consumer::Host => self.host += part,
            Consumer::Unknown => self.unknown += part,
        }
    }
}

/// Division of an interval among the consumers, as fractions of the interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimeSplit {
    /// Fractions of all consumers.
    pub all: Fractions,
    /// Fraction of each process that the driver reported, which is contained in `all`. `None` if the driver
    /// does not report the busy time of processes: then only containers with windows are known.
    pub processes: Option<BTreeMap<u32, f64>>,
}

/// Divides the busy time of an interval, as fractions of the interval. Busy time that no process
/// explains is counted as unknown.
///
/// Each of the driver's samples names one process, so samples are inaccurate for processes that
/// alternate within milliseconds. For containers that share the GPU by windows, the arbiter's record of
/// their windows is used instead. The chip counts kernels but no copies, so the GPU was busy for at least the time in
/// windows. If the claims add up to more than the GPU was busy, they are scaled down.
#[must_use]
pub fn split_time(
    gpu: Option<f64>,
    processes: Option<Vec<(u32, Consumer, f64)>>,
    windows: &BTreeMap<ContainerKey, f64>,
) -> Option<TimeSplit> {
    if gpu.is_none() && processes.is_none() {
        return None;
    }
    let is_by_process = processes.is_some();
    let processes = processes.unwrap_or_default();
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
    let in_windows: f64 = windows.values().sum();
    let whole = gpu.unwrap_or(sum).max(in_windows).clamp(0.0, 1.0);
    // Windows end slightly before or after the last kernel. If only containers with windows were busy,
    // all busy time of the GPU is theirs. Without the times of processes, others may have been busy.
    let only_windows = is_by_process && claims.keys().all(|consumer| by_window(consumer).is_some());
    let scale = if sum > whole || (sum > 0.0 && only_windows) { whole / sum } else { 1.0 };
    let mut split = TimeSplit { all: Fractions { whole, ..Fractions::default() }, processes: None };
    for (consumer, claim) in &claims {
        split.all.add(consumer, claim * scale);
    }
    split.all.unknown += (whole - sum * scale).max(0.0);
    let own = |(pid, consumer, part): &(u32, Consumer, f64)| {
        let [claim, of_all] = [&claims[consumer], &sampled[consumer]].map(|part| *part);
        (*pid, if of_all > 0.0 { part / of_all * claim * scale } else { 0.0 })
    };
    split.processes = is_by_process.then(|| processes.iter().map(own).collect());
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
            let containers = split.containers.values().flatten().sum::<u64>();
            let sum = containers + split.host.unwrap_or(0) + split.unknown + split.driver.unwrap_or(0);
            prop_assert_eq!(sum, split.whole);
            prop_assert!(split.whole >= used);
            for (consumer, bytes) in &processes {
                let part = match consumer {
                    Consumer::Container(key) => split.containers[key],
                    Consumer::Host => split.host,
                    Consumer::Unknown => split.driver,
                };
                prop_assert!(bytes.is_some() || (part.is_none() && split.driver.is_none()));
            }
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
            let sum = all.containers.values().sum::<f64>() + all.host + all.unknown;
            prop_assert!(close(sum, all.whole), "{} {}", sum, all.whole);
            prop_assert!(all.whole <= 1.0 + 1e-9);
            let in_windows = windows.values().sum::<f64>().min(1.0);
            prop_assert!(gpu.is_none_or(|gpu| close(gpu.max(in_windows), all.whole)));
            prop_assert!(processes.iter().flat_map(BTreeMap::values).sum::<f64>() <= all.whole + 1e-9);
        }
    }

    #[test]
    fn divides_memory_and_time_by_consumer() {
        let (a, b) = (Consumer::Host, Consumer::Unknown);
        let split = split_memory(100, [(&a, Some(30)), (&b, Some(20))]);
        assert_eq!((split.host, split.unknown, split.driver), (Some(30), 20, Some(50)));
        let both = vec![(1, a, 0.75), (2, b, 0.25)];
        let split = split_time(Some(0.5), Some(both), &BTreeMap::new()).unwrap();
        assert_eq!((split.all.host, split.all.unknown), (0.375, 0.125));
        assert_eq!(split.processes, Some(BTreeMap::from([(1, 0.375), (2, 0.125)])));
    }

    /// What the driver does not report is unknown, and neither zero nor the driver's.
    #[test]
    fn attributes_nothing_that_the_driver_does_not_report() {
        let of = |name: &str| ContainerKey { uid: PodUid(name.into()), container: String::new() };
        let [a, b] = ["a", "b"].map(|name| Consumer::Container(of(name)));
        let split = split_memory(100, [(&a, Some(30)), (&b, Some(20)), (&b, None)]);
        assert_eq!(split.containers, BTreeMap::from([(of("a"), Some(30)), (of("b"), None)]));
        assert_eq!((split.host, split.unknown, split.driver), (Some(0), 70, None));
        // Container `a` had windows, and the driver does not report the busy time of processes.
        let windows = BTreeMap::from([(of("a"), 0.2)]);
        let split = split_time(Some(0.5), None, &windows).unwrap();
        assert_eq!((split.all.containers, split.processes), (BTreeMap::from([(of("a"), 0.2)]), None));
        assert!(close(split.all.unknown, 0.3));
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
        assert_eq!(split.processes.unwrap()[&3], 0.0);
    }

    /// The chip's counter of kernels shows half of the time of a container that also copies.
    #[test]
    fn copies_in_windows_count_as_busy() {
        let of = |name: &str| ContainerKey { uid: PodUid(name.into()), container: String::new() };
        let windows = BTreeMap::from([(of("a"), 0.3), (of("b"), 0.6)]);
        let all = windows.keys().map(|key| (1, Consumer::Container(key.clone()), 0.2)).collect();
        let split = split_time(Some(0.5), Some(all), &windows).unwrap();
        assert_eq!(split.all.containers, windows);
        assert!(close(split.all.whole, 0.9) && close(split.all.unknown, 0.0), "{split:?}");
    }
}
