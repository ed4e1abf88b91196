//! What a set of GPUs is good for: how well the jobs to come could be served from it.

use super::mask::{bits, index};
use super::rates::Bandwidth;
use crate::gpu_set::GpuSet;

/// Every set of a machine of at most [`Outlook::MAX_GPUS`] GPUs, by mask.
///
/// The size of the next job is not known, so every size from two GPUs to the whole machine counts alike; a job is
/// served as well as its bandwidth compares with the best of its size on the empty machine.
#[derive(Debug)]
pub(crate) struct Outlook {
    bandwidth: Vec<Bandwidth>,
    /// The best share inside each set by size, `sizes` in a row.
    best_inside: Vec<f32>,
    sizes: usize,
    next_job: Vec<f32>,
    queue: Vec<f32>,
}

impl Outlook {
    /// 65,536 sets: 5 MB and a tenth of a second, once per kind of machine.
    pub(super) const MAX_GPUS: usize = 16;

    pub(super) fn of(count: usize, bandwidth: Vec<Bandwidth>, best: &[Bandwidth]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a share needs no more digits")]
        let share = |(set, bandwidth): (usize, &Bandwidth)| {
            if set.count_ones() < 2 {
                0.0
            } else {
                bandwidth.share_of(best[set.count_ones() as usize]) as f32
            }
        };
        let shares: Vec<f32> = bandwidth.iter().enumerate().map(share).collect();
        #[expect(clippy::cast_precision_loss, reason = "at most 16 sizes")]
        let sizes = count.saturating_sub(1).max(1) as f32;
        let best = best_inside(&shares);
        Self {
            next_job: best.iter().map(|inside| inside.iter().sum::<f32>() / sizes).collect(),
            best_inside: best.iter().flat_map(|inside| &inside[..=count]).copied().collect(),
            sizes: count + 1,
            queue: queue(&shares, sizes),
            bandwidth,
        }
    }

    /// Of a set of the machine's GPUs.
    pub(crate) fn bandwidth(&self, gpus: GpuSet) -> Bandwidth {
        self.bandwidth[index(gpus.mask())]
    }

    /// The share of the best set of `size` GPUs within these; nothing where there are not that many.
    pub(crate) fn best_share_within(&self, gpus: GpuSet, size: usize) -> f64 {
        let inside = &self.best_inside[index(gpus.mask()) * self.sizes..][..self.sizes];
        inside.get(size).copied().map_or(0.0, f64::from)
    }

    /// How well the next job is served from these GPUs: the mean over all sizes of the best set among them, 0 for
    /// a size that does not fit.
    pub(crate) fn next_job(&self, gpus: GpuSet) -> f32 {
        self.next_job[index(gpus.mask())]
    }

    /// How well a queue of jobs is served from these GPUs, each with the set that is best for it and for those
    /// after it, until one does not fit.
    pub(crate) fn queue(&self, gpus: GpuSet) -> f32 {
        self.queue[index(gpus.mask())]
    }
}

/// One entry per size a set can have.
type BySize = [f32; Outlook::MAX_GPUS + 1];

/// The best share of every size inside each set.
fn best_inside(shares: &[f32]) -> Vec<BySize> {
    let mut best: Vec<BySize> = vec![BySize::default(); shares.len()];
    for set in 1..shares.len() {
        let mut inside = BySize::default();
        for gpu in bits(set as u64) {
            let without = &best[set & !(1 << gpu)];
            inside.iter_mut().zip(without).for_each(|(best, other)| *best = best.max(*other));
        }
        inside[set.count_ones() as usize] = shares[set];
        best[set] = inside;
    }
    best
}

/// For each set the mean over all sizes of what the first job of that size and the queue after it get.
fn queue(shares: &[f32], sizes: f32) -> Vec<f32> {
    #[expect(clippy::cast_possible_truncation, reason = "at most 16")]
    let size_of: Vec<u8> = (0..shares.len()).map(|set| set.count_ones() as u8).collect();
    let mut queue = vec![0.0; shares.len()];
    for all in 1..shares.len() {
        let mut best = BySize::default();
        // Down through all subsets.
        let mut first = all;
        while first != 0 {
            let served = shares[first] + queue[all ^ first];
            let of_size = &mut best[usize::from(size_of[first])];
            *of_size = of_size.max(served);
            first = (first - 1) & all;
        }
        queue[all] = best[2..].iter().sum::<f32>() / sizes;
    }
    queue
}
