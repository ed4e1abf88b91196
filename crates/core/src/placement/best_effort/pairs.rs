//! The points of all pairs of some GPUs, and of sets of them.

use std::cmp::Reverse;

use super::points;
use crate::gpu_set::GpuSet;
use crate::topology::Topology;
use crate::units::GpuIndex;

/// GPUs by their position among those that are free; sets of them are masks.
#[derive(Debug)]
pub(super) struct Pairs {
    gpus: Vec<GpuIndex>,
    /// Symmetric.
    points: Vec<[u32; Self::MAX_GPUS]>,
    /// The other GPUs, the best partner first.
    partners: Vec<Vec<usize>>,
}

impl Pairs {
    pub(super) const MAX_GPUS: usize = 16;

    pub(super) fn of(topology: &Topology, free: GpuSet) -> Self {
        let gpus: Vec<GpuIndex> = free.iter().take(Self::MAX_GPUS).collect();
        let row = |a: &GpuIndex| {
            let mut row = [0; Self::MAX_GPUS];
            row.iter_mut().zip(&gpus).for_each(|(entry, b)| *entry = points(topology, *a, *b));
            row
        };
        let points: Vec<[u32; Self::MAX_GPUS]> = gpus.iter().map(row).collect();
        let partners = |gpu: usize| {
            let mut others: Vec<usize> = (0..gpus.len()).filter(|other| *other != gpu).collect();
            others.sort_by_key(|other| Reverse(points[gpu][*other]));
            others
        };
        Self { partners: (0..gpus.len()).map(partners).collect(), points, gpus }
    }

    pub(super) fn all(&self) -> u32 {
        (1 << self.gpus.len()) - 1
    }

    pub(super) fn mask(&self, gpus: GpuSet) -> u32 {
        let members = self.gpus.iter().enumerate().filter(|(_, gpu)| gpus.contains(**gpu));
        members.fold(0, |mask, (position, _)| mask | 1 << position)
    }

    pub(super) fn gpus(&self, mask: u32) -> GpuSet {
        bits(mask).map(|position| self.gpus[position]).collect()
    }

    /// Of a GPU with all members of a set.
    pub(super) fn with(&self, set: u32, gpu: usize) -> u32 {
        bits(set).map(|member| self.points[gpu][member]).sum()
    }

    /// Of all pairs of a set.
    pub(super) fn inside(&self, set: u32) -> u32 {
        bits(set).map(|gpu| self.with(set & ((1 << gpu) - 1), gpu)).sum()
    }

    /// Of a GPU with its `count` best partners in a set.
    pub(super) fn with_best(&self, set: u32, gpu: usize, count: usize) -> u32 {
        let partners = self.partners[gpu].iter().filter(|other| set & (1 << **other) != 0);
        partners.take(count).map(|other| self.points[gpu][*other]).sum()
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
