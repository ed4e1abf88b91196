//! What a card used, split among those who used it. The parts always add up to the whole.

use std::collections::BTreeMap;

use super::{ContainerKey, Holder};

/// A whole and its parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Split<T> {
    /// `containers + host + unknown + rest`.
    pub whole: T,
    /// Of each container that has a process on the card.
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
    fn add(&mut self, holder: &Holder, amount: T) {
        match holder {
            Holder::Container(key) => *self.containers.entry(key.clone()).or_default() += amount,
            Holder::Host => self.host += amount,
            Holder::Unknown => self.unknown += amount,
        }
    }
}

/// Memory, in bytes. What no process explains is the driver's. Card and processes are read one after the other: where the
/// processes have more by then, so has the card.
#[must_use]
pub fn split_memory<'a>(
    used: u64,
    processes: impl IntoIterator<Item = (&'a Holder, Option<u64>)>,
) -> Split<u64> {
    let mut split = Split::default();
    let mut known: u64 = 0;
    for (holder, bytes) in processes {
        // A process that does not tell is on the card all the same.
        let bytes = bytes.unwrap_or(0).min(u64::MAX - known);
        known += bytes;
        split.add(holder, bytes);
    }
    split.whole = used.max(known);
    split.rest = split.whole - known;
    split
}

/// Time, as parts of an interval: the card's, and that of each process. Processes that ran side by side may sum up to more than the
/// card was busy: each then counts for its part. What no process explains is unknown.
#[must_use]
pub fn split_time<'a>(
    card: Option<f64>,
    processes: Option<impl IntoIterator<Item = (&'a Holder, f64)>>,
) -> Option<Split<f64>> {
    let processes: Option<Vec<(&Holder, f64)>> = processes.map(|all| all.into_iter().collect());
    let sum: f64 = processes.iter().flatten().map(|(_, time)| time).sum();
    let whole = match (card, &processes) {
        (Some(card), _) => card.clamp(0.0, 1.0),
        (None, Some(_)) => sum.clamp(0.0, 1.0),
        (None, None) => return None,
    };
    let scale = if sum > whole { whole / sum } else { 1.0 };
    let mut split = Split { whole, ..Split::default() };
    for (holder, time) in processes.into_iter().flatten() {
        split.add(holder, time * scale);
    }
    split.unknown += (whole - sum * scale).max(0.0);
    Some(split)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tessera_core::units::PodUid;

    use super::*;

    fn holder() -> impl Strategy<Value = Holder> {
        prop_oneof![
            Just(Holder::Host),
            Just(Holder::Unknown),
            (0..3u8, 0..2u8).prop_map(|(pod, container)| Holder::Container(ContainerKey {
                uid: PodUid(format!("pod-{pod}")),
                container: format!("c{container}"),
            })),
        ]
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
        ) {
            let given = processes.as_ref().map(|all| all.iter().map(|(holder, time)| (holder, *time)));
            let split = split_time(card, given);
            prop_assert_eq!(split.is_none(), card.is_none() && processes.is_none());
            if let Some(split) = split {
                let sum = split.containers.values().sum::<f64>() + split.host + split.unknown + split.rest;
                prop_assert!(close(sum, split.whole), "{} {}", sum, split.whole);
                prop_assert!(split.whole <= 1.0 + 1e-9);
                prop_assert!(card.is_none_or(|card| close(card, split.whole)));
            }
        }
    }

    #[test]
    fn nothing_is_taken_from_one_for_the_other() {
        let (a, b) = (Holder::Host, Holder::Unknown);
        let split = split_memory(100, [(&a, Some(30)), (&b, Some(20)), (&b, None)]);
        assert_eq!((split.host, split.unknown, split.rest), (30, 20, 50));
        let split = split_time(Some(0.5), Some([(&a, 0.75), (&b, 0.25)])).unwrap();
        assert_eq!((split.host, split.unknown), (0.375, 0.125));
    }
}
