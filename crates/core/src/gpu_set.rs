//! A set of GPUs of one node, stored as bits.

use std::fmt;

use crate::units::GpuIndex;

/// A set of GPUs of one node. At most [`GpuSet::CAPACITY`] GPUs per node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GpuSet(u64);

impl GpuSet {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// The largest number of GPUs per node.
    pub const CAPACITY: usize = 64;

    /// Returns the GPUs 0 to `count` - 1.
    #[must_use]
    pub fn first(count: usize) -> Self {
        match count {
            0 => Self::EMPTY,
            1..Self::CAPACITY => Self((1 << count) - 1),
            _ => Self(u64::MAX),
        }
    }

    /// Returns the set whose members are the one-bits of `mask`.
    #[must_use]
    pub fn from_mask(mask: u64) -> Self {
        Self(mask)
    }

    /// Returns the members as one-bits.
    #[must_use]
    pub fn mask(self) -> u64 {
        self.0
    }

    /// Returns the number of members.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns whether `gpu` is a member.
    #[must_use]
    pub fn contains(self, gpu: GpuIndex) -> bool {
        self.0 & bit(gpu) != 0
    }

    /// Returns whether every member of `other` is a member.
    #[must_use]
    pub fn is_superset(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the set with `gpu` added.
    #[must_use]
    pub fn with(self, gpu: GpuIndex) -> Self {
        Self(self.0 | bit(gpu))
    }

    /// Returns the members of either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the members of both sets.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the members that `other` does not have.
    #[must_use]
    pub fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the member with the lowest index.
    #[must_use]
    pub fn lowest(self) -> Option<GpuIndex> {
        self.iter().next()
    }

    /// Returns the `count` members with the lowest indexes, or all where there are fewer.
    #[must_use]
    pub fn lowest_n(self, count: usize) -> Self {
        self.iter().take(count).collect()
    }

    /// Returns `required` and the lowest other members, `count` in all.
    ///
    /// The result is `None` where the set has too few members, lacks a required one, or `required`
    /// is larger than `count`.
    #[must_use]
    pub fn lowest_with(self, required: Self, count: usize) -> Option<Self> {
        let others = count.checked_sub(required.len())?;
        let set = required.union(self.difference(required).lowest_n(others));
        (set.len() == count && self.is_superset(required)).then_some(set)
    }

    /// Returns the members by ascending index.
    pub fn iter(self) -> impl Iterator<Item = GpuIndex> + Clone {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            (rest != 0).then(|| {
                let lowest = rest.trailing_zeros();
                rest &= rest - 1;
                #[expect(clippy::cast_possible_truncation, reason = "a bit position of a u64")]
                GpuIndex(lowest as u8)
            })
        })
    }

    /// Returns all unordered pairs of members, the lower index first.
    pub fn pairs(self) -> impl Iterator<Item = (GpuIndex, GpuIndex)> {
        self.iter().flat_map(move |a| Self(self.0 & !(bit(a) | (bit(a) - 1))).iter().map(move |b| (a, b)))
    }

    /// Returns all subsets of `size` members, in lexicographic order of their sorted indexes.
    pub fn subsets(self, size: usize) -> impl Iterator<Item = Self> {
        let members: Vec<u64> = self.iter().map(bit).collect();
        let mut positions: Vec<usize> = (0..size).collect();
        let mut next = (size <= members.len()).then(|| self.lowest_n(size).0);
        std::iter::from_fn(move || {
            let subset = next?;
            // Advance the rightmost position that still can, and reset those after it; the others
            // keep their bits.
            let last = members.len() - size;
            next = (0..size).rev().find(|&at| positions[at] < last + at).map(|at| {
                let kept = subset & (members[positions[at]] - 1);
                let first = positions[at] + 1;
                (at..size).zip(first..).fold(kept, |mask, (at, position)| {
                    positions[at] = position;
                    mask | members[position]
                })
            });
            Some(Self(subset))
        })
    }
}

/// Returns the bit of a GPU; 0 for an index beyond the capacity.
fn bit(gpu: GpuIndex) -> u64 {
    1u64.checked_shl(u32::from(gpu.0)).unwrap_or(0)
}

impl FromIterator<GpuIndex> for GpuSet {
    fn from_iter<I: IntoIterator<Item = GpuIndex>>(gpus: I) -> Self {
        gpus.into_iter().fold(Self::EMPTY, Self::with)
    }
}

/// `0,3,5`
impl fmt::Display for GpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, gpu) in self.iter().enumerate() {
            let comma = if position == 0 { "" } else { "," };
            write!(f, "{comma}{gpu}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(indexes: &[u8]) -> GpuSet {
        indexes.iter().copied().map(GpuIndex).collect()
    }

    #[test]
    fn subsets_come_in_lexicographic_order() {
        let all: Vec<String> = set(&[0, 2, 5, 7]).subsets(2).map(|s| s.to_string()).collect();
        assert_eq!(all, ["0,2", "0,5", "0,7", "2,5", "2,7", "5,7"]);
    }

    #[test]
    fn counts_subsets_of_every_size() {
        assert_eq!(set(&[1, 2]).subsets(0).count(), 1);
        assert_eq!(set(&[1, 2]).subsets(3).count(), 0);
        assert_eq!(GpuSet::first(16).subsets(8).count(), 12_870);
    }

    #[test]
    fn pairs_include_the_highest_bits() {
        let pairs: Vec<_> = set(&[3, 62, 63]).pairs().map(|(a, b)| (a.0, b.0)).collect();
        assert_eq!(pairs, [(3, 62), (3, 63), (62, 63)]);
    }

    #[test]
    fn lowest_with_contains_the_required_gpus() {
        let free = set(&[1, 2, 5, 7]);
        assert_eq!(free.lowest_with(GpuSet::EMPTY, 2), Some(set(&[1, 2])));
        assert_eq!(free.lowest_with(set(&[7]), 2), Some(set(&[1, 7])));
        assert_eq!(free.lowest_with(set(&[2, 7]), 1), None);
        assert_eq!(free.lowest_with(set(&[3]), 2), None);
        assert_eq!(free.lowest_with(GpuSet::EMPTY, 5), None);
    }

    #[test]
    fn first_fills_up_to_the_capacity() {
        assert_eq!(GpuSet::first(0), GpuSet::EMPTY);
        assert_eq!(GpuSet::first(3), set(&[0, 1, 2]));
        assert_eq!(GpuSet::first(64).len(), 64);
    }
}
