//! The points of all pairs of some GPUs, and of sets of them.

use std::cmp::Reverse;

use super::points;
use crate::gpu_set::GpuSet;
use crate::topology::Topology;
use crate::units::GpuIndex;

/// GPUs by their position among those that are free; sets of them are masks.
#[derive(Debug)]
pub(super) struct Pairs {
    cards: Vec<GpuIndex>,
    /// Symmetric.
    points: Vec<[u32; Self::MOST_CARDS]>,
    /// The other GPUs, the best partner first.
    partners: Vec<Vec<usize>>,
}

impl Pairs {
    pub(super) const MOST_CARDS: usize = 16;

    pub(super) fn of(topology: &Topology, free: GpuSet) -> Self {
        let cards: Vec<GpuIndex> = free.iter().take(Self::MOST_CARDS).collect();
        let row = |a: &GpuIndex| {
            let mut row = [0; Self::MOST_CARDS];
            row.iter_mut().zip(&cards).for_each(|(entry, b)| *entry = points(topology, *a, *b));
            row
        };
        let points: Vec<[u32; Self::MOST_CARDS]> = cards.iter().map(row).collect();
        let partners = |card: usize| {
            let mut others: Vec<usize> = (0..cards.len()).filter(|other| *other != card).collect();
            others.sort_by_key(|other| Reverse(points[card][*other]));
            others
        };
        Self { partners: (0..cards.len()).map(partners).collect(), points, cards }
    }

    pub(super) fn all(&self) -> u32 {
        (1 << self.cards.len()) - 1
    }

    pub(super) fn mask(&self, gpus: GpuSet) -> u32 {
        let members = self.cards.iter().enumerate().filter(|(_, gpu)| gpus.contains(**gpu));
        members.fold(0, |mask, (position, _)| mask | 1 << position)
    }

    pub(super) fn gpus(&self, mask: u32) -> GpuSet {
        bits(mask).map(|position| self.cards[position]).collect()
    }

    /// Of a GPU with all members of a set.
    pub(super) fn with(&self, set: u32, card: usize) -> u32 {
        bits(set).map(|member| self.points[card][member]).sum()
    }

    /// Of all pairs of a set.
    pub(super) fn inside(&self, set: u32) -> u32 {
        bits(set).map(|card| self.with(set & ((1 << card) - 1), card)).sum()
    }

    /// Of a GPU with its `count` best partners in a set.
    pub(super) fn with_best(&self, set: u32, card: usize, count: usize) -> u32 {
        let partners = self.partners[card].iter().filter(|other| set & (1 << **other) != 0);
        partners.take(count).map(|other| self.points[card][*other]).sum()
    }
}

/// The one-bits of a mask, lowest first.
pub(super) fn bits(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let lowest = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            lowest
        })
    })
}
