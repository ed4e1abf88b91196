//! Policy `static`: sets of GPUs that an administrator listed for each instance type.

use std::collections::BTreeMap;

use crate::gpu_set::GpuSet;

/// The listed sets by instance type and number of GPUs. Earlier sets are preferred.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticTable {
    /// The sets by instance type and size.
    pub sets: BTreeMap<String, BTreeMap<usize, Vec<GpuSet>>>,
    /// True to choose only listed sets and parts of them, as gputopology does. A pod that finds none waits.
    pub strict: bool,
}

/// The origin of a chosen set; a greater value is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TableSource {
    /// No listed set is free, so the set has the lowest free indexes.
    Unlisted,
    /// The set is part of a larger listed set that is free as a whole.
    PartOfListed,
    /// The set is listed and free.
    Listed,
}

impl StaticTable {
    /// Chooses the first listed set that is free and contains `required`.
    ///
    /// Without one it takes the lowest part of a larger free set, else the lowest free GPUs. A
    /// table with gaps therefore never makes a pod wait, unless the table is strict.
    pub(super) fn choose(
        &self,
        instance_type: Option<&str>,
        free: GpuSet,
        required: GpuSet,
        count: usize,
    ) -> Option<(GpuSet, TableSource)> {
        let sizes = instance_type.and_then(|name| self.sets.get(name));
        let is_free = |set: &&GpuSet| free.is_superset(**set) && set.is_superset(required);
        let listed =
            |size| sizes.and_then(|sizes| sizes.get(&size)).and_then(|sets| sets.iter().find(is_free));
        if let Some(set) = listed(count) {
            return Some((*set, TableSource::Listed));
        }
        let larger = (count + 1..=free.len()).find_map(listed);
        if let Some(set) = larger.and_then(|set| set.lowest_with(required, count)) {
            return Some((set, TableSource::PartOfListed));
        }
        let lowest = free.lowest_with(required, count).filter(|_| !self.strict);
        lowest.map(|set| (set, TableSource::Unlisted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GpuIndex;

    fn set(indexes: &[u8]) -> GpuSet {
        indexes.iter().copied().map(GpuIndex).collect()
    }

    fn check(free: &[u8], count: usize, expected: Option<(&[u8], TableSource)>) {
        let strict = expected.filter(|(_, source)| *source != TableSource::Unlisted);
        check_one(free, count, expected, false);
        check_one(free, count, strict, true);
    }

    fn check_one(free: &[u8], count: usize, expected: Option<(&[u8], TableSource)>, strict: bool) {
        let sizes = BTreeMap::from([
            (2, vec![set(&[0, 2]), set(&[1, 3]), set(&[4, 6]), set(&[5, 7])]),
            (4, vec![set(&[0, 1, 2, 3]), set(&[4, 5, 6, 7])]),
        ]);
        let table = StaticTable { sets: BTreeMap::from([("big".to_owned(), sizes)]), strict };
        let chosen = table.choose(Some("big"), set(free), GpuSet::EMPTY, count);
        assert_eq!(chosen, expected.map(|(gpus, source)| (set(gpus), source)), "strict: {strict}");
    }

    #[test]
    fn prefers_a_listed_set_then_part_of_a_larger_one_then_any() {
        let all = [0, 1, 2, 3, 4, 5, 6, 7];
        check(&all, 2, Some((&[0, 2], TableSource::Listed)));
        check(&[1, 3, 4], 2, Some((&[1, 3], TableSource::Listed)));
        check(&[0, 4, 5, 6, 7], 3, Some((&[4, 5, 6], TableSource::PartOfListed)));
        check(&[0, 1, 4], 2, Some((&[0, 1], TableSource::Unlisted)));
        check(&[0, 1, 4], 4, None);
    }

    #[test]
    fn an_unknown_instance_type_gets_the_lowest_gpus() {
        let chosen = StaticTable::default().choose(None, set(&[3, 5, 6]), set(&[6]), 2);
        assert_eq!(chosen, Some((set(&[3, 6]), TableSource::Unlisted)));
    }
}
